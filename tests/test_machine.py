"""The machine's name and weather, its roofs, and `mrb doctor`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from command_line import mrb, mrb_json
from moe_routing_bench.bench import roofs as roofs_module
from moe_routing_bench.bench.noise import Neighbours, NoiseDuring, NoiseReading, noise_now
from moe_routing_bench.bench.roofs import (
    MIN_SECONDS,
    Roofs,
    measure_roofs,
    roofs_now,
    roofs_path,
    store_roofs,
    stored_roofs,
)
from moe_routing_bench.core import cpp
from moe_routing_bench.core.machine import this_machine

ROOFS = Roofs(
    machine="toy-1",
    read_bytes={1: 1e10},
    copy_bytes={1: 8e9},
    gemm_flops={"float32": {1: 1e11}},
    seconds=1.0,
)
CPP = {"how": "C++"}


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


QUIET = NoiseReading(
    load_1min=0.1, cpu_seconds=1000.0, steal_seconds=0.0, available_gib=8.0, throttle_count=None
)


def test_bad_weather_is_told() -> None:
    now = noise_now()
    assert now.available_gib > 0 and now.cpu_seconds > 0 and 0 <= now.steal_percent <= 100
    storm = replace(QUIET, load_1min=3.0, steal_seconds=70.0, throttle_count=4)
    assert storm.steal_percent == pytest.approx(7.0)
    assert len(storm.complaints(cores=2)) == 3
    assert QUIET.complaints(2) == []


def test_a_span_counts_what_happened_in_between() -> None:
    before = replace(QUIET, steal_seconds=500.0, throttle_count=7)
    after = replace(before, cpu_seconds=1060.0, steal_seconds=503.0, throttle_count=9, available_gib=6.0)
    span = NoiseDuring(before=before, after=after)
    assert span.steal_percent == pytest.approx(5.0) and span.throttles == 2
    assert span.to_dict()["available_gib"] == 6.0
    words = span.complaints(cores=2)
    assert len(words) == 2 and "5.0 % of time" in words[0] and "throttled 2 times" in words[1]
    # half a machine stolen before the run says nothing about the run
    calm = NoiseDuring(before=before, after=replace(before, cpu_seconds=1060.0))
    assert calm.steal_percent == 0 and calm.complaints(2) == []


def test_the_load_of_the_run_itself_is_no_complaint() -> None:
    span = NoiseDuring(before=QUIET, after=replace(QUIET, load_1min=2.2))
    assert span.complaints(cores=4, threads=2) == []
    assert (
        "after a run of 1 threads"
        in NoiseDuring(before=QUIET, after=replace(QUIET, load_1min=3.5)).complaints(4)[0]
    )
    busy = NoiseDuring(before=replace(QUIET, load_1min=2.2), after=QUIET)
    assert "before the run" in busy.complaints(cores=4)[0]


@pytest.mark.parametrize("seconds", [0.0, -0.01])
def test_counters_that_stand_still_or_step_back_give_no_nonsense(seconds: float) -> None:
    after = replace(QUIET, cpu_seconds=QUIET.cpu_seconds + seconds, steal_seconds=seconds)
    span = NoiseDuring(before=QUIET, after=after)
    assert span.steal_percent == 0 and span.throttles is None
    back = replace(QUIET, cpu_seconds=QUIET.cpu_seconds + 5, steal_seconds=-0.01)
    assert NoiseDuring(before=QUIET, after=back).steal_percent == 0


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: Path, level: str | None = None) -> None:
        raise NotImplementedError("no C++ compiler was found")

    monkeypatch.setattr(cpp, "load", load)


@pytest.mark.parametrize("by", ["C++", "torch"])
def test_roofs_are_measured_and_plausible(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs_module, "MEMORY_BYTES", 2**24)
    monkeypatch.setattr(roofs_module, "GEMM_SIZES", (128,))
    for name, value in {"MAX_RUNG": 2**20, "TRY_BYTES": 2**21, "TRY_STEPS": 10_000}.items():
        monkeypatch.setattr(roofs_module, name, value)
    if by == "torch":
        no_compiler(monkeypatch)
    elif (reason := cpp.why_not()) is not None:
        pytest.skip(reason)
    steps: list[str] = []
    roofs = measure_roofs("here", (1,), steps.append)
    assert 1e8 < roofs.read_bytes[1] < 1e13 and 1e8 < roofs.copy_bytes[1] < 1e13
    assert all(1e8 < rates[1] < 1e15 for rates in (*roofs.gemm_flops.values(), *roofs.units.values()))
    assert steps[0] == "memory, 1 threads" and roofs.how.startswith(by)
    assert stored_roofs("here") is None and stored_roofs(store_roofs(roofs).stem) == roofs
    if by == "torch":
        assert not roofs.ladder and not roofs.units
    else:
        assert list(roofs.ladder[1]) == [2**n for n in range(14, 21)]
        assert roofs.gemm_flops["float32"] == roofs.units["fma"]
        flags = set(this_machine().instructions)
        assert ("vnni" in roofs.units) == ("avx512_vnni" in flags)
        assert ("amx_bf16" in roofs.units) == (cpp.best_level() == "amx")


def test_a_slow_product_is_not_waited_for_and_is_no_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 on a processor without it: 0.4 GFLOP/s beside 100 in float32."""
    now, plain, sizes = [0.0], torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        slow = a.dtype == torch.float16
        now[0] += 2 * a.shape[0] ** 3 / (4e8 if slow else 1e11)
        sizes.append(a.shape[0]) if slow else None
        return plain(a[:1], b[:, :1])

    no_compiler(monkeypatch)
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


def test_bandwidth_between_two_rungs_is_a_line_over_logarithms() -> None:
    roofs = ROOFS.model_copy(update={"ladder": {1: {2**20: 1e11, 2**22: 2.5e10, 2**30: 1e10}}})
    assert roofs.bandwidth(2**21, 1) == pytest.approx(5e10)
    assert roofs.bandwidth(2**26, 1) == pytest.approx((2.5e10 * 1e10) ** 0.5)
    for size, rate in {0: 1e11, 1: 1e11, 2**20: 1e11, 2**22: 2.5e10, 2**30: 1e10, 2**40: 1e10}.items():
        assert roofs.bandwidth(size, 1) == pytest.approx(rate)


def test_the_best_ever_seen_is_kept() -> None:
    ladder = {1: {2**20: 4e10, 2**30: 1e10}}
    one = ROOFS.model_copy(update={"read_bytes": {1: 2e10}, "gemm_flops": {"float32": {1: 3e10}}, **CPP})
    other = ROOFS.model_copy(update={"ladder": ladder, "units": {"vnni": {1: 6e11}}, **CPP})
    both = one.best_of_both(other)
    assert both.read_bytes == {1: 2e10} and both.gemm_flops == {"float32": {1: 1e11}}
    assert both.ladder == ladder and both.units == {"vnni": {1: 6e11}} and one.best_of_both(None) == one
    more = ROOFS.model_copy(update={"read_bytes": {1: 1.0, 2: 5.0}, "copy_bytes": {1: 1.0, 2: 5.0}})
    assert more.best_of_both(ROOFS).read_bytes == {1: 1e10, 2: 5.0}


def test_a_busy_machine_can_raise_the_rates_of_a_quiet_one_and_add_none() -> None:
    ladder = {1: {2**20: 4e10, 2**30: 2e10}}
    high = ROOFS.model_copy(
        update={"read_bytes": {1: 2e10}, "ladder": ladder, "busy": "others used 0.9 cores", **CPP}
    )
    quiet = ROOFS.model_copy(update={"ladder": {1: {2**20: 5e10}}, **CPP})
    both = quiet.best_of_both(high)
    assert high.best_of_both(quiet) == both and not both.busy
    assert both.read_bytes == {1: 2e10} and both.ladder == {1: {2**20: 5e10}}
    # old ones have no ladder, so they are replaced whole, and the mark stays
    assert high.best_of_both(ROOFS) == high
    assert high.stale and ROOFS.stale and not quiet.stale


def test_old_files_are_read_and_measured_again() -> None:
    known = {"machine", "read_bytes", "copy_bytes", "gemm_flops", "seconds"}
    old = ROOFS.model_dump(mode="json", include=known)
    path = store_roofs(ROOFS)
    for quiet in (True, False):
        path.write_text(json.dumps({**old, "quiet": quiet}))
        found = stored_roofs("toy-1")
        assert found is not None and found.stale and bool(found.busy) is not quiet


def test_roofs_of_a_busy_machine_are_measured_again_in_the_next_quiet_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, measured, now = this_machine(), [], ["others used 0.9 cores meanwhile"]

    def fake(machine: str, threads: tuple[int, ...], on_step: object) -> Roofs:
        measured.append(threads)
        return ROOFS.model_copy(update={"machine": machine, "read_bytes": {1: 3e10}, **CPP})

    monkeypatch.setattr(roofs_module, "measure_roofs", fake)
    monkeypatch.setattr(roofs_module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(Neighbours, "complaint", lambda self: now[0] or None)
    assert roofs_now(here, MIN_SECONDS) is None and not measured  # only `mrb doctor` begins
    busy = ROOFS.model_copy(update={"machine": here.name, "busy": now[0], **CPP})
    store_roofs(busy)
    assert roofs_now(here, MIN_SECONDS) == busy and not measured  # it is busy still
    now[0] = ""
    assert roofs_now(here, MIN_SECONDS - 1) == busy and not measured  # no time for it
    again = roofs_now(here, MIN_SECONDS)
    assert again is not None and not again.busy and again.read_bytes == {1: 3e10} and len(measured) == 1
    assert stored_roofs(here.name) == again == roofs_now(here, MIN_SECONDS) and len(measured) == 1


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
    assert "1.00 cores" in (neighbours.complaint() or "")


def test_roofs_are_kept_and_read_back() -> None:
    assert stored_roofs("toy-1") is None
    path = store_roofs(ROOFS)
    assert path == roofs_path("toy-1") and stored_roofs("toy-1") == ROOFS
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_roofs_that_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = store_roofs(ROOFS)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="full"):
        store_roofs(ROOFS.model_copy(update={"read_bytes": {1: 1.0}}))
    assert stored_roofs("toy-1") == ROOFS and list(path.parent.iterdir()) == [path]


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
            how="C++",
            busy="" if quiet[min(now, 1)] else "others used 0.9 cores",
        )

    monkeypatch.setattr(roofs_module, "measure_roofs", fake)
    # roofs of a busy machine are marked, and measured again by the next call
    assert "no time is checked against them" in mrb("doctor").stdout
    document = mrb_json("doctor")
    assert len(measured) == 2 and not document["roofs"]["busy"]
    assert document["machine"]["name"] == this_machine().name
    assert document["roofs"]["read_bytes"]["1"] == 2e10
    text = mrb("doctor").stdout
    assert "GB/s" in text and "GFLOP/s" in text and this_machine().name in text
    assert len(measured) == 2 and "no time is checked" not in text
    again = mrb_json("doctor", "--again")
    assert len(measured) == 3 and again["roofs"]["read_bytes"]["1"] == 2e10  # the best ever seen
