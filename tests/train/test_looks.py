"""Looks at a growing study: how often nothing is called something, and what a decision says."""

from __future__ import annotations

import numpy as np
import pytest

from moe_routing_bench.train.looks import bounds, decide

LOOKS = (4, 6, 8, 10)


def test_the_error_over_all_looks_is_alpha() -> None:
    draw = np.random.default_rng(7).standard_normal((40_000, LOOKS[-1]))
    rejected = np.zeros(len(draw), dtype=bool)
    early = []
    for n, bound in zip(LOOKS, bounds(LOOKS, 0.05), strict=True):
        seen = draw[:, :n]
        rejected |= np.abs(seen.mean(1) / seen.std(1, ddof=1)) * n**0.5 > bound
        early.append(rejected.mean())
    assert early[-1] == pytest.approx(0.05, abs=0.005)
    assert early[0] < 0.004  # nearly all of the error is kept for the end


def test_one_look_is_students_test() -> None:
    from scipy import stats

    assert bounds((10,), 0.05)[0] == pytest.approx(stats.t.ppf(0.975, 9), rel=0.01)


def test_a_decision_stops_at_the_first_look_that_decides() -> None:
    clear = [0.10, 0.11, 0.09, 0.10, 0.11, 0.10, -5.0, -5.0]
    decision = decide(clear, LOOKS, 0.05)
    assert decision.decided and decision.seeds in (4, 6) and decision.interval[0] > 0
    unclear = decide([0.1, -0.1, 0.2, -0.2, 0.1, -0.15, 0.1, -0.05], LOOKS, 0.05)
    assert not unclear.decided and unclear.seeds == 8
    assert unclear.interval[0] < 0 < unclear.interval[1] and unclear.detectable > unclear.deviation


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError):
        bounds((6, 4), 0.05)
    with pytest.raises(ValueError):
        decide([0.1, 0.2], LOOKS, 0.05)
