"""Who runs the cells of a sweep: the seam an engine for many machines fills.

An executor takes cells and gives outcomes back in any order, each as soon as it is there. It writes nothing:
results are the caller's, so a crash anywhere costs the cells in flight and no others.
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
