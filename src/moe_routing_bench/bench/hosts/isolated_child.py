"""A child that runs code from outside. It is frozen except during its turn."""

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
from moe_routing_bench.bench.hosts.freezing import GoneError, cpu_seconds, faults_of_ended_children
from moe_routing_bench.bench.hosts.holding import Tree
from moe_routing_bench.bench.hosts.memory import Place, read_memory
from moe_routing_bench.bench.hosts.messages import Done, Reply, ResultAt
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.workloads.experiment import Experiment

READ_SECONDS = 5.0  # memory that makes its reader wait longer is no result
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
            experiment, cores, isolated_worker.serve, plan,
            sandbox=sandbox, fds=fds if sandbox else (), held=True,
        )  # fmt: skip
        self.ready()
        self._stop()
        self._look()

    def prepare(self, *, calls: int, hot: bool, empty: bool = False) -> None:
        """Prepares a turn, which is not timed. Afterwards the child stands still."""
        self._check_still()
        self.tree.resume()
        self.ask("prepare", Reply, calls=calls, hot=hot, empty=empty)
        self._stop()
        self._look()

    def go(self) -> TimedCalls:
        """The timed span: from before it is woken until no thread of it can run any more."""
        self._check_still()
        ended, cpu = faults_of_ended_children(self.pid), cpu_seconds(self.pid)
        self._asked = "go"
        with _on_cores(self.cores):
            started = _now_ns()
            self.tree.resume()
            self._send({"do": "go"})
            message = self._message()
            self._stop()
            seconds = (_now_ns() - started) * 1e-9
        self._look()
        cpu = cpu_seconds(self.pid) - cpu
        if faults_of_ended_children(self.pid) != ended:
            raise ImplementationError(Status.SUSPECT, "it started other processes in a timed call")
        results = self._read(message, Done).results
        return TimedCalls(seconds=seconds, cpu_seconds=cpu, results=results)

    def read(self, results: tuple[ResultAt, ...], most_bytes: int) -> list[dict[str, Tensor]]:
        """The tensors of results, by name, copied from the memory of the process."""
        places = []
        for result in results:
            if result.wrong_type:
                raise ImplementationError(Status.WRONG_STRUCTURE, result.wrong_type)
            for t in result.tensors:
                if not isinstance(getattr(torch, t.dtype, None), torch.dtype) or len(t.shape) != len(
                    t.stride
                ):
                    raise ImplementationError(
                        Status.SUSPECT, f"its answer names a tensor of dtype {t.dtype!r}"
                    )
                place = Place(start=t.address, shape=t.shape, stride=t.stride, dtype=t.dtype)
                if place.num_bytes > MAX_GAPS * most_bytes + 2**20:
                    raise ImplementationError(Status.WRONG_SHAPE, f"a result of shape {t.shape}")
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

    @property
    def tree(self) -> Tree:
        assert self._tree is not None
        return self._tree

    def _stop(self) -> None:
        try:
            self.tree.stop()
        except GoneError:
            raise self._died() from None
        except TimeoutError as late:
            raise ImplementationError(Status.SUSPECT, str(late)) from None

    def _look(self) -> None:
        """What is left besides it when it stands still; from here on it must."""
        if others := self.tree.others():
            raise ImplementationError(Status.SUSPECT, f"it left {others} processes running")
        self.tree.watch()

    def _check_still(self) -> None:
        if self.tree.has_moved():
            raise ImplementationError(Status.SUSPECT, "its process ran while it was stopped")

    def _within(self, seconds: float, read: Callable[[], V]) -> V:
        """Ends the child if a read of its memory does not return. Another process may fill those pages and
        never do so."""
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(read).result(seconds)
        except LateError:
            self._process.kill()
            raise ImplementationError(
                Status.SUSPECT, "its result lies in memory that cannot be read"
            ) from None
        except OSError as error:
            reason = f"its result does not lie in its memory: {error.strerror}"
            raise ImplementationError(Status.SUSPECT, reason) from None
        finally:
            pool.shutdown(wait=False)


@contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Runs this process on the worker's core, which is free when the worker is done. On another core that
    something keeps busy, this process would be woken only at the next tick of the scheduler, up to 4 ms
    later."""
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
