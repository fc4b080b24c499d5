"""A page that compares two runs: confirmed changes first, sorted by their cause, then undecided ones, then
those that were measured in different ways, without ratios."""

from __future__ import annotations

from collections.abc import Sequence

from moe_routing_bench.bench.verdict import OPEN
from moe_routing_bench.report.drawing import COLOURS, INK, Picture, Table, figure, label, patches, style
from moe_routing_bench.report.page import Page, Section
from moe_routing_bench.results.compare import Change, Kind, RunComparison, Turned

KINDS: dict[Kind, str] = {
    "regression": "The code changed and is slower, measured in the same way on the same machine.",
    "improvement": "The code changed and is faster, measured in the same way on the same machine.",
    "method change": "The benchmark's code or method changed: measure both runs with the same version.",
    "other machine": "The machine, torch, Python or its settings changed: this says nothing about the code.",
    "noise": "The source is the same in both runs: look at the machine and at the code that it calls.",
}
COLOUR: dict[Kind, str] = {
    "regression": COLOURS[5], "improvement": COLOURS[2], "method change": COLOURS[1],
    "other machine": COLOURS[3], "noise": COLOURS[11], "not decided": COLOURS[4],
}  # fmt: skip
MAX_BARS, MAX_ROWS = 40, 2_000
HEAD = ("case", "implementation", "A, ms", "B, ms", "B / A", "99 % interval", "p", "by")
WHY = ("case", "implementation", "why it is undecided", *HEAD[2:])


def two_runs(runs: RunComparison, name_a: str, name_b: str, command: str) -> Page:
    confirmed = [change for change in runs.changes if change.confirmed]
    confirmed.sort(key=lambda change: abs(change.ratio - 1), reverse=True)
    by_kind = {kind: [change for change in confirmed if change.kind == kind] for kind in KINDS}
    undecided = [change for change in runs.changes if change.verdict in OPEN]
    same = [change for change in runs.changes if change.verdict == "SAME"]
    picture = _picture([*(one for some in by_kind.values() for one in some), *undecided])
    sections = [
        Section(
            title="Confirmed changes" if confirmed else "No confirmed change",
            text=() if confirmed else ("Nothing is shown to be faster or slower.",),
            pictures=() if picture is None else (picture,),
            tables=tuple(
                Table(head=HEAD, rows=_rows(some), words=2, title=kind, note=KINDS[kind])
                for kind, some in by_kind.items()
                if some
            ),
        ),
        _turned("Broken: passed in A and not in B", runs.broken),
        _turned("Fixed: passed in B and not in A", runs.fixed),
        Section(
            title="Undecided",
            tables=(Table(head=WHY, rows=_rows(undecided, why=True), words=3),) if undecided else (),
        ),
        Section(
            title="The same within the limit",
            tables=(Table(head=HEAD, rows=_rows(same), words=2),) if same else (),
        ),
        Section(
            title="Measured unlike: side by side",
            text=("No ratio of these times means anything.",),
            tables=(_apart(runs),) if runs.apart else (),
        ),
        *(
            Section(
                title=title, tables=(Table(head=("name",), rows=tuple((one,) for one in names[:MAX_ROWS])),)
            )
            for title, names in (("Only in A", runs.only_a), ("Only in B", runs.only_b))
            if names
        ),
    ]
    counts = (
        ", ".join(f"{kind}: {len(some)}" for kind, some in by_kind.items() if some) or "no confirmed change"
    )
    summary = (
        f"A: {name_a}. B: {name_b}.",
        f"{counts}; {len(undecided)} undecided, {len(same)} the same, {len(runs.broken)} broken, "
        f"{len(runs.fixed)} fixed, {len(runs.apart)} measured unlike.",
        "The two runs were not interleaved, so samples of A and B are not paired.",
    )
    kept = tuple(
        one for one in sections if one.tables or one.pictures or one.title.startswith("No confirmed")
    )
    return Page(
        title="What changed from A to B",
        answer=summary,
        chapters=((f"{len(runs.changes):,} compared", kept),),
        notes=(*runs.notes, *runs.unreadable, *runs.left_out.first, *runs.left_out.remarks),
        command=command,
        data={"rows": [], "hovers": {}},
    )


def _rows(changes: Sequence[Change], *, why: bool = False) -> tuple[tuple[str, ...], ...]:
    rows = []
    for one in changes[:MAX_ROWS]:
        ends = "" if one.interval is None else f"{one.interval[0]:.3f} to {one.interval[1]:.3f}"
        row = (
            one.where, one.title, f"{one.ms[0]:.4g}", f"{one.ms[1]:.4g}", f"{one.ratio:.3f}", ends,
            f"{one.p_adjusted:.2g}", one.method,
        )  # fmt: skip
        rows.append((*row[:2], one.reason, *row[2:]) if why else row)
    return tuple(rows)


def _turned(title: str, turned: Sequence[Turned]) -> Section:
    rows = tuple((one.name, one.status, one.reason, one.repro) for one in turned[:MAX_ROWS])
    table = Table(head=("name", "status", "why", "command"), rows=rows, words=4)
    return Section(title=title, tables=(table,) if turned else ())


def _apart(runs: RunComparison) -> Table:
    def ms(value: float | None) -> str:
        return "no time" if value is None else f"{value:.4g}"

    rows = tuple(
        (one.name, "; ".join(one.differences), ms(one.ms_a), ms(one.ms_b)) for one in runs.apart[:MAX_ROWS]
    )
    return Table(head=("name", "what differs", "A, ms", "B, ms"), rows=rows, words=2)


def _picture(changes: Sequence[Change]) -> Picture | None:
    """Each change with its interval, confirmed ones first; a line at 1."""
    shown = [change for change in changes if change.interval is not None][:MAX_BARS]
    if not shown:
        return None
    with style():
        made = figure(9.5, 1.2 + 0.3 * len(shown))
        axes = made.add_subplot()
        for place, one in enumerate(shown):
            low, high = one.interval or (one.ratio, one.ratio)
            colour = COLOUR[one.kind]
            axes.plot([low, high], [place, place], color=colour, linewidth=2.2)
            axes.plot(one.ratio, place, "o", color=colour, markersize=6)
        names = [f"{label(one.title, 30)}  {label(one.where, 50)}" for one in shown]
        axes.set_yticks(range(len(shown)), names, fontsize=8)
        axes.axvline(1, color=INK, linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("time in B over time in A, 99 % interval; left of the line is faster")
        kinds = dict.fromkeys(one.kind for one in shown)
        handles = patches({kind: COLOUR[kind] for kind in kinds})
        made.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    more = f"{len(changes) - len(shown):,} more are in the tables." if len(changes) > len(shown) else ""
    confirmed = sum(change.confirmed for change in changes)
    title = f"{confirmed:,} confirmed change{'s' * (confirmed != 1)} from A to B"
    return Picture(name="changes", title=title, caption=more, figure=made)
