"""A child that runs code from outside: it stands still except when it is its turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from moe_routing_bench.bench.hosts import isolated_worker
from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.freezing import (
    GoneError,
    cpu_seconds,
    faults_of_ended_children,
    freeze,
    thaw,
)
from moe_routing_bench.bench.hosts.memory import Place, read_memory
from moe_routing_bench.bench.hosts.messages import Done, Reply, ResultAt
from moe_routing_bench.bench.status import Status, SubjectError
from moe_routing_bench.workloads.experiment import Experiment

READ_SECONDS = 30.0
# a result may lie in memory with gaps, but not with more than this factor
MAX_GAPS = 4
_now_ns = time.perf_counter_ns
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class TimedCalls:
    """One timed span: seconds by the parent's clock, CPU seconds of all its threads, what it says it made."""

    seconds: float
    cpu_seconds: float
    results: tuple[ResultAt, ...]


class IsolatedChild(Child):
    def __init__(self, experiment: Experiment, cores: tuple[int, ...], plan: str, fds: Sequence[int]):
        sandbox = experiment.sandbox
        super().__init__(
            experiment, cores, isolated_worker.serve, plan, sandbox=sandbox, fds=fds if sandbox else ()
        )
        self.ready()
        self._freeze()

    def prepare(self, *, calls: int, hot: bool, empty: bool = False) -> None:
        """Not timed. Afterwards it stands still."""
        thaw(self.pid)
        self.ask("prepare", Reply, calls=calls, hot=hot, empty=empty)
        self._freeze()

    def go(self) -> TimedCalls:
        """The timed span: from before it is woken until no thread of it can run any more."""
        ended, cpu = faults_of_ended_children(self.pid), cpu_seconds(self.pid)
        self._asked = "go"
        with _on_cores(self.cores):
            started = _now_ns()
            thaw(self.pid)
            self._send({"do": "go"})
            message = self._message()
            self._freeze()
            seconds = (_now_ns() - started) * 1e-9
        cpu = cpu_seconds(self.pid) - cpu
        if faults_of_ended_children(self.pid) != ended:
            raise SubjectError(Status.SUSPECT, "it started other processes in a timed call")
        results = self._read(message, Done).results
        return TimedCalls(seconds=seconds, cpu_seconds=cpu, results=results)

    def read(self, results: tuple[ResultAt, ...], most_bytes: int) -> list[dict[str, Tensor]]:
        """The tensors of results, by name, copied from the memory of the process."""
        places = []
        for result in results:
            if result.wrong_type:
                raise SubjectError(Status.WRONG_STRUCTURE, result.wrong_type)
            for t in result.tensors:
                if not isinstance(getattr(torch, t.dtype, None), torch.dtype) or len(t.shape) != len(
                    t.stride
                ):
                    raise SubjectError(Status.SUSPECT, f"its answer names a tensor of dtype {t.dtype!r}")
                place = Place(start=t.address, shape=t.shape, stride=t.stride, dtype=t.dtype)
                if place.num_bytes > MAX_GAPS * most_bytes + 2**20:
                    raise SubjectError(Status.WRONG_SHAPE, f"a result of shape {t.shape}")
                places.append(place)
        spans = [(place.start, place.num_bytes) for place in places]
        copies = iter(self._within(READ_SECONDS, lambda: read_memory(self.pid, spans)))
        waiting = iter(places)
        copied = []
        for result in results:
            tensors = {t.name: _tensor(next(copies), next(waiting)) for t in result.tensors}
            copied.append(tensors | ({"filled": torch.ones(1)} if result.filled else {}))
        return copied

    def _is_stopped(self) -> bool:
        return False  # it is by us, most of the time

    def _freeze(self) -> None:
        try:
            freeze(self.pid)
        except GoneError:
            raise self._died() from None
        except TimeoutError as late:
            raise SubjectError(Status.SUSPECT, str(late)) from None

    def _within(self, seconds: float, read: Callable[[], V]) -> V:
        """A read of memory whose pages another process fills may never end: then this process is ended."""
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(read).result(seconds)
        except LateError:
            self._process.kill()
            raise SubjectError(Status.SUSPECT, "its result lies in memory that cannot be read") from None
        except OSError as error:
            reason = f"its result does not lie in its memory: {error.strerror}"
            raise SubjectError(Status.SUSPECT, reason) from None
        finally:
            pool.shutdown(wait=False)


@contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Wait where the worker runs: its core is free when it is done. On another core, if something keeps that
    busy, this process would be woken only at the next tick of the scheduler, up to 4 ms later."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _tensor(copy: Tensor, place: Place) -> Tensor:
    dtype = getattr(torch, place.dtype)
    if not place.numel:
        return torch.empty(place.shape, dtype=dtype)
    return copy.view(dtype).as_strided(place.shape, place.stride)
