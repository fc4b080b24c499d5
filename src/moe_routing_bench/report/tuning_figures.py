"""What a tuning found: the gain over numbers of tokens, two knobs as a map, and the ten best of every case.

A tuning leaves many cells of one case (tuning/tune.py). The last one ranks the best settings again, and only
its numbers are gains; the map shows all races, whose short times are only good enough to search by.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.report.drawing import INK, Picture, Table, colours, figure, file_name, label, style
from moe_routing_bench.report.reading import Cell, Group
from moe_routing_bench.results.record import RANKED, TUNING, Record
from moe_routing_bench.workloads.axes import names_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

TEN = 10
RULE = "kernel's rule"
HEAD = ("case", "setting", "tokens", "gain", "99 % interval", "verdict")


def tuned(group: Group) -> list[list[Cell]]:
    """The cells of each case that was tuned, the last one last."""
    axes = [name for name in names_of(Experiment, None, "row") if name != "case"]
    places: dict[Hashable, list[Cell]] = {}
    for cell in group.cells:
        if cell.first.suite in (TUNING, RANKED) and cell.passed:
            place = tuple(getattr(cell.first.experiment, name) for name in axes)
            places.setdefault(place, []).append(cell)
    found = [sorted(cells, key=lambda one: one.first.created_at) for cells in places.values()]
    return sorted(found, key=lambda cells: (cells[0].sizes, cells[0].routing, cells[0].T))


def top_ten(cells: Sequence[Cell]) -> Table | None:
    """The last race of a case, the fastest first; the default is among them. None if it ranks nothing."""
    final = cells[-1]
    if final.first.suite != RANKED:
        return None
    timed = [one for one in final.passed if one.implementation.role in ("baseline", "candidate")]
    rows = [
        (
            one.implementation.spec,
            "1.000" if one.comparison is None else f"{one.comparison.ratio:.3f}",
            "" if one.comparison is None else f"{one.comparison.low:.3f} to {one.comparison.high:.3f}",
            "default" if one.comparison is None else one.comparison.verdict,
        )
        for one in sorted(timed, key=_ratio)
    ]
    head = ("setting", "time / default", "99 % interval", "verdict")
    return Table(head=head, rows=tuple(rows[: TEN + 1]), title=final.title) if len(rows) > 1 else None


def gains(group: Group) -> Picture | None:
    """How many times faster the best setting is than the default, over tokens."""
    by_line: dict[str, list[tuple[int, Record]]] = {}
    for cells in tuned(group):
        final = cells[-1]
        if final.first.suite == RANKED and (
            compared := [
                one for one in final.passed if one.comparison and one.implementation.role == "candidate"
            ]
        ):
            sizes = " ".join(f"{letter}={size:,}" for letter, size in zip("DFEK", final.sizes, strict=True))
            line = f"{final.model or sizes}, {final.routing}"
            by_line.setdefault(line, []).append((final.T, min(compared, key=_ratio)))
    if not by_line:
        return None
    rows = []
    with style():
        made = figure(8.5, 3.6)
        axes = made.add_subplot()
        for (line, points), colour in zip(by_line.items(), colours(by_line).values(), strict=True):
            tokens = [T for T, _ in points]
            gain, low, high = zip(*(_gain(one) for _, one in points), strict=True)
            ends = [
                [a - b for a, b in zip(gain, low, strict=True)],
                [b - a for a, b in zip(gain, high, strict=True)],
            ]
            axes.errorbar(tokens, gain, yerr=ends, color=colour, marker="o", capsize=4, label=label(line))
            for T, one in points:
                verdict = one.comparison.verdict if one.comparison else ""
                middle, least, most = _gain(one)
                rows.append(
                    (
                        line,
                        one.implementation.spec,
                        f"{T:,}",
                        f"{middle:.3f}x",
                        f"{least:.3f}x to {most:.3f}x",
                        verdict,
                    )
                )
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_xscale("log", base=2)
        every = sorted({T for points in by_line.values() for T, _ in points})
        axes.set_xticks(every, [f"{T:,}" for T in every])
        axes.minorticks_off()
        axes.set_xlabel("tokens", loc="left")
        axes.set_ylabel("times faster than the default")
        axes.legend()
    faster = sum(row[-1] == "FASTER" for row in rows)
    return Picture(
        name=file_name("tuning", group.title),
        title=f"Tuning gains in {faster} of {len(rows)} cases",
        caption="The fastest setting of the last race, with its 99 % interval. Only the verdict FASTER is a "
        "gain; otherwise the default stays.",
        figure=made,
        table=Table(head=HEAD, rows=tuple(rows), words=2),
    )


def knob_map(cells: Sequence[Cell]) -> Picture | None:
    """The two knobs with most settings that turn both, or one of them, and no other."""
    seen: dict[tuple[tuple[str, int], ...], float] = {}
    for record in (record for cell in cells for record in cell.passed):
        if record.implementation.role in ("baseline", "candidate"):
            config = parse_spec(ImplementationRef.read(record.implementation.spec).name)[1]
            seen[tuple(sorted(config.items()))] = _ratio(record)
    names = sorted({name for config in seen for name, _ in config})
    pairs = [
        (x, y, {config: ratio for config, ratio in seen.items() if {name for name, _ in config} <= {x, y}})
        for x, y in combinations(names, 2)
    ]
    pairs = [one for one in pairs if any(len(config) == 2 for config in one[2])]
    if not pairs:
        return None
    x, y, table = max(pairs, key=lambda one: len(one[2]))
    columns, rows = ([0, *sorted({v for config in table for n, v in config if n == name})] for name in (x, y))
    grid = [[table.get(tuple((n, v) for n, v in ((x, a), (y, b)) if v)) for a in columns] for b in rows]
    with style():
        made = figure(1.6 + 1.0 * len(columns), 1.2 + 0.5 * len(rows))
        axes = made.add_subplot()
        values = [[float("nan") if one is None else one for one in row] for row in grid]
        far = max(0.02, *(abs(one - 1) for row in grid for one in row if one is not None))
        image = axes.imshow(values, cmap="PuOr", vmin=1 - far, vmax=1 + far, aspect="auto")
        for place, row in enumerate(grid):
            for at, one in enumerate(row):
                if one is not None:
                    box = {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.7, "pad": 1}
                    said = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "#000000", "bbox": box}
                    axes.text(at, place, f"{one:.3f}", **said)
        axes.set_xticks(range(len(columns)), [str(one or RULE) for one in columns])
        axes.set_yticks(range(len(rows)), [str(one or RULE) for one in rows])
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(False)
        made.colorbar(image, label="time / default")
    return Picture(
        name=file_name("knobs", cells[-1].title), title=f"{x} and {y}: {cells[-1].title}",
        caption="Time as a multiple of the default's, of short races: the last race decides.", figure=made,
    )  # fmt: skip


def _ratio(one: Record) -> float:
    return 1.0 if one.comparison is None else one.comparison.ratio


def _gain(one: Record) -> tuple[float, float, float]:
    assert one.comparison is not None
    return 1 / one.comparison.ratio, 1 / one.comparison.high, 1 / one.comparison.low
