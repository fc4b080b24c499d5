"""Faults of captured routes: each kind that users reported is named, and good routes raise no alarm."""

from __future__ import annotations

import numpy as np
import pytest

from engine_routes import Ids, hashed, recording, routes, text
from moe_routing_bench.workloads.trace_check import Recording, check

WORDS = text(400)
GOOD = routes(WORDS[:-1])


def changed(rows: slice | list[int], value: int | Ids, *, layer: int | None = None, ids: Ids = GOOD) -> Ids:
    ids = ids.copy()
    ids[rows, slice(None) if layer is None else layer] = value
    return ids


def swapped() -> Ids:
    ids = GOOD.copy()
    ids[:, 1] = np.roll(ids[:, 1], 1, axis=0)
    return ids


def with_an_id_twice() -> Ids:
    ids = GOOD.copy()
    ids[77, 2] = 9
    return ids


WIDE = routes(text(600), E=512, K=8, L=6)
# what is wrong, and the kind and the words it must be named by
BAD: dict[str, tuple[Recording, str, str]] = {
    # vllm#54730, vllm#44116, vllm-ascend#16314
    "nothing captured": (recording(GOOD * 0, GOOD * 0), "nothing captured", "every id is 0"),
    # SGLang's buffer has a place for dense layers; vllm-ascend: a layer without its number
    "a layer of zeros": (recording(changed(slice(None), 0, layer=1)), "zero layer", "layer 1 has only zeros"),
    # prefix cache, prefill elsewhere: vllm#42346, vllm/router#184
    "zeroed prompt": (
        recording(GOOD, changed(slice(0, 32), 0)),
        "zero start",
        "1: positions 0 to 31 are zeros",
    ),
    "one zeroed row": (recording(changed([0], 0)), "zero start", "position 0 is zeros"),
    # trainers that fill up the token sampled last: prime-rl#1807, twinkle#240
    "filled up": (
        recording(np.concatenate([GOOD, GOOD[:1] * 0]), tokens=[WORDS]),
        "zero end",
        "position 399 is zeros",
    ),
    # joined turns: prime-rl#1807
    "hole between turns": (recording(changed(slice(150, 151), 0)), "zero rows", "position 150 is zeros"),
    # verl#4986
    "an id twice": (recording(with_an_id_twice()), "repeated", "layer 2, position 77: expert 9 twice"),
    # sglang#36404, miles#2697
    "padding": (recording(changed(slice(380, 399), -1)), "absent rows", "positions 380 to 398 are -1"),
    # vllm#33013
    "ids of copies": (
        recording(changed([5], np.array([3, 17])), E=16),
        "outside",
        "position 5: expert 17, outside",
    ),
    "not written": (
        recording(changed([5], np.array([3, -9]), layer=2)),
        "outside",
        "expert -9, outside 0 to 15",
    ),
    # SkyRL#2091, prime-rl#3350
    "too narrow": (recording((WIDE % 256).astype(np.uint8), E=512), "narrow", "uint8, which cannot hold 511"),
    "cut to a byte": (
        recording(np.argsort(np.random.default_rng(0).random((800, 6, 256)))[:, :, :8], E=512),
        "narrow",
        "no id is above 255",
    ),
    # sglang#36404: one row 67 times
    "old rows": (
        recording(changed(slice(200, 240), GOOD[199])),
        "old rows",
        "positions 199 to 239 are one row",
    ),
    "a request of one row": (
        recording(GOOD, changed(slice(None), GOOD[7])),
        "old rows",
        "response 1: positions 0 to 398 are one row",
    ),
    "a constant layer": (
        recording(changed(slice(None), GOOD[7, 0], layer=2)),
        "constant layer",
        "layer 2: all 399",
    ),
    # vllm#48622: a draft model's layer written over the target's
    "twin layers": (
        recording(np.stack([GOOD[:, 0], GOOD[:, 1], GOOD[:, 0]], axis=1)),
        "twin layers",
        "layers 0 and 2",
    ),
    # NeMo-RL#2590, twinkle#240
    "too short": (recording(GOOD[:-3], tokens=[WORDS]), "length", "396 rows for 400 tokens"),
    "too long": (recording(np.concatenate([GOOD, GOOD[:2]]), tokens=[WORDS]), "length", "401 rows for 400"),
    "exchanged": (
        recording(GOOD.transpose(1, 0, 2), tokens=[WORDS]),
        "exchanged",
        "tokens and layers are exchanged",
    ),
    # off by one
    "shifted": (
        recording(np.roll(GOOD, 1, axis=0), tokens=[WORDS]),
        "shifted",
        "fit the tokens best 1 row later",
    ),
    "shifted back": (recording(np.roll(GOOD, -2, axis=0), tokens=[WORDS]), "shifted", "best 2 rows earlier"),
    "a shifted layer": (recording(swapped()), "shifted", "layer 1 fit those of layer 0 best 1 row later"),
    # another request's slots
    "copied": (
        recording(GOOD, GOOD, tokens=[WORDS, text(400, seed=5)]),
        "copied",
        "response 1 has the 399 rows of response 0",
    ),
    "no rows": (recording(GOOD[:0]), "empty", "nothing was captured"),
}


@pytest.mark.parametrize(("captured", "kind", "words"), BAD.values(), ids=BAD)
def test_a_fault_is_named(captured: Recording, kind: str, words: str) -> None:
    faults = check(captured)
    assert any(fault.kind == kind and words in fault.sentence for fault in faults), faults
    # and nothing else is blamed, but for what follows from it
    follows = {"narrow": {"repeated"}, "copied": {"shifted"}}.get(kind, set())
    assert {fault.kind for fault in faults} <= {kind} | follows, faults
    for fault in faults:
        assert fault.sentence.isprintable() and 20 < len(fault.sentence) < 300


def collapsed(T: int, share: float, *, L: int, E: int, K: int) -> Ids:
    """One expert (and its second) has `share` of the tokens in every layer."""
    draw = np.random.default_rng(5)
    ids = np.argsort(draw.random((T, L, E)), axis=2)[:, :, :K]
    ids[draw.random((T, L)) < share] = np.arange(K)
    return ids


def sticky(T: int, *, L: int, E: int, K: int, keep: float) -> Ids:
    """A token often takes the experts of the one before."""
    draw = np.random.default_rng(6)
    ids = np.argsort(draw.random((T, L, E)), axis=2)[:, :, :K]
    for t in range(1, T):
        kept = draw.random(L) < keep
        ids[t, kept] = ids[t - 1, kept]
    return ids


SPACES = [*WORDS[:100], *[1] * 60, *WORDS[100:]]
CODE = [0, 5, 9] * 100
FINE: dict[str, Recording] = {
    "plain": recording(GOOD),
    "plain with tokens": recording(GOOD, tokens=[WORDS]),
    "prompt alone, every token run": recording(routes(WORDS), tokens=[WORDS]),
    "many requests": recording(*(routes(text(90, seed=n), seed=n) for n in range(8))),
    "the same prompt twice": recording(GOOD, GOOD, tokens=[WORDS, WORDS]),
    "decode alone": recording(GOOD[100:], tokens=[WORDS], start=100),
    "one token": recording(GOOD[:1]),
    "three tokens, one request empty": recording(GOOD[:3], GOOD[:0]),
    "one layer": recording(GOOD[:, :1]),
    "one choice": recording(routes(WORDS, K=1)),
    "one choice, two experts": recording(routes(WORDS, K=1, E=2), E=2),
    "one expert": recording(routes(WORDS, K=1, E=1, L=1), E=1),
    "every expert chosen": recording(routes(WORDS, K=4, E=4), E=4),
    "three of four experts": recording(routes(WORDS, K=3, E=4), E=4),
    "skewed": recording(routes(WORDS, skew=3.0), tokens=[WORDS]),
    "very skewed, one choice": recording(routes(WORDS, skew=8.0, K=1, L=1)),
    "collapsed to 97 %": recording(collapsed(2000, 0.97, L=1, E=8, K=1), E=8),
    "collapsed to 97 %, short": recording(collapsed(60, 0.97, L=3, E=8, K=2), E=8),
    "collapsed to 99 %": recording(collapsed(300, 0.99, L=1, E=8, K=1), E=8),
    "hash routed": recording(hashed(WORDS, L=3, E=16, K=2)),
    "hash routed, many spaces": recording(hashed(SPACES, L=3, E=16, K=2), tokens=[SPACES]),
    "hash routed, text that repeats": recording(hashed(CODE, L=2, E=16, K=1), tokens=[CODE]),
    "sticky": recording(sticky(1500, L=3, E=16, K=2, keep=0.8)),
    "no layer knows the other": recording(sticky(1500, L=4, E=16, K=2, keep=0.0)),
    "many experts": recording(WIDE, E=512),
    "few ids of many experts, in bytes": recording(
        (routes(text(4), E=512)[:, :, :1] % 256).astype(np.uint8), E=512
    ),
    "in bytes": recording(GOOD.astype(np.uint8)),
    "of 320 experts few are used": recording(routes(text(100), E=320, K=1, L=1, skew=4.0), E=320),
    "real zeros": recording(changed(slice(None), np.array([0, 1]), layer=0)[:20]),
}


@pytest.mark.parametrize("captured", FINE.values(), ids=FINE)
def test_good_routes_raise_no_alarm(captured: Recording) -> None:
    assert check(captured) == []


def test_chance_raises_no_alarm() -> None:
    for seed in range(40):
        draw = np.random.default_rng(seed)
        L, E, K = int(draw.integers(1, 5)), int(draw.integers(4, 64)), int(draw.integers(1, 4))
        words = text(int(draw.integers(1, 700)), seed=seed)
        ids = routes(
            words, L=L, E=E, K=K, skew=float(draw.uniform(0, 4)), context=float(draw.uniform(0, 2)), seed=seed
        )
        assert check(recording(ids, E=E, tokens=[words])) == [], (seed, L, E, K)
        assert check(recording(sticky(len(words), L=L, E=E, K=K, keep=draw.uniform(0, 0.95)), E=E)) == []
