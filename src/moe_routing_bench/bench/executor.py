"""Executors run the cells of a sweep. An engine for many machines would be another executor.

An executor takes cells and yields each outcome as soon as it is ready, in any order. It writes no files: the
caller stores results, so a crash loses only the cells that are running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.runner import Progress, run_cell
from moe_routing_bench.bench.trial import Watch

OnCellProgress = Callable[[Cell, Progress], None]


class Executor(Protocol):
    name: str

    def run(
        self, cells: Sequence[Cell], *, roofs: Roofs | None, on_progress: OnCellProgress, watch: Watch
    ) -> Iterator[CellOutcome]: ...


class LocalExecutor:
    """One cell after another on this machine: two at once would disturb each other's times."""

    name = "local"

    def run(
        self, cells: Sequence[Cell], *, roofs: Roofs | None, on_progress: OnCellProgress, watch: Watch
    ) -> Iterator[CellOutcome]:
        for cell in cells:
            yield run_cell(cell, roofs=roofs, on_progress=partial(on_progress, cell), watch=watch)


ENGINES: dict[str, type[LocalExecutor]] = {"local": LocalExecutor}
