"""Tables that fit the terminal: if names are too long for it, rows are numbered and a legend names them.

In a pipe a table may be as wide as PIPE_COLUMNS, or as COLUMNS says.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_routing_bench.cli.terminal import console, two_columns

PIPE_COLUMNS = 100
GAP = 2  # spaces between columns

Cells: TypeAlias = Sequence[str | Text]


def columns_here() -> int:
    """How wide a table may be."""
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
    """A table of columns by heading, and a legend if it needs one.

    words: what tells rows apart; it moves to the legend if there is no room, and is never cut. spare: numbers
    that may be left out instead, the first first. left: numbers that are words, and stand on the left.

        #      ms  ratio  verdict
        1  10.000  1      baseline
        2  20.000  2.000  SLOWER

        1  staged(combine=native,dispatch=native,grouped_gemm=native)
        2  eager_loop

    A table that is too wide even so goes on in another below it. room: columns, if not those of the terminal.
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
    """The same for rows. If there is no room even for the numbers, each row is a block of lines."""
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
    """The columns in as few tables as have room for them."""
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
