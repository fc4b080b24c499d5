"""The verdict on simulated noise and by hand: how often it is wrong, what it finds, and what it says."""

from __future__ import annotations

import math
import runpy
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing_bench.bench.verdict import (
    OPEN,
    Paired,
    aa_floor,
    compare,
    compare_cell,
    compare_cells,
    precision_reached,
    regret,
    stop_reason,
)
from repository import ROOT

POWER = runpy.run_path(str(ROOT / "measurements" / "bench" / "verdict_power.py"))
simulate, share = POWER["simulate"], POWER["share"]
OPPOSITE = {"FASTER": "SLOWER", "SLOWER": "FASTER"}


def jittered(rounds: int, effect: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.exp(0.03 * np.random.default_rng(seed).standard_normal((2, rounds)))
    return a, effect * b


# at a true rate of 1 %, 150 sessions give more than 6 with a chance of 0.1 %; the seeds are fixed besides
@pytest.mark.parametrize("model", POWER["SHARED"])
def test_the_same_code_is_rarely_called_different(model: str) -> None:
    found = simulate(model, 20, 1.0, 150, 1)
    assert share(found, "FASTER", "SLOWER") <= 6 / 150
    covered = sum(c.interval[0] <= 1 <= c.interval[1] for c in found) / len(found)
    assert covered >= 0.95


@pytest.mark.parametrize("model", POWER["SHARED"])
def test_five_percent_is_found_in_eighty_rounds(model: str) -> None:
    found = simulate(model, 80, 1.05, 50, 1)
    assert share(found, "SLOWER") >= 0.95
    assert share(found, "FASTER") == 0


def test_the_same_code_is_called_the_same_with_enough_rounds() -> None:
    assert share(simulate("jitter", 200, 1.0, 40, 1), "SAME") >= 0.9


# times from a coarse clock as well: equal pairs, and ratios that lie on the threshold
some_times = st.one_of(st.sampled_from([1.0, 1.02, 1.05, 2.0]), st.floats(0.5, 2.0))


@st.composite
def paired(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    rounds = draw(st.integers(5, 16))
    factor = draw(st.sampled_from([1.0, 1.01, 1.02, 1.03, 1.1]))
    a = draw(st.lists(some_times, min_size=rounds, max_size=rounds))
    jitter = draw(st.lists(st.floats(0.99, 1.01), min_size=rounds, max_size=rounds))
    return a, [x * y * factor for x, y in zip(a, jitter, strict=True)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(paired(), st.sampled_from([0.0, 0.01, 0.04]))
def test_swapping_a_and_b_swaps_faster_and_slower(times, floor: float) -> None:
    a, b = times
    one, other = compare(a, b, aa_floor=floor), compare(b, a, aa_floor=floor)
    assert other.verdict == OPPOSITE.get(one.verdict, one.verdict)
    assert other.more_rounds == one.more_rounds
    assert other.p_value == pytest.approx(one.p_value, rel=1e-9)
    assert (other.ratio, *other.interval) == pytest.approx(
        (1 / one.ratio, 1 / one.interval[1], 1 / one.interval[0]), rel=1e-9
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(paired(), st.floats(1e-9, 1e9))
def test_the_unit_of_time_is_irrelevant(times, unit: float) -> None:
    a, b = times
    one, other = compare(a, b), compare([unit * x for x in a], [unit * x for x in b])
    assert (other.verdict, other.more_rounds) == (one.verdict, one.more_rounds)
    assert (other.ratio, *other.interval) == pytest.approx((one.ratio, *one.interval), rel=1e-9)


def test_a_difference_by_hand() -> None:
    found = compare([1.0] * 10, [1.1] * 10)
    assert found.verdict == "SLOWER" and found.more_rounds is None
    assert (found.ratio, *found.interval) == pytest.approx((1.1, 1.1, 1.1))
    assert found.p_value < 0.01
    assert "1.100 times" in found.reason and "2.0 %" in found.reason


def test_the_threshold_itself_is_no_difference() -> None:
    assert compare([1.0] * 20, [1.02] * 20).verdict == "SAME"
    assert compare([1.0] * 20, [1.0201] * 20).verdict == "SLOWER"
    assert compare([1.0] * 20, [1.0201] * 20, delta=0.03).verdict == "SAME"
    assert compare([1.0] * 20, [1 / 1.02] * 20).verdict == "SAME"


def test_a_difference_below_the_floor_is_not_claimed() -> None:
    a, b = jittered(80, 1.05)
    assert compare(a, b).verdict == "SLOWER"
    found = compare(a, b, aa_floor=0.07)
    assert found.verdict == "UNDECIDED" and found.more_rounds is None
    assert "7.0 %" in found.reason


def test_a_session_whose_twins_differ_cannot_say_same() -> None:
    assert compare([1.0] * 20, [1.0] * 20).verdict == "SAME"
    assert compare([1.0] * 20, [1.0] * 20, aa_floor=0.03).verdict == "UNDECIDED"


def test_one_wild_round_changes_little() -> None:
    a, b = jittered(40, 1.05)
    wild = b.copy()
    wild[7] *= 1000
    assert compare(a, wild).verdict == compare(a, b).verdict == "SLOWER"
    assert compare(a, wild).ratio == pytest.approx(compare(a, b).ratio, rel=0.01)
    assert compare(a, wild).interval == pytest.approx(compare(a, b).interval, rel=0.01)


def test_too_few_rounds_decide_nothing() -> None:
    found = compare([1.0] * 5, [2.0] * 5)
    assert found.verdict == "TOO_FEW_ROUNDS" and found.more_rounds == 3
    assert "5 rounds" in found.reason
    assert compare([1.0] * 8, [2.0] * 8).verdict == "SLOWER"
    assert compare([1.0] * 5, [2.0] * 5, confidence=0.9).verdict == "SLOWER"


def test_want_of_rounds_is_not_a_tie() -> None:
    """Nine rounds among twenty comparisons cannot show 0.049: that is no tie, and the verdict says so."""
    alone = ([1.0] * 9, [0.049 + 1e-4 * i for i in range(9)])
    found = compare_cells([alone, *(jittered(9, seed=seed) for seed in range(19))])[0]
    assert found.verdict == "TOO_FEW_ROUNDS" and found.more_rounds
    wide = compare(*jittered(20, 1.01))
    assert wide.verdict == "TOO_FEW_ROUNDS" and wide.more_rounds


def test_what_is_known_as_well_as_asked_for_needs_no_more_rounds() -> None:
    a, b = jittered(400, 1.015)
    assert precision_reached(a, b, 0.01)
    tie = compare(a, b)
    assert tie.verdict == "UNDECIDED" and tie.more_rounds is None
    assert compare(a, b, target=1e-4).verdict == "TOO_FEW_ROUNDS"


def test_more_rounds_grow_with_the_square_of_the_noise() -> None:
    once, twice = (
        compare([1.0] * 41, np.exp(noise * np.linspace(-1, 1, 41))).more_rounds for noise in (0.1, 0.2)
    )
    assert once and twice and (twice + 41) / (once + 41) == pytest.approx(4, rel=0.01)


def test_more_rounds_decide_about_half_the_time() -> None:
    decided = tried = 0
    for session in POWER["times"]("jitter", 80, 400, np.random.default_rng(0)):
        a, _, b = session.T
        if (more := compare(a[:30], b[:30]).more_rounds) is not None and more <= 370:
            tried += 1
            decided += compare(a[: 30 + more], b[: 30 + more]).verdict not in OPEN
    assert tried >= 60 and 0.3 <= decided / tried <= 0.9


def test_many_cells_raise_the_bar() -> None:
    # all of ten rounds on one side: p = 2 / 1024, enough for one cell of one, not for one of twenty
    alone = ([1.0] * 10, [1.1 + 0.001 * i for i in range(10)])
    nothing = [jittered(10, seed=seed) for seed in range(19)]
    assert compare(*alone).verdict == "SLOWER"
    found = compare_cells([alone, *nothing])
    assert found[0].p_value == pytest.approx(2 / 1024)
    assert found[0].p_adjusted == pytest.approx(20 * 2 / 1024)
    assert found[0].verdict == "TOO_FEW_ROUNDS" and "p = 0.039 is above 0.01" in found[0].reason
    assert found[0].more_rounds in range(1, 21)
    assert compare_cells([alone] * 20)[0].verdict == "SLOWER"
    assert compare_cells([]) == []


def test_floors_may_differ_by_cell() -> None:
    cell = jittered(80, 1.05)
    verdicts = [c.verdict for c in compare_cells([cell, cell], aa_floor=[0.0, 0.07])]
    assert verdicts == ["SLOWER", "UNDECIDED"]


def test_a_difference_must_be_larger_between_processes() -> None:
    cell = jittered(400, 1.025)
    verdicts = [c.verdict for c in compare_cells([cell, cell], delta=[0.02, 0.03])]
    assert verdicts == ["SLOWER", "UNDECIDED"]
    assert [c.verdict for c in compare_cells([jittered(400, 1.05)], delta=[0.03])] == ["SLOWER"]


def test_the_floor_has_no_direction_and_ignores_spikes() -> None:
    a = [1.0] * 9
    assert aa_floor(a, [1.03] * 9) == pytest.approx(0.03)
    assert aa_floor([1.03] * 9, a) == pytest.approx(0.03)
    assert aa_floor(a, [1.01] * 7 + [50.0] * 2) == pytest.approx(0.01)


def test_precision_looks_at_the_width_alone() -> None:
    a, b = jittered(80)
    assert precision_reached(a, b, 0.03) and not precision_reached(a, b, 0.005)
    assert precision_reached(a, 7 * b, 0.03) and not precision_reached(a, 7 * b, 0.005)


def test_stop_reasons() -> None:
    a, b = jittered(40)
    assert stop_reason(a, b, target=0.005) is None
    assert stop_reason(a[:3], b[:3], min_rounds=1) is None
    assert (stop_reason(a, b, target=0.1) or "").startswith("precision: ")
    assert stop_reason(a, b, target=0.1, min_rounds=41) is None
    assert (stop_reason(a, b, max_rounds=40) or "").startswith("rounds: 40 ")
    assert (stop_reason(a, b, target=0.005, seconds=61, max_seconds=60) or "").startswith("time: 61 s ")


def test_regret_of_one_choice_for_all() -> None:
    table = {
        "small": {"x": 1.0, "y": 1.01, "z": 2.0},
        "middle": {"x": 1.3, "y": 1.0, "z": 1.0},
        "large": {"x": 1.1, "y": 1.0},
    }
    slower = compare([1.0] * 20, [1.3] * 20)
    same, undecided = replace(slower, verdict="SAME"), replace(slower, verdict="UNDECIDED")
    against_best = {
        "small": {"y": same, "z": slower},
        "middle": {"x": slower, "z": undecided},
        "large": {"x": slower},
    }
    y, x, z = regret(table, against_best)
    assert (y.implementation, y.ties, y.worst_cell) == ("y", ("small", "middle", "large"), "small")
    assert (y.median_loss, y.worst_loss) == pytest.approx((0.0, 0.01))
    assert (x.implementation, x.ties, x.worst_cell) == ("x", ("small",), "middle")
    assert (x.median_loss, x.worst_loss) == pytest.approx((0.1, 0.3))
    assert (z.implementation, z.ties, z.missing) == ("z", ("middle",), ("large",))
    assert (z.median_loss, z.worst_loss) == (1.0, math.inf)
    with pytest.raises(ValueError, match=r"y .* x, .* small"):
        regret(table, {**against_best, "small": {"z": slower}})
    with pytest.raises(ValueError, match="one cell"):
        regret({}, {})


@pytest.mark.parametrize(
    ("a", "b", "named"),
    [
        ([1.0] * 6, [1.0] * 7, "one time"),
        ([[1.0] * 6], [[1.0] * 6], "one time"),
        ([1.0] * 4, [1.0] * 4, "4 rounds"),
        ([1.0] * 6, [1.0] * 5 + [0.0], "B .*0.0 .*round 5"),
        ([-1.0] + [1.0] * 5, [1.0] * 6, "A .*-1.0 .*round 0"),
        ([1.0, math.nan] + [1.0] * 4, [1.0] * 6, "A .*nan .*round 1"),
        ([1.0] * 6, [math.inf] * 6, "B .*inf .*round 0"),
    ],
)
def test_times_that_are_none(a: list[float], b: list[float], named: str) -> None:
    for function in (compare, aa_floor, lambda a, b: precision_reached(a, b, 0.1)):
        with pytest.raises(ValueError, match=named):
            function(a, b)


@pytest.mark.parametrize(
    ("option", "value"), [("delta", 0.0), ("confidence", 1.0), ("aa_floor", -0.1), ("aa_floor", math.nan)]
)
def test_options_that_mean_nothing(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        compare([1.0] * 6, [1.0] * 6, **{option: value})  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_answer() -> None:
    a, b = jittered(40)
    assert compare(a, b, seed=1) == compare(a, b, seed=1)


@pytest.mark.parametrize("times", [jittered(100), ([1.0] * 13, [1.0] * 6 + [2.0] * 7)])
def test_a_comparison_is_quick(times) -> None:
    compare(*times)
    fastest = math.inf
    for _ in range(3):
        started = time.process_time()
        compare(*times)
        fastest = min(fastest, time.process_time() - started)
    assert fastest < 0.05


@pytest.mark.parametrize("rounds", [5, 12, 13, 40, 51])
def test_intervals_and_p_values_are_scipys(rounds: int) -> None:
    """Many cells at once are computed by hand; they must be what scipy gives for each alone."""
    from scipy import stats

    pairs = [jittered(rounds, 1.02, seed) for seed in range(4)]
    pairs.append((np.ones(rounds), np.round(pairs[0][1], 2)))  # a coarse clock
    for found, (a, b) in zip(compare_cells(pairs), pairs, strict=True):
        log = np.round(np.log(b) - np.log(a), 12)
        interval = stats.bootstrap(
            (log,), np.median, n_resamples=1999, confidence_level=0.99, method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        ends = (math.exp(round(float(end), 12)) for end in (interval.low, interval.high))
        assert found.interval == tuple(ends)
        method = "exact" if rounds <= 50 else "auto"
        assert found.p_value == stats.wilcoxon(log, zero_method="zsplit", method=method).pvalue


def test_faster_must_hold_against_both_copies_of_the_baseline():
    base, fast = [1.0, 1.1, 1.05, 1.02] * 8, [0.5, 0.55, 0.52, 0.51] * 8
    twin = Paired(own=[1.01 * t for t in base], against=base)
    (found, _) = compare_cell([Paired(own=fast, against=base, elsewhere=base)], twin)
    assert found.verdict == "FASTER"
    quick = [0.4, 0.44, 0.42, 0.41] * 8
    (found, _) = compare_cell([Paired(own=fast, against=base, elsewhere=quick)], twin)
    assert found.verdict == "UNDECIDED" and "not faster" in found.reason


def test_the_twin_counts_only_for_processes_like_its_own():
    base, same = [1.0, 1.1, 1.05, 1.02] * 8, [1.025, 1.1275, 1.07625, 1.0455] * 8
    noisy = Paired(own=[1.2 * t for t in base], against=base)
    shared, apart, twin = compare_cell(
        [Paired(own=same, against=base), Paired(own=same, against=base, isolated=True)], noisy
    )
    assert shared.aa_floor == twin.aa_floor == pytest.approx(0.2) and apart.aa_floor == 0.0
    assert (shared.verdict, apart.verdict) == ("UNDECIDED", "SAME")  # within 3 % of 1, as two processes are


def test_code_that_nothing_holds_is_not_called_faster():
    base, fast = [1.0, 1.1, 1.05, 1.02] * 8, [0.5, 0.55, 0.52, 0.51] * 8
    twin = Paired(own=[1.01 * t for t in base], against=base)
    free = Paired(own=fast, against=base, isolated=True, trusted=False)
    found, slow, _ = compare_cell([free, replace(free, own=base, against=fast)], twin)
    assert found.verdict == "UNDECIDED" and "--trust" in found.reason
    assert slow.verdict == "SLOWER"
