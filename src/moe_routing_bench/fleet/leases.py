"""Leases say which machine is measuring which cell, so that no two machines do the same work.

A lease is an object leases/<cell key>-<attempt>/<n>.json that is written only if it does not exist. It is
valid for the seconds it states. Clocks of two machines are never compared: a machine that wants the cell sees
the lease, waits that long by its own clock, and if there is still no result it writes lease n + 1. The first
machine may only have been slow and may still finish. Leases save work; only the segment decides which result
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, ValidationError

from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.record import Name, RecordPart
from moe_routing_bench.workloads.experiment import Experiment

START_SECONDS = 120.0  # compiling, starting workers, a slow store
UNREADABLE_SECONDS = 3600.0  # how long a lease that cannot be read is respected


class Terms(RecordPart):
    """{"worker": "node7-4711-5f2e", "seconds": 300}"""

    worker: Name
    seconds: Annotated[float, Field(gt=0, le=1e6)]


def lease_seconds(experiment: Experiment) -> float:
    """Twice what a cell may take, and the start."""
    return START_SECONDS + 2 * experiment.processes * experiment.max_seconds


class Leases:
    """leases.take("0f3a...", 1, 300.0) -> True: this machine may measure the cell for five minutes."""

    def __init__(self, objects: Objects, worker: str, clock: Callable[[], float] = time.monotonic):
        self.objects, self.worker, self.clock = objects, worker, clock
        self._seen: dict[
            str, tuple[float, float]
        ] = {}  # lease -> when it was first seen by this process, its seconds
        self._mine: dict[tuple[str, int], str] = {}

    def take(self, cell_key: str, attempt: int, seconds: float) -> bool:
        """Returns False if another machine holds a valid lease."""
        home = f"leases/{cell_key}-{attempt:04d}"
        last = max((listed.name for listed in self.objects.list(f"{home}/")), default=None)
        number = 1
        if last is not None:
            if not self._is_over(last):
                return False
            number = int(last.rpartition("/")[2].partition(".")[0]) + 1
        name = f"{home}/{number:06d}.json"
        terms = Terms(worker=self.worker, seconds=seconds)
        if not self.objects.put_new(name, terms.model_dump_json().encode()):
            return False
        self._mine[cell_key, attempt] = name
        return True

    def give_back(self, cell_key: str, attempt: int) -> None:
        """Deletes the lease of a cell that has results or was not measured, so that others do not wait."""
        if name := self._mine.pop((cell_key, attempt), None):
            self.objects.delete([name])

    def _is_over(self, name: str) -> bool:
        if name not in self._seen:
            terms = self._terms(name)
            self._seen[name] = (self.clock(), terms.seconds if terms else UNREADABLE_SECONDS)
        since, seconds = self._seen[name]
        return self.clock() - since > seconds

    def _terms(self, name: str) -> Terms | None:
        try:
            return Terms.model_validate_json(self.objects.get(name))
        except (ValidationError, FileNotFoundError):
            return None
