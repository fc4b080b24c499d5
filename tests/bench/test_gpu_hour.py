"""The suite gpu-hour: real sizes in the order of the questions, within an hour; rehearsed without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from command_line import mrb_json, refused
from moe_routing_bench.bench import choosing
from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.choosing import MeasureOptions, SizeOptions, WhatOptions, sweep_experiments
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.warming import warm
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.sweep import plan_sweep, run_sweep
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.gpu_cases import implementations_of, rehearsed, step_of
from repository import ROOT

STEPS = ["1 right", "2 roofs", "3 founding", "4 models", "5 rivals"]


def hour(device: str = "pretend:h100", suite: str = "gpu-hour", **axes):
    measure = MeasureOptions(axes={"device": device, "threads": 1, **axes})
    return sweep_experiments(suite, SizeOptions(), WhatOptions(), measure, dry_run=device == "cuda")


def test_the_questions_come_in_their_order_with_real_sizes() -> None:
    suite = cases("gpu-hour")
    assert list(dict.fromkeys(step_of(case.case) for case in suite)) == STEPS
    assert [step_of(case.case) for case in suite] == sorted(step_of(case.case) for case in suite)
    (pack,) = cases("gpu-hour/3-founding-pack")
    assert (pack.T, pack.D, pack.E, pack.K, pack.dtype) == (16384, 4096, 128, 2, "float16")
    models = [case for case in suite if step_of(case.case) == "4 models"]
    assert {(case.D, case.F, case.E) for case in models} == {
        (2048, 768, 128), (2880, 2880, 128), (7168, 2048, 256)
    }  # fmt: skip
    assert {case.workload for case in models} == {"uniform", "zipf(1.2)"}
    assert {case.direction for case in models} == {"forward", "train"}
    assert {case.T for case in models} >= {1, 8192}
    for case in suite:
        for name in implementations_of(case):
            span_named(case.span).origins(name)  # ValueError if there is no such implementation


def test_it_fits_into_an_hour_and_says_the_minutes_of_each_step(
    tmp_path: Path, usual_speed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(available=512 * 2**30)
    monkeypatch.setattr(choosing.psutil, "virtual_memory", lambda: room)
    plan = mrb_json("sweep", "gpu-hour", "--device", "pretend:h100", "--out", tmp_path, "--dry-run")
    assert plan["to_do"] == len(cases("gpu-hour")) and "~" not in "".join(plan["todo"])
    assert list(plan["minutes_by_step"]) == STEPS and all(plan["minutes_by_step"].values())
    assert sum(plan["minutes_by_step"].values()) == pytest.approx(plan["about_seconds"] / 60, abs=0.5)
    assert plan["about_seconds"] < 3600
    assert {(e.view, e.device, e.max_seconds) for e in hour("cuda")} == {("cuda_device", "cuda", 20.0)}


def test_the_page_names_the_lines_that_differ_on_a_gpu() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    named = re.findall(r"^\| `([\w/]+\.py):(\d+)` `(\w+)` \|", text, re.M)
    assert len(named) >= 10
    for file, line, word in named:
        lines = (ROOT / "src/moe_routing_bench" / file).read_text().splitlines()
        declared = [n for n, one in enumerate(lines, 1) if re.match(rf" *(def )?{word}\b", one)]
        assert int(line) in declared, f"docs/gpu.md: {file}:{line} is not {word}, which is at {declared}"
    assert len(text.split()) <= 1200


def test_a_rehearsal_has_every_case_and_is_tiny() -> None:
    small = hour()
    assert len(small) == len(cases("gpu-hour")) and all(one.flops < 1e7 for one in small)
    assert [one.scaled_from for one in small] == [case.case for case in cases("gpu-hour")]
    assert rehearsed(small[0]).T == small[0].T


def test_what_ran_out_of_time_is_not_done(tmp_path: Path) -> None:
    (one,) = hour(suite="gpu-hour/1-right-topk")

    class OverAtOnce:
        name = "local"

        def keys(self, experiments):
            from moe_routing_bench.bench.identity import cell_key

            return [{cell_key(e, this_machine())} for e in experiments]

        def run(self, experiments, **_) -> list[CellOutcome]:
            return [run_cell(e, budget=Budget(0.0)) for e in experiments]

    (outcome,) = run_sweep([one], tmp_path, OverAtOnce())
    assert {o.status for o in outcome.implementations} == {Status.NO_TIME}
    plan = plan_sweep([one], tmp_path, executor=OverAtOnce())
    assert plan.todo == (one,) and not plan.done


def test_a_quick_check_takes_the_first_case_alone() -> None:
    words = ("check", "--op", "combine", "--impl", "index_add", "--dtype", "float32")
    quick, all_of_it = mrb_json(*words, "--quick")["passed"], mrb_json(*words)["passed"]
    assert 0 < quick < all_of_it / 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warming_needs_a_gpu() -> None:
    assert "no GPU" in refused("gpu", "compile", "--warm")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_warming_compiles_checks_and_names_what_fails() -> None:
    some = hour(suite="gpu-hour/1-right-pack")
    assert warm(some, 2, lambda said: None) == []
    (said,) = warm(hour("pretend:h100:oom@index_select+index_add", "gpu-hour/1-right-pack"), 2, print)
    assert "index_select+index_add is OOM" in said


@pytest.mark.nightly  # .ci/run runs the command itself
@pytest.mark.timeout(1200)
def test_the_rehearsal_finds_every_fault(tmp_path: Path) -> None:
    document = mrb_json("gpu", "rehearse", "mi300x", "--out", tmp_path / "out")
    assert set(document["steps"].values()) == {""} and (tmp_path / "out/report.html").stat().st_size > 10_000
