"""A tuner whose races are made up: it keeps its time, goes on after a kill, and a tie keeps the default."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moe_routing_bench as mrb
from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.identity import identify
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.core import cpp
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.results.decisions import decide, write_decisions
from moe_routing_bench.results.record import TUNING
from moe_routing_bench.tuning import tune
from moe_routing_bench.tuning.tune import Tuner, known_races, space_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from repository import ROOT
from sample_outcomes import an_outcome

pytestmark = pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
CASE = Experiment(
    case="own/made", span="expert_ffn", T=100, D=128, F=64, E=8, K=2, dtype="float32", max_seconds=5.0,
    implementations=(ImplementationRef(name="native"),),
)  # fmt: skip
Time = Callable[[dict[str, int]], float | str]


class Races:
    """Stands for run_cell: gives the times of `time` and uses the seconds of every race, by a made clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, time: Time, *, kill_after: int = 10**6):
        self.time, self.kill_after, self.asked, self.now = time, kill_after, list[Experiment](), 0.0
        monkeypatch.setattr(tune, "run_cell", self)
        monkeypatch.setattr(tune, "start_server", lambda: None)
        monkeypatch.setattr(tune, "compile_first", lambda *_: None)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def __call__(self, cell: Experiment, *, budget: Budget, **_: Any) -> CellOutcome:
        if len(self.asked) == self.kill_after:
            raise KeyboardInterrupt
        self.asked.append(cell)
        self.now += budget.seconds
        times = [self.time(parse_spec(one.name)[1]) for one in cell.implementations]
        made = an_outcome(*times, implementations=cell.implementations, span="expert_ffn")
        return replace(made, experiment=cell, identity=identify(cell, this_machine()), seconds=budget.seconds)


def run(folder: Path, seconds: float = 120.0, cases: tuple[Experiment, ...] = (CASE,)) -> Tuner:
    tuner = Tuner(seconds, search="greedy", known=known_races(folder))
    list(run_sweep(cases, folder, tuner, suite=TUNING))
    return tuner


def chosen(folder: Path) -> dict[str, Any]:
    (entry,) = write_decisions(decide(folder), folder, folder / "decisions.json")["entries"]
    (winner,) = entry["by_tokens"]
    return winner


def gains(config: dict[str, int]) -> float:
    return (0.9 if config.get("rows") == 8 else 1.0) * (0.95 if config.get("strip_out") == 2 else 1.0)


def test_the_best_setting_is_found_ranked_again_and_decided(tmp_path: Path, monkeypatch) -> None:
    races = Races(monkeypatch, gains)
    (tuned,) = run(tmp_path).tuned
    final = races.asked[-1].implementations
    assert final[0].name == "native" and len(final) <= tune.FINALISTS + 1 and tuned.ranked
    assert all(cell.implementations[0].name == "native" for cell in races.asked)  # in every race
    winner = chosen(tmp_path)
    assert winner["impl"] == "native(rows=8,strip_out=2)"
    assert winner["ratio"] == pytest.approx(0.855, rel=1e-3)
    assert winner["low"] <= winner["ratio"] <= winner["high"]


def test_a_tie_keeps_the_default(tmp_path: Path, monkeypatch) -> None:
    Races(monkeypatch, lambda config: 1.0 - 0.001 * len(config))
    run(tmp_path)
    assert chosen(tmp_path)["impl"] == "native"


def test_races_of_a_search_decide_nothing(tmp_path: Path, monkeypatch) -> None:
    """A search that has no time to rank its best settings again, then one that has."""
    races = Races(monkeypatch, gains)
    with monkeypatch.context() as patch:
        patch.setattr(tune, "FINALISTS", 1)
        (tuned,) = run(tmp_path).tuned
    assert not tuned.ranked and min(tuned.seen.values()) < 0.9
    assert (chosen(tmp_path)["impl"], chosen(tmp_path)["ties"]) == ("native", [])
    (note,) = (one for one in decide(tmp_path).notes if "not ranked" in one)
    assert "T=100" in note
    measured = len(races.asked)
    (tuned,) = run(tmp_path).tuned  # the races of the search are known
    assert tuned.ranked and len(races.asked) == measured + 1
    assert chosen(tmp_path)["impl"] == "native(rows=8,strip_out=2)"
    monkeypatch.setattr(tune, "FINALISTS", 1)
    assert not run(tmp_path, 60, (replace(CASE, seed=1),)).tuned[0].ranked  # newer, and not ranked
    assert chosen(tmp_path)["impl"] == "native(rows=8,strip_out=2)"


@pytest.mark.parametrize("seconds", [20, 61, 600])
def test_the_time_is_kept(tmp_path: Path, monkeypatch, seconds: int) -> None:
    races = Races(monkeypatch, gains)
    cases = tuple(replace(CASE, T=T, case=f"own/{T}") for T in (60, 100, 200))
    tuner = run(tmp_path, seconds, cases)
    assert races.now <= seconds and len(tuner.tuned) == 3
    assert races.now > 0.5 * seconds or seconds == 20


def test_a_killed_tuning_goes_on_and_its_seconds_count(tmp_path: Path, monkeypatch) -> None:
    whole = Races(monkeypatch, gains)
    run(tmp_path / "whole")
    killed = Races(monkeypatch, gains, kill_after=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
    later = Races(monkeypatch, gains)
    (tuned,) = run(tmp_path / "killed").tuned
    asked = [[one.name for one in cell.implementations] for cell in killed.asked + later.asked]
    assert asked == [[one.name for one in cell.implementations] for cell in whole.asked]
    assert killed.now + later.now <= 120 and tuned.races == len(whole.asked)
    assert chosen(tmp_path / "killed")["impl"] == "native(rows=8,strip_out=2)"


@pytest.mark.parametrize("status", ["CRASHED", "OOM"])
def test_a_crash_is_a_result(tmp_path: Path, monkeypatch, status: str) -> None:
    Races(monkeypatch, lambda config: status if config.get("strip") == 4 else gains(config))
    (tuned,) = run(tmp_path).tuned
    assert tuned.seen["native(rows=8,strip=4)"] == math.inf
    assert tuned.failed["native(rows=8,strip=4)"].startswith(status)
    assert chosen(tmp_path)["impl"] == "native(rows=8,strip_out=2)"


def test_the_space_is_that_of_the_weights(monkeypatch) -> None:
    frozen = replace(CASE, implementations=(ImplementationRef(name="native", frozen=True),))
    names = ["prefetch", "in_place"]
    assert any("prefetch" in one for one in space_of(frozen).settings("native", names))
    assert not any("prefetch" in one for one in space_of(CASE).settings("native", names))
    assert space_of(CASE).settings("native(level=avx2)", ["strip"])[1] == "native(level=avx2,strip=1)"


def test_what_has_no_choice_is_refused() -> None:
    for span, name in (("combine", "gather_sum"), ("pack", "index_select+gather_sum")):
        with pytest.raises(ValueError):
            space_of(replace(CASE, span=span, implementations=(ImplementationRef(name=name),)))
    two = (ImplementationRef(name="gather_sum"), ImplementationRef(name="index_add"))
    assert space_of(replace(CASE, span="combine", implementations=two)).starts == ("gather_sum", "index_add")


def test_a_report_shows_gains_a_map_and_the_ten_best(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        Races(patch, gains)
        cases = tuple(replace(CASE, T=T, case=f"own/{T}") for T in (60, 100, 200))
        run(tmp_path / "tuned", 600, cases)
    page = mrb.open(tmp_path / "tuned").report(tmp_path / "report.html").read_text()
    assert "Tuned settings" in page and "Tuning gains in 3 of 3 cases" in page
    assert page.count(">time / default</th>") == 3
    assert "rows and strip_out: " in page


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Scripts of measurements/ as modules."""
    monkeypatch.syspath_prepend(ROOT / "measurements")
    monkeypatch.syspath_prepend(ROOT / "measurements" / "tuning")
    return importlib.import_module


def test_the_page_of_figures_shows_gains_and_says_no_gain(tmp_path: Path, monkeypatch, scripts) -> None:
    figures, sweeps = scripts("figures"), scripts("sweeps")
    assert figures.tuned_section(tmp_path) == []
    with monkeypatch.context() as patch:
        Races(patch, gains)
        run(tmp_path / "olmoe")
        patch.setattr(tune, "FINALISTS", 1)
        run(tmp_path / "olmoe", cases=(replace(CASE, T=200, case="own/200"),))
    with monkeypatch.context() as patch:
        Races(patch, lambda config: 1.0 + 0.1 * bool(config))
        run(tmp_path / "mixtral", cases=(replace(CASE, dtype="bfloat16"),))
    monkeypatch.setattr(sweeps, "RECORDS", tmp_path)
    for name in ("olmoe", "mixtral"):
        write_decisions(decide(tmp_path / name), name, tmp_path / name / "decisions.json")
        sweeps.keep_tuned([tmp_path / name])
    lines = figures.tuned_section(tmp_path)
    assert "## `mrb tune layer` gains in 1 of 3 cases, and keeps the default in the others" in lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| own")]
    assert [row[-4:-2] + row[-1:] for row in rows] == [
        ["1,000", "native", "SLOWER 9"],
        ["1,000", "native(rows=8,strip_out=2)", "FASTER"],
        ["-", "native", "not ranked again"],
    ]
    assert [row[-2].partition(" (")[0] for row in rows] == ["no gain", "1.170x", "no gain"]


def test_a_regret_is_beside_all_that_were_ranked(tmp_path: Path, monkeypatch, scripts) -> None:
    held_out = scripts("held_out")
    with monkeypatch.context() as patch:
        Races(patch, gains)
        run(tmp_path)
    write_decisions(decide(tmp_path), tmp_path, path := tmp_path / "decisions.json")
    (entry,) = held_out.read_decisions(path).entries
    finalists = held_out.ranked(tmp_path, entry, 64)
    assert "native(rows=8,strip_out=2)" in finalists and len(finalists) == tune.FINALISTS + 1
    names = ("native", "native(rows=8)", "native(rows=8,strip_out=2)")
    refs = tuple(ImplementationRef(name=name) for name in names)
    outcome = an_outcome(1.0, 0.9, 0.8, implementations=refs)
    row = held_out.judged(outcome, "native", "native(rows=8)")
    assert (row["best"], row["beside best"]) == (names[2], "SLOWER")
    assert row["ratio"] == pytest.approx(0.9) and row["regret"] == pytest.approx(0.125)
    kept = held_out.judged(outcome, "native", "native")
    assert kept["regret"] == pytest.approx(0.25) and kept["verdict"] == "the default"
    assert "regret of at most 25.0 %" in held_out.summary([kept])
    assert "regret" not in held_out.summary([{"verdict": "the default, not timed"}])
