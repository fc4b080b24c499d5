"""A report as one HTML file: the answer first, then figures and tables, and the evidence folded at the end.

Every string on the page passes `plain` and then jinja2's autoescape, so nothing in a record can become
markup, script or style, or change the direction of text. The page needs no network, and its policy (CSP)
forbids it. The page lists at most MAX_CELLS cases in full; figures and other tables show all cases.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report import timing_figures as draw
from moe_routing_bench.report import training_figures
from moe_routing_bench.report.drawing import Picture, Table, inline
from moe_routing_bench.report.reading import Cell, Chapter, Group, Material, Study
from moe_routing_bench.report.tables import (
    failures,
    machine_table,
    noise_table,
    ranking,
    regret_table,
    study_answer,
    study_notes,
    study_table,
    verdict_of,
)
from moe_routing_bench.report.tuning_figures import gains, knob_map, top_ten, tuned
from moe_routing_bench.report.winners import MEANING, Hovers, answer, decided, leads, winner_map
from moe_routing_bench.results.read import command_of
from moe_routing_bench.results.record import Record
from moe_routing_bench.train.pareto import sentences

HERE = Path(__file__).parent
MAX_CELLS = 1_000
MAX_LETTERS = 4_000
MAX_ANSWERS = 3  # then the chart begins on the first screen
FASTEST = "Which implementation is fastest, and how sure is that?"
LEARNS = "Which router learns best, and what does it cost?"


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A cell in the form of the page. details: the numbers of its rows in the JSON of the page."""

    anchor: str
    title: str
    summary: str
    table: Table
    details: tuple[int, ...]
    failed: tuple[tuple[str, str, str], ...]
    command: str
    words: str  # the filter searches them


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    cells: tuple[Ranked, ...] = ()


Chapters: TypeAlias = tuple[tuple[str, tuple[Section, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page. title: the question. answer, chart: the first screen. chapters: (title, sections); the evidence
    is folded. data: values for the script, by kind and number."""

    title: str
    answer: tuple[str, ...]
    chapters: Chapters
    notes: tuple[str, ...]
    command: str
    chart: Picture | None = None
    evidence: Chapters = ()
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def pictures(self) -> list[Picture]:
        drawn = [
            one
            for _, sections in (*self.chapters, *self.evidence)
            for section in sections
            for one in section.pictures
        ]
        return drawn if self.chart is None else [self.chart, *drawn]

    def write(self, target: Path) -> Path:
        """Writes HTML. It raises a ValueError if the place does not exist, NotImplementedError without
        jinja2."""
        if target.is_dir():
            raise ValueError(f"{target} is a folder; name a file such as {target / 'report.html'}")
        if not target.parent.is_dir():
            raise ValueError(f"there is no folder {target.parent} to write {target.name} into")
        write_whole(target, render(self))
        return target


def make_page(material: Material, command: str) -> Page:
    """Makes a page with all sections that have data."""
    hovers, details = Hovers(), list[list[str]]()
    chapters, evidence, room = [], [], MAX_CELLS
    for number, chapter in enumerate(material.chapters, start=1):
        title = f"Chapter {number}: {chapter.title}" if len(material.chapters) > 1 else chapter.title
        chapters.append((title, _sections(chapter, hovers, details, room)))
        evidence.append((title, _evidence(chapter)))
        room = max(0, room - len(chapter.cells))
    trained = [_trained(study) for study in material.studies]
    groups = _answered(material)
    chart = leads(groups[0][1], hovers) if groups else None
    if chart is None and trained:
        chart = next((one for section in trained for one in section.pictures), None)
        left = [tuple(one for one in section.pictures if one is not chart) for section in trained]
        trained = [replace(one, pictures=some) for one, some in zip(trained, left, strict=True)]
    if trained:
        chapters.append(("Training", tuple(trained)))
    return Page(
        title=FASTEST if material.chapters else LEARNS,
        answer=_answer(material, groups),
        chart=chart,
        chapters=tuple(chapters),
        evidence=tuple(evidence),
        notes=_notes(material),
        command=command,
        data={"rows": details, "hovers": {name: plain(text) for name, text in hovers.texts.items()}},
    )


def _answered(material: Material) -> list[tuple[int, Group]]:
    """Returns the groups with winners and the numbers of their chapters. Whole layers and experts come before
    their parts, then groups with more clear winners, then those with more cases."""
    found = [
        (number, group)
        for number, chapter in enumerate(material.chapters, start=1)
        for group in chapter.groups
        if decided(group)
    ]

    def place(one: tuple[int, Group]) -> tuple[bool, int, int]:
        _, group = one
        cells = decided(group)
        return group.span not in draw.WHOLE, -sum(not contest.ties for _, contest in cells), -len(cells)

    return sorted(found, key=place)


def _answer(material: Material, groups: Sequence[tuple[int, Group]]) -> tuple[str, ...]:
    """Returns a sentence for each group and each study."""
    several = len(material.chapters) > 1
    lines = [
        f"{group.title}{f' (chapter {number})' if several else ''}: {answer(group)}."
        for number, group in groups[:MAX_ANSWERS]
    ]
    if len(groups) > MAX_ANSWERS:
        lines.append(f"{len(groups) - MAX_ANSWERS:,} more comparisons are below.")
    if material.chapters and not groups:
        lines.append("There is no winner: nothing here compares implementations of the same function.")
    studies = [study.pareto for study in material.studies if study.pareto is not None]
    studies.sort(key=lambda reached: -len(reached.standings))
    lines += [study_answer(reached) for reached in studies[:MAX_ANSWERS]]
    if len(studies) > MAX_ANSWERS:
        lines.append(f"{len(studies) - MAX_ANSWERS:,} more studies are below.")
    return tuple(lines)


def _sections(chapter: Chapter, hovers: Hovers, details: list[list[str]], room: int) -> tuple[Section, ...]:
    groups = chapter.groups
    shown = chapter.cells[:room]
    left = len(chapter.cells) - len(shown)
    ranked_text = (
        "The fastest comes first. Each ratio compares with the baseline of the same case, paired by round. "
        "Click a row to see its record, its samples and the command that measures it again."
    )
    if left:
        ranked_text += (
            f" {left:,} of {len(chapter.cells):,} cells are not listed here, but they are in all other "
            "figures and tables; mrb results export DIR --csv FILE writes all of them."
        )
    choice = "The cost of using one implementation everywhere, compared with the best of each case. An "
    choice += "implementation lacks a case if it has no time there or drops pairs."
    sections = [
        _drawn(
            "Winners over tokens, sizes and skew",
            [winner_map(group, hovers) for group in groups],
            text=(MEANING,),
        ),
        _drawn("One choice everywhere", [], [regret_table(group) for group in groups], (choice,)),
        _drawn(
            "Tuned settings",
            [picture for group in groups for picture in (gains(group), *map(knob_map, tuned(group)))],
            [top_ten(cells) for group in groups for cells in tuned(group)],
        ),
        _drawn("Time and memory", [draw.memory(group) for group in groups]),
        _drawn("Layouts", [draw.layouts(group) for group in groups]),
        _drawn("Stages", [draw.stages(group) for group in groups]),
        _drawn("Bandwidth of pack and combine", [draw.bandwidth(group) for group in groups]),
        _drawn("Roofline", [draw.roofline(chapter)]),
        _drawn("Routers", [draw.routers(group) for group in groups]),
        Section(
            title="Every case",
            text=(ranked_text,),
            cells=tuple(_ranked(cell, details) for cell in shown),
        ),
    ]
    return tuple(one for one in sections if one.pictures or one.tables or one.cells)


def _evidence(chapter: Chapter) -> tuple[Section, ...]:
    sections = (
        Section(title="Machine, versions and commits", tables=(machine_table(chapter),)),
        _drawn("Rounds and noise", [draw.noise(chapter)], [noise_table(chapter)]),
        _drawn("Checks that failed, and what was not timed", [], [failures(chapter.cells)]),
    )
    return tuple(one for one in sections if one.pictures or one.tables)


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
    elif contest.second is not None:
        summary = f"{contest.winner}, {contest.lead.ratio:.2f}x faster than {contest.second}"
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
        anchor=cell.anchor,
        title=cell.title,
        summary=summary,
        table=table,
        details=tuple(range(start, len(details))),
        failed=failed,
        command=command_of(cell.first),
        words=f"{cell.title} {cell.model} {' '.join(cell.names.values())} {verdicts}".lower(),
    )


def _details(record: Record) -> list[str]:
    """Returns the lines of an opened row; the last one is its command."""
    timing, comparison = record.timing, record.comparison
    assert timing is not None
    quantiles = " ".join(
        f"{name} {1e3 * getattr(timing, name):.4g}"
        for name in ("least", "p05", "p25", "median", "p75", "p95")
    )
    lines = [
        f"{record.implementation.runs or record.implementation.label}; {record.implementation.layout}",
        f"ms: {quantiles}; {timing.samples.count} rounds, {record.protocol.stop_reason}",
        f"record {record.record_id}, {record.created_at:%Y-%m-%d %H:%M} UTC; "
        f"{record.correctness.checked_timed_calls} timed results checked",
    ]
    if comparison is not None:
        lines.append(f"against {comparison.baseline}: {comparison.reason}")
    return [*map(plain, lines), plain(command_of(record))]


def _trained(study: Study) -> Section:
    reached, notes = study.pareto, study_notes(study)
    if reached is None:
        return Section(title=study.source.name, text=tuple(notes))
    try:
        drawn = training_figures.pictures(reached, study.trainings, study.lines)
    except (KeyError, TypeError, ValueError, IndexError):
        drawn = training_figures.pictures(reached, study.trainings, {})
        notes.append("The files of its runs do not match, so the load of experts is not drawn.")
    return Section(
        title=f"Study {reached.study}",
        text=(*notes, *sentences(reached)),
        pictures=tuple(drawn),
        tables=(study_table(reached),),
    )


def _notes(material: Material) -> tuple[str, ...]:
    cells = [cell for chapter in material.chapters for cell in chapter.cells]
    notes = []
    if cells:
        days = sorted(f"{cell.first.created_at:%Y-%m-%d}" for cell in cells)
        statuses = Counter(str(record.correctness.status) for cell in cells for record in cell.records)
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(statuses.items()))
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        notes.append(f"{material.records}.")
        notes.append(f"{len(cells):,} cases, each in its newest run, measured {when}: {counts}.")
    if material.studies:
        runs = sum(len(study.trainings) for study in material.studies)
        notes.append(f"{len(material.studies)} folders of training runs, {runs:,} runs.")
    if len(material.chapters) > 1:
        notes.append(
            f"{len(material.chapters)} chapters, one for each machine and way of measuring. Nothing is "
            "compared across chapters."
        )
    if material.older:
        notes.append(f"{material.older:,} older runs of the same cases are not shown.")
    if material.left_out.count:
        notes.append(f"{material.left_out.count:,} lines were left out as invalid:")
        notes += material.left_out.first
    notes += material.left_out.remarks
    notes.append(f"Read from: {', '.join(source.name for source in material.sources)}.")
    notes.append("Every number comes from a record that passed its checks.")
    return tuple(notes)


def plain(value: Any) -> Any:
    """Makes text safe for a page: letters that are invisible or change the direction of text become their
    number, and long text is cut. Our own markup and values that are not text stay unchanged."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    more = len(value) - MAX_LETTERS
    text = value if more <= 0 else f"{value[:MAX_LETTERS]} ... and {more:,} more letters"
    return "".join(one if one.isprintable() or one == "\n" else f"\\u{ord(one):04x}" for one in text)


def render(page: Page, template: str = "page.html") -> str:
    """Returns the page as HTML. A NotImplementedError says what to install."""
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
    """Makes ids for headings; the same words get the same id."""
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
