"""Shows the winners: in a sentence, as their lead over the next, and as a map over tokens, sizes and skew.

The lead of a winner is the time of the second divided by its own in the same rounds. An implementation that
drops pairs does less work, so it cannot win where another drops none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any

from moe_routing_bench.bench.verdict import OPEN
from moe_routing_bench.report.drawing import (
    INK,
    PAPER,
    Picture,
    Table,
    colours,
    contrast,
    figure,
    file_name,
    label,
    legend,
    patches,
    style,
    times_axis,
)
from moe_routing_bench.report.reading import Cell, Group, Sizes
from moe_routing_bench.results.winners import Contest
from moe_routing_bench.workloads.axes import names_of
from moe_routing_bench.workloads.experiment import Experiment

MAX_ROWS, MAX_COLUMNS = 40, 12
MAX_LEADS = 24  # cases in the first chart
MAX_WINNERS = 3  # in a sentence
MAX_TIMES = 10  # a larger ratio is an arrow at the edge
MEANING = (
    "The number says how many times faster the winner is than the next. Hatched ///: another takes the same "
    "time. Hatched xxx: it is not certain that the others are slower. Busiest: the load of the busiest "
    "expert divided by the mean. Click a field to see its case."
)
HEAD = ("case", "winner", "times faster (99 % interval)", "certain", "than the next", "winner's ms")


class Hovers:
    """Makes ids for parts of figures, unique in a page, and keeps the text of each."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, text: str) -> str:
        name = f"h{len(self.texts)}"
        self.texts[name] = text
        return name


def decided(group: Group) -> list[tuple[Cell, Contest]]:
    """Returns the cells with a winner among implementations that compute the same. If several cells have the
    same workload, it takes the one with the most implementations."""
    cells = [
        (cell, cell.contest)
        for cell in group.cells
        if group.decides and cell.contest is not None and cell.contest.second is not None
    ]
    axes = [name for name in names_of(Experiment, None, "row") if name != "case"]
    return _widest(cells, lambda one: tuple(getattr(one.first.experiment, name) for name in axes))


def _widest(
    cells: Sequence[tuple[Cell, Contest]], place_of: Callable[[Cell], Hashable]
) -> list[tuple[Cell, Contest]]:
    at: dict[Hashable, tuple[Cell, Contest]] = {}
    for cell, contest in cells:
        place = place_of(cell)
        if place not in at or len(at[place][1].ratios) < len(contest.ratios):
            at[place] = cell, contest
    return list(at.values())


def answer(group: Group) -> str:
    """Returns sentences such as "native is the fastest in 9 of 12 cases. This is certain in 7, where it is
    1.12x to 1.41x faster than the next. vllm_cpu is the fastest in 3; none is certain"."""
    cells = decided(group)
    if len(cells) == 1:
        (_, contest), (low, high) = cells[0], cells[0][1].lead.interval
        interval = f"99 % interval {low:.2f}x to {high:.2f}x"
        if contest.ties:
            said = f"{contest.winner} is not shown to be faster than {contest.second}"
            return f"{said} ({contest.lead.ratio:.2f}x, {interval}); certain: {contest.certain}"
        return f"{contest.winner} is {contest.lead.ratio:.2f}x faster than {contest.second} ({interval})"
    parts: list[str] = []
    for name, count in Counter(contest.winner for _, contest in cells).most_common(MAX_WINNERS):
        won = [contest for _, contest in cells if contest.winner == name]
        clear = [contest.lead.ratio for contest in won if not contest.ties]
        of = f" of {len(cells):,} cases" if not parts else ""
        said = f"{name} is the fastest in {count:,}{of}"
        if clear:
            where = "" if len(clear) == len(cells) else f" in {len(clear):,}, where it is"
            said += f". This is certain{where or ': it is'} {_span(clear)} faster than the next"
        else:
            said += "; none is certain" if count > 1 else "; that is not certain"
        if not parts and any(_family(contest.second or "") == _family(name) for contest in won):
            others = [ratio for contest in won if (ratio := _other_family(contest)) is not None]
            if others:
                said += f", and {_span(others)} faster than the best that is not {_family(name)}"
        parts.append(said)
    return ". ".join(parts)


def _family(name: str) -> str:
    """Returns "native" for frozen(native) and native(store=int8) @ compact."""
    return name.removeprefix("frozen(").partition("(")[0].partition(" ")[0].rstrip("),")


def _other_family(contest: Contest) -> float | None:
    """Returns how many times faster the winner is than the fastest of another family."""
    names = [one for one in contest.against_winner if _family(one) != _family(contest.winner)]
    return min((contest.against_winner[name].ratio for name in names), default=None)


def _span(values: Sequence[float]) -> str:
    """Writes a range: 1.12x to 1.41x, 2.04x to 36x."""
    ends = (min(values), max(values))
    return " to ".join(dict.fromkeys(f"{value:.2f}x" if value < 10 else f"{value:.0f}x" for value in ends))


def lead_table(group: Group) -> Table:
    """Makes a table with a row for each decided case."""
    cells = decided(group)
    names, _ = case_names([cell for cell, _ in cells])
    rows = []
    for cell, contest in cells:
        low, high = contest.lead.interval
        assert contest.second is not None  # it is decided
        lead = f"{contest.lead.ratio:.2f} ({low:.2f} to {high:.2f})"
        who = names[cell.anchor], contest.winner
        rows.append((*who, lead, contest.certain, contest.second, cell.winner_ms))
    return Table(head=HEAD, rows=tuple(rows), words=5, links=tuple(cell.anchor for cell, _ in cells))


def leads(group: Group, hovers: Hovers) -> Picture | None:
    """Draws a row for each case: the times of the others divided by the winner's, with intervals."""
    if not (cells := decided(group)):
        return None
    shown = cells[:MAX_LEADS]
    names, common = case_names([cell for cell, _ in cells])
    colour = colours(name for name in group.implementations if any(name in one.ratios for _, one in shown))
    others = [one for _, contest in shown for one in contest.against_winner.values()]
    ends = [end for one in others for end in one.interval if end < MAX_TIMES]
    # the axis is wide enough that noise looks small
    low, high = min(0.95, *ends), max(1.25, *ends, *(min(MAX_TIMES, one.ratio) for one in others))
    ticks = [label(names[cell.anchor], 40) for cell, _ in shown]
    with style():
        width = 5.6 if max(map(len, ticks)) < 24 else 6.4
        made = figure(width, 1.4 + 0.3 * len(shown))
        axes = made.add_subplot()
        for place, (cell, contest) in enumerate(shown):
            for name, one in contest.against_winner.items():
                face = colour[name] if one.verdict == "SLOWER" else PAPER
                x, mark = (one.ratio, "o") if one.ratio <= MAX_TIMES else (MAX_TIMES, ">")
                axes.plot(one.interval, [place, place], color=colour[name], linewidth=2)
                axes.plot(x, place, mark, color=colour[name], markersize=6, mfc=face)
            (diamond,) = axes.plot(1, place, "D", color=colour[contest.winner], markersize=9)
            diamond.set_gid(hovers.add(_said(cell, contest)))
        times_axis(axes.xaxis, low, high)
        axes.axvline(1, color=INK, linewidth=1, zorder=1)
        axes.set_yticks(range(len(shown)), ticks)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel("time / winner's time (the winner is at 1)")
        legend(made, patches(colour), 2, least=1)
    left = len(cells) - len(shown)
    finding = f"the others take {_span([one.ratio for one in others])} the time of the winner"
    caption = (
        f"{common} Diamond: the fastest of a case. Circle: how many times as long another takes, with its "
        "99 % interval; hollow: it is not certain that it is slower."
        + (f" Arrow: more than {MAX_TIMES} times." if any(one.ratio > MAX_TIMES for one in others) else "")
        + (f" {left:,} more cases are in the table." if left else "")
    )
    return Picture(
        name=file_name("leads", group.title), title=f"{group.title}: {finding}", caption=caption,
        figure=made, table=lead_table(group),
    )  # fmt: skip


def winner_map(group: Group, hovers: Hovers) -> Picture | None:
    """Draws tokens against sizes and skew. The colour shows the winner, hatched if its lead is not
    certain."""
    cells = decided(group)
    if len(cells) < 2:
        return None
    cells.sort(key=lambda pair: (pair[0].model or "~", pair[0].sizes, pair[0].skew, pair[0].routing))
    every = list(dict.fromkeys((cell.sizes, cell.routing) for cell, _ in cells))
    rows = {row: place for place, row in enumerate(every[:MAX_ROWS])}
    tokens = sorted({cell.T for cell, _ in cells})
    columns = {T: place for place, T in enumerate(tokens[:MAX_COLUMNS])}
    fitting = [one for one in cells if one[0].T in columns and (one[0].sizes, one[0].routing) in rows]
    shown = _widest(fitting, lambda cell: (cell.sizes, cell.routing, cell.T))
    names = _row_names([cell for cell, _ in shown], skew=True)
    colour = {name: colours(group.implementations)[name] for name in _winners(group, shown)}
    grid = {row: [""] * len(columns) for row in rows}
    with style():
        made = figure(9.5, 0.36 * len(rows) + 1.25)
        axes = made.add_subplot()
        for cell, contest in shown:
            row = cell.sizes, cell.routing
            grid[row][columns[cell.T]] = f"{contest.winner} {contest.lead.ratio:.2f}x"
            _draw_winner(axes, (columns[cell.T], rows[row]), cell, contest, colour, hovers)
        axes.set_xticks(range(len(columns)), [f"{T:,}" for T in columns])
        axes.set_yticks(range(len(rows)), [label(names.get(row, ""), 56) for row in rows])
        axes.set_xlim(-0.5, max(len(columns), 6) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("tokens", loc="left")
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        legend(made, patches(colour), 3, least=1)
    left = len(cells) - len(shown)
    caption = (
        "The number says how many times faster the winner is. Hatched ///: another takes the same time. "
    )
    caption += "Hatched xxx: it is not certain that the others are slower."
    if left:
        caption += (
            f" {left:,} of {len(cells):,} cases do not fit, or compare less than another in their place."
        )
    table = Table(
        head=("case", *(f"{T:,} tokens" for T in columns)),
        rows=tuple((names.get(row, ""), *values) for row, values in grid.items()),
    )
    return Picture(
        name=file_name("winners", group.title), title=f"{group.title}: {_by_tokens(shown)}",
        caption=caption if left else "",
        figure=made, table=table,
    )  # fmt: skip


def _winners(group: Group, cells: Sequence[tuple[Cell, Contest]]) -> list[str]:
    won = {contest.winner for _, contest in cells}
    return [name for name in group.implementations if name in won]


def _by_tokens(cells: Sequence[tuple[Cell, Contest]]) -> str:
    """Returns a sentence such as "native wins most cases at 1 to 64 tokens, vllm_cpu at 256; certain in 7 of
    9 cases"."""
    certain = sum(not contest.ties for _, contest in cells)
    if not certain:
        return "no winner is certain"
    how_sure = "" if certain == len(cells) else f"; certain in {certain:,} of {len(cells):,} cases"
    won: dict[int, Counter[str]] = {}
    for cell, contest in cells:
        won.setdefault(cell.T, Counter())[contest.winner] += 1
    most = {T: won[T].most_common(1)[0][0] for T in sorted(won)}
    runs = [(name, list(some)) for name, some in groupby(most, key=most.__getitem__)]
    if len(runs) > MAX_WINNERS:
        return "no single winner; it depends on the number of tokens and the sizes"
    word = "wins every case" if all(len(one) == 1 for one in won.values()) else "wins most cases"
    spans = [" to ".join(dict.fromkeys(f"{T:,}" for T in (some[0], some[-1]))) for _, some in runs]
    parts = [f"{name} at {span} tokens" for (name, _), span in zip(runs, spans, strict=True)]
    return ", ".join(parts).replace(" at ", f" {word} at ", 1) + how_sure


def _draw_winner(
    axes: Any, at: tuple[int, int], cell: Cell, contest: Contest, colour: dict[str, str], hovers: Hovers
) -> None:
    from matplotlib.patches import Rectangle

    x, y = at
    verdicts = {contest.against_winner[name].verdict for name in contest.ties}
    hatch = "xxx" if verdicts.intersection(OPEN) else "///" if verdicts else None
    fill = colour[contest.winner]
    box = Rectangle((x - 0.49, y - 0.45), 0.98, 0.9, facecolor=fill, hatch=hatch, edgecolor=PAPER)
    box.set_linewidth(0)
    box.set_gid(hovers.add(_said(cell, contest)))
    box.set_url(f"#{cell.anchor}")
    axes.add_patch(box)
    axes.text(
        x, y, f"{contest.lead.ratio:.2f}x", ha="center", va="center", fontsize=9, color=contrast(fill),
        bbox={"facecolor": fill, "edgecolor": "none", "pad": 1.2},
    )  # fmt: skip


def _said(cell: Cell, contest: Contest) -> str:
    low, high = contest.lead.interval
    ties = f"; not shown to be slower: {', '.join(contest.ties)}" if contest.ties else ""
    lead = f"{contest.lead.ratio:.2f}x faster than {contest.second} ({low:.2f}x to {high:.2f}x)"
    return f"{cell.title}: {contest.winner}, {lead}{ties}"


def case_names(cells: Sequence[Cell]) -> tuple[dict[str, str], str]:
    """Returns by anchor how the cells differ, "qwen3-30b-a3b, T=64", and a sentence with what they share."""
    rows = _row_names(cells)
    one_row = len(set(rows.values())) == 1
    names = {}
    for cell in cells:
        tokens = "1 token" if cell.T == 1 else f"{cell.T:,} tokens"
        names[cell.anchor] = tokens if one_row else f"{rows[cell.sizes, cell.routing]}, T={cell.T:,}"
    first = cells[0]
    sizes = " ".join(f"{letter}={size:,}" for letter, size in zip("DFEK", first.sizes, strict=True))
    one_size = len({cell.sizes for cell in cells}) == 1
    routing = first.routing if len({cell.routing for cell in cells}) == 1 else ""
    shared = ", ".join(filter(None, (first.model if one_size else "", sizes if one_size else "", routing)))
    return names, f"Every case: {shared}." if shared else ""


def _row_names(cells: Sequence[Cell], *, skew: bool = False) -> dict[tuple[Sizes, str], str]:
    """Returns a name for each size and routing: the model, or the sizes that differ, and the routing if a
    size has several. skew: adds the load of the busiest expert divided by the mean."""
    models = {cell.sizes: cell.model for cell in cells}
    letters = [place for place in range(4) if len({sizes[place] for sizes in models}) > 1] or [2, 3]
    pairs = {(cell.sizes, cell.routing): cell for cell in cells}
    names = {}
    for (sizes, routing), cell in pairs.items():
        words = " ".join(f"{'DFEK'[place]}={sizes[place]:,}" for place in letters)
        alone = cell.model and list(models.values()).count(cell.model) == 1
        name = cell.model if alone else f"{cell.model} {words}".strip()
        if sum(other == sizes for other, _ in pairs) > 1:
            name += f", {routing}" + (f" (busiest {cell.skew:.1f}x)" if skew else "")
        names[sizes, routing] = name
    return names
