"""A progress bar with the time left, on stderr; nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.runner import Progress as CellProgress
from moe_routing_bench.cli.terminal import console


class ShownProgress:
    """Progress over all cells: update() is called often while a cell is measured, cell_done() after it."""

    def __init__(self, bar: Progress, cells: int):
        self._bar, self._cells, self._done = bar, cells, 0
        self._task: TaskID = bar.add_task("starting", total=max(cells, 1))

    def update(self, cell: Cell, progress: CellProgress) -> None:
        where = f"{self._done + 1}/{self._cells} " if self._cells > 1 else ""
        self._bar.update(
            self._task,
            completed=self._done + progress.share,
            description=f"{where}{cell.name}: {progress.what}"[:90],
        )

    def cell_done(self) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)

    def pause(self, show: Callable[[], None]) -> None:
        """Show text on stdout without disturbing the bar."""
        self._bar.stop()
        show()
        if self._done < self._cells:
            self._bar.start()


@contextmanager
def shown_progress(cells: int) -> Iterator[ShownProgress]:
    out = console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), console=out, transient=True, disable=not out.is_terminal,
    )  # fmt: skip
    with bar:
        yield ShownProgress(bar, cells)
