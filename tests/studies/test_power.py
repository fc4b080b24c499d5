"""The power study counts what it should, on times made up for it; and one small study on real ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command_line import mrb, refused
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.ops import registry
from moe_routing_bench.ops.combine.op import op as combine
from moe_routing_bench.report.pictures import check_picture_path, draw_power
from moe_routing_bench.studies import power
from moe_routing_bench.studies.power import (
    CASE,
    FailedTrialError,
    PowerStudy,
    PowerTrial,
    Times,
    count,
    plan_trials,
    share_interval,
    study_power,
)

pytestmark = pytest.mark.slow


def made_up(percents: Sequence[int], noise: float = 0.002, seed: int | None = None) -> Times:
    draw = random.Random(seed if seed is not None else percents[0])
    a, twin, *b = ([draw.gauss(1.0, noise) for _ in range(30)] for _ in range(2 + len(percents)))
    slowed = [[x * (1 + p / 100) for x in times] for p, times in zip(percents, b, strict=True)]
    return Times(a=a, twin=twin, b=slowed, stop_reason="made up")


def trial(percent: int, verdict: str, ratio: float = 1.0) -> PowerTrial:
    numbers = {} if verdict == "FAILED" else {"ratio": ratio, "interval": (0.9, 1.1), "aa_floor": 0.0}
    return PowerTrial.model_validate(
        {"percent": percent, "verdict": verdict, "rounds": 20, "seconds": 1.0, "reason": "", **numbers}
    )


def test_published_figures_have_200_of_the_same_code_and_100_of_each_slow_down() -> None:
    assert plan_trials(200) == {0: 200, 1: 100, 2: 100, 3: 100, 5: 100, 8: 100}
    assert plan_trials(1) == {0: 1, 1: 1, 2: 1, 3: 1, 5: 1, 8: 1}
    for wrong in (0, -3, 10**9):
        with pytest.raises(ValueError, match="10000"):
            plan_trials(wrong)


def test_a_slow_down_counts_when_slower_and_the_same_code_when_called_either() -> None:
    calls = ["FASTER", "SLOWER", "SAME", "UNDECIDED"]
    same, slowed = count([trial(p, v) for p in (0, 5) for v in calls])
    assert (same.percent, same.share, same.trials) == (0, 0.5, 4)
    assert (slowed.percent, slowed.share) == (5, 0.25)
    assert slowed.verdicts == dict.fromkeys(calls, 1)


def test_a_failed_trial_found_nothing_and_excuses_nothing() -> None:
    same, slowed = count([trial(p, v) for p in (0, 5) for v in ("SLOWER", "FAILED")])
    assert same.share == 1.0 and same.interval == share_interval(1, 1)
    assert slowed.share == 0.5 and slowed.interval == share_interval(1, 2)
    (only,) = count([trial(0, "FAILED")])
    assert only.median_ratio is None and only.interval == (0.0, 1.0)


def test_intervals_are_clopper_and_pearsons() -> None:
    # the ends with 0 or all hits have a closed form: 1 - 0.025 ** (1 / n)
    assert share_interval(0, 200) == (0.0, pytest.approx(1 - 0.025 ** (1 / 200)))
    assert share_interval(100, 100) == (pytest.approx(0.025 ** (1 / 100)), 1.0)
    # 95 of 100, from tables
    assert share_interval(95, 100) == (pytest.approx(0.8872, abs=1e-4), pytest.approx(0.9836, abs=1e-4))


def test_a_study_finds_what_is_there_and_nothing_else() -> None:
    seeds = iter(range(1000))
    study = study_power({0: 20, 1: 10, 5: 10}, take_times=lambda p: made_up(p, seed=next(seeds)))
    same, small, large = study.rows
    assert study.finished and [row.percent for row in study.rows] == [0, 1, 5]
    assert same.share == 0 and small.share == 0 and large.share == 1
    assert large.median_ratio == pytest.approx(1.05, abs=0.002) and large.median_rounds == 30
    assert {t.reason for t in study.trials} == {"made up"}


def test_the_twin_counts() -> None:
    def far_twin(percents: Sequence[int]) -> Times:
        times = made_up(percents)
        return Times(a=times.a, twin=[1.1 * x for x in times.a], b=times.b, stop_reason="")

    (row,) = study_power({5: 3}, take_times=far_twin).rows
    assert row.verdicts == {"UNDECIDED": 3}, "5 % is nothing where the twin is 10 % away"


def test_the_order_is_shuffled_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return [t.percent for t in study_power({0: 20, 5: 20}, seed=seed, take_times=made_up).trials]

    first = order(0)
    assert Counter(first) == {0: 20, 5: 20}
    assert first == order(0) != order(1)
    assert 5 < first[:20].count(5) < 15, "both percents in both halves"


def test_a_study_survives_its_file(tmp_path: Path) -> None:
    study = study_power({0: 3, 5: 3}, take_times=made_up, command="mrb doctor --power")
    assert PowerStudy.from_json(study.to_json()) == study
    assert study.policy["max_rounds"] == CASE.max_rounds
    assert set(study.weather) >= {"load_before", "load_after", "steal_percent"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["rows"][0].update(share=0.0, interval=[0, 1]),
        lambda d: d["trials"].pop(),
        lambda d: d["trials"][0].update(verdict="FAILED"),
        lambda d: d["trials"][0].update(ratio=-1),
        lambda d: d.update(surprise=1),
        lambda d: d.pop("machine"),
    ],
)
def test_a_file_that_is_not_a_study_is_refused_in_a_sentence(spoil) -> None:
    document = json.loads(study_power({5: 4}, take_times=made_up).to_json())
    spoil(document)
    with pytest.raises(ValueError, match="power study"):
        PowerStudy.from_json(json.dumps(document))


def test_a_trial_has_all_its_numbers_or_failed() -> None:
    whole = trial(5, "SLOWER").model_dump()
    for changed in ({"verdict": "FAILED"}, {"ratio": None}, {"interval": None}, {"aa_floor": None}):
        with pytest.raises(ValueError, match="FAILED"):
            PowerTrial.model_validate({**whole, **changed})


def test_a_failure_is_a_trial_with_its_reason() -> None:
    def refused(percents: Sequence[int]) -> Times:
        raise FailedTrialError("SUSPECT: it keeps memory")

    study = study_power({0: 2}, take_times=refused)
    assert study.rows[0].verdicts == {"FAILED": 2}
    assert study.trials[0].reason == "SUSPECT: it keeps memory" and study.trials[0].ratio is None


def interrupted(after: int):
    left = iter(range(after))

    def take(percents: Sequence[int]) -> Times:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return made_up(percents)

    return take


def test_ctrl_c_keeps_what_was_measured() -> None:
    reports: list[tuple[int, int]] = []
    study = study_power(
        {5: 30}, take_times=interrupted(4), on_progress=lambda done, total: reports.append((done, total))
    )
    assert not study.finished and study.rows[0].trials == 28 and study.planned == {5: 30}
    assert reports == [(7 * n, 30) for n in range(5)]
    with pytest.raises(KeyboardInterrupt):
        study_power({5: 10}, take_times=interrupted(0))


@pytest.fixture
def kernels() -> None:
    registry.include(power.KERNELS)


@pytest.mark.usefixtures("kernels")
def test_the_kernel_is_right_at_every_speed() -> None:
    args = (
        span_named(CASE.span)
        .arguments(Inputs(replace(CASE, workload="uniform")).at(0, 0, CASE.layout))
        .values()
    )
    wanted = combine.get("gather_sum").run(*args)
    for spec in ("slowed(percent=0,role=baseline)", "slowed(percent=8)"):
        assert torch.equal(combine.get(spec)(*args), wanted)


@pytest.mark.usefixtures("kernels")
def test_the_spin_is_a_percent_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (
        span_named(CASE.span)
        .arguments(Inputs(replace(CASE, workload="uniform")).at(0, 0, CASE.layout))
        .values()
    )
    for percent, reads in ((0, 3), (5, 2 + 5), (8, 2 + 8)):
        ready = combine.get(f"slowed(percent={percent})")
        # a clock that stands at 0 at the start, at 100 after the work and goes on by one with each look
        ticks = iter([0, *range(100, 200)])
        looks: list[int] = []
        tick = lambda ticks=ticks, looks=looks: looks.append(t := next(ticks)) or t  # noqa: E731
        monkeypatch.setitem(ready.run.func.__globals__, "perf_counter_ns", tick)
        ready.run(*args)
        assert len(looks) == reads and looks[-1] == 100 + max(1, percent)


def test_the_picture_is_1000_pixels_wide(tmp_path: Path) -> None:
    study = study_power({0: 4, 1: 2, 5: 2}, take_times=made_up)
    draw_power(study, tmp_path / "power.png")
    head = (tmp_path / "power.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20], "big") == 1000


def test_a_picture_that_cannot_be_written_is_told_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="end in"):
        check_picture_path(tmp_path / "power.doc")
    with pytest.raises(ValueError, match="not a folder"):
        check_picture_path(tmp_path / "absent" / "power.png")


@pytest.fixture
def fake_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "RealTimes", lambda experiment, seed: made_up)


@pytest.mark.usefixtures("fake_rounds")
def test_the_command_shows_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_routing_bench.report.console.LINE_SECONDS", 0.0)
    out = tmp_path / "power.png"
    words = ("doctor", "--power", "--trials", "4", "--out", out)
    ran = mrb(*words)
    assert "none (A/A)" in ran.stdout and "2 SLOWER" in ran.stdout and str(out) in ran.stdout
    assert "14 of 14 comparisons" in ran.stderr and "comparisons" not in ran.stdout
    study = PowerStudy.from_json(out.with_suffix(".json").read_bytes())
    assert len(study.trials) == 4 + 5 * 2 and out.exists()
    ran = mrb(*words, "--json")
    assert [t.ratio for t in PowerStudy.from_json(ran.stdout).trials] == [t.ratio for t in study.trials]


@pytest.mark.usefixtures("fake_rounds")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trials", "5"], "belong to --power"),
        (["--power", "--trials", "0"], "10000"),
        (["--power", "--out", "power.doc"], ".png"),
    ],
)
def test_mistakes_get_a_sentence(words: list[str], sentence: str) -> None:
    assert sentence in refused("doctor", *words)


def test_ctrl_c_shows_and_writes_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "power.png"
    monkeypatch.setattr(power, "RealTimes", lambda experiment, seed: interrupted(1))
    words = ("doctor", "--power", "--trials", "4", "--out", out)
    assert "7 of 14" in mrb(*words, code=130).stdout
    assert not PowerStudy.from_json(out.with_suffix(".json").read_bytes()).finished
    monkeypatch.setattr(power, "RealTimes", lambda experiment, seed: interrupted(0))
    assert "was measured" in mrb(*words, code=2).stderr


def test_a_real_study_of_two_trials() -> None:
    study = study_power({0: 1, 300: 1}, experiment=replace(CASE, min_rounds=8, max_rounds=8))
    same, slowed = study.rows
    assert same.median_rounds == slowed.median_rounds == 8, study.trials
    assert slowed.median_ratio is not None and slowed.median_ratio > 1.2
