"""Where a worker computes: the CPU, a GPU, or a stand-in with which all but the GPU itself is tested.

`pretend` takes every step a GPU would (inputs placed, events recorded, no roofs of the CPU), on the CPU.
What is measured so says nothing about a GPU.
"""

from __future__ import annotations

import time
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.clock import Clock, EventClock, HostClock

# the views of each, the usual one first
VIEWS = {"cpu": ("host_wall",), "cuda": ("cuda_events", "host_wall"), "pretend": ("cuda_events",)}


def check_place(device: str, view: str, cache: str) -> None:
    if device not in VIEWS:
        raise ValueError(f"there is no device {device!r}; there are {', '.join(VIEWS)}")
    if view not in VIEWS[device]:
        raise ValueError(f"there is no view {view!r} of {device}; there are {', '.join(VIEWS[device])}")
    if device != "cpu" and cache != "hot":
        raise ValueError(f"cache={cache}: the caches of a GPU are not overwritten yet; choose hot")


def memory_place(device: str) -> str:
    """The torch device that tensors are on."""
    return "cpu" if device == "pretend" else device


def clock_for(device: str, view: str) -> Clock:
    if view == "host_wall":
        return HostClock(device)
    return EventClock(cuda=PretendCuda() if device == "pretend" else torch.cuda)


def placed(value: Any, where: str) -> Any:
    """The same with every tensor inside on a torch device; what is there already stays the same object."""
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


class PretendCuda:
    """torch.cuda as far as EventClock needs it, on the CPU: work is finished when it returns."""

    class Event:
        def __init__(self, enable_timing: bool = False):
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: PretendCuda.Event) -> float:
            return (other.at - self.at) * 1e3

    def synchronize(self) -> None:
        pass
