"""How long a span of calls takes: one interface, several views.

A view is part of a result, and different views are never compared: host wall includes launching, device
events do not, a graph has no launch gaps, a profiler's span begins with the first kernel. Each call of a span
is a closure over its own inputs, made beforehand, so that no call can reuse results of an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

Call = Callable[[], object]

# bound at import, so that a measured implementation cannot change it by patching the time module
_now_ns = time.perf_counter_ns
# seconds after the last event in which other streams are believed to be idle: a synchronisation and an
# event take 12 to 40 us
OTHER_STREAMS = 1e-4


class Clock(Protocol):
    """view names what the seconds mean; span runs the calls in order and returns their total seconds.

    used, launch_seconds: what measured the last span on a device, and how long the host took to launch it
    """

    @property
    def view(self) -> str: ...

    @property
    def used(self) -> str: ...

    @property
    def launch_seconds(self) -> float: ...

    def span(self, calls: Sequence[Call]) -> float: ...


@dataclass(frozen=True)
class HostClock:
    """Wall time on the host, from before the first call until the last has finished on the device."""

    device: str = "cpu"
    view: str = "host_wall"
    used: str = ""
    launch_seconds: float = 0.0

    def span(self, calls: Sequence[Call]) -> float:
        self._settle()
        started = _now_ns()
        for call in calls:
            call()
        self._settle()
        return (_now_ns() - started) * 1e-9

    def _settle(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


@dataclass
class EventClock:
    """Time between two CUDA events around the calls. Nothing waits between them, so a synchronisation is no
    part of it. Work that other streams do after the second event counts too: nothing hides there."""

    cuda: Any = torch.cuda  # a stand-in with the same names, in tests without a GPU
    view: str = "cuda_events"
    launch_seconds: float = field(default=0.0, compare=False)

    @property
    def used(self) -> str:
        return "events"

    def span(self, calls: Sequence[Call]) -> float:
        start, end, after = (self.cuda.Event(enable_timing=True) for _ in range(3))
        self.cuda.synchronize()
        start.record()
        self.launch_seconds = launched(calls)
        end.record()
        self.cuda.synchronize()
        after.record()
        after.synchronize()
        seconds, late = start.elapsed_time(end) * 1e-3, end.elapsed_time(after) * 1e-3
        if seconds <= 0:
            raise ValueError(
                f"the device's events say that the calls took {seconds:g} s: its clock is broken"
            )
        return seconds + late if late > OTHER_STREAMS else seconds


@dataclass
class GraphClock:
    """Time of replaying the calls as one CUDA graph, without launch gaps. The last calls stay captured."""

    cuda: Any = torch.cuda
    view: str = "cuda_graph"
    launch_seconds: float = field(default=0.0, compare=False)  # of the calls themselves, before the capture
    _captured: tuple[Any, list[Call]] | None = field(default=None, compare=False)

    @property
    def used(self) -> str:
        return "graph"

    def span(self, calls: Sequence[Call]) -> float:
        # the calls of the last span are kept, so that no other object gets their ids
        if self._captured is None or [*map(id, self._captured[1])] != [*map(id, calls)]:
            self._captured = None  # its memory is free for the next one
            self._captured = self._capture(calls), list(calls)
        graph, _ = self._captured
        graph.replay()  # the first replay also sends the graph to the device
        return EventClock(cuda=self.cuda).span([graph.replay])

    def _capture(self, calls: Sequence[Call]) -> Any:
        side = self.cuda.Stream()
        side.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(side):
            launched(calls)  # lazy initialisation must not be captured, nor new memory count as launching
            self.launch_seconds = launched(calls)
        self.cuda.current_stream().wait_stream(side)
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            for call in calls:
                call()
        return graph


@dataclass
class DeviceClock:
    """Time on the device: of a replayed graph if the calls of an implementation can be captured, else between
    events. `used` says which, and `why_not` why they cannot be captured."""

    cuda: Any = torch.cuda
    view: str = "cuda_device"
    why_not: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self._graph, self._events = GraphClock(cuda=self.cuda), EventClock(cuda=self.cuda)

    @property
    def used(self) -> str:
        return self._events.used if self.why_not else self._graph.used

    @property
    def launch_seconds(self) -> float:
        return self._events.launch_seconds if self.why_not else self._graph.launch_seconds

    def span(self, calls: Sequence[Call]) -> float:
        if not self.why_not:
            try:
                return self._graph.span(calls)
            except RuntimeError as error:
                self.why_not = str(error).partition("\n")[0] or type(error).__name__
                self._graph = GraphClock(cuda=self.cuda)
                self.cuda.synchronize()  # raises if not the capture but a kernel failed
        return self._events.span(calls)


def launched(calls: Sequence[Call]) -> float:
    """Makes the calls and returns the seconds until the last one returned, when the device may still work."""
    began = _now_ns()
    for call in calls:
        call()
    return (_now_ns() - began) * 1e-9


@dataclass(frozen=True)
class ProfilerClock:
    """Device time from the start of the first kernel to the end of the last, from torch.profiler: without the
    first launch, with the gaps between kernels. Copies and fills on the device count as kernels.

    Two kernels at 100..140 us and 150..170 us are a span of 70 us.
    """

    cuda: Any = torch.cuda  # stand-ins with the same names, in tests without a GPU
    profiler: Any = torch.profiler
    view: str = "profiler_span"
    used: str = "profiler"
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.cuda.is_available():
            raise NotImplementedError(
                "profiler_span reads the kernels of a CUDA device, and there is none here; use host_wall"
            )

    def span(self, calls: Sequence[Call]) -> float:
        self.cuda.synchronize()
        with self.profiler.profile(activities=[self.profiler.ProfilerActivity.CUDA]) as seen:
            for call in calls:
                call()
            # kernels that end after the profiler stopped would be missing
            self.cuda.synchronize()
        kernels = [event.time_range for event in seen.events() if self._is_work(event)]
        if not kernels:
            raise ValueError(
                "the profiler saw no kernel: the calls do nothing on the device, or another profiler holds it"
            )
        first, last = min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)
        return (last - first) * 1e-6

    def _is_work(self, event: Any) -> bool:
        # user annotations are device events too, but they also cover the gaps around kernels
        return event.device_type == self.profiler.DeviceType.CUDA and not event.is_user_annotation


class CacheFlusher:
    """Evicts all data from the caches by writing twice their size. Runs outside the timed span, so a cold
    sample is a single call."""

    def __init__(self, num_bytes: int | None = None):
        size = 2 * last_level_cache_bytes() if num_bytes is None else num_bytes
        self._memory = torch.zeros(max(1, size // 4))

    @property
    def num_bytes(self) -> int:
        return self._memory.numel() * 4

    def flush(self) -> None:
        self._memory.add_(1.0)


def last_level_cache_bytes() -> int:
    """The largest cache the system reports; 64 MiB if it reports none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes, default=64 * 2**20)
