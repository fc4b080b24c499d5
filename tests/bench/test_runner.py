"""run_cell on honest implementations: every span, what a time is made of, and what stands beside it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file

from moe_routing_bench.bench import identity, kit, measure, runner, trial
from moe_routing_bench.bench.floor import TOLERANCE, floor_seconds, raise_stored, too_fast
from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.host import Turn
from moe_routing_bench.bench.hosts.messages import Described, KitRun
from moe_routing_bench.bench.hosts.shared import SharedHost, check_clocks
from moe_routing_bench.bench.roofs import Roofs, measure_roofs, store_roofs, stored_roofs
from moe_routing_bench.bench.runner import Progress, run_cell
from moe_routing_bench.bench.series import Series
from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.trial import _checks
from moe_routing_bench.conformance.check import Outcome
from moe_routing_bench.core import cpp, fork_server
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.fork_server import server_harm, server_pid
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.registry import BUILT_IN
from moe_routing_bench.report.outcome_tables import show_outcome
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from sample_outcomes import an_outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HOW = {  # a busy machine may compile for minutes
    "min_rounds": 8, "max_rounds": 8, "checked": 2, "target": 0.5, "memory_gib": 4, "max_seconds": 900,
    "step_seconds": 600,
}  # fmt: skip


def cell_of(span: str, *specs: str, layouts: tuple[str, ...] = ("compact",), **more) -> Experiment:
    case = Experiment(case="own/x", span=span, T=24, D=32, F=16, E=8, K=2, dtype="float32", shared_F=16)
    implementations = tuple(
        ImplementationRef.read(s, layout=y) for s in specs or span_named(span).all_names() for y in layouts
    )
    return replace(case, implementations=implementations, **{**HOW, **more})


@pytest.mark.parametrize(
    "layout",
    [
        "compact",
        pytest.param("padded(capacity_factor=1.0)", marks=pytest.mark.nightly),
        pytest.param("block(8)", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("span", [name for name in span_names() if name not in ("block", "model")])
def test_no_honest_implementation_is_rejected(span, layout):
    """Everything there is in every layout is timed, or says itself why not."""
    outcome = run_cell(cell_of(span, layouts=(layout,)))
    for one in outcome.implementations:
        assert one.status in (Status.PASSED, Status.UNSUPPORTED), f"{one.label}: {one.status} {one.reason}"
        assert (len(one.samples) == 8) == (one.status is Status.PASSED)
    passed = [one for one in outcome.implementations if one.status is Status.PASSED]
    if (span, layout) == ("parallel", "block(8)"):  # ranks send rows without blocks
        assert not passed
        return
    assert passed and outcome.baseline is passed[0]
    for one in passed[1:]:  # an installed package is code from outside, whose calls are drawn by lot
        assert one.checked_timed_calls >= (2 if one.origin == BUILT_IN else 1) and one.comparison
    assert outcome.twin is not None and outcome.twin.samples != passed[0].samples


def test_a_cell_that_does_not_fit_in_memory_is_not_begun(monkeypatch):
    """The system killed the whole bench without a word."""
    monkeypatch.setattr(runner.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=1000))
    outcome = run_cell(cell_of("expert_ffn", "staged", "eager_loop"))
    assert [one.status for one in outcome.implementations] == [Status.OOM] * 2


def test_stages_and_several_processes():
    outcome = run_cell(cell_of("layer", "staged", "eager_loop", stages=True, processes=2))
    staged, eager = outcome.implementations
    assert list(staged.stages) == ["route", "plan", "dispatch", "gemm", "combine", "shared"]
    assert list(eager.stages) == ["route", "plan", "eager_loop", "shared"]
    assert outcome.rounds_by_process == (8, 8) and len(staged.samples) == outcome.rounds == 16


def leaves_after_five(name):
    leaver = Series("candidate", ImplementationRef(name=name))
    return lambda self, done: [leaver] if done == 5 and leaver in self.lineup else []


def test_who_left_one_set_of_processes_does_not_return_in_the_next(monkeypatch):
    """Its samples would be paired with other rounds of the baseline."""
    monkeypatch.setattr(measure._Rounds, "_who_leaves", leaves_after_five("gather_sum"))
    outcome = run_cell(cell_of("combine", "index_add", "gather_sum", "native", processes=2))
    assert [len(one.samples) for one in outcome.implementations] == [16, 5, 16]
    assert outcome.rounds_by_process == (8, 8)


@pytest.mark.parametrize("cache", ["cold", "weights-cold"])
def test_cold_caches_time_single_calls(cache):
    outcome = run_cell(cell_of("expert_ffn", "staged", cache=cache))
    (one,) = outcome.implementations
    assert one.status is Status.PASSED and one.calls_per_sample == 1


def test_a_baseline_that_cannot_run_is_replaced_and_said():
    outcome = run_cell(cell_of("grouped_gemm", "padded_bmm", "expert_loop"))
    refused, other = outcome.implementations
    assert refused.status is Status.UNSUPPORTED and "padded layout" in refused.reason
    assert other.role == "baseline" and "padded_bmm" in outcome.notes[0]


def test_a_trial_that_ended_early_is_not_held_against_the_next(monkeypatch):
    """Its first result is not the next implementation's own earlier one."""
    first_calls = trial._first_calls

    def short_of_time(host, series, *more):
        if series.implementation.name == "staged":
            turn = Turn(series=series, first=10, step=1, keep=0, hot=False, name="first")
            host.sample(turn)
            host.judge(turn)
            raise trial.OutOfTimeError("over")
        return first_calls(host, series, *more)

    monkeypatch.setattr(trial, "_first_calls", short_of_time)
    outcome = run_cell(cell_of("layer", "eager_loop", "staged", "dense_all_experts"))
    statuses = [one.status for one in outcome.implementations]
    assert statuses == [Status.PASSED, Status.NO_TIME, Status.PASSED]


def test_nothing_that_runs_is_an_outcome_too():
    outcome = run_cell(cell_of("grouped_gemm", "padded_bmm"))
    assert outcome.baseline is None and outcome.rounds == 0 and "nothing passed" in outcome.stop_reason


def test_progress_only_goes_up():
    seen: list[Progress] = []
    run_cell(cell_of("combine", "gather_sum"), on_progress=seen.append)
    shares = [one.share for one in seen]
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)


# a million times too low: they stand for a clock that runs too slowly
LOW = Roofs(
    machine="m",
    read_bytes={1: 1e3},
    copy_bytes={1: 1e3},
    gemm_flops={"float32": {1: 1e3}},
    seconds=1.0,
)


def test_our_own_code_is_never_suspect_because_of_roofs():
    outcome = run_cell(cell_of("expert_ffn", "staged", "eager_loop"), roofs=LOW)
    assert all(one.status is Status.PASSED and one.samples for one in outcome.implementations)
    assert any("measured roofs" in note and "staged" in note for note in outcome.notes)


def test_code_from_outside_that_is_faster_than_the_machine_is_suspect():
    floors: dict[int, float | None] = {0: 1.0, 1: 1.0}
    assert too_fast({0: 0.5, 1: 0.5}, floors, ()) == {}  # a second by the roofs, but ours
    assert list(too_fast({0: 2.0, 1: 0.5}, floors, {1})) == [1]
    assert "200 %" in too_fast({0: 2.0, 1: 0.5}, floors, {1})[1]
    assert too_fast({0: 0.5, 1: 0.5}, floors, {1}) == {}  # ours shows how much too low the roofs are
    assert too_fast({0: 2.0, 1: 0.5}, {0: None, 1: None}, {1}) == {}
    cost = Cost(useful_flops=1000, executed_flops=1000)
    experiment = cell_of("expert_ffn", "staged")
    assert floor_seconds(experiment, cost, LOW) == 1.0
    assert (
        floor_seconds(experiment, cost, LOW.model_copy(update={"busy": "others"})) is None
    )  # a busy machine's


def test_our_own_code_raises_the_stored_roof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    here = this_machine().name
    implementations = (ImplementationRef(name="staged"), ImplementationRef(name="native(store=int8)"))
    cost = Cost(useful_flops=10**9, executed_flops=10**9)
    outcome = an_outcome(0.01, 0.009, implementations=implementations, cost=cost)  # 1e11 a second
    for roof, kept in ((9e10, 1e11), (2e11, 2e11), (1e10, 1e10)):  # ten times: the work is counted wrongly
        store_roofs(LOW.model_copy(update={"machine": here, "gemm_flops": {"float32": {1: roof}}}))
        raise_stored(outcome)
        found = stored_roofs(here)
        assert found is not None and found.gemm_flops["float32"][1] == pytest.approx(kept)


def test_the_floor_counts_bytes_only_where_they_must_come_from_memory():
    roofs = Roofs(
        machine="m",
        read_bytes={1: 1e9},
        copy_bytes={1: 2e9},
        gemm_flops={"float32": {1: 1e9}},
        seconds=1.0,
    )
    cost = Cost(useful_flops=10**6, executed_flops=10**6, weight_bytes=6 * 10**6, activation_bytes=2 * 10**6)
    hot, cold, weights_cold = (
        floor_seconds(cell_of("expert_ffn", "staged", cache=cache), cost, roofs)
        for cache in ("hot", "cold", "weights-cold")
    )
    assert (hot, cold, weights_cold) == (1e-3, 4e-3, 3e-3)
    huge = replace(cost, weight_bytes=10**12)
    assert floor_seconds(cell_of("expert_ffn", "staged"), huge, roofs) == pytest.approx(500, rel=0.01)
    assert floor_seconds(cell_of("expert_ffn", "staged", threads=2), cost, roofs) is None


def test_what_roofs_of_a_busy_machine_say_is_marked(capsys: pytest.CaptureFixture[str]):
    busy = LOW.model_copy(update={"busy": "0.9 cores"})
    outcome = run_cell(cell_of("expert_ffn", "staged", "eager_loop"), roofs=busy)
    for one in outcome.implementations:
        assert one.roof_busy and one.share_of_roof == 1.0 and one.floor_seconds is None
    assert not any("too low" in note for note in outcome.notes)
    show_outcome(outcome, roofs=busy)
    shown = " ".join(capsys.readouterr().out.split())
    assert "~100 %" in shown and "0.9 cores" in shown


def test_an_honest_cell_is_not_above_the_roof():
    if (reason := cpp.why_not()) is not None:
        pytest.skip(reason)
    shape = MoEShape(T=4, D=1024, F=1024, E=8, K=4)
    case = Experiment(case="own", span="expert_ffn", **vars(shape), dtype="float32", direction="forward")
    implementations = tuple(ImplementationRef(name=spec) for spec in ("staged", "native"))
    for _ in range(3):  # what others do meanwhile can only lower a roof
        roofs = measure_roofs(this_machine().name, (1,))
        outcome = run_cell(replace(case, workload="uniform", implementations=implementations), roofs=roofs)
        shares = [(one.roof_seconds or 0) / median(one.samples) for one in outcome.implementations]
        if max(shares) < TOLERANCE:
            break
    assert 0.1 < max(shares) < TOLERANCE, (shares, roofs.busy)


def test_clocks_that_disagree_are_suspect_but_a_busy_machine_is_not():
    busy = [(0.010, 0.013)] * 8
    check_clocks(busy, lambda: (0.010, 0.0101))  # one undisturbed span is enough
    asked = []
    with pytest.raises(ImplementationError, match=r"10 ms .* 13 ms"):
        check_clocks(busy, lambda: asked.append(1) or (0.010, 0.013))
    assert len(asked) == 50


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cache": "warm"}, "cache"),
        ({"min_rounds": 3}, "at least 8"),
        ({"max_rounds": 10, "min_rounds": 20}, "rounds"),
        ({"threads": 0}, "at least 1"),
        ({"target": 2.0}, "fraction"),
        ({"memory_gib": 0.0}, "memory cap"),
    ],
)
def test_policies_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        cell_of("combine", **wrong)


def test_an_experiment_travels_as_json_and_refuses_what_is_none():
    experiment = cell_of("combine")
    assert Experiment.from_json(experiment.to_json()) == experiment
    for text in ("", "{}", "[1]", '{"case": 3}', experiment.to_json()[:-2], "null"):
        with pytest.raises(ValueError, match="not an experiment"):
            Experiment.from_json(text)
    with pytest.raises(ValueError, match="no implementation"):
        run_cell(replace(experiment, implementations=()))
    with pytest.raises(ValueError, match="named twice"):
        replace(experiment, implementations=experiment.implementations[:1] * 2)


@pytest.fixture
def late_after_six(monkeypatch):
    take = measure._Rounds._take

    def late(self, series, done):
        take(self, series, done)
        if done == 5:
            self.deadline = time.perf_counter()

    monkeypatch.setattr(measure._Rounds, "_take", late)


def test_who_must_leave_for_want_of_time_keeps_its_place(late_after_six):
    """Six rounds are too few for a verdict, but they rank."""
    outcome = run_cell(cell_of("combine", "index_add", "gather_sum", "native", min_rounds=20, max_rounds=20))
    assert [one.status for one in outcome.implementations] == [Status.PASSED] * 3
    assert [len(one.samples) for one in outcome.implementations] == [6, 6, 6]
    for one in outcome.implementations[1:]:
        assert one.comparison is not None and one.comparison.verdict == "TOO_FEW_ROUNDS"
        assert one.checked_timed_calls >= 1 and "6 rounds" in one.comparison.reason


def test_changed_weights_are_blamed_on_one_of_those_who_share_a_process(monkeypatch):
    asked, leaving = [], leaves_after_five("eager_loop")

    def changed(host):
        if len(host.setup.trials) == 3:  # after the rounds
            asked.append(host)
            raise ImplementationError(
                Status.MUTATED_INPUT, "the experts' weights were not the same after its calls"
            )

    monkeypatch.setattr(SharedHost, "check_weights", changed)
    monkeypatch.setattr(measure._Rounds, "_who_leaves", leaving)
    outcome = run_cell(cell_of("expert_ffn", "staged", "eager_loop", "native"))
    assert [one.status for one in outcome.implementations] == [Status.MUTATED_INPUT] * 3
    for one in outcome.implementations:
        assert "one of staged, eager_loop, native" in one.reason
    assert len(asked) == 1, "all of them at once, not one baseline after the other"


def test_a_server_of_workers_that_was_slowed_is_noticed(monkeypatch):
    """Its workers inherit that, so what they begin with is not what they should have."""
    pid, undone = server_pid(), []
    assert server_harm() == ""
    usual = fork_server._begun_with[pid]
    monkeypatch.setitem(fork_server._begun_with, pid, replace(usual, priority=usual.priority - 1))
    monkeypatch.setattr(os, "setpriority", lambda *how: undone.append(how))
    assert "priority" in server_harm()
    assert undone == [(os.PRIO_PROCESS, pid, usual.priority - 1)]
    with pytest.raises(ImplementationError, match="priority"):
        Child(cell_of("combine", "gather_sum"), (), shared_worker.serve).ready()


def test_a_record_names_the_checks_that_ran():
    """The clock of our own code is not audited, and gather_sum has no weights."""
    (one,) = run_cell(cell_of("combine", "gather_sum")).implementations
    assert {"right on the kit's hard cases", "same bits twice", "no threads left"} <= {*one.checks}
    assert not {"weights unchanged", "time agrees with the parent's clock"} & {*one.checks}
    mine = ImplementationRef(name="mine")
    setup = SimpleNamespace(experiment=cell_of("expert_ffn", "staged"), can_freeze=True, outside={mine})
    careless = Described(label="mine", deterministic=False, reuses_output=True)
    ran = _checks(mine, careless, setup)
    assert "weights unchanged" in ran and "time agrees with the parent's clock" in ran
    assert not {"same bits twice", "earlier results left alone", "no threads left"} & {*ran}


def test_who_supports_no_case_of_the_kit_has_not_passed_it(monkeypatch):
    """One part of several is enough: its neighbour's cases say nothing about it."""

    def refuses(one):
        return Outcome(cell=one, status="passed" if one.op == "dispatch" else "unsupported")

    monkeypatch.setattr(kit, "_check", refuses)
    experiment = cell_of("pack", "index_select+gather_sum")
    with pytest.raises(NotImplementedError, match=r"0 cases of combine\.gather_sum"):
        kit.run_kit(experiment, experiment.implementations[0])


def test_the_parent_says_which_hard_cases_code_from_outside_must_answer(tmp_path):
    """A worker said that it ran no case, handed over nothing, and passed."""
    experiment = cell_of("combine", "gather_sum")
    one, file = experiment.implementations[0], tmp_path / "kit.safetensors"
    tensors, refused = kit.kit_results(experiment, one)
    every = {name.rpartition("/")[0] + "/" for name in tensors} | set(refused)
    plain = {name: tensor for name, tensor in tensors.items() if name.startswith("combine/plain/")}

    def judged(handed_over: dict, refused: set[str]) -> Status:
        save_file(handed_over, file)
        try:
            kit.judge_kit(file, experiment, one, "", refused)
        except ImplementationError as failure:
            return failure.status
        return Status.PASSED

    assert len(every) == 14 and not refused
    assert judged({}, set()) is Status.SUSPECT
    assert judged(plain, set()) is Status.SUSPECT
    assert judged({}, every) is Status.UNSUPPORTED
    assert judged(plain, every) is Status.PASSED
    assert judged(tensors, set()) is Status.PASSED
    assert judged({name: tensor + 1 for name, tensor in plain.items()}, every) is Status.WRONG_VALUE


def test_a_kit_that_nobody_can_judge_has_at_least_run():
    experiment = cell_of("expert_ffn", "native(store=int8)")
    (one,) = experiment.implementations
    answer = KitRun(passed=0, failed=0, first="")
    host = SimpleNamespace(
        setup=SimpleNamespace(experiment=experiment, outside={one}, about=lambda one: Described(label="")),
        child=SimpleNamespace(ask=lambda *unused, **more: answer), place=lambda one: 0,
    )  # fmt: skip
    with pytest.raises(ImplementationError, match="none of the hard cases"):
        SharedHost.kit(host, one)
    answer = KitRun(passed=1, failed=0, first="")
    assert SharedHost.kit(host, one) == answer


def test_what_changes_results_changes_what_the_kit_remembers(monkeypatch, tmp_path):
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    experiment = cell_of("combine", "index_add")
    (one,) = experiment.implementations
    kit.PassedKits(experiment, outside=False).add(one, "abc")
    changes = (
        lambda m: m.setenv("OPENBLAS_CORETYPE", "Haswell"),
        lambda m: m.setenv("LD_LIBRARY_PATH", "/somewhere"),
        lambda m: m.setattr(identity, "distribution_version", lambda name: "9.9.9"),
        lambda m: m.setattr(kit, "compiler_version", lambda: "g++ 99"),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            assert not kit.PassedKits(experiment, outside=False).knows(one, "abc")
    assert kit.PassedKits(experiment, outside=False).knows(one, "abc")


def test_only_our_own_code_is_remembered_in_a_file(monkeypatch, tmp_path):
    """Code from outside could write the file."""
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    experiment = cell_of("combine", "index_add")
    kit.PassedKits(experiment, outside=False).add(experiment.implementations[0], "abc")
    assert kit.PassedKits(experiment, outside=False).knows(experiment.implementations[0], "abc")
    assert not kit.PassedKits(experiment, outside=True).knows(experiment.implementations[0], "abc")
    written = (tmp_path / "kit.json").read_bytes()
    kit.PassedKits(experiment, outside=True).add(experiment.implementations[0], "def")
    assert kit.PassedKits(experiment, outside=True).knows(experiment.implementations[0], "def")
    assert (tmp_path / "kit.json").read_bytes() == written


def test_long_calls_are_timed_one_at_a_time_and_without_one_before(monkeypatch):
    asked = []
    sample = Child.sample
    monkeypatch.setattr(Child, "sample", lambda self, **how: asked.append(how) or sample(self, **how))
    for file in ("setup", "trial"):
        monkeypatch.setattr(f"moe_routing_bench.bench.{file}.LONG_CALL", 0.0)
    outcome = run_cell(cell_of("combine", "index_add", "native"))
    assert [one.status for one in outcome.implementations] == [Status.PASSED] * 2
    assert asked and all(how["calls"] == 1 and not how["warm"] for how in asked)


def test_what_first_calls_keep_is_no_leak(monkeypatch):
    """Packed weights are kept from the first call on; at full size that is gigabytes."""
    monkeypatch.setattr("moe_routing_bench.bench.measure.LEAK_BYTES", 2**25)
    experiment = cell_of("expert_ffn", "staged", "native")
    shape = MoEShape(T=4, D=512, F=1024, E=16, K=2)  # 100 MB of weights
    outcome = run_cell(replace(experiment, **vars(shape), shared_F=0))
    assert [one.status for one in outcome.implementations] == [Status.PASSED] * 2, outcome.implementations[
        1
    ].reason


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nobody starts threads")
def test_the_threads_of_what_an_implementation_imports_are_not_its_own():
    """Transformers imports scipy, whose OpenBLAS starts a thread for every further core."""
    pytest.importorskip("transformers")
    outcome = run_cell(cell_of("expert_ffn", "staged", "hf_grouped_mm", threads=2))
    assert [one.status for one in outcome.implementations] == [Status.PASSED] * 2, outcome.implementations[
        1
    ].reason
