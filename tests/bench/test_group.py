"""A cell on several ranks: judged, paired, written as records; what fails is a status of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench import group as group_file
from moe_routing_bench.bench.calls import Result
from moe_routing_bench.bench.cell import Cell, Policy
from moe_routing_bench.bench.group import Group, run_group
from moe_routing_bench.bench.spans.parallel import STAGES, span
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import BenchCase

pytestmark = pytest.mark.slow

POLICY = Policy(min_rounds=8, max_rounds=8, checked=2, target=0.5, max_seconds=900)
SHAPE = MoEShape(T=24, D=32, F=16, E=8, K=2)


def cell_of(*specs: str, W: int = 2, **more: str) -> Cell:
    case = BenchCase(name="own/x", span="parallel", shape=SHAPE, dtype="float32", **more)
    subjects = tuple(Subject(spec=spec) for spec in specs or span.specs())
    return Cell(case=case, workload="source_ragged(own=0.7)", subjects=subjects, W=W, policy=POLICY)


@pytest.mark.parametrize("W", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_transport_is_judged_and_timed(W: int) -> None:
    outcome = run_group(cell_of(W=W))
    names = [one.subject.spec for one in outcome.subjects]
    assert names[0] == "all_to_all+all_to_all" and "hierarchical+hierarchical" in names
    for one in outcome.subjects:
        assert one.status is Status.PASSED, f"{one.label}: {one.reason}"
        assert (
            len(one.samples) == 8 and tuple(one.stages) == STAGES["forward"] and one.checked_timed_calls == 2
        )
        assert one.wire is not None and one.wire.sent >= one.wire.least > 0
    baseline, *others = outcome.subjects
    assert outcome.baseline is baseline and all(one.comparison for one in others)
    assert outcome.twin is not None and outcome.twin.samples != baseline.samples
    nodes = next(one.wire for one in others if one.subject.spec.startswith("hierarchical"))
    assert nodes is not None and nodes.sent == nodes.least, "on one node it sends a token once to a rank"


@pytest.mark.parametrize("direction", ["train", "backward"])
def test_gradients_are_judged_and_timed(direction: str) -> None:
    outcome = run_group(cell_of(direction=direction))
    for one in outcome.subjects:
        assert one.status is Status.PASSED, f"{one.label}: {one.reason}"
        assert tuple(one.stages) == STAGES[direction] and one.checked_timed_calls == 2


def test_a_wrong_gradient_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Group.result

    def wrong(self: Group) -> Result:
        result = right(self)
        gradients = {**result.gradients, "experts.w_in_EDG": result.gradients["experts.w_in_EDG"] * 1.1}
        return replace(result, gradients=gradients)

    monkeypatch.setattr(Group, "result", wrong)
    (one,) = run_group(cell_of("all_to_all+all_to_all", direction="train")).outcomes
    assert one.status is Status.WRONG_VALUE and "gradient of experts.w_in_EDG" in one.reason


def test_what_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Group.result

    def wrong(self: Group) -> Result:
        result = right(self)
        return replace(result, out=result.out * 1.5)

    monkeypatch.setattr(Group, "result", wrong)
    outcome = run_group(cell_of("all_to_all+all_to_all"))
    assert [one.status for one in outcome.outcomes] == [Status.WRONG_VALUE] and outcome.rounds == 0


def test_a_rank_that_dies_ends_its_subject_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    call, killed = Group.call, []

    def dying(self: Group, subject: int, number: int, *, keep: bool = False):  # type: ignore[no-untyped-def]
        if subject == 1 and number == 3 and not killed:
            killed.append(subject)
            self._processes[1].kill()
        return call(self, subject, number, keep=keep)

    monkeypatch.setattr(Group, "call", dying)
    outcome = run_group(cell_of("all_to_all+all_to_all", "all_gather+all_gather"))
    first, second = outcome.subjects
    assert first.status is Status.PASSED and len(first.samples) == 8
    assert second.status in (Status.CRASHED, Status.RUNTIME_ERROR) and not second.samples
    assert group_file.TRIAL_CALLS > 3


def test_what_cannot_be_measured_says_why(tmp_path: Path) -> None:
    padded = cell_of("all_to_all+all_to_all")
    padded = padded.only((replace(padded.subjects[0], layout="padded(capacity_factor=2)"),))
    for cell, words in (
        (padded, "only the compact layout"),
        (cell_of("all_to_all+all_to_all", W=3), "cannot be placed on 3 ranks"),
    ):
        (one,) = run_group(cell).outcomes
        assert one.status is Status.UNSUPPORTED and words in one.reason


def test_the_command_writes_records(tmp_path: Path) -> None:
    sizes = ("--tokens", 16, "--width", 16, "--hidden", 8, "--experts", 4, "--topk", 2, "--dtype", "float32")
    few = ("--min-rounds", 8, "--rounds", 8, "--seconds", 600, "--impl", "all_to_all+all_to_all")
    mrb("bench", "parallel", "--ranks", "2", *sizes, *few, "--out", tmp_path)
    query = "select W, span, wire_bytes, least_wire_bytes, status from records where role = 'baseline'"
    (row,) = mrb_json("results", query, "--folder", tmp_path)["rows"]
    assert row[:2] == [2, "parallel"] and row[4] == "PASSED" and row[2] >= row[3] > 0
    assert "--ranks" in refused("bench", "parallel", "--ranks", "two", *sizes)
