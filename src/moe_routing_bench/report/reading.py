"""Reads results folders for a report: chapters of cells that can be compared, and training studies.

A chapter is one machine with one torch, one Python, one device, one number of threads, one cache policy and
one timer. Nothing is ranked, averaged or drawn across chapters. All records of the newest run of every cell
are kept in memory, about 20 kB each; reading 10^5 takes half a minute.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.names import by_numbers, short_label
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.report.finding import ResultsFolder
from moe_routing_bench.results.folder import CellRun, Run, environments, read_run
from moe_routing_bench.results.read import OWN_ROLES, LeftOut, RecordCount, is_plain_file
from moe_routing_bench.results.record import DEFAULT_ROUTER, Record
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.results.winners import Contest, Contested, contested, contests
from moe_routing_bench.train.pareto import Pareto, pareto
from moe_routing_bench.train.study import STUDY, TUNING, curves
from moe_routing_bench.workloads.axes import names_of
from moe_routing_bench.workloads.experiment import Experiment

Shared: TypeAlias = tuple[str | None, str | None, str | None]
Sizes: TypeAlias = tuple[int, int, int, int]
Lines = dict[str, list[tuple[Training, list[dict[str, Any]]]]]
SIZES = {(model.D, model.F, model.E, model.K): model.name for model in reversed(MODELS.values())}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Records that were timed together. names: short names of the implementations by record_id; they are the
    same in every cell of a group. contest is None if nothing could be compared; why has the reason.
    """

    source: ResultsFolder
    run: Run = field(repr=False)
    cell: CellRun = field(repr=False)
    names: dict[str, str] = field(repr=False)
    contest: Contest | None
    why: str = ""

    @cached_property
    def records(self) -> list[Record]:
        """The implementations: passed ones first, sorted by their ratio to the baseline."""
        mine = [record for record in self.cell.records if record.record_id in self.names]
        return sorted(mine, key=lambda one: (one.timing is None, ratio_of(one), self.names[one.record_id]))

    @property
    def passed(self) -> list[Record]:
        return [record for record in self.records if record.timing is not None]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def routing(self) -> str:
        return self.cell.workload[0] if self.cell.workload else "routing unknown"

    @property
    def anchor(self) -> str:
        """The id in a page: the id of its first record, which has only letters, digits and dashes."""
        return f"c{self.first.record_id}"

    @property
    def T(self) -> int:
        return self.first.experiment.T

    @property
    def sizes(self) -> Sizes:
        one = self.first.experiment
        return one.D, one.F, one.E, one.K

    @property
    def skew(self) -> float:
        """The load of the busiest expert divided by the mean; 0 if it is not known."""
        routing = self.first.routing
        return routing.max_over_mean if routing is not None else 0.0

    @property
    def model(self) -> str:
        """The model's name, such as qwen3-30b-a3b, if the case or its sizes tell it; else empty."""
        return self.first.model or SIZES.get(self.sizes, "")

    @property
    def winner_ms(self) -> str:
        """The median time of the fastest in milliseconds."""
        assert self.contest is not None
        times = (one.timing for one in self.passed if self.names[one.record_id] == self.contest.winner)
        return next(milliseconds(timing.median) for timing in times if timing is not None)

    @property
    def title(self) -> str:
        """layer train olmoe-1b-7b/prefill-256 bfloat16 zipf(1.2)"""
        one = self.first.experiment
        direction = "" if one.direction == "forward" else f" {one.direction}"
        dtype = "" if one.case.endswith(one.dtype) else f" {one.dtype}"
        return f"{one.span}{direction} {one.case}{dtype} {self.routing}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells of a chapter in which implementations have the same names: Group(span="layer",
    direction="forward", dtype="bfloat16", store="", shared=("compact", "softmax_topk", ""), cells=...).
    store: the format of the weights. shared: layout, router and kind of layer; None for those that differ
    within a cell."""

    span: str
    direction: str
    dtype: str
    store: str
    shared: Shared
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """layer, train, bfloat16, block(64); layer, bfloat16, layouts compared"""
        words = [self.span, "" if self.direction == "forward" else self.direction, self.dtype, self.store]
        usual = ("compact", DEFAULT_ROUTER, "")
        names = ("layouts", "routers", "kinds of layer")
        for value, name, known in zip(self.shared, names, usual, strict=True):
            words.append(
                f"{name} compared" if value is None else short_layout(value) if value != known else ""
            )
        return ", ".join(filter(None, words))

    @property
    def decides(self) -> bool:
        """Can it have a winner? Another router or kind of layer is another function, so a faster one does not
        win."""
        return self.shared[1] is not None and self.shared[2] is not None

    @cached_property
    def implementations(self) -> list[str]:
        """The implementations, sorted by the number of wins."""
        won: dict[str, int] = {}
        for cell in self.cells:
            for name in cell.names.values():
                won.setdefault(name, 0)
            if cell.contest is not None:
                won[cell.contest.winner] += 1
        return sorted(won, key=lambda name: (-won[name], name))


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A chapter. setting: values that all of its records share. machine: the document of its environment."""

    setting: dict[str, str]
    machine: dict[str, Any]
    groups: tuple[Group, ...]
    commits: tuple[str, ...]

    @cached_property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group.cells]

    @property
    def title(self) -> str:
        s = self.setting
        threads = "1 thread" if s["threads"] == "1" else f"{s['threads']} threads"
        return f"{s['machine']}, {threads}, {s['cache']} caches, torch {s['torch']}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A folder of training runs: quality and cost, or the reason why they are not known yet. lines: the lines
    of every run by router, if the folder has them."""

    source: ResultsFolder
    trainings: tuple[Training, ...]
    pareto: Pareto | None
    why: str = ""
    lines: Lines = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Material:
    """Everything that a report shows. older: the number of cells that a newer run replaces."""

    sources: tuple[ResultsFolder, ...]
    chapters: tuple[Chapter, ...]
    studies: tuple[Study, ...]
    records: RecordCount
    older: int
    left_out: LeftOut


def ratio_of(record: Record) -> float:
    """Returns the ratio to the baseline of the cell; it is 1 for the baseline."""
    return record.comparison.ratio if record.comparison is not None else 1.0


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g}" if seconds < 10 else f"{1e3 * seconds:,.0f}"


def read(sources: Sequence[ResultsFolder]) -> Material:
    """Reads everything in these folders."""
    looking = gc.isenabled()
    gc.disable()  # nothing is freed here, and collecting garbage would take a quarter of the time
    try:
        return _read(sources)
    finally:
        if looking:
            gc.enable()


def _read(sources: Sequence[ResultsFolder]) -> Material:
    left_out = LeftOut()
    by_setting: dict[tuple[tuple[str, str], ...], dict[object, tuple[ResultsFolder, Run, CellRun]]] = {}
    machines: dict[str, dict[str, Any]] = {}
    commits: dict[tuple[tuple[str, str], ...], set[str]] = {}
    records, older = RecordCount.of({}), 0
    for source in sources:
        if not source.timed:
            continue
        run = read_run(source.folder, left_out)
        documents = {key: (document, machine) for key, document, machine in environments(source.folder)}
        for cell in run.cells:
            if not (mine := _implementations(cell)):
                continue
            records += RecordCount.of(Counter(record.implementation.role for record in cell.records))
            setting = tuple(_setting(run, mine[0]).items())
            document, machine = documents.get(mine[0].environment, ({}, {}))
            machines.setdefault(dict(setting)["machine"], machine)
            commits.setdefault(setting, set()).update(_commit(document))
            key, cells = _question(cell, mine), by_setting.setdefault(setting, {})
            older += key in cells
            if key not in cells or _age(cells[key][2]) < _age(cell):
                cells[key] = (source, run, cell)
    chapters = [
        Chapter(
            setting=dict(setting),
            machine=machines[dict(setting)["machine"]],
            groups=_groups(cells.values()),
            commits=tuple(sorted(commits[setting])),
        )
        for setting, cells in by_setting.items()
    ]
    chapters.sort(key=lambda chapter: (-len(chapter.cells), chapter.title))
    studies = [_study(source, left_out) for source in sources if source.trained]
    if not chapters and not studies:
        raise ValueError(f"no line of {', '.join(source.name for source in sources)} is a valid record")
    return Material(
        sources=tuple(sources),
        chapters=tuple(chapters),
        studies=tuple(studies),
        records=records,
        older=older,
        left_out=left_out,
    )


def _implementations(cell: CellRun) -> list[Record]:
    return [record for record in cell.records if record.implementation.role in OWN_ROLES]


def _setting(run: Run, record: Record) -> dict[str, str]:
    environment, experiment = run.environment(record), record.experiment
    return {
        "machine": environment.machine,
        "torch": environment.torch,
        "python": environment.python,
        "settings": environment.settings,
        **{name: str(getattr(experiment, name)) for name in names_of(Experiment, "how", "agree")},
    }


def _question(cell: CellRun, mine: Sequence[Record]) -> tuple[object, ...]:
    """Returns the question of a cell. If two cells have the same question, the newer counts. Other
    implementations make another question, because they were not timed together."""
    first = mine[0]
    return (
        *(getattr(first.experiment, name) for name in names_of(Experiment, None, "row", "agree")),
        cell.workload,
        frozenset((one.implementation.spec, one.implementation.setting) for one in mine),
    )


def _age(cell: CellRun) -> tuple[object, str]:
    return max(record.created_at for record in cell.records), cell.session


def _commit(document: dict[str, Any]) -> list[str]:
    """Returns the commit of the measured source: 3f80af225a, or 3f80af225a (changed)."""
    source = document.get("source")
    if not isinstance(source, dict) or not isinstance(commit := source.get("commit"), str):
        return []
    return [commit[:10] + (" (changed)" if source.get("dirty") else "")]


def _groups(given: Iterable[tuple[ResultsFolder, Run, CellRun]]) -> tuple[Group, ...]:
    by_group: dict[tuple[str, str, str, str, Shared], list[tuple[ResultsFolder, Run, CellRun]]] = {}
    for one in given:
        mine = _implementations(one[2])
        first = mine[0].experiment
        key = (first.span, first.direction, first.dtype, first.store, _shared(mine))
        by_group.setdefault(key, []).append(one)
    named = [(key, _names([cell for *_, cell in cells], key[-1]), cells) for key, cells in by_group.items()]
    fields: list[Contested] = []
    places: list[int | str] = []  # for each cell: its place in fields, or the reason why it has none
    for _, names, cells in named:
        for _, run, cell in cells:
            try:
                passed = [r for r in _implementations(cell) if r.correctness.status is Status.PASSED]
                if not passed:
                    raise ValueError("nothing passed")
                # an implementation that drops pairs does less work, so it does not compete with the others
                whole = [r for r in passed if not (r.routing and r.routing.dropped_pairs)]
                by_name = {names[r.record_id]: r for r in reversed(whole or passed)}
                fields.append(contested(run, cell, by_name))
                places.append(len(fields) - 1)
            except ValueError as error:
                places.append(str(error))
    decided, at = contests(fields), iter(places)
    groups = []
    for (span, direction, dtype, store, shared), names, cells in named:
        made = []
        for source, run, cell in cells:
            place = next(at)
            own = {record.record_id: names[record.record_id] for record in _implementations(cell)}
            made.append(
                Cell(
                    source=source,
                    run=run,
                    cell=cell,
                    names=own,
                    contest=None if isinstance(place, str) else decided[place],
                    why=place if isinstance(place, str) else "",
                )
            )
        made.sort(key=lambda one: by_numbers(one.title))
        made.sort(key=lambda one: (one.model or "~", one.sizes, one.first.experiment.T))
        about = {"span": span, "direction": direction, "dtype": dtype, "store": store}
        groups.append(Group(**about, shared=shared, cells=tuple(made)))
    return tuple(sorted(groups, key=lambda one: (-len(one.cells), one.title)))


def _shared(records: Sequence[Record]) -> Shared:
    settings = [record.implementation.setting for record in records]
    layout, router, layer = (one[0] if len(set(one)) == 1 else None for one in zip(*settings, strict=True))
    return layout, router, layer


def _names(cells: Sequence[CellRun], shared: Shared) -> dict[str, str]:
    """Returns the label by record_id, with the layout, router and layer if they differ."""
    names = {}
    for record in (record for cell in cells for record in _implementations(cell)):
        layout, router, layer = record.implementation.setting
        name = short_label(record.implementation.label)
        name += f" @ {short_layout(layout)}" if shared[0] is None else ""
        more = [router] * (shared[1] is None) + [layer or "plain"] * (shared[2] is None)
        names[record.record_id] = ", ".join([name, *more])
    return names


def short_layout(name: str) -> str:
    """Shortens padded(capacity_factor=1.25,drop=position) to padded(1.25)."""
    return name.replace("capacity_factor=", "").replace(",drop=position", "")


def _study(source: ResultsFolder, left_out: LeftOut) -> Study:
    try:
        trainings = [one for one in read_trainings(source.folder, left_out) if not one.study.endswith(TUNING)]
    except ValueError:
        trainings = []
    reached, why, lines = None, "it is not a study, only single runs", Lines()
    if is_plain_file(source.folder / STUDY):
        try:
            reached = pareto(source.folder)
            lines = study_lines(source.folder, trainings)
        except ValueError as error:
            why = str(error)
        except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError):
            why = "its files do not match; mrb train makes them again"
    return Study(
        source=source, trainings=tuple(trainings), pareto=reached, why="" if reached else why, lines=lines
    )


def study_lines(folder: Path, trainings: Sequence[Training]) -> Lines:
    """Reads the lines of every run by router, if a folder has them: the load of each layer over the steps."""
    lines: Lines = {}
    for training, events in curves(folder, trainings):
        if events:
            lines.setdefault(training.rule, []).append((training, events))
    return lines
