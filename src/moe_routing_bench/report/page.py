"""A report as one HTML file: sections of figures and tables, with the style and script beside this file.

Every string that reaches the page passes `plain`, then jinja2's autoescape: nothing in a record can become
markup, script or style, or turn the direction of the text around it. The page asks no network, and its policy
(CSP) forbids it to. It holds at most MOST_CELLS ranked cells in full; figures and other tables are of all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report import timing_figures as draw
from moe_routing_bench.report import training_figures
from moe_routing_bench.report.drawing import Picture, inline
from moe_routing_bench.report.reading import Cell, Chapter, Material, Study
from moe_routing_bench.report.tables import (
    Table,
    failures,
    findings,
    machine_table,
    noise_table,
    ranking,
    regret_table,
    study_notes,
    study_table,
    verdict_of,
)
from moe_routing_bench.report.winners import MEANING, Hovers, winner_map
from moe_routing_bench.results.record import Record
from moe_routing_bench.train.pareto import sentences

HERE = Path(__file__).parent
MAX_CELLS = 1_000
MAX_LETTERS = 4_000


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A cell as the page shows it. details: the numbers of its rows in the page's JSON."""

    title: str
    summary: str
    table: Table
    details: tuple[int, ...]
    failed: tuple[tuple[str, str, str], ...]
    command: str
    words: str  # what the filter looks at


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    cells: tuple[Ranked, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """chapters: (title, its sections). data: what the script looks up, by kind and number."""

    title: str
    summary: tuple[str, ...]
    chapters: tuple[tuple[str, tuple[Section, ...]], ...]
    notes: tuple[str, ...]
    command: str
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def pictures(self) -> list[Picture]:
        return [one for _, sections in self.chapters for section in sections for one in section.pictures]

    def write(self, target: Path) -> Path:
        """As HTML. ValueError if there is no such place, NotImplementedError if jinja2 is absent."""
        if target.is_dir():
            raise ValueError(f"{target} is a folder; name a file such as {target / 'report.html'}")
        if not target.parent.is_dir():
            raise ValueError(f"there is no folder {target.parent} to write {target.name} into")
        write_whole(target, render(self))
        return target


def make_page(material: Material, command: str) -> Page:
    """All sections that have data."""
    hovers, details = Hovers(), list[list[str]]()
    chapters, room = [], MAX_CELLS
    for chapter in material.chapters:
        chapters.append((chapter.title, _sections(chapter, hovers, details, room)))
        room = max(0, room - len(chapter.cells))
    trained = [_trained(study) for study in material.studies]
    if trained:
        chapters.append(("Training", tuple(trained)))
    return Page(
        title="Mixture-of-Experts benchmark report",
        summary=_summary(material),
        chapters=tuple(chapters),
        notes=_notes(material),
        command=command,
        data={"rows": details, "hovers": {name: plain(text) for name, text in hovers.texts.items()}},
    )


def _sections(chapter: Chapter, hovers: Hovers, details: list[list[str]], room: int) -> tuple[Section, ...]:
    groups = chapter.groups
    said = findings(chapter)
    shown = chapter.cells[:room]
    left = len(chapter.cells) - len(shown)
    ranked_text = (
        "Fastest first. A ratio is to the baseline of the same cell, paired round by round. A row opens to "
        "show its samples and the command that measures it again."
    )
    if left:
        ranked_text += (
            f" {left:,} of {len(chapter.cells):,} cells are not listed here, though they are in all other "
            "figures and tables; mrb results export DIR --csv FILE writes every one."
        )
    sections = [
        Section(title="Machine and roofs", tables=(machine_table(chapter),)),
        _drawn("Winners", [winner_map(group, hovers) for group in groups], text=(MEANING, *said)),
        _drawn(
            "One choice everywhere",
            [],
            tables=[regret_table(group) for group in groups],
            text=(
                "What it costs to use one implementation for all sizes, against the best of each cell. It "
                "lacks a cell where it has no time, or drops pairs.",
            ),
        ),
        _drawn("Stages", [draw.stages(group) for group in groups]),
        _drawn("Bandwidth of pack and combine", [draw.bandwidth(group) for group in groups]),
        _drawn("Roofline", [draw.roofline(chapter)]),
        _drawn("Layouts", [draw.layouts(group) for group in groups]),
        _drawn("Routers", [draw.routers(group) for group in groups]),
        _drawn("Noise", [draw.noise(chapter)], tables=[noise_table(chapter)]),
        _drawn("What has no time, and why", [], tables=[failures(chapter.cells)]),
        Section(
            title="Ranked, cell by cell",
            text=(ranked_text,),
            cells=tuple(_ranked(cell, details) for cell in shown),
        ),
    ]
    return tuple(one for one in sections if one.pictures or one.tables or one.cells)


def _drawn(
    title: str,
    pictures: Sequence[Picture | None],
    tables: Sequence[Table | None] = (),
    text: tuple[str, ...] = (),
) -> Section:
    return Section(
        title=title,
        text=text,
        pictures=tuple(one for one in pictures if one is not None),
        tables=tuple(one for one in tables if one is not None),
    )


def _ranked(cell: Cell, details: list[list[str]]) -> Ranked:
    contest, table = cell.contest, ranking(cell)
    if contest is None:
        summary = cell.why
    elif contest.ties:
        summary = f"{contest.winner}; not shown to be slower: {', '.join(contest.ties)}"
    else:
        summary = contest.winner
    start = len(details)
    details += [_details(record) for record in cell.passed]
    failed = tuple(
        (cell.names[record.record_id], verdict_of(record), record.correctness.reason)
        for record in cell.records
        if record.timing is None
    )
    verdicts = " ".join(dict.fromkeys(verdict_of(record) for record in cell.records))
    return Ranked(
        title=cell.title,
        summary=summary,
        table=table,
        details=tuple(range(start, len(details))),
        failed=failed,
        command=cell.first.repro,
        words=f"{cell.title} {cell.model} {' '.join(cell.names.values())} {verdicts}".lower(),
    )


def _details(record: Record) -> list[str]:
    """What a row shows when it is opened, line by line; the last is its command."""
    timing, comparison = record.timing, record.comparison
    assert timing is not None
    quantiles = " ".join(
        f"{name} {1e3 * getattr(timing, name):.4g}"
        for name in ("least", "p05", "p25", "median", "p75", "p95")
    )
    lines = [
        f"{record.implementation.runs or record.implementation.label}; {record.implementation.layout}",
        f"ms: {quantiles}; {timing.samples.count} rounds, {record.protocol.stop_reason}",
        f"{record.created_at:%Y-%m-%d %H:%M} UTC, {record.record_id}; "
        f"{record.correctness.checked_timed_calls} timed results judged",
    ]
    if comparison is not None:
        lines.append(f"against {comparison.baseline}: {comparison.reason}")
    return [*map(plain, lines), plain(record.repro)]


def _trained(study: Study) -> Section:
    reached = study.pareto
    if reached is None:
        return Section(title=study.source.name, text=tuple(study_notes(study)))
    return Section(
        title=f"Study {reached.study}",
        text=(*study_notes(study), *sentences(reached)),
        pictures=tuple(training_figures.pictures(reached, study.trainings)),
        tables=(study_table(reached),),
    )


def _summary(material: Material) -> tuple[str, ...]:
    cells = [cell for chapter in material.chapters for cell in chapter.cells]
    lines = []
    if cells:
        days = sorted(f"{cell.first.created_at:%Y-%m-%d}" for cell in cells)
        statuses: dict[str, int] = {}
        for cell in cells:
            for record in cell.records:
                name = str(record.correctness.status)
                statuses[name] = statuses.get(name, 0) + 1
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(statuses.items()))
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        lines.append(f"{material.records}.")
        lines.append(f"{len(cells):,} cells, each in its newest run, measured {when}: {counts}.")
    if material.studies:
        runs = sum(len(study.trainings) for study in material.studies)
        lines.append(f"{len(material.studies)} folders of training runs, {runs:,} runs.")
    if len(material.chapters) > 1:
        lines.append(
            f"{len(material.chapters)} chapters, one for each machine and way of measuring. Nothing is "
            "compared across chapters."
        )
    return tuple(lines)


def _notes(material: Material) -> tuple[str, ...]:
    notes = []
    if material.older:
        notes.append(f"{material.older:,} older runs of the same cells are not shown.")
    if material.left_out.count:
        notes.append(f"{material.left_out.count:,} lines were left out as invalid:")
        notes += material.left_out.first
    notes += material.left_out.remarks
    notes.append(f"Read from: {', '.join(source.name for source in material.sources)}.")
    notes.append(
        "Every number comes from a record that passed its checks; a row of a ranking shows its command."
    )
    return tuple(notes)


def plain(value: Any) -> Any:
    """Text as a page may show it: letters that cannot be seen or that turn the direction of text become their
    number, and what is too long is cut. Markup made here and anything that is no text stays."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    more = len(value) - MAX_LETTERS
    text = value if more <= 0 else f"{value[:MAX_LETTERS]} ... and {more:,} more letters"
    return "".join(one if one.isprintable() or one == "\n" else f"\\u{ord(one):04x}" for one in text)


def render(page: Page, template: str = "page.html") -> str:
    """The page as HTML. NotImplementedError with the line to install what is missing."""
    templates = _environment()
    from markupsafe import Markup  # jinja2 brings it

    script = (HERE / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.get_template(template).render(
        page=page,
        style=Markup((HERE / "page.css").read_text()),
        script=Markup(script),
        digest=digest,
        svg=lambda picture: Markup(inline(picture)),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        slug=_slugs(),
    )


def _slugs() -> Any:
    """Ids for headings, the same for the same words."""
    known: dict[tuple[str, ...], str] = {}
    return lambda *words: known.setdefault(words, f"s{len(known)}")


@cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise NotImplementedError(
            "a page needs jinja2; pip install 'moe-routing-bench[report]' brings it"
        ) from None
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        finalize=plain,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
