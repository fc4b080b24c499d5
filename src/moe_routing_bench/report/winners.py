"""The winner map: who is fastest for how many tokens and which sizes, and where that is not decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_routing_bench.bench.verdict import OPEN
from moe_routing_bench.report.drawing import (
    PAPER,
    Picture,
    colours,
    contrast,
    figure,
    file_name,
    label,
    legend,
    patches,
    style,
)
from moe_routing_bench.report.reading import Cell, Group

MAX_ROWS, MAX_COLUMNS = 40, 12
MEANING = (
    "The fastest for each size. The number is the time of the next one over the winner's, paired round by "
    "round. Hatched ///: another takes the same time. Hatched xxx: not decided whether another is as fast. "
    "What drops pairs does less work, so it wins nothing where another drops none."
)


class Hovers:
    """Ids for parts of figures, unique in a page, and the text of each."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, text: str) -> str:
        name = f"h{len(self.texts)}"
        self.texts[name] = text
        return name


def winner_map(group: Group, hovers: Hovers) -> Picture | None:
    """Tokens x sizes and routing; the colour is the winner's, and hatched if others tie with it."""
    decided = [cell for cell in group.cells if cell.contest is not None and len(cell.contest.ratios) > 1]
    if len(decided) < 2 or not group.decides:
        return None
    ordered = sorted(decided, key=lambda cell: (cell.routing, cell.model or "~", cell.sizes))
    every = list(dict.fromkeys((cell.sizes, cell.routing) for cell in ordered))
    rows = {row: place for place, row in enumerate(every[:MAX_ROWS])}
    shown = [cell for cell in ordered if (cell.sizes, cell.routing) in rows]
    tokens = sorted({cell.first.experiment.T for cell in shown})
    columns = {T: place for place, T in enumerate(tokens[:MAX_COLUMNS])}
    shown = _widest([cell for cell in shown if cell.first.experiment.T in columns])
    several = len({cell.routing for cell in shown}) > 1
    by_sizes = _row_names(shown)
    names = {
        (cell.sizes, cell.routing): by_sizes[cell.sizes] + (f", {cell.routing}" if several else "")
        for cell in shown
    }
    colour = colours(group.contenders)
    with style():
        made = figure(9.5, 0.36 * len(rows) + 1.25)
        axes = made.add_subplot()
        for cell in shown:
            place = columns[cell.first.experiment.T], rows[cell.sizes, cell.routing]
            _winner(axes, cell, place, colour, hovers)
        axes.set_xticks(range(len(columns)), [f"{T:,}" for T in columns])
        axes.set_yticks(range(len(rows)), [label(names.get(row, ""), 48) for row in rows])
        axes.set_xlim(-0.5, max(len(columns), 6) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("tokens", loc="left")
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        won = [name for name in group.contenders if any(_won(cell, name) for cell in shown)]
        legend(made, patches({name: colour[name] for name in won}), 3, least=1)
    left = len(decided) - len(shown)
    caption = "" if several else f"Routing: {ordered[0].routing}. "
    if left:
        caption += (
            f"{left:,} of {len(decided):,} cells do not fit the figure, or compare less than another in "
            "their place; the tables have them."
        )
    return Picture(name=file_name("winners", group.title), title=group.title, caption=caption, figure=made)


def _widest(cells: Sequence[Cell]) -> list[Cell]:
    """One for each place: of cells with the same size and routing, the one that compares most."""
    at: dict[object, Cell] = {}
    for cell in cells:
        place = cell.sizes, cell.routing, cell.first.experiment.T
        if place not in at or _compared(at[place]) < _compared(cell):
            at[place] = cell
    return list(at.values())


def _compared(cell: Cell) -> int:
    return len(cell.contest.ratios) if cell.contest is not None else 0


def _won(cell: Cell, name: str) -> bool:
    return cell.contest is not None and cell.contest.winner == name


def _winner(axes: Any, cell: Cell, place: tuple[int, int], colour: dict[str, str], hovers: Hovers) -> None:
    from matplotlib.patches import Rectangle

    contest, (x, y) = cell.contest, place
    assert contest is not None
    others = sorted((ratio, name) for name, ratio in contest.ratios.items() if name != contest.winner)
    verdicts = {contest.against_winner[name].verdict for name in contest.ties}
    hatch = "xxx" if verdicts.intersection(OPEN) else "///" if verdicts else None
    said = ", ".join(f"{name}: {contest.against_winner[name].verdict}" for name in contest.ties)
    text = f"{cell.title}: {contest.winner}" + (f"; not shown to be slower: {said}" if said else "; no tie")
    fill = colour[contest.winner]
    box = Rectangle((x - 0.49, y - 0.45), 0.98, 0.9, facecolor=fill, hatch=hatch, edgecolor=PAPER)
    box.set_linewidth(0)
    box.set_gid(hovers.add(text))
    axes.add_patch(box)
    axes.text(
        x, y, f"{others[0][0] / contest.ratios[contest.winner]:.2f}", ha="center", va="center", fontsize=9,
        color=contrast(fill), bbox={"facecolor": fill, "edgecolor": "none", "pad": 1.2},
    )  # fmt: skip


def _row_names(cells: Sequence[Cell]) -> dict[tuple[int, int, int, int], str]:
    """By sizes: the model, or the letters in which the sizes differ."""
    models = {cell.sizes: cell.model for cell in cells}
    letters = [place for place in range(4) if len({sizes[place] for sizes in models}) > 1] or [2, 3]
    names = {}
    for sizes, model in models.items():
        words = " ".join(f"{'DFEK'[place]}={sizes[place]:,}" for place in letters)
        alone = model and list(models.values()).count(model) == 1
        names[sizes] = model if alone else f"{model} {words}".strip()
    return names
