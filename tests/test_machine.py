"""The machine's name and weather, its roofs, and `mrb doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from command_line import mrb, mrb_json
from moe_routing_bench.bench import roofs as roofs_module
from moe_routing_bench.bench.roofs import Roofs, measure_roofs, roofs_path, store_roofs, stored_roofs
from moe_routing_bench.bench.weather import Neighbours, Weather, WeatherSpan, weather
from moe_routing_bench.cost import Cost
from moe_routing_bench.machine import this_machine

ROOFS = Roofs(
    machine="toy-1",
    read_bytes={1: 1e10},
    copy_bytes={1: 8e9},
    gemm_flops={"float32": {1: 1e11}},
    seconds=1.0,
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    return tmp_path


def test_the_name_stays_and_changes_when_it_should() -> None:
    machine = this_machine()
    assert machine.name == this_machine().name
    assert machine.cores >= 1 and machine.memory_gib >= 1
    assert replace(machine, cores=machine.cores + 1).name != machine.name
    # software is recorded beside the name, not in it
    assert replace(machine, torch="9.9").name == machine.name
    assert set(machine.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_memory_is_what_psutil_says() -> None:
    # the name holds this number, and earlier names were made with psutil's
    assert this_machine().memory_gib == round(psutil.virtual_memory().total / 2**30)


QUIET = Weather(load_1min=0.1, cpu_seconds=1000.0, steal_seconds=0.0, available_gib=8.0, throttle_count=None)


def test_bad_weather_is_told() -> None:
    now = weather()
    assert now.available_gib > 0 and now.cpu_seconds > 0 and 0 <= now.steal_percent <= 100
    storm = replace(QUIET, load_1min=3.0, steal_seconds=70.0, throttle_count=4)
    assert storm.steal_percent == pytest.approx(7.0)
    assert len(storm.complaints(cores=2)) == 3
    assert QUIET.complaints(2) == []


def test_a_span_counts_what_happened_in_between() -> None:
    before = replace(QUIET, steal_seconds=500.0, throttle_count=7)
    after = replace(before, cpu_seconds=1060.0, steal_seconds=503.0, throttle_count=9, available_gib=6.0)
    span = WeatherSpan(before=before, after=after)
    assert span.steal_percent == pytest.approx(5.0) and span.throttles == 2
    assert span.to_dict()["available_gib"] == 6.0
    words = span.complaints(cores=2)
    assert len(words) == 2 and "5.0 % of time" in words[0] and "throttled 2 times" in words[1]
    # half a machine stolen before the run says nothing about the run
    calm = WeatherSpan(before=before, after=replace(before, cpu_seconds=1060.0))
    assert calm.steal_percent == 0 and calm.complaints(2) == []


def test_the_load_of_the_run_itself_is_no_complaint() -> None:
    span = WeatherSpan(before=QUIET, after=replace(QUIET, load_1min=2.2))
    assert span.complaints(cores=4, threads=2) == []
    assert (
        "after a run of 1 threads"
        in WeatherSpan(before=QUIET, after=replace(QUIET, load_1min=3.5)).complaints(4)[0]
    )
    busy = WeatherSpan(before=replace(QUIET, load_1min=2.2), after=QUIET)
    assert "before the run" in busy.complaints(cores=4)[0]


@pytest.mark.parametrize("seconds", [0.0, -0.01])
def test_counters_that_stand_still_or_step_back_give_no_nonsense(seconds: float) -> None:
    after = replace(QUIET, cpu_seconds=QUIET.cpu_seconds + seconds, steal_seconds=seconds)
    span = WeatherSpan(before=QUIET, after=after)
    assert span.steal_percent == 0 and span.throttles is None
    back = replace(QUIET, cpu_seconds=QUIET.cpu_seconds + 5, steal_seconds=-0.01)
    assert WeatherSpan(before=QUIET, after=back).steal_percent == 0


def test_roofs_are_measured_and_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs_module, "MEMORY_BYTES", 2**24)
    monkeypatch.setattr(roofs_module, "GEMM_SIZES", (128,))
    steps: list[str] = []
    roofs = measure_roofs("here", (1,), steps.append)
    assert 1e8 < roofs.read_bytes[1] < 1e13 and 1e8 < roofs.copy_bytes[1] < 1e13
    assert all(1e8 < rates[1] < 1e15 for rates in roofs.gemm_flops.values())
    assert steps[0] == "memory, 1 threads"


def test_a_slow_product_is_not_waited_for_and_is_no_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 on a processor without it: 0.4 GFLOP/s beside 100 in float32."""
    now, plain, sizes = [0.0], torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        slow = a.dtype == torch.float16
        now[0] += 2 * a.shape[0] ** 3 / (4e8 if slow else 1e11)
        sizes.append(a.shape[0]) if slow else None
        return plain(a[:1], b[:, :1])

    monkeypatch.setattr(roofs_module, "MEMORY_BYTES", 2**20)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(roofs_module, "_best", _not_zero(roofs_module._best))
    roofs = measure_roofs("here", (1,))
    assert sizes == [512], "0.7 s; the largest would take 43"
    assert {name: rates[1] for name, rates in roofs.gemm_flops.items()} == pytest.approx(
        dict.fromkeys(("float32", "bfloat16", "float16"), 1e11)
    )


def _not_zero(best: Callable[..., float]) -> Callable[..., float]:
    """Memory takes no time on that clock."""
    return lambda run: best(run) or 1e-3


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    cost = Cost(useful_flops=10**9, executed_flops=10**9, weight_bytes=10**9)
    assert ROOFS.floor_seconds(cost, "float32", 1) == 0.1  # memory: 1 GB at 10 GB/s


def test_the_best_ever_seen_is_kept() -> None:
    busy = ROOFS.model_copy(update={"read_bytes": {1: 2e10}, "gemm_flops": {"float32": {1: 3e10}}})
    quiet = ROOFS.model_copy(update={"quiet": True})
    both = busy.best_of_both(quiet)
    assert both.read_bytes == {1: 2e10} and both.gemm_flops == {"float32": {1: 1e11}} and both.quiet
    assert not busy.best_of_both(None).quiet and busy.best_of_both(None) == busy
    more = ROOFS.model_copy(update={"read_bytes": {1: 1.0, 2: 5.0}, "copy_bytes": {1: 1.0, 2: 5.0}})
    assert more.best_of_both(ROOFS).read_bytes == {1: 1e10, 2: 5.0}


def test_neighbours_are_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = iter([(10.0, 1.0), (10.1, 1.0), (11.62, 1.0), (10.0, 3.0)])
    monkeypatch.setattr(Neighbours, "_counters", lambda self: next(counters))
    clock = iter([0.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    neighbours = Neighbours()
    assert neighbours.complaint() is None
    assert "others used 0.8 cores" in (neighbours.complaint() or "")
    assert "other guests of the host took 1.00 cores" in (neighbours.complaint() or "")


def test_roofs_are_kept_and_read_back() -> None:
    assert stored_roofs("toy-1") is None
    path = store_roofs(ROOFS)
    assert path == roofs_path("toy-1") and stored_roofs("toy-1") == ROOFS
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"machine": "toy-1"}', '{"machine": "toy-1", "evil": 1}', "\x00\xff", "x" * 2**21],
    ids=["empty", "half", "list", "missing", "extra", "bytes", "huge"],
)
def test_a_spoilt_file_is_refused_in_words(text: str) -> None:
    path = roofs_path("toy-1")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match="delete it"):
        stored_roofs("toy-1")


def test_doctor_measures_once_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    quiet, rate = [False, True], [1e10, 2e10, 1e9]

    def fake(machine: str, threads: tuple[int, ...], on_step: object) -> Roofs:
        measured.append(machine)
        now = len(measured) - 1
        names = ("float32", "bfloat16", "float16")
        rates = {n: rate[now] for n in threads}
        return Roofs(
            machine=machine,
            read_bytes=rates,
            copy_bytes=rates,
            gemm_flops={name: rates for name in names},
            seconds=1,
            quiet=quiet[min(now, 1)],
        )

    monkeypatch.setattr("moe_routing_bench.cli.doctor.measure_roofs", fake)
    # roofs of a busy machine are marked, and measured again by the next call
    assert "nothing is held to them" in mrb("doctor").stdout
    document = mrb_json("doctor")
    assert len(measured) == 2 and document["roofs"]["quiet"]
    assert document["machine"]["name"] == this_machine().name
    assert document["roofs"]["read_bytes"]["1"] == 2e10
    text = mrb("doctor").stdout
    assert "GB/s" in text and "GFLOP/s" in text and this_machine().name in text
    assert len(measured) == 2 and "nothing is held" not in text
    again = mrb_json("doctor", "--again")
    assert len(measured) == 3 and again["roofs"]["read_bytes"]["1"] == 2e10  # the best ever seen
