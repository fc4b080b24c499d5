"""Progress on stderr: on a terminal a bar, the time left, the ranking so far; in a pipe a line a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.compiling import BUILDING
from moe_routing_bench.bench.runner import Progress as CellProgress
from moe_routing_bench.bench.runner import Standing
from moe_routing_bench.cli.terminal import console

LINE_SECONDS = 60.0
WIDTH = 48  # of names in the ranking


def say_roofs_are_measured() -> None:
    console(stderr=True).print("First this machine's roofs are measured again, about 10 s: it is quiet now.")


class ShownProgress:
    """Progress over all cells: update() is called often while a cell is measured, cell_done() after it."""

    def __init__(self, cells: int, *, quiet: bool = False):
        self._cells, self._done, self._started, self._quiet = cells, 0, time.monotonic(), quiet
        self._said, self._standing = self._started, tuple[Standing, ...]()
        out = console(stderr=True)
        self._lines = not out.is_terminal
        self._bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(20), console=out)
        self._task: TaskID = self._bar.add_task("starting", total=max(cells, 1))
        self._live = Live(get_renderable=self._drawn, console=out, transient=True, refresh_per_second=4)

    def update(self, cell: Cell, progress: CellProgress) -> None:
        where = f"{self._done + 1}/{self._cells} " if self._cells > 1 else ""
        now = time.monotonic()
        used, left = minutes(now - self._started), self._left(progress, now)
        what = f"{where}{cell.name}: {progress.what}"
        self._standing = progress.standing
        self._bar.update(
            self._task, completed=self._done + progress.share, description=f"{used} {what[:60]}; {left}"
        )
        building = progress.what.startswith(BUILDING)
        if self._lines and not self._quiet and (building or now - self._said >= LINE_SECONDS):
            self._said = now
            console(stderr=True).print(progress.what if building else f"{used} {what}; {left}")

    def _left(self, progress: CellProgress, now: float) -> str:
        if self._cells == 1:
            return f"at most {minutes(progress.left)} left"
        share = (self._done + progress.share) / max(self._cells, 1)
        if share < 0.05:
            return f"{100 * share:.0f} % done"
        left = (now - self._started) * (1 - share) / share
        return f"{100 * share:.0f} % done, about {minutes(left)} left"

    def _drawn(self) -> RenderableType:
        return Group(_ranking(self._standing), self._bar) if self._standing else self._bar

    def cell_done(self) -> None:
        self._done += 1
        self._standing = ()
        self._bar.update(self._task, completed=self._done)

    def pause(self, show: Callable[[], None]) -> None:
        """Show text on stdout without disturbing the bar."""
        self.stop()
        show()
        if self._done < self._cells:
            self.start()

    def start(self) -> None:
        if not self._lines and not self._quiet:
            self._live.start()

    def stop(self) -> None:
        self._live.stop()


def _ranking(standing: Sequence[Standing]) -> Table:
    """How they stand so far; verdicts come when the rounds are over."""
    table = Table(box=None, pad_edge=False)
    table.add_column("so far", no_wrap=True, max_width=WIDTH)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for one in standing:
        table.add_row(one.label, f"{1e3 * one.seconds:.3f}", f"{one.ratio:.3f}")
    return table


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def is_wanted(progress: bool | None) -> bool:
    """None: where somebody looks on, in a terminal or a notebook."""
    out = console(stderr=True)
    return (out.is_terminal or out.is_jupyter) if progress is None else progress


@contextmanager
def shown_progress(cells: int, *, quiet: bool = False) -> Iterator[ShownProgress]:
    progress = ShownProgress(cells, quiet=quiet)
    progress.start()
    try:
        yield progress
    finally:
        progress.stop()
