"""From popularity to exact counts, and from counts to distinct experts per token.

Everything random comes from the raw 64-bit words of PCG64, the one stream numpy promises never to change;
the methods of numpy's Generator carry no such promise (NEP 19).
"""

from __future__ import annotations

import hashlib
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Floats = NDArray[np.floating]


class Draws:
    """A stream of random numbers that depends on the given words alone."""

    def __init__(self, *words: object) -> None:
        digest = hashlib.sha256("|".join(map(str, words)).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def raw(self, n: int) -> NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(n), dtype=np.uint64)

    def unit(self, n: int) -> Floats:
        """In the open interval (0, 1), multiples of 2^-53."""
        return ((self.raw(n) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def below(self, limit: int, n: int) -> Ints:
        """Integers in 0 .. limit - 1. The bias is limit / 2^32."""
        assert 0 < limit < 2**31
        return ((self.raw(n) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def permutation(self, n: int) -> Ints:
        return np.argsort(self.raw(n), kind="stable")

    def normal(self, n: int) -> Floats:
        bell = NormalDist()
        return np.array([bell.inv_cdf(float(u)) for u in self.unit(n)])


def spread_evenly(total: int, n: int) -> Ints:
    """n counts that sum to total and differ by at most one, the larger ones first."""
    each, left = divmod(total, n) if n else (0, 0)
    return each + (np.arange(n) < left)


def apportion(weight_E: Floats, total: int, limit: int) -> Ints:
    """Counts proportional to the weights, none above the limit, that sum to total: what the limit cuts off
    goes to the others in proportion, and remainders are rounded up from the largest down.

    apportion([6, 3, 1], total=8, limit=4) = [4, 3, 1]: quotas 4.8, 2.4, 0.8; capped 4, then 3 : 1 of 4.
    """
    weight_E = np.asarray(weight_E, dtype=np.float64)
    assert 0 <= total <= limit * np.count_nonzero(weight_E), "the caller checks that the total fits"
    full_E = np.zeros(weight_E.shape, dtype=bool)
    while True:
        left = total - limit * int(full_E.sum())
        open_weight = weight_E[~full_E].sum()
        quota_E = np.full(weight_E.shape, float(limit))
        quota_E[~full_E] = weight_E[~full_E] / (open_weight or 1.0) * left
        over_E = ~full_E & (quota_E > limit)
        if not over_E.any():
            break
        full_E |= over_E
    # a quota a hair below or above a whole number is that number
    count_E = np.minimum(np.floor(quota_E + 1e-9), limit).astype(np.int64)
    missing = total - int(count_E.sum())
    remainder_E = quota_E - count_E
    if missing >= 0:
        takers_E = np.argsort(np.where(count_E < limit, -remainder_E, np.inf), kind="stable")
        count_E[takers_E[:missing]] += 1
    else:
        givers_E = np.argsort(np.where(count_E > 0, remainder_E, np.inf), kind="stable")
        count_E[givers_E[:-missing]] -= 1
    assert count_E.sum() == total and count_E.max(initial=0) <= limit and count_E.min(initial=0) >= 0
    return count_E


def assign(count_E: Ints, T: int, K: int, draws: Draws) -> Ints:
    """expert_TK in which expert e occurs exactly count_E[e] times and the experts of a token are distinct.

    Possible whenever the counts sum to T * K and none exceeds T. The copies of the experts are laid out
    expert by expert and position p goes to token p mod T: the copies of one expert are at most T consecutive
    positions, so no token gets it twice. T=3, K=2, counts [3, 1, 2]: 0 0 0 | 1 2 2 -> tokens 01, 02, 02.

    That leaves few different sets of experts, so each choice is then exchanged with that of another token
    wherever both stay distinct, which keeps the counts. The time is O(T * K * K), the memory O(T * K).
    """
    E = len(count_E)
    if count_E.sum() != T * K or count_E.max(initial=0) > T or count_E.min(initial=0) < 0:
        raise ValueError(
            f"counts that sum to {count_E.sum()} with a maximum of {count_E.max(initial=0)} cannot be met by "
            f"{T} tokens with {K} distinct experts each; they must sum to {T * K}, none above {T}"
        )
    order_E = draws.permutation(E)
    expert_KT = np.repeat(order_E.astype(np.int32), count_E[order_E]).reshape(K, T)
    expert_KT = np.ascontiguousarray(expert_KT[:, draws.permutation(T)])
    half = T // 2
    if half and K > 1:
        here, there = expert_KT[:, :half], expert_KT[:, half : 2 * half]
        for k, turn in enumerate(draws.below(half, K)):
            partner = np.roll(there, -int(turn), axis=1)
            clash = (here == partner[k]).any(axis=0) | (partner == here[k]).any(axis=0)
            mine = np.where(clash, here[k], partner[k])
            partner[k] = np.where(clash, partner[k], here[k])
            here[k] = mine
            there[k] = np.roll(partner[k], int(turn))
    return shuffle_choices(expert_KT, draws)


def distinct_uniform(T: int, E: int, K: int, draws: Draws) -> Ints:
    """K distinct experts per token, every set equally likely: Floyd's algorithm on all tokens at once."""
    expert_KT = np.empty((K, T), dtype=np.int32)
    for k, last in enumerate(range(E - K, E)):
        pick_T = draws.below(last + 1, T).astype(np.int32)
        taken_T = (expert_KT[:k] == pick_T).any(axis=0)
        expert_KT[k] = np.where(taken_T, last, pick_T)
    return shuffle_choices(expert_KT, draws)


def shuffle_choices(expert_KT: Ints, draws: Draws) -> Ints:
    """Each token's choices in random order, as expert_TK: Fisher-Yates on all tokens at once."""
    K, T = expert_KT.shape
    token_T = np.arange(T)
    for k in range(K - 1, 0, -1):
        other_T = draws.below(k + 1, T)
        moved_T = expert_KT[other_T, token_T]
        expert_KT[other_T, token_T] = expert_KT[k]
        expert_KT[k] = moved_T
    return np.ascontiguousarray(expert_KT.T).astype(np.int64)
