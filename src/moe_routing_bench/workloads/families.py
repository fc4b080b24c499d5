"""The families of the Routing Suite: each function turns a Batch into experts for its tokens.

The first line of a docstring says what the family models. The rest is its target, which it meets by
construction. Arguments after the batch are the parameters in a workload's name: positional ones are written
bare, keywords by name. `batch.steady` decides which experts are hot, the same at every step; `batch.draws`
decides which tokens choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from moe_routing_bench.workloads.assignment import (
    Draws,
    Floats,
    Ints,
    apportion,
    assign,
    distinct_uniform,
    spread_evenly,
)
from moe_routing_bench.workloads.trace import Trace, read_trace


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of a family. E experts are on W ranks: rank w holds experts w * E / W to (w + 1) * E / W."""

    T: int
    E: int
    K: int
    W: int
    seed: int
    step: int
    steady: Draws  # the same at every step and for every T, because popularity belongs to the model
    draws: Draws

    @property
    def num_pairs(self) -> int:
        return self.T * self.K

    @property
    def experts_per_rank(self) -> int:
        return self.E // self.W


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The result of a family. The first tokens_W[0] tokens start on rank 0, and so on; None: shared evenly.
    Without gates the workload draws them."""

    expert_TK: Ints | Tensor
    gate_TK: Tensor | None = None
    tokens_W: tuple[int, ...] | None = None


def uniform(batch: Batch) -> Choices:
    """A router that knows nothing: K distinct experts per token, every set equally likely.

    Target: in expectation T * K / E pairs per expert, E * (1 - (1 - K / E)^T) active experts.
    """
    return Choices(expert_TK=distinct_uniform(batch.T, batch.E, batch.K, batch.draws))


def balanced(batch: Batch) -> Choices:
    """The best a balancing loss could do: equal load on every expert and on every rank.

    Target: loads differ by at most one between experts, and by at most one between ranks, also if T * K < E.
    """
    return _from_counts(batch, _evenly(batch, batch.num_pairs, range(batch.E)))


def zipf(batch: Batch, a: float) -> Choices:
    """Popularity by power law: the r-th most popular expert gets a load proportional to 1 / r^a.

    Target: exactly that, rounded to whole pairs; what an expert would get beyond T goes to the others in
    proportion, because a token picks an expert at most once.
    """
    if not 0 <= a <= 100:
        raise ValueError(f"zipf's exponent a is {a}; it must be between 0 (even) and 100")
    weight_E = np.arange(1, batch.E + 1, dtype=np.float64) ** -a
    rank_E = batch.steady.permutation(batch.E)
    return _from_counts(batch, apportion(weight_E[rank_E], batch.num_pairs, batch.T))


def lognormal(batch: Batch, *, maxvio: float) -> Choices:
    """Log-normal popularity, the best fit to DeepSeek-V3's recorded load (DeepEP#393), at a stated MaxVio.

    Target: the largest load is (1 + maxvio) * T * K / E, rounded to whole pairs; sigma is found by bisection.
    At most E / K - 1, where one expert is chosen by every token.
    """
    T, E, K = batch.T, batch.E, batch.K
    if not 0 <= maxvio <= E / K - 1 + 1e-9:
        raise ValueError(
            f"maxvio={maxvio:g} cannot be reached with E={E} and K={K}: a token picks an expert at most "
            f"once, so max/mean is at most E/K and maxvio at most {E / K - 1:g}; choose one from 0 to that"
        )
    z_E = batch.steady.normal(E)
    most = min(max(round((1 + maxvio) * T * K / E), -(-T * K // E)), T)
    top = int(z_E.argmax())
    others_E = np.arange(E) != top
    popularity_E = _lognormal_popularity(z_E, share=most / max(T * K, 1))
    count_E = np.zeros(E, dtype=np.int64)
    count_E[top] = most
    if E > 1:
        count_E[others_E] = apportion(popularity_E[others_E], T * K - most, most)
    return _from_counts(batch, count_E)


def khot(batch: Batch, n: int, *, share: float = 1.0) -> Choices:
    """A hot set: n experts, anywhere, take the stated share of all pairs evenly (Mooncake's k-hot incast).

    Target: with share=1 exactly n active experts and max/mean = E / n; n must be at least share * K.
    """
    _check_count("khot", "n", n, batch.E)
    return _from_counts(batch, _heat(batch, batch.steady.permutation(batch.E)[:n], share, "khot"))


def hot_rank(batch: Batch, *, share: float = 0.5) -> Choices:
    """All hot experts on one rank: its E / W experts take the stated share of all pairs.

    Target: per-rank max/mean = share * W, per-expert the same; the other experts are even.
    """
    _check_ranks(batch, "hot_rank")
    rank = int(batch.steady.below(batch.W, 1)[0])
    return _from_counts(batch, _heat(batch, _experts_of(batch, rank), share, "hot_rank"))


def spread_hot(batch: Batch, *, share: float = 0.5) -> Choices:
    """The heat of hot_rank spread over ranks: as many hot experts, one per rank before any rank has two.

    Target: per-expert max/mean = share * W as in hot_rank, but ranks differ only as E / W experts on W must.
    """
    _check_ranks(batch, "spread_hot")
    hot = _rank_by_rank(batch, batch.steady)[: batch.experts_per_rank]
    return _from_counts(batch, _heat(batch, hot, share, "spread_hot"))


def one_expert(batch: Batch) -> Choices:
    """A collapsed router: every token's first choice is one expert, the others share the rest evenly.

    Target: max/mean = E / K, the largest there is.
    """
    return _one_for_all(batch, 1)


def zero_expert_rank(batch: Batch) -> Choices:
    """A rank whose experts get nothing; all others are even.

    Target: exactly E / W experts without a pair, per-rank max/mean = W / (W - 1).
    """
    _check_ranks(batch, "zero_expert_rank")
    idle = _experts_of(batch, int(batch.steady.below(batch.W, 1)[0]))
    if batch.E - len(idle) < batch.K:
        raise ValueError(
            f"zero_expert_rank leaves {batch.E - len(idle)} experts, too few for K={batch.K} distinct "
            "choices; choose more experts or ranks"
        )
    return _from_counts(batch, _evenly(batch, batch.num_pairs, set(range(batch.E)) - set(idle.tolist())))


def rotating(batch: Batch, n: int, *, share: float = 1.0) -> Choices:
    """A hot set that moves on: n neighbouring experts, the next n at the next step, round and round.

    Target: as khot(n) at every step; two steps in a row share no hot expert if 2 * n <= E.
    """
    _check_count("rotating", "n", n, batch.E)
    start = int(batch.steady.below(batch.E, 1)[0]) + batch.step * n
    return _from_counts(batch, _heat(batch, (start + np.arange(n)) % batch.E, share, "rotating"))


def burst(batch: Batch, p: int = 8, *, n: int = 1) -> Choices:
    """Even load, but at every p-th step (0, p, 2p, ...) each token picks the same n experts among its K.

    Target: max/mean = E / K at those steps; balanced at all others.
    """
    _check_count("burst", "p", p, None)
    _check_count("burst", "n", n, batch.K)
    return balanced(batch) if batch.step % p else _one_for_all(batch, n)


def source_ragged(batch: Batch, *, own: float = 0.5) -> Choices:
    """Tokens start on W ranks in very different numbers, and each rank's tokens prefer its own experts.

    Target: each source has twice the tokens of the next, in shuffled order; a share `own` of a source's pairs
    goes to the experts of its rank, the rest evenly to the others.
    """
    _check_ranks(batch, "source_ragged")
    weight_W = 0.5 ** np.arange(batch.W)
    tokens_W = apportion(weight_W, batch.T, batch.T)[batch.steady.permutation(batch.W)]
    parts = []
    for rank, T in enumerate(tokens_W.tolist()):
        count_E = _heat(batch, _experts_of(batch, rank), own, "source_ragged", name="own", T=T)
        parts.append(assign(count_E, T, batch.K, batch.draws))
    return Choices(expert_TK=np.concatenate(parts), tokens_W=tuple(tokens_W.tolist()))


def correlated(batch: Batch, p: float) -> Choices:
    """Neighbouring tokens agree: a token repeats the experts of the one before it with probability p.

    Target: exactly round(p * (T - 1)) tokens repeat, the others are uniform; neighbours then share
    p + (1 - p) * K / E of their experts in expectation.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"correlated's p is {p:g}; a probability is between 0 and 1")
    T = batch.T
    fresh_TK = distinct_uniform(T, batch.E, batch.K, batch.draws)
    origin_T = np.arange(T)
    if T > 1:
        repeats = 1 + batch.draws.permutation(T - 1)[: round(p * (T - 1))]
        origin_T[repeats] = 0
    return Choices(expert_TK=fresh_TK[np.maximum.accumulate(origin_T)])


def trace(batch: Batch, file: str, *, layer: int | None = None, document: int | None = None) -> Choices:
    """A recorded routing replayed: T tokens from a place drawn from the seed, each step where the last ended.

    Target: the file's own ids and gates, of one layer or document if it is named, from the beginning again
    after the end. E and K must be the file's.
    """
    status = Path(file).stat() if Path(file).is_file() else None
    recorded = _recorded(file, layer, document, status and (status.st_mtime_ns, status.st_size))
    routing = recorded.routing
    N = routing.num_tokens
    if (routing.num_experts, routing.num_choices) != (batch.E, batch.K):
        raise ValueError(
            f"{file} was recorded with E={routing.num_experts} and K={routing.num_choices}, not "
            f"E={batch.E} and K={batch.K}; ask for the sizes of the file"
        )
    if N == 0:
        raise ValueError(f"{file} holds no tokens to replay; record some")
    # by content, so that a file that was moved is still the same workload
    start = int(Draws("trace", recorded.checksum, batch.seed).below(N, 1)[0]) + batch.step * batch.T
    token_T = (start + np.arange(batch.T)) % N
    return Choices(expert_TK=routing.expert_TK[token_T], gate_TK=routing.gate_TK[token_T])


# every step of a cell needs the file, and reading checks all of it
@lru_cache(maxsize=1)
def _recorded(file: str, layer: int | None, document: int | None, stamp: object) -> Trace:
    return read_trace(file).part(layer=layer, document=document)


FAMILIES: dict[str, Callable[..., Choices]] = {
    family.__name__: family
    for family in (
        uniform, balanced, zipf, lognormal, khot, hot_rank, spread_hot, one_expert, zero_expert_rank,
        rotating, burst, source_ragged, correlated, trace,
    )
}  # fmt: skip


def _from_counts(batch: Batch, count_E: Ints) -> Choices:
    return Choices(expert_TK=assign(count_E, batch.T, batch.K, batch.draws))


def _one_for_all(batch: Batch, n: int) -> Choices:
    """Makes the same n experts every token's first choices; the other K - n are even."""
    hot = batch.steady.permutation(batch.E)[:n]
    others = set(range(batch.E)) - set(hot.tolist())
    count_E = _evenly(batch, batch.T * (batch.K - n), others)
    rest = assign(count_E, batch.T, batch.K - n, batch.draws)
    return Choices(expert_TK=np.concatenate([np.tile(hot, (batch.T, 1)), rest], axis=1))


def _evenly(batch: Batch, total: int, experts: Iterable[int]) -> Ints:
    """Returns count_E with the total shared evenly by these experts; the remainder is spread over ranks."""
    order = _rank_by_rank(batch, batch.draws)
    order = order[np.isin(order, [*experts])]
    count_E = np.zeros(batch.E, dtype=np.int64)
    count_E[order] = spread_evenly(total, len(order))
    return count_E


def _rank_by_rank(batch: Batch, draws: Draws) -> Ints:
    """Returns all experts in random order, with one of each rank before any rank has two."""
    within_WE = draws.raw(batch.E).reshape(batch.W, -1).argsort(axis=1, kind="stable")
    expert_WE = within_WE + batch.experts_per_rank * np.arange(batch.W)[:, None]
    return expert_WE[draws.permutation(batch.W)].T.ravel()


def _experts_of(batch: Batch, rank: int) -> Ints:
    return rank * batch.experts_per_rank + np.arange(batch.experts_per_rank)


def _heat(
    batch: Batch, hot: Ints, share: float, family: str, *, name: str = "share", T: int | None = None
) -> Ints:
    """Returns count_E: the hot experts take `share` of the pairs evenly, the others the rest evenly."""
    E, K, n = batch.E, batch.K, len(hot)
    T = batch.T if T is None else T
    # every hot expert at most once per token: share * K <= n; not cooler than even: share > n / E
    most = min(1.0, n / K)
    if not (n / E < share <= most + 1e-12 or share == n / E == 1):
        raise ValueError(
            f"{family} cannot give {n} of {E} experts {name}={share:g} of the pairs with K={K}: it must be "
            f"above their even {n / E:g} and at most {most:g}, because a token picks an expert at most once"
        )
    heated = min(round(share * T * K), n * T)
    count_E = _evenly(batch, T * K - heated, set(range(E)) - set(hot.tolist()))
    count_E[hot] = spread_evenly(heated, n)
    return count_E


def _lognormal_popularity(z_E: Floats, share: float) -> Floats:
    """Returns exp(sigma * z_E) with the sigma that gives the most popular expert this share of the sum. The
    share grows with sigma from 1 / E to 1, so bisection finds it."""
    low, high = 0.0, 1.0
    z_E = z_E - z_E.max()

    def too_flat(sigma: float) -> bool:
        return 1 / np.exp(sigma * z_E).sum() < share

    while too_flat(high) and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if too_flat(middle) else (low, middle)
    # exp is 0 far down the tail; with a tiny share instead, rounding may still give that expert a pair
    return np.maximum(np.exp(high * z_E), 1e-300)


def _check_ranks(batch: Batch, family: str) -> None:
    if batch.W < 2:
        raise ValueError(f"{family} compares ranks and there is only one; ask for W of at least 2")


def _check_count(family: str, name: str, value: int, most: int | None) -> None:
    if value < 1 or (most is not None and value > most):
        span = "at least 1" if most is None else f"between 1 and {most}"
        raise ValueError(f"{family}'s {name} is {value}; it must be {span}")
