"""Where a worker computes: on the CPU, on a GPU, or on a stand-in that tests the GPU's code path without a
GPU.

`pretend` takes all steps of a GPU run (inputs placed, events recorded, no CPU roofs), but on the CPU. Its
times say nothing about a GPU.
"""

from __future__ import annotations

import time
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.clock import Clock, EventClock, HostClock


def memory_place(device: str) -> str:
    """The torch device that holds the tensors."""
    return "cpu" if device == "pretend" else device


def clock_for(device: str, view: str) -> Clock:
    if view == "host_wall":
        return HostClock(device)
    return EventClock(cuda=PretendCuda() if device == "pretend" else torch.cuda)


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


class PretendCuda:
    """The part of torch.cuda that EventClock needs, on the CPU, where work is done when a call returns."""

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
