"""Executors run the cells of a sweep, on this machine or on a Ray cluster (ray_engine.py).

An executor takes cells and yields each outcome as soon as it is ready, in any order. It writes no files: the
caller stores results, so a crash loses only the cells that are running.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.compiling import compile_first
from moe_routing_bench.bench.estimate import share_of_rounds
from moe_routing_bench.bench.fork_server import start_server
from moe_routing_bench.bench.group import run_group
from moe_routing_bench.bench.identity import cell_key
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.runner import Progress, run_cell
from moe_routing_bench.bench.trial import Reuse, Watch
from moe_routing_bench.core.machine import this_machine

TRIALS_SHARE = 0.7  # of the time for several cells, the most that the trials of the next one may use
SCRATCH_BYTES = 4 << 20  # logs and small results of a cell's workers
OnCellProgress = Callable[[Cell, Progress], None]


class Executor(Protocol):
    name: str

    def keys(self, cells: Sequence[Cell]) -> list[set[str]]:
        """Returns for each cell its resume keys, computed on the machines that would run it: their
        processors, versions and settings may differ from those of this machine."""
        ...

    def run(
        self, cells: Sequence[Cell], *, roofs: Roofs | None, on_progress: OnCellProgress, watch: Watch
    ) -> Iterator[CellOutcome]: ...


class LocalExecutor:
    """Runs one cell after another on this machine. Two at a time would disturb each other's times."""

    name = "local"

    def __init__(self, budget: Budget | None = None):
        self.budget = budget  # for all cells; None: each cell has the budget of its policy

    def keys(self, cells: Sequence[Cell]) -> list[set[str]]:
        machine = this_machine()
        return [{cell_key(cell, machine)} for cell in cells]

    def run(
        self, cells: Sequence[Cell], *, roofs: Roofs | None, on_progress: OnCellProgress, watch: Watch
    ) -> Iterator[CellOutcome]:
        whole = self.budget
        start_server()
        if whole is not None and cells:
            with whole.paused():
                compile_first(
                    cells, lambda what: on_progress(cells[0], Progress(what=what, share=0.0, left=whole.left))
                )
        with closing(Reuse()) as reuse:
            for place, cell in enumerate(cells):
                check_scratch(cell)
                progress = partial(on_progress, cell)
                budget = Budget(cell.policy.max_seconds, kit_apart=True)
                if whole is not None:
                    last = place == len(cells) - 1
                    budget = Budget(max(whole.left, 0.0) * (1.0 if last else TRIALS_SHARE))
                if cell.span.grouped and cell.W > 1:
                    yield run_group(cell, roofs=roofs, on_progress=progress, budget=budget)
                else:
                    yield run_cell(
                        cell, roofs=roofs, on_progress=progress, watch=watch, budget=budget,
                        for_rounds=None if whole is None else partial(_share, whole, cells[place:]),
                        reuse=reuse,
                    )  # fmt: skip


def _share(whole: Budget, cells: Sequence[Cell], needed: float) -> float:
    """Returns the seconds for the rounds of the first cell, whose trials are over: its share, or what it
    needs for a decision if that leaves half of the time to the others."""
    left = max(whole.left, 0.0)
    return max(left * share_of_rounds(cells), min(needed, left / 2))


def check_scratch(cell: Cell) -> None:
    """Raises ValueError if the disk is too full for the workers' results: a kernel would be blamed for it."""
    # three results of each call, twice, and what is handed over; with gradients also those of the weights
    weights = cell.case.weight_bytes if cell.case.direction != "forward" else 0
    needed = SCRATCH_BYTES + 8 * (cell.case.activation_bytes + weights)
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise ValueError(f"there is no folder for temporary files: {error.strerror or error}") from None
    if free < needed:
        raise ValueError(
            f"{place} has {free / 2**20:,.0f} MiB free, and the workers of {cell.name} may need "
            f"{needed / 2**20:,.0f} MiB there; free some, or set TMPDIR to another folder"
        )
