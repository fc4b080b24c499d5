"""Where a worker computes: on the CPU, on a GPU, or on a stand-in that tests the GPU's code path without a
GPU (pretend.py)."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.clock import Clock, DeviceClock, EventClock, GraphClock, HostClock, ProfilerClock
from moe_routing_bench.bench.pretend import pretended
from moe_routing_bench.workloads.experiment import device_kind

OTHERS_BYTES = 2 * 2**30  # a process that computes holds more; a display and our own context hold less


def memory_place(device: str) -> str:
    """Returns the torch device that holds the tensors."""
    return "cpu" if device_kind(device) == "pretend" else device


def cuda_of(device: str) -> Any:
    """Returns torch.cuda, or the stand-in for a pretended device."""
    return pretended(device) if device_kind(device) == "pretend" else torch.cuda


def clock_for(device: str, view: str, *, replayable: bool = True) -> Clock:
    """Returns the clock for a device. replayable: the calls may be made several times, and a graph may replay
    them. Others are timed between events: a backward alone, which can be made once, and code from outside,
    because the parent's clock must agree and cannot tell a capture from hidden work."""
    if view == "host_wall":
        return HostClock(device)
    cuda = cuda_of(device)
    if view == "profiler_span":
        return ProfilerClock(cuda=cuda)
    if view == "cuda_events" or not replayable:
        return EventClock(cuda=cuda)
    return GraphClock(cuda=cuda) if view == "cuda_graph" else DeviceClock(cuda=cuda)


def why_no_gpu(device: str) -> str | None:
    """Says why torch cannot use a GPU, in the words of torch or its driver; None if it can."""
    cuda = cuda_of(device)
    if cuda.is_available():
        return None
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "it sees none"


def others_on(device: str) -> str:
    """Says in a sentence that another process uses the GPU; empty if none does. It is asked before our
    tensors are there."""
    if device == "cpu":
        return ""
    free, total = cuda_of(device).mem_get_info()
    if (used := total - free) < OTHERS_BYTES:
        return ""
    return (
        f"Another process holds {used / 2**30:.0f} of the GPU's {total / 2**30:.0f} GiB: it may compute at "
        "the same time, and then all times are too long"
    )


def placed(value: Any, where: str) -> Any:
    """Moves all tensors of a value to a torch device. If they are there already, it returns the same
    object."""
    if isinstance(value, Tensor):
        return value.to(where)
    if isinstance(value, tuple):
        return tuple(placed(item, where) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        tensors = {name: item for name, item in inside.items() if isinstance(item, Tensor)}
        moved = {name: item.to(where) for name, item in tensors.items()}
        if any(moved[name] is not tensors[name] for name in tensors):
            return replace(value, **moved)
    return value
