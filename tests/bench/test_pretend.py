"""A pretended GPU: a run on it takes a GPU's steps, and each planted fault is found where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from command_line import refused
from moe_routing_bench.bench import budget
from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.choosing import check_device
from moe_routing_bench.bench.device import cuda_of, others_on
from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.bench.hosts.shared import SharedHost
from moe_routing_bench.bench.kit import PassedKits
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.names import ArgumentError
from moe_routing_bench.workloads.experiment import CARDS, FAULTS, Experiment, ImplementationRef

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = ("gather_sum", "index_add")


def measured(device: str, names: tuple[str, ...] = NAMES, **more: Any) -> CellOutcome:
    how = {"view": "cuda_device", "min_rounds": 8, "max_rounds": 8, "checked": 1, "target": 0.5}
    refs = tuple(ImplementationRef(name=name) for name in names)
    sizes = {"span": "combine", "T": 64, "D": 32, "F": 16, "E": 8, "K": 2, "dtype": "float32"}
    return run_cell(Experiment(**sizes | how | {"device": device, "implementations": refs} | more))


def states(outcome: CellOutcome) -> list[Status]:
    return [one.status for one in outcome.implementations]


def test_the_thread_of_autograd_is_nobodys_and_the_clock_is_in_the_outcome() -> None:
    outcome = measured("pretend:h100", direction="train")
    assert states(outcome) == [Status.PASSED] * 2, [one.reason for one in outcome.implementations]
    assert {one.clock for one in outcome.implementations} == {"graph"}
    assert not [note for note in outcome.notes if "same way" in note]
    assert all((one.launch_seconds or 0) > 0 for one in outcome.implementations)


def test_a_backward_alone_is_made_once_and_timed_between_events() -> None:
    outcome = measured("pretend:h100", direction="backward")
    assert states(outcome) == [Status.PASSED] * 2, [one.reason for one in outcome.implementations]
    assert {one.clock for one in outcome.implementations} == {"events"}


def test_without_a_warm_backward_everything_would_be_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run on a CPU showed this fault. The worker is another process, so its function is called here."""
    engine = "_engine_run_backward"
    monkeypatch.setattr(torch.autograd, engine, getattr(torch.autograd, engine))  # undone afterwards
    cuda = cuda_of("pretend:a100")
    started: list[str] = []
    monkeypatch.setattr("threading.Thread.start", lambda self: started.append("thread"))
    cuda.start()
    shared_worker.start_threads("cpu", autograd=False)
    assert not started
    shared_worker.start_threads("cpu")
    assert started == ["thread"]
    shared_worker.start_threads("cpu")
    assert started == ["thread"]


@pytest.mark.parametrize(
    "fault,status,said",
    [
        ("oom", Status.OOM, "out of memory"),
        ("poison", Status.RUNTIME_ERROR, "illegal memory access"),
        ("compiler", Status.CRASHED, "its process"),
    ],
)
def test_a_fault_is_blamed_on_its_own_implementation_and_the_others_run(
    fault: str, status: Status, said: str
) -> None:
    outcome = measured(f"pretend:h100:{fault}@index_add", (*NAMES, "embedding_bag"))
    assert states(outcome) == [Status.PASSED, status, Status.PASSED]
    assert said in outcome.implementations[1].reason


def test_events_that_say_zero_are_never_a_time() -> None:
    outcome = measured("pretend:h100:events", view="cuda_events")
    assert states(outcome) == [Status.RUNTIME_ERROR] * 2
    assert "events say" in outcome.implementations[0].reason


def test_a_clock_that_drops_by_half_and_a_second_process_are_said() -> None:
    outcome = measured("pretend:h100:clock", min_rounds=60, max_rounds=60, max_seconds=300)
    assert states(outcome) == [Status.PASSED] * 2
    assert any("times as long in later rounds" in note for note in outcome.notes), outcome.notes
    shared = measured("pretend:h100:shared")
    assert states(shared) == [Status.PASSED] * 2 and any("Another process" in note for note in shared.notes)


def test_a_driver_that_is_too_old_is_named() -> None:
    with pytest.raises(ArgumentError, match="too old"):
        check_device("pretend:h100:driver")
    check_device("pretend:h100")
    said = refused("bench", "combine", "--device", "pretend:h100:driver", "--tokens", "8")
    assert "driver" in said and "too old" in said


@pytest.mark.parametrize("card", CARDS)
def test_every_card_has_its_properties(card: str) -> None:
    cuda = cuda_of(f"pretend:{card}")
    properties = cuda.get_device_properties()
    free, total = cuda.mem_get_info()
    assert free == total == properties.total_memory >= 24 * 2**30
    assert properties.multi_processor_count >= 100 and others_on(f"pretend:{card}") == ""


def test_what_waits_for_the_device_is_timed_between_events() -> None:
    outcome = measured("pretend:b200", ("expert_loop", "torch_grouped_mm"), span="grouped_gemm")
    assert [one.clock for one in outcome.implementations] == ["events", "graph"]
    (told,) = [note for note in outcome.notes if "same way" in note]
    assert "(events: expert_loop; graph: torch_grouped_mm)" in told and "--view cuda_events" in told


def test_a_compilation_takes_none_of_the_time_for_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call and the kit are made while the clock of the cell stands still."""
    seen: dict[str, set[bool]] = {}

    def watched(name: str) -> Any:
        plain = getattr(SharedHost, name)

        def call(self: SharedHost, one: Any) -> Any:
            what = name if name == "kit" else one.name
            seen.setdefault(what, set()).add(self.setup.budget.is_paused)
            return plain(self, one)

        return call

    for name in ("kit", "sample"):
        monkeypatch.setattr(SharedHost, name, watched(name))
    monkeypatch.setattr(PassedKits, "knows", lambda *_: False)
    measured("pretend:h100")
    assert seen == {"kit": {True}, "first": {True}, "second": {False}, "": {False}}
    now = [0.0]
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now[0])
    whole = Budget(10)
    with whole.paused():
        now[0] += 100
        with whole.paused():
            now[0] += 100
    assert whole.used == 0 and whole.left == 10 and not whole.is_paused
    now[0] += 4
    assert whole.left == 6


def test_every_fault_has_a_test() -> None:
    assert set(FAULTS) == {"oom", "poison", "compiler", "driver", "shared", "clock", "events"}
