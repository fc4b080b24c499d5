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


class Clock(Protocol):
    """view names what the seconds mean; span runs the calls in order and returns their total seconds."""

    @property
    def view(self) -> str: ...

    def span(self, calls: Sequence[Call]) -> float: ...


@dataclass(frozen=True)
class HostClock:
    """Wall time on the host, from before the first call until the last has finished on the device."""

    device: str = "cpu"
    view: str = "host_wall"

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


@dataclass(frozen=True)
class EventClock:
    """Time between two CUDA events around the calls, on every stream: a side stream cannot hide work."""

    cuda: Any = torch.cuda  # a stand-in with the same names, in tests without a GPU
    view: str = "cuda_events"

    def span(self, calls: Sequence[Call]) -> float:
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.cuda.synchronize()
        start.record()
        for call in calls:
            call()
        # work on other streams belongs to the span, so it ends only when all streams are done
        self.cuda.synchronize()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


@dataclass
class GraphClock:
    """Time of replaying the calls as one CUDA graph, without launch gaps. Equal calls are captured once."""

    cuda: Any = torch.cuda
    view: str = "cuda_graph"
    _captured: dict[tuple[int, ...], tuple[Any, Sequence[Call]]] = field(default_factory=dict)

    def span(self, calls: Sequence[Call]) -> float:
        key = tuple(map(id, calls))
        if key not in self._captured:
            side = self.cuda.Stream()
            side.wait_stream(self.cuda.current_stream())
            with self.cuda.stream(side):
                for call in calls:  # lazy initialisation must not be captured
                    call()
            self.cuda.current_stream().wait_stream(side)
            graph = self.cuda.CUDAGraph()
            with self.cuda.graph(graph):
                for call in calls:
                    call()
            # keep the calls alive, so that no other object gets their ids
            self._captured[key] = (graph, list(calls))
        graph, _ = self._captured[key]
        return EventClock(cuda=self.cuda).span([graph.replay])


@dataclass(frozen=True)
class ProfilerClock:
    """Device time from the start of the first kernel to the end of the last, from torch.profiler: without the
    first launch, with the gaps between kernels. Copies and fills on the device count as kernels.

    Two kernels at 100..140 us and 150..170 us are a span of 70 us.
    """

    cuda: Any = torch.cuda  # stand-ins with the same names, in tests without a GPU
    profiler: Any = torch.profiler
    view: str = "profiler_span"

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
