"""Output: text for a terminal, a pipe or a notebook.

Tables fit the terminal: if names are too long, rows are numbered and a legend names them. In a pipe a table
may be as wide as PIPE_COLUMNS, or as the variable COLUMNS says.

Progress goes to stderr: on a terminal a bar, the time left and the ranking so far; in a pipe a line per
minute.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # most commands measure nothing
    from moe_routing_bench.bench.runner import Progress as CellProgress
    from moe_routing_bench.bench.runner import Standing
    from moe_routing_bench.workloads.experiment import Experiment

_recording: ContextVar[Console | None] = ContextVar("_recording", default=None)


def say(sentence: str) -> None:
    """Prints a sentence on stderr."""
    console(stderr=True).print(Text.assemble(("mrb: ", "bold red"), sentence))


def console(*, stderr: bool = False) -> Console:
    if not stderr and (recorder := _recording.get()) is not None:
        return recorder
    # error messages contain brackets, so nothing is read as markup
    shown = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not shown.is_terminal:
        shown.width = 1000  # lines are not wrapped in a pipe
    return shown


@contextmanager
def recorded(width: int) -> Iterator[Console]:
    """Makes the console keep its output instead of printing it; see export_text and export_html."""
    recorder = Console(
        file=io.StringIO(), record=True, width=width, force_terminal=False, force_jupyter=False,
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    token = _recording.set(recorder)
    try:
        yield recorder
    finally:
        _recording.reset(token)


def show(*things: RenderableType) -> None:
    out = console()
    if out.is_terminal or out.record:
        out.print(*things, sep="\n")
        return
    with out.capture() as captured:
        out.print(*things, sep="\n")
    # remove the spaces that fill the last column of tables
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def heading(name: str, summary: str) -> Text:
    meaning, _, shapes = summary.partition("   ")
    return Text.assemble((name, "bold cyan"), ": ", meaning, "   ", (shapes, "dim"))


def two_columns(first_width: int | None = None) -> Table:
    """Makes a table of names and explanations. On a terminal a name takes at most half of a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    screen = console()
    most = max(screen.width // 2, first_width or 0) if screen.is_terminal else None
    table.add_column(min_width=first_width, max_width=most, overflow="fold", no_wrap=most is None)
    table.add_column(overflow="fold")
    return table


PIPE_COLUMNS = 100
GAP = 2  # spaces between columns

Cells: TypeAlias = Sequence[str | Text]


def columns_here() -> int:
    """Returns how wide a table may be."""
    screen = console()
    if screen.is_terminal or screen.record:
        return screen.width
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else PIPE_COLUMNS


def fitted(
    words: Mapping[str, Cells],
    numbers: Mapping[str, Cells],
    *,
    spare: Sequence[str] = (),
    left: Sequence[str] = ("verdict",),
    style: str = "dim",
    room: int | None = None,
) -> list[RenderableType]:
    """Makes a table of columns by heading, and a legend if the table needs one.

    words: the names of rows; they move to the legend if there is no room and are never cut. spare: columns of
    numbers that may be left out instead, the first one first. left: columns that are aligned on the left.

        #      ms  ratio  verdict
        1  10.000  1      baseline
        2  20.000  2.000  SLOWER

        1  staged(combine=native,dispatch=native,grouped_gemm=native)
        2  eager_loop

    A table that is still too wide continues in another one below it. room: its width, if not the terminal's.
    """
    room = room or columns_here()
    kept = dict(numbers)
    tries = [kept]
    for name in spare:
        if name in kept:
            kept = {head: cells for head, cells in kept.items() if head != name}
            tries.append(kept)
    for columns in tries:
        if _width({**words, **columns}) <= room:
            return [_table(words, columns, left, style)]
    if not words:
        return [_table(words, tries[-1], left, style)]
    places: Cells = [str(number + 1) for number in range(len(next(iter(words.values()))))]
    columns = next((some for some in tries if _width({"#": places, **some}) <= room), tries[-1])
    legend = two_columns()
    for place, row in zip(places, zip(*words.values(), strict=True), strict=True):
        facts = zip(words, row, strict=True)
        named = [f"{head}: {cell}" for head, cell in facts if str(cell)] if len(words) > 1 else [str(row[0])]
        legend.add_row(place, "; ".join(named))
    shown: list[RenderableType] = []
    for part in _parts(places, columns, room):
        shown += [_table({"#": places}, part, left, style), ""]
    return [*shown, legend]


def fitted_rows(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    words: Collection[str],
    right: Collection[str],
) -> Group:
    """Does the same for rows. If there is no room for the numbers, each row becomes a block of lines."""
    cells = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
    if len(cells) < len(columns) or _width(cells) <= columns_here():
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for name in columns:
            table.add_column(name, justify="right" if name in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        return Group(table)
    named = {name: some for name, some in cells.items() if name in words}
    others = {name: some for name, some in cells.items() if name not in words}
    places = [str(number + 1) for number in range(len(rows))]
    if named and others and _width({"#": places, **others}) <= columns_here():
        return Group(
            *fitted(named, others, left=[name for name in others if name not in right], style="bold")
        )
    blocks: list[RenderableType] = []
    for place, row in zip(places, rows, strict=True):
        block = two_columns()
        for name, cell in zip(columns, row, strict=True):
            block.add_row(Text(name, "bold"), cell)
        blocks += [Text(f"row {place}", "dim"), block]
    return Group(*blocks)


def _parts(places: Cells, columns: Mapping[str, Cells], room: int) -> list[dict[str, Cells]]:
    """Splits the columns into as few tables as possible."""
    parts: list[dict[str, Cells]] = [{}]
    for head, cells in columns.items():
        if parts[-1] and _width({"#": places, **parts[-1], head: cells}) > room:
            parts.append({})
        parts[-1][head] = cells
    return parts


def _width(columns: Mapping[str, Cells]) -> int:
    widths = [max(map(_length, (head, *cells))) for head, cells in columns.items()]
    return sum(widths) + GAP * (len(widths) - 1)


def _length(cell: str | Text) -> int:
    return max((len(line) for line in str(cell).split("\n")), default=0)


def _table(
    words: Mapping[str, Cells], numbers: Mapping[str, Cells], left: Sequence[str], style: str
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=style)
    for head in words:
        table.add_column(head, no_wrap=True, justify="right" if head == "#" else "left")
    for head in numbers:
        table.add_column(head, no_wrap=True, justify="left" if head in left else "right")
    for row in zip(*words.values(), *numbers.values(), strict=True):
        table.add_row(*row)
    return table


LINE_SECONDS = 60.0
BAR = 20  # letters
WIDTH = 48  # letters of names in the ranking


class Lines:
    """Prints a line per minute in a pipe, where no bar is drawn. It prints nothing on a terminal or if
    `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.screen, self._quiet = console(stderr=True), quiet
        self._said = time.monotonic()

    @property
    def drawn(self) -> bool:
        """Is a bar drawn?"""
        return self.screen.is_terminal and not self._quiet

    def say(self, line: str, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not (self.screen.is_terminal or self._quiet) and (at_once or now - self._said >= LINE_SECONDS):
            self._said = now
            self.screen.print(line)


class Bar:
    """A bar. update(3, 14) shows "comparing: 3 of 14 comparisons, about 2:40 left"; without a unit, the
    share."""

    def __init__(self, what: str, unit: str = "", *, quiet: bool = False):
        self._what, self._unit, self._lines = what, unit, Lines(quiet=quiet)
        self._phases: dict[str, tuple[float, float]] = {}
        self.drawn = _bar(self._lines)
        self._task = self.drawn.add_task(what, total=None)

    def update(self, done: float, total: float, *, phase: str = "", now: str = "") -> None:
        """phase: the part of the work that `done` counts; each part has its own speed. now: the current
        item."""
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
    """Shows a spinner on a terminal for work of unknown length. The function takes the current item."""
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
    console(stderr=True).print("The machine is idle now, so its roofs are measured again first, about 10 s.")


class ShownProgress:
    """Progress of all cells. update() is called often while a cell is measured, cell_done() after it."""

    def __init__(self, cells: int, *, quiet: bool = False):
        self._cells, self._done, self._started = cells, 0, time.monotonic()
        self._standing: tuple[Standing, ...] = ()
        self._lines = Lines(quiet=quiet)
        self._bar = _bar(self._lines)
        self._task: TaskID = self._bar.add_task("starting", total=max(cells, 1))
        self._live = Live(
            get_renderable=self._drawn, console=self._lines.screen, transient=True, refresh_per_second=4
        )

    def update(self, experiment: Experiment, progress: CellProgress) -> None:
        from moe_routing_bench.bench.compiling import BUILDING

        where = f"{self._done + 1}/{self._cells} " if self._cells > 1 else ""
        now = time.monotonic()
        used, left = minutes(now - self._started), self._left(progress, now)
        what = f"{where}{experiment.title}: {progress.what}"
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
        """Shows text on stdout without disturbing the bar."""
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
    """Makes the ranking so far. Verdicts come after the last round."""
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
    """Returns whether to show progress. None means: in a terminal or a notebook."""
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
