"""A GPU that is not there: `--device pretend:h100` takes every step of a GPU run, on the CPU.

PretendCuda has the names of torch.cuda that the benchmark uses: events, streams, graphs, memory, properties.
Kernels run as torch's CPU code, or in Triton's interpreter. A graph that is replayed waits as long as its
calls took. The first backward starts a thread, as autograd does for a real device. Times say nothing about a
GPU.

`pretend:h100:oom@index_add` plants a fault (FAULTS) in one implementation, or in all without a name.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from moe_routing_bench.ops.targets import TARGETS, Target
from moe_routing_bench.workloads.experiment import CARDS

GIB = 2**30
ENGINE = "_engine_run_backward"  # what every backward calls
SLOW_AFTER = 600  # synchronisations of a process after which the fault `clock` begins: about 150 samples
OTHERS_BYTES = 12 * GIB  # that another process holds, by the fault `shared`


@dataclass(frozen=True, kw_only=True)
class Card:
    """Card(name="NVIDIA H100 80GB HBM3", target=TARGETS["sm_90a"], memory_gib=80)"""

    name: str
    target: Target
    memory_gib: int


_KNOWN = {
    "h100": Card(name="NVIDIA H100 80GB HBM3", target=TARGETS["sm_90a"], memory_gib=80),
    "a100": Card(name="NVIDIA A100-SXM4-80GB", target=TARGETS["sm_80"], memory_gib=80),
    "mi300x": Card(name="AMD Instinct MI300X", target=TARGETS["gfx942"], memory_gib=192),
    "b200": Card(name="NVIDIA B200", target=TARGETS["sm_100a"], memory_gib=180),
    "4090": Card(name="NVIDIA GeForce RTX 4090", target=replace(TARGETS["sm_89"], units=128), memory_gib=24),
}
assert tuple(_KNOWN) == CARDS


@cache
def pretended(device: str) -> PretendCuda:
    """Returns the one stand-in of this process for a device such as pretend, pretend:a100 or
    pretend:a100:driver."""
    _, card, fault = (*device.split(":", 2), "", "")[:3]
    return PretendCuda(_KNOWN[card or CARDS[0]], *fault.partition("@")[::2])


class PretendCuda:
    def __init__(self, card: Card, fault: str = "", victim: str = ""):
        self.card, self.fault, self.victim = card, fault, victim
        self.poisoned = self.capturing = False
        self.waits = 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False):
                self.at = 0.0

            def record(self) -> None:
                self.at = time.perf_counter()

            def synchronize(self) -> None:
                cuda.synchronize()

            def elapsed_time(self, other: Event) -> float:
                return 0.0 if cuda.fault == "events" else (other.at - self.at) * 1e3

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        class CUDAGraph:
            seconds = 0.0

            def replay(self) -> None:
                until = time.perf_counter() + self.seconds
                while time.perf_counter() < until:
                    pass

        self.Event, self.Stream, self.CUDAGraph = Event, Stream, CUDAGraph

    def is_available(self) -> bool:
        return self.fault != "driver"

    def init(self) -> None:
        if self.fault == "driver":
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    def synchronize(self, device: Any = None) -> None:
        if self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self.poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.waits += 1

    def current_stream(self) -> Any:
        return self.Stream()

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.synchronize()
        self.capturing, began = True, time.perf_counter()
        try:
            yield
        finally:
            self.capturing, graph.seconds = False, time.perf_counter() - began

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self.card.memory_gib * GIB
        return total - (OTHERS_BYTES if self.fault == "shared" else 0), total

    def get_device_name(self, device: Any = None) -> str:
        return f"{self.card.name} (pretended)"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(
            name=self.get_device_name(), total_memory=self.card.memory_gib * GIB,
            multi_processor_count=self.card.target.units, warp_size=self.card.target.lanes,
        )  # fmt: skip

    def start(self) -> None:
        """Makes the first backward start a thread that stays, as autograd's engine does for a GPU."""
        plain, started = getattr(torch.autograd, ENGINE), threading.Event()

        def with_thread(*args: Any, **options: Any) -> Any:
            if not started.is_set():
                started.set()
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            return plain(*args, **options)

        setattr(torch.autograd, ENGINE, with_thread)

    def computing(self, run: Callable[..., Any], name: str, *, waits: bool) -> Callable[..., Any]:
        """Wraps an implementation as this device runs it: with the planted fault, if it is the victim. waits:
        it says itself that it waits for the device, which no graph can capture."""
        planted = _PLANTED.get(self.fault) if self.victim in ("", name) else None

        def on_device(*args: Any) -> Any:
            if planted is not None:
                planted(self)
            began = time.perf_counter()
            out = run(*args)
            if waits:
                self.synchronize()
            if self.fault == "clock" and self.waits > SLOW_AFTER:
                until = 2 * time.perf_counter() - began
                while time.perf_counter() < until:
                    pass
            return out

        return on_device


def _out_of_memory(cuda: PretendCuda) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 96.00 GiB. GPU 0 has a total capacity"
    )


def _poison(cuda: PretendCuda) -> None:
    cuda.poisoned = True  # it shows at the next synchronisation, and at every one after it


def _crash(cuda: PretendCuda) -> None:
    os.abort()  # what an assertion of LLVM does


_PLANTED: dict[str, Callable[[PretendCuda], None]] = {
    "oom": _out_of_memory,
    "poison": _poison,
    "compiler": _crash,
}
