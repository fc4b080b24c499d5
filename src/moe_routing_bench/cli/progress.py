"""Progress on stderr: on a terminal a bar, the time left, the ranking so far; in a pipe a line a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from moe_routing_bench.cli.terminal import console

if TYPE_CHECKING:  # most commands measure nothing
    from moe_routing_bench.bench.cell import Cell
    from moe_routing_bench.bench.runner import Progress as CellProgress
    from moe_routing_bench.bench.runner import Standing

LINE_SECONDS = 60.0
BAR = 20  # letters
WIDTH = 48  # of names in the ranking


class Lines:
    """What would be on a bar, in a pipe: a line a minute; nothing on a terminal, or if `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.screen, self._quiet = console(stderr=True), quiet
        self._said = time.monotonic()

    @property
    def drawn(self) -> bool:
        """Is there a bar?"""
        return self.screen.is_terminal and not self._quiet

    def say(self, line: str, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not (self.screen.is_terminal or self._quiet) and (at_once or now - self._said >= LINE_SECONDS):
            self._said = now
            self.screen.print(line)


class Bar:
    """update(3, 14) shows "comparing: 3 of 14 comparisons, about 2:40 left"; without a unit, the share."""

    def __init__(self, what: str, unit: str = "", *, quiet: bool = False):
        self._what, self._unit, self._lines = what, unit, Lines(quiet=quiet)
        self._phases: dict[str, tuple[float, float]] = {}
        self.drawn = _bar(self._lines)
        self._task = self.drawn.add_task(what, total=None)

    def update(self, done: float, total: float, *, phase: str = "", now: str = "") -> None:
        """phase: a part of the work with its own speed, of which `done` counts. now: what it is at."""
        count = f"{done:,} of {total:,} {self._unit}" if self._unit else f"{100 * done / total:.0f} %"
        line = f"{self._what}: {phase} {count}" if phase else f"{self._what}: {count}"
        line += self._left(done / max(total, 1), phase) + (f"; {now}" if now else "")
        room = max(BAR, self._lines.screen.width - BAR - 4)
        self.drawn.update(self._task, completed=done, total=total, description=line[:room])
        self._lines.say(line)

    def _left(self, share: float, phase: str) -> str:
        now = time.monotonic()
        began, first = self._phases.setdefault(phase, (now, share))
        if share < first + 0.01:
            return ""
        return f", about {minutes((now - began) * (1 - share) / (share - first))} left"


@contextmanager
def bar(what: str, unit: str = "", *, quiet: bool = False) -> Iterator[Bar]:
    shown = Bar(what, unit, quiet=quiet)
    with shown.drawn:
        yield shown


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """For work of unknown length: a spinner on a terminal. The function takes what is being done now."""
    lines = Lines()
    with lines.screen.status(what) as status:

        def update(what: str) -> None:
            status.update(what)
            lines.say(what)

        yield update


def _bar(lines: Lines) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(BAR),
        console=lines.screen, transient=True, disable=not lines.drawn,
    )  # fmt: skip


def say_roofs_are_measured() -> None:
    console(stderr=True).print("First this machine's roofs are measured again, about 10 s: it is quiet now.")


class ShownProgress:
    """Progress over all cells: update() is called often while a cell is measured, cell_done() after it."""

    def __init__(self, cells: int, *, quiet: bool = False):
        self._cells, self._done, self._started = cells, 0, time.monotonic()
        self._standing: tuple[Standing, ...] = ()
        self._lines = Lines(quiet=quiet)
        self._bar = _bar(self._lines)
        self._task: TaskID = self._bar.add_task("starting", total=max(cells, 1))
        self._live = Live(
            get_renderable=self._drawn, console=self._lines.screen, transient=True, refresh_per_second=4
        )

    def update(self, cell: Cell, progress: CellProgress) -> None:
        from moe_routing_bench.bench.compiling import BUILDING

        where = f"{self._done + 1}/{self._cells} " if self._cells > 1 else ""
        now = time.monotonic()
        used, left = minutes(now - self._started), self._left(progress, now)
        what = f"{where}{cell.name}: {progress.what}"
        self._standing = progress.standing
        self._bar.update(
            self._task, completed=self._done + progress.share, description=f"{used} {what[:60]}; {left}"
        )
        building = progress.what.startswith(BUILDING)
        self._lines.say(progress.what if building else f"{used} {what}; {left}", at_once=building)

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
        if self._lines.drawn:
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
