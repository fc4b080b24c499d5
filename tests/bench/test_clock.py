"""Clocks: each view measures what it says, with stand-ins where there is no GPU."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.bench.clock import (
    CacheFlusher,
    DeviceClock,
    EventClock,
    GraphClock,
    HostClock,
    ProfilerClock,
    last_level_cache_bytes,
)


def wait(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_host_wall_is_the_time_of_all_calls() -> None:
    once = min(HostClock().span([lambda: wait(0.002)]) for _ in range(5))
    thrice = min(HostClock().span([lambda: wait(0.002)] * 3) for _ in range(5))
    # from above loosely: the machine may be busy
    assert 0.002 <= once < 0.02 and 0.006 <= thrice < 0.06


def test_patching_the_time_module_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert HostClock().span([lambda: wait(0.002)]) >= 0.002


class FakeCuda(SimpleNamespace):
    """A GPU in which each call takes 5 ms, launched at once. An event is recorded when the work before it in
    its stream is done. A synchronisation waits for all streams, and then the device idles for 30 us."""

    def __init__(self) -> None:
        self.now, self.pending, self.side, self.log = 0.0, 0.0, 0.0, []
        self.capturing = False
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = cuda.now + cuda.pending

            def synchronize(self) -> None:
                cuda.log.append("event.synchronize")

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * 1e3

        class Stream:
            def wait_stream(self, other: object) -> None:
                cuda.log.append("wait_stream")

        class CUDAGraph:
            def __init__(self) -> None:
                self.launches = 0.0

            def replay(self) -> None:
                cuda.pending += self.launches

        super().__init__(Event=Event, Stream=Stream, CUDAGraph=CUDAGraph)

    def launch(self) -> None:
        self.pending += 0.005

    def launch_elsewhere(self) -> None:
        self.side += 0.005

    def synchronize(self) -> None:
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.now += max(self.pending, self.side) + 30e-6
        self.pending = self.side = 0.0

    def current_stream(self):
        return self.Stream()

    def stream(self, stream: object):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self, graph):
        before, self.capturing = self.pending, True
        try:
            yield
        finally:
            graph.launches, self.pending, self.capturing = self.pending - before, before, False
        self.log.append("captured")


def test_events_wait_for_work_that_was_only_launched() -> None:
    cuda = FakeCuda()
    assert EventClock(cuda=cuda).span([cuda.launch] * 3) == pytest.approx(0.015)


def test_no_synchronisation_is_inside_the_events() -> None:
    """It takes 30 us here, and the calls 5 ms."""
    cuda = FakeCuda()
    assert EventClock(cuda=cuda).span([cuda.launch]) == pytest.approx(0.005, abs=1e-9)


def test_work_on_another_stream_counts() -> None:
    cuda = FakeCuda()
    clock = EventClock(cuda=cuda)
    assert clock.span([cuda.launch, cuda.launch_elsewhere]) == pytest.approx(0.005, abs=1e-9)
    assert clock.span([cuda.launch, *[cuda.launch_elsewhere] * 4]) == pytest.approx(0.020, rel=0.01)


def test_events_that_say_zero_are_no_time() -> None:
    with pytest.raises(ValueError, match="0 s"):
        EventClock(cuda=FakeCuda()).span([lambda: None])


def test_the_host_time_of_a_launch_is_apart() -> None:
    cuda = FakeCuda()
    for clock in (EventClock(cuda=cuda), DeviceClock(cuda=cuda)):
        seconds = clock.span([lambda: (wait(0.002), cuda.launch())])
        assert seconds == pytest.approx(0.005) and clock.launch_seconds >= 0.002


def test_the_device_clock_uses_a_graph_where_it_can_and_says_so() -> None:
    cuda = FakeCuda()
    clock = DeviceClock(cuda=cuda)
    assert (clock.span([cuda.launch]), clock.used, clock.why_not) == (pytest.approx(0.005), "graph", "")

    def waiting() -> None:
        cuda.launch()
        cuda.synchronize()

    clock = DeviceClock(cuda=cuda)
    # 30 us of the synchronisation in the call, twice: it is its own
    assert clock.span([waiting, waiting]) == pytest.approx(0.010, abs=1e-4)
    assert clock.used == "events" and clock.why_not == "operation not permitted when stream is capturing"
    clock.span([waiting])
    assert cuda.log.count("captured") == 1  # it is not tried again


def test_a_kernel_that_faults_is_not_taken_for_one_that_cannot_be_captured() -> None:
    cuda = FakeCuda()

    def fault() -> None:
        cuda.synchronize = lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access"))
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        DeviceClock(cuda=cuda).span([fault])


def test_a_graph_is_captured_once_and_replayed() -> None:
    cuda = FakeCuda()
    clock, calls = GraphClock(cuda=cuda), [cuda.launch, cuda.launch]
    assert [clock.span(calls) for _ in range(3)] == pytest.approx([0.010] * 3)
    assert cuda.log.count("captured") == 1
    other = [lambda: cuda.launch()]
    assert clock.span(other) == pytest.approx(0.005)
    assert cuda.log.count("captured") == 2
    assert clock._captured[1] == other  # the calls before it, and their inputs, are free


class FakeProfiler(SimpleNamespace):
    """Hands out events written down beforehand, and only what ran while it watched."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(
            ProfilerActivity=torch.profiler.ProfilerActivity, DeviceType=torch.profiler.DeviceType
        )
        self.cuda, self.asked, self.other = cuda, [], []

    @contextlib.contextmanager
    def profile(self, activities):
        self.asked.append(activities)
        begun = self.cuda.now
        seen = SimpleNamespace(events=lambda: self.other + kernels)
        kernels: list[SimpleNamespace] = []
        yield seen
        at = begun
        # a gap of 1 ms between kernels of 5 ms; what was launched and not finished is not seen
        for _ in range(round((self.cuda.now - begun) / 0.005)):
            kernels.append(event(at * 1e6, at * 1e6 + 5000))
            at += 0.006


def event(
    start_us: float, end_us: float, device: str = "CUDA", *, annotation: bool = False
) -> SimpleNamespace:
    return SimpleNamespace(
        device_type=getattr(torch.profiler.DeviceType, device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start_us, end=end_us),
    )


@pytest.fixture
def gpu() -> FakeCuda:
    cuda = FakeCuda()
    cuda.is_available = lambda: True
    return cuda


def test_a_profiler_span_is_first_start_to_last_end(gpu: FakeCuda) -> None:
    profiler = FakeProfiler(gpu)
    clock = ProfilerClock(cuda=gpu, profiler=profiler)
    assert clock.view == "profiler_span"
    assert clock.span([gpu.launch]) == pytest.approx(0.005)
    assert clock.span([gpu.launch] * 3) == pytest.approx(0.017)
    assert profiler.asked == [[torch.profiler.ProfilerActivity.CUDA]] * 2


def test_work_launched_before_does_not_reach_a_profiler_span(gpu: FakeCuda) -> None:
    gpu.launch()
    assert ProfilerClock(cuda=gpu, profiler=FakeProfiler(gpu)).span([gpu.launch]) == pytest.approx(0.005)


def test_a_profiler_span_ignores_the_host_and_annotations(gpu: FakeCuda) -> None:
    profiler = FakeProfiler(gpu)
    # the order of events is not promised; a later kernel on a side stream ends inside an earlier one
    profiler.other = [event(-1e6, 9e6, "CPU"), event(-1e6, 9e6, annotation=True), event(1000, 2000)]
    assert ProfilerClock(cuda=gpu, profiler=profiler).span([gpu.launch]) == pytest.approx(0.005)


def test_a_profiler_that_saw_nothing_is_no_time_of_zero(gpu: FakeCuda) -> None:
    with pytest.raises(ValueError, match="saw no kernel"):
        ProfilerClock(cuda=gpu, profiler=FakeProfiler(gpu)).span([lambda: None])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_profiler_clock_without_a_gpu_says_so() -> None:
    with pytest.raises(NotImplementedError, match="host_wall"):
        ProfilerClock()


def test_the_flusher_walks_over_more_than_the_caches() -> None:
    assert last_level_cache_bytes() >= 2**18
    flusher = CacheFlusher(2**20)
    assert flusher.num_bytes == 2**20
    flusher.flush()
    assert bool((flusher._memory == 1).all())


@pytest.mark.slow
def test_flushed_data_is_slower_to_read() -> None:
    torch.set_num_threads(1)
    data, flusher = torch.zeros(2**17), CacheFlusher()  # 512 KiB: in the second-level cache of most cores
    clock = HostClock()

    def sample(*, cold: bool) -> float:
        data.sum()
        if cold:
            flusher.flush()
        return clock.span([data.sum])

    pairs = [(sample(cold=True), sample(cold=False)) for _ in range(15)]
    ratios = sorted(cold / hot for cold, hot in pairs)
    assert ratios[len(ratios) // 2] > 1.2
