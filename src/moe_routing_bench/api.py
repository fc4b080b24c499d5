"""What the command line does, as functions: bench, sweep, tune, check, open, train. Commands call them.

A call leaves the process as it found it: torch's threads, limits and signal handlers. What measures runs in
worker processes, so a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import inspect
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from rich.text import Text

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.choosing import (
    LIST,
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    bench_experiments,
    check_device,
    group_of,
    parameters_of,
    sweep_experiments,
)
from moe_routing_bench.bench.cores import core_count
from moe_routing_bench.bench.floor import raise_stored
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs, roofs_now
from moe_routing_bench.bench.verdict import DELTA
from moe_routing_bench.conformance.outside import ROUTERS, found_outside
from moe_routing_bench.conformance.run import (
    Row,
    TokenMap,
    never_ran,
    parse_tokens,
    run_row,
    select,
    token_map,
)
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.fork_server import without_main_module
from moe_routing_bench.core.machine import this_machine, torch_threads
from moe_routing_bench.core.names import ArgumentError, did_you_mean, one_of
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.claims import FleetPlan, plan_fleet, run_fleet
from moe_routing_bench.fleet.engines import engine_named
from moe_routing_bench.fleet.executor import Executor, LocalExecutor
from moe_routing_bench.fleet.shards import Shard
from moe_routing_bench.fleet.store import RemoteStore
from moe_routing_bench.fleet.sweep import SweepPlan, plan_sweep, run_sweep
from moe_routing_bench.ops.auto import VARIABLE
from moe_routing_bench.ops.registry import included_folders
from moe_routing_bench.report.check_tables import check_progress, show_legend_of_maps, show_map, show_rows
from moe_routing_bench.report.console import (
    Bar,
    bar,
    is_wanted,
    say,
    say_roofs_are_measured,
    show,
    shown_progress,
)
from moe_routing_bench.report.finding import at_hand, results_folders
from moe_routing_bench.report.outcome_tables import show_outcome, show_summary
from moe_routing_bench.report.overview import Displayed, Table, read_overview
from moe_routing_bench.report.reading import read
from moe_routing_bench.report.result_tables import (
    show_comparison,
    show_history,
    show_runs,
    show_step,
    show_study,
)
from moe_routing_bench.results.compare import RunComparison, compare_runs
from moe_routing_bench.results.decisions import Decided, decide, write_decisions
from moe_routing_bench.results.folder import Selection, copy_selected, iterate, temporary_folder
from moe_routing_bench.results.history import History, history
from moe_routing_bench.results.objects import url_of
from moe_routing_bench.results.parquet import COLUMNS, quoted
from moe_routing_bench.results.query import JOINED, export_csv, export_parquet, run_query
from moe_routing_bench.results.read import LeftOut, measurable
from moe_routing_bench.results.record import TUNING, Record, RecordPart
from moe_routing_bench.results.remeasure import experiment_of
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.results.winners import BEST, Contest
from moe_routing_bench.routers.router import without_included
from moe_routing_bench.train.loop import Event, Stepped
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.pareto import Pareto, pareto
from moe_routing_bench.train.records import execute, load_model, run_folder
from moe_routing_bench.train.settings import Rule, Run, Size
from moe_routing_bench.train.study import StudyRun
from moe_routing_bench.train.study_rules import RATES, rule_named, studies
from moe_routing_bench.train.text import read_texts, synthetic
from moe_routing_bench.tuning.search import SEARCHES
from moe_routing_bench.tuning.tune import Tuned, Tuner, known_races, space_of, tuning_experiments
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

__all__ = ["Experiment", "ImplementationRef"]  # public names from elsewhere (__init__.py)

PathLike: TypeAlias = str | os.PathLike[str]
OnOutcome: TypeAlias = Callable[[CellOutcome], None]
Function = TypeVar("Function", bound=Callable[..., Any])
Options: TypeAlias = tuple[SizeOptions, WhatOptions, MeasureOptions]
GROUPS = (SizeOptions, WhatOptions, MeasureOptions)
OTHER_NAMES = {"top_k": "topk"}  # in Python -> on the command line
DECIDING = 3.0  # seconds to make decisions of a tuning and write them
NO_AXES = ("impl", "include_path")  # an argument of its own; mrb.include


class Comparison(Displayed, RunComparison):
    """What became faster or slower from one run to another."""

    def _show(self) -> None:
        show_comparison(self)


class Past(Displayed, History):
    """A metric over commits, with the commits at which it steps."""

    def _show(self) -> None:
        show_history(self)


class Results(Displayed):
    """Records of a results folder: what `bench`, `sweep` and `open` return.

    place is where they are kept, `folder` a results folder with these records alone. `experiments` are
    what they measured.

    >>> results = mrb.open("measurements/records/pack.tar.xz")
    >>> len(results) == len(list(results)) == len(results.query("SELECT impl FROM records"))
    True
    """

    def __init__(
        self, source: Path, *, place: PathLike | None = None, selection: Selection | None = None,
        experiments: Sequence[Experiment] = (), outcomes: Sequence[CellOutcome] = (),
        roofs: Roofs | None = None, keeps: object = None,
    ):  # fmt: skip
        """keeps: what must live as long as these results; an ExitStack is closed after them."""
        self.place = str(source if place is None else place)
        self._experiments, self.outcomes = tuple(experiments), tuple(outcomes)
        self._source, self._selection, self._roofs, self._keeps = source, selection, roofs, keeps
        if isinstance(keeps, ExitStack):
            weakref.finalize(self, keeps.close)

    @cached_property
    def folder(self) -> Path:
        if self._selection is None:
            return self._source
        stack = ExitStack()
        weakref.finalize(self, stack.close)
        folder = temporary_folder(stack)
        copy_selected(self._source, folder, self._selection)
        return folder

    @cached_property
    def experiments(self) -> tuple[Experiment, ...]:
        """Returns what was measured, to measure it again: mrb.bench(results.experiments, out="after")."""
        if self._experiments:
            return self._experiments
        cells: dict[tuple[str, str], list[Record]] = {}
        for record in self:
            cells.setdefault((record.session, record.cell_key), []).append(record)
        return tuple(dict.fromkeys(map(experiment_of, cells.values())))

    def __len__(self) -> int:
        return self.query("SELECT count(*) FROM records").rows[0][0]

    def __iter__(self) -> Iterator[Record]:
        return iterate(self.folder)

    def __repr__(self) -> str:
        return f"<Results in {self.place}>"

    def query(self, sql: str) -> Table:
        """The answer to one SELECT over `records`, `latest`, `trainings` or `left_out`; it can only read."""
        return Table(*run_query(self.folder, sql))

    @cached_property
    def left_out(self) -> LeftOut:
        """Lines of the folder that are no valid records."""
        found = LeftOut()
        run_query(self.folder, "SELECT 1", found)
        return found

    def to_pandas(self) -> Any:
        """All records as a pandas.DataFrame, a row each."""
        return self.query("SELECT * FROM records").to_pandas()

    def winners(self) -> Table:
        """The fastest implementation of each case, its lead over the next, and whether that is certain."""
        return self.query(BEST.format(condition="true"))

    def where(self, **columns: Any) -> Results:
        """The records with these values: where(impl="native", T=[1, 16]). A list means any of them. A copy of
        the baseline that was timed beside code from outside stays with what was compared with it."""
        known = [*(column.name for column in COLUMNS), *(name for name, _ in JOINED)]
        conditions = ["true"]
        for name, value in columns.items():
            column = f'"{one_of("column", name, known)}"'
            equal = [f"{column} IS NOT DISTINCT FROM {_in_sql(one)}" for one in _each(value)]
            conditions.append(f"({' OR '.join(equal)})")
        chosen = self.query(
            f"""WITH chosen AS (SELECT * FROM records WHERE {" AND ".join(conditions)})
            SELECT session, record_id FROM chosen UNION SELECT session, record_id FROM records
            WHERE role NOT IN ('baseline', 'twin', 'candidate')
            AND (session, cell_key) IN (SELECT (session, cell_key) FROM chosen)"""
        )
        selection: dict[str, set[str]] = {}
        for session, record_id in chosen.rows:
            selection.setdefault(session, set()).add(record_id)
        return Results(self.folder, place=self.place, selection=selection, keeps=self)

    def compare(
        self, other: Results | PathLike, *, allow: Collection[str] = (), delta: float = DELTA
    ) -> Comparison:
        """From these results to the other ones: what became faster, slower, or stopped working. ValueError if
        they were measured unlike, unless `allow` names how. delta: the least difference that counts."""
        later = other if isinstance(other, Results) else open(other)
        return Comparison(**vars(compare_runs(self.folder, later.folder, allow=allow, delta=delta)))

    def history(self, metric: Literal["ratio", "ms"] = "ratio") -> Past:
        """A metric over commits, and the commits at which it steps."""
        return Past(**vars(history(self.folder, metric)))

    def report(self, path: PathLike = "report.html") -> Path:
        """Write one page with figures and tables, which needs no network."""
        from moe_routing_bench.report.page import make_page  # it draws, which others do not wait for

        with results_folders([self.folder]) as found:
            material = read([replace(one, name=self.place) for one in found])
            return make_page(material, f"mrb results report {self.place}").write(Path(path))

    def export(self, path: PathLike) -> int:
        """Write all records into one .parquet or .csv file, a row each; how many."""
        exports = {".parquet": export_parquet, ".csv": export_csv}
        target = Path(path)
        if target.suffix not in exports:
            raise ValueError(f"{target} should end in {' or '.join(exports)}")
        return exports[target.suffix](self.folder, target)

    def _show(self) -> None:
        if not self.outcomes:
            read_overview(self.folder, {}, LeftOut()).show()
        for outcome in self.outcomes:
            show_outcome(outcome, roofs=self._roofs)
        if len(self.outcomes) > 1:
            show_summary(self.outcomes)


def _in_sql(value: Any) -> str:
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, bool | int | float) else quoted(str(_plain(value)))


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set | range) else [value]


def _axes() -> dict[str, tuple[type, inspect.Parameter]]:
    """The axes by name: the group of options that has it, and the axis as a parameter of a function."""
    shown = {there: here for here, there in OTHER_NAMES.items()}
    return {
        shown.get(one.name, one.name): (group, one)
        for group in GROUPS
        for one in parameters_of(group)
        if one.name not in NO_AXES
    }


def with_axes(function: Function) -> Function:
    """The function with every axis in its signature, for help and completion."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    axes = [one.replace(name=name, annotation=one.empty) for name, (_, one) in _axes().items()]
    function.__signature__ = signature.replace(parameters=[*own, *axes])  # type: ignore[attr-defined]
    return function


def options_of(implementations: Sequence[str] | str | None, axes: dict[str, Any]) -> list[Options]:
    """The options of `mrb bench` for axes by their Python names. A list means each: where an option takes a
    list itself it gets it, and else there are options for every combination."""
    known = _axes()
    for name in axes:
        if name not in known:
            raise TypeError(
                f"there is no axis {name!r}; {did_you_mean(name, known)}there are {', '.join(known)}"
            )
    single: dict[str, list[Any]] = {}
    given: dict[str, Any] = {"include_path": list(included_folders())}
    if implementations is not None:
        given["impl"] = _each(implementations)
    for name, value in axes.items():
        option, values = OTHER_NAMES.get(name, name), [_plain(one) for one in _each(value)]
        hint = known[name][1].annotation
        if _takes_list(hint):
            text = ",".join(map(str, values))
            given[option] = [text] if "list[" in str(hint.__origin__) else text
        else:
            single[option] = values
    return [
        tuple(group_of(group, all_given) for group in GROUPS)
        for chosen in product(*single.values())
        for all_given in [{**given, **dict(zip(single, chosen, strict=True))}]
    ]


def _takes_list(hint: Any) -> bool:
    return any(getattr(about, "metavar", None) == LIST for about in getattr(hint, "__metadata__", ()))


def _plain(value: Any) -> Any:
    """torch.bfloat16 is "bfloat16"."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _chosen(
    make: Callable[..., list[Experiment]], what: str | Experiment | Iterable[Experiment],
    implementations: Sequence[str] | str | None, axes: dict[str, Any],
) -> list[Experiment]:  # fmt: skip
    if isinstance(what, str):
        return [one for options in options_of(implementations, axes) for one in make(what, *options)]
    if axes.keys() - {"seconds"} or implementations is not None:
        raise TypeError("experiments say all that is measured; leave out implementations and axes")
    several = [what] if isinstance(what, Experiment | RecordPart) else what
    return [one if isinstance(one, Experiment) else measurable(one) for one in several]


def collected(
    source: Callable[..., Iterator[CellOutcome]], experiments: int, *, progress: bool | None = None,
    on_outcome: OnOutcome = lambda outcome: None,
) -> list[CellOutcome]:  # fmt: skip
    """All outcomes of a source of so many cells, with progress on stderr; each is shown when it is there."""
    outcomes = []
    with shown_progress(experiments, quiet=not is_wanted(progress)) as shown:
        for outcome in source(on_progress=shown.update):
            shown.cell_done()
            raise_stored(outcome)
            outcomes.append(outcome)
            shown.pause(partial(on_outcome, outcome))
    return outcomes


def measure(
    experiments: Sequence[Experiment], out: Path | None, *, suite: str = "", seconds: float,
    roofs: Roofs | None = None, began: float | None = None, progress: bool | None = None,
    on_outcome: OnOutcome = lambda outcome: None,
    complete: Callable[[CellOutcome], CellOutcome] = lambda outcome: outcome,
) -> Results:  # fmt: skip
    """Measure all experiments in so many seconds from `began` on. Without `out` the records are kept as long
    as the results are. complete adds to an outcome before it is written."""
    sessions: list[str] = []
    with ExitStack() as stack:
        folder = temporary_folder(stack) if out is None else out
        executor = LocalExecutor(Budget(seconds, began))
        source = partial(
            run_sweep, experiments, folder, executor, suite=suite, roofs=roofs, on_session=sessions.append,
            complete=complete,
        )  # fmt: skip
        outcomes = collected(source, len(experiments), progress=progress, on_outcome=on_outcome)
        selection = dict.fromkeys(sessions) if out is not None else None
        return Results(
            folder, selection=selection, experiments=experiments, outcomes=outcomes, roofs=roofs,
            keeps=stack.pop_all(),
        )  # fmt: skip


def saving_folder(out: Path | None, *, save: bool) -> Path | None:
    """Where results go: `out` if it is given, else the default folder; None if they are not kept."""
    if out is not None:
        if not save:
            raise ArgumentError(
                "{out} names a folder to save in, and {save} saves nothing; leave out one of them",
                "out",
                "save",
            )
        return out
    if not save:
        return None
    folder = default_results()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"results are not saved: {folder} cannot be made ({error.strerror}); name another folder")
        return None
    if not os.access(folder, os.W_OK):
        say(f"results are not saved: {folder} cannot be written; name another folder")
        return None
    return folder


def roofs_here(experiments: Sequence[Experiment], progress: bool | None = None) -> Roofs | None:
    seconds = max((experiment.max_seconds for experiment in experiments), default=0.0)
    say = say_roofs_are_measured if is_wanted(progress) else lambda: None
    return roofs_now(this_machine(), seconds, say)


@with_axes
def bench(
    what: str | Experiment | Iterable[Experiment] = "layer",
    implementations: Sequence[str] | str | None = None, *, out: PathLike | None = None, save: bool = True,
    progress: bool | None = None, **axes: Any,
) -> Results:  # fmt: skip
    """Which implementation is fastest here? Checks each, then times all of them in interleaved rounds.

    what             a span, such as layer, expert_ffn or combine (`mrb bench` lists them); or experiments
    implementations  the baseline first; None: the few that matter
    axes             the options of `mrb bench` by name: tokens, width, hidden, experts, top_k, dtype,
                     workload, direction, model, case, threads, seconds, ...; a list means each of them
    out              the folder to save in; None: where `mrb results` looks, or nowhere with save=False
    progress         None: in a terminal or a notebook

    >>> shapes = dict(tokens=16, width=32, hidden=16, experts=4, top_k=2, dtype="float32")
    >>> results = mrb.bench("combine", ["gather_sum", "index_add"], **shapes, rounds=8, save=False)
    >>> len(results.winners())
    1
    """
    experiments = _chosen(bench_experiments, what, implementations, axes)
    seconds = group_of(MeasureOptions, {"seconds": axes.get("seconds")}).seconds_for(experiments)
    folder = saving_folder(None if out is None else Path(out), save=save)
    roofs = roofs_here(experiments, progress)
    suite = str(axes.get("case") or axes.get("model") or "")
    return measure(experiments, folder, suite=suite, seconds=seconds, roofs=roofs, progress=progress)


@dataclass(frozen=True, kw_only=True)
class PlannedSweep:
    """A sweep before it runs: what is still to measure, and where it goes."""

    plan: SweepPlan
    out: Path
    executor: Executor
    store: RemoteStore | None
    claim: bool

    @staticmethod
    def of(
        experiments: Sequence[Experiment], out: Path, *, resume: bool = True, retry_failed: bool = False,
        shard: str = "", claim: bool = False, engine: str = "local", dry_run: bool = False,
    ) -> PlannedSweep:  # fmt: skip
        url, store = url_of(out), None
        if shard:
            experiments = list(Shard.parse(shard, os.environ).part(experiments))
        if claim and engine != "local":
            raise ArgumentError(
                f"{{claim}} is for machines that work alone; the engine {engine} gives out the work itself",
                "claim",
            )
        executor = engine_named(engine)
        if claim and url is None:
            raise ArgumentError(
                f"{{claim}} needs a store that others reach too, as {{out}} file://{out.absolute()}",
                "claim",
                "out",
            )
        plan = SweepPlan(todo=tuple(experiments), done=0, failed=0)
        if url is not None:
            store = RemoteStore(out, make=not dry_run)
            plan = plan_fleet(experiments, store, executor, retry_failed=retry_failed, resume=resume)
        elif resume:
            plan = plan_sweep(experiments, out, retry_failed=retry_failed, executor=executor)
        return PlannedSweep(plan=plan, out=out, executor=executor, store=store, claim=claim)

    def roofs(self, experiments: Sequence[Experiment], progress: bool | None = None) -> Roofs | None:
        """Returns what this machine can do at most. ValueError if it lacks the device of the experiments."""
        roofs = roofs_here(experiments, progress)
        if self.executor.name == "local":
            for experiment in experiments[:1]:
                check_device(experiment.device)
        return roofs

    def run(
        self, *, suite: str, roofs: Roofs | None, progress: bool | None = None,
        on_outcome: OnOutcome = lambda outcome: None,
    ) -> list[CellOutcome]:  # fmt: skip
        if isinstance(self.plan, FleetPlan):
            assert self.store is not None
            run = partial(run_fleet, self.plan, self.store, self.executor, claim=self.claim)
        else:
            run = partial(run_sweep, self.plan.todo, self.out, self.executor)
        source = partial(run, suite=suite, roofs=roofs)
        return collected(source, len(self.plan.todo), progress=progress, on_outcome=on_outcome)


@with_axes
def sweep(
    what: str | Iterable[Experiment], out: PathLike, implementations: Sequence[str] | str | None = None, *,
    resume: bool = True, retry_failed: bool = False, shard: str = "", claim: bool = False,
    engine: str = "local", progress: bool | None = None, **axes: Any,
) -> Results:  # fmt: skip
    """Measure many cases into one folder or store. Stop it at any time; the same call goes on.

    what is a suite (`mrb list suites`), a model, a case, a span with axes, or experiments. The result has all
    that `out` holds, also from earlier calls.

    >>> shapes = dict(tokens=[4, 8], width=32, hidden=16, experts=4, top_k=2, dtype="float32")
    >>> results = mrb.sweep("topk", "results", ["torch_topk", "sort"], **shapes, rounds=8)
    >>> results.query("SELECT DISTINCT T FROM records ORDER BY T").rows
    [(4,), (8,)]
    """
    experiments, place = _chosen(sweep_experiments, what, implementations, axes), Path(out)
    planned = PlannedSweep.of(
        experiments, place, resume=resume, retry_failed=retry_failed, shard=shard, claim=claim, engine=engine
    )
    suite = what if isinstance(what, str) else ""
    planned.run(suite=suite, roofs=planned.roofs(experiments, progress), progress=progress)
    return Results(at_hand(place), place=out, experiments=experiments)


@dataclass(frozen=True, kw_only=True)
class Tuning(Displayed):
    """What `tune` found. decided: the winner of each size; tuned: what each search did; path: the decisions,
    which impl="auto" follows after use_decisions(path)."""

    decided: Decided
    tuned: tuple[Tuned, ...]
    path: Path

    def _show(self) -> None:
        for answer in self.decided.answers:
            show(Text(printable(answer.question), "bold cyan"))
            for contest in answer.contests:
                show(Text(printable(f"  T={contest.T}: {_gain(contest)}")))
        if not all(one.ranked for one in self.tuned):
            show("Give more minutes: the best settings were not ranked again everywhere.")
        settings, races = sum(len(one.seen) for one in self.tuned), sum(one.races for one in self.tuned)
        where = f"Written to {self.path}; use it with {VARIABLE}={self.path}."
        show(f"{settings} settings in {races} races. {where}")


def _gain(contest: Contest) -> str:
    if len(contest.ratios) == 1:
        return f"{contest.chosen} stays: its best settings were not ranked again"
    if (gain := contest.against_baseline.get(contest.chosen)) is None:
        return (
            f"no gain: none of {len(contest.ratios) - 1} settings is shown to be faster than {contest.chosen}"
        )
    low, high = (1 / end for end in reversed(gain.interval))
    return f"{contest.chosen} is {1 / gain.ratio:.3f}x faster (99 % interval {low:.3f}x to {high:.3f}x)"


def run_tuning(
    experiments: Sequence[Experiment], out: Path, *, minutes: float, search: str,
    began: float | None = None, progress: bool | None = None,
    on_outcome: OnOutcome = lambda outcome: None,
) -> Tuning:  # fmt: skip
    """Search the settings of all experiments in so many minutes, and write what is decided."""
    one_of("search", search, SEARCHES)
    for experiment in experiments:
        space_of(experiment)
    tuner = Tuner(60 * minutes - DECIDING, search=search, known=known_races(out), began=began)
    source = partial(
        run_sweep, experiments, out, tuner, suite=TUNING, roofs=roofs_here(experiments, progress)
    )
    collected(source, len(experiments), progress=progress, on_outcome=on_outcome)
    decided = decide(out)
    write_decisions(decided, out, path := out / "decisions.json")
    return Tuning(decided=decided, tuned=tuple(tuner.tuned), path=path)


@with_axes
def tune(
    what: str | Experiment | Iterable[Experiment], out: PathLike,
    implementations: Sequence[str] | str | None = None, *, minutes: float = 10.0, search: str = "greedy",
    progress: bool | None = None, **axes: Any,
) -> Tuning:  # fmt: skip
    """Search the settings of a kernel for one that is faster than its own rules; a tie keeps the rules.

    what is "layer", an operation or experiments. Several implementations are settings too. Stop it at any
    time; the same call goes on. search: "greedy", "exhaustive" or "tpe".

    >>> sizes = dict(tokens=8, width=32, hidden=16, experts=4, top_k=2, dtype="float32")
    >>> tuning = mrb.tune("topk", "tuned", ["torch_topk", "sort"], minutes=0.5, **sizes)
    >>> tuning.path.name
    'decisions.json'
    """
    experiments = _chosen(tuning_experiments, what, implementations, axes)
    return run_tuning(experiments, Path(out), minutes=minutes, search=search, progress=progress)


def open(place: PathLike | None = None) -> Results:
    """Read results: a folder, a URL, a bundle or packed records. None: where `mrb bench` saves.

    >>> mrb.open("measurements/records/pack.tar.xz").query("SELECT DISTINCT span FROM records").rows
    [('pack',)]
    """
    path = default_results() if place is None else Path(place)
    with ExitStack() as stack:
        found = stack.enter_context(results_folders([at_hand(path)]))
        if len(found) > 1:
            raise ValueError(f"{path} holds {len(found)} results folders; open one, such as {found[0].name}")
        return Results(found[0].folder, place=path, keeps=stack.pop_all())


@dataclass(kw_only=True)
class CheckReport(Displayed):
    """What `check` found: `passed`, a row for each implementation, `failures` as sentences."""

    dtypes: tuple[str, ...]
    device: str
    wanted: list[str] = field(default_factory=list, repr=False)  # operations of which something must run
    rows: list[Row] = field(default_factory=list, repr=False)
    tokens: list[int] | None = field(default=None, repr=False)
    maps: list[TokenMap] = field(default_factory=list, repr=False)

    @staticmethod
    def asked(dtype: str | Sequence[str], device: str, tokens: str | None) -> CheckReport:
        """How to check; what, `select` says. ValueError if that cannot be."""
        names = [one_of("dtype", _plain(name), DTYPES) for name in _each(dtype)] or [*DTYPES]
        dtypes = tuple(dict.fromkeys(names))
        try:
            torch.empty(1, device=device).cpu()
        except Exception as error:
            raise ValueError(f"cannot run on {device!r}: {str(error).partition(chr(10))[0]}") from None
        numbers = None if tokens is None else parse_tokens(tokens)
        return CheckReport(dtypes=dtypes, device=device, tokens=numbers)

    def select(
        self, op: str, implementation: str, folders: Sequence[Path], *, quick: bool = False
    ) -> CheckReport:
        """Chooses what to check and checks nothing yet. ValueError if there is no such thing. quick: only the
        first case of each implementation that is our own."""
        with torch_threads(1):
            outside = found_outside(folders)
            self.wanted, self.rows = select(op, implementation, self.dtypes, self.device, outside)
        for row in self.rows if quick else ():
            row.cells = [cell for cell in row.cells if cell.case == row.cells[0].case]
            row.count = max(1, len(row.cells)) if row.outside is None else row.count
        return self

    def run(self, progress: bool | None = None) -> CheckReport:
        total = sum(row.count for row in self.rows)
        # the cases are tiny: two threads took 343 s, because they wait for each other; one takes 33 s
        with torch_threads(1), check_progress(total, quiet=not is_wanted(progress)) as (advance, finished):
            for row in self.rows:
                began = time.perf_counter()
                run_row(row, self.dtypes, self.device, advance)
                finished(row, time.perf_counter() - began)
        return self

    def run_maps(self, on_map: Callable[[TokenMap], None] = lambda one_map: None) -> CheckReport:
        """For each number of tokens: is it right?"""
        assert self.tokens is not None
        with torch_threads(1):
            for row in (row for row in self.rows if row.op != ROUTERS and not row.broken):
                self.maps.append(token_map(row, self.dtypes, self.device, self.tokens))
                on_map(self.maps[-1])
        return self

    @property
    def idle(self) -> list[str]:
        """Operations and included implementations of which nothing ran."""
        return never_ran(self.wanted, self.rows)

    @property
    def passed(self) -> bool:
        if self.tokens is None:
            return not self.idle and not any(row.failed for row in self.rows)
        wrong = any(one.wrong or not one.ran for one in self.maps) or any(row.broken for row in self.rows)
        return bool(self.maps) and not wrong

    @property
    def failures(self) -> list[str]:
        sentences = []
        for row in self.rows:
            for one in row.failures:
                where = ", ".join(filter(None, (one["case"], one["layout"], one["dtype"])))
                sentences.append(f"{row.op}.{row.spec}: {where}: {one['sentence']}")
        for one_map in self.maps:
            for T, sentence in one_map.wrong.items():
                sentences.append(f"{one_map.op}.{one_map.spec}: T={T}: {sentence}")
        return sentences

    def to_pandas(self) -> Any:
        counts = ("passed", "failed", "unsupported")
        rows = [
            (row.op, row.spec, row.verdict, *(getattr(row, count).total() for count in counts))
            for row in self.rows
        ]
        return Table(["op", "implementation", "verdict", *counts], rows).to_pandas()

    def _show(self) -> None:
        if self.tokens is None:
            show_rows(self.rows, self.dtypes, self.idle)
            return
        for one_map in self.maps:
            show_map(one_map)
        show_legend_of_maps()


def check(
    op: str = "*", implementation: str = "*", *, dtype: str | Sequence[str] = (), device: str = "cpu",
    tokens: str | None = None, progress: bool | None = None,
) -> CheckReport:  # fmt: skip
    """Is it correct? Checks results, gradients and memory of implementations and routers on hard cases.

    op and implementation are shell patterns; the op `routers` stands for routers. dtype: one or several, ()
    for all. tokens="1-512" makes a map of right and wrong by number of tokens instead. Code from a folder
    that was given to `include` runs in a process of its own.

    >>> mrb.check("topk", "sort", dtype="float32").passed
    True
    """
    with without_included() as folders:
        report = CheckReport.asked(dtype, device, tokens).select(op, implementation, folders)
        return report.run(progress) if tokens is None else report.run_maps()


class Trainings(Displayed):
    """Finished training runs, one for each rule and seed; `folder` keeps them."""

    def __init__(self, runs: Sequence[Training], folder: Path, keeps: ExitStack):
        self.runs, self.folder = list(runs), folder
        weakref.finalize(self, keeps.close)

    def pareto(self) -> Pareto:
        """Returns what each rule of a study reached and what it cost."""
        return pareto(self.folder)

    def model(self, rule: str, seed: int = 0) -> Decoder:
        """The trained model of a rule."""
        named = {one.rule: one for one in self.runs if one.seed == seed}
        home = run_folder(self.folder, named[one_of("rule", rule, named)].key)
        with torch.random.fork_rng(devices=()):  # a new model draws weights
            return load_model(home)

    def to_pandas(self) -> Any:
        documents = [one.model_dump(mode="json") for one in self.runs]
        rows = [tuple(document.values()) for document in documents]
        return Table(list(documents[0]) if documents else [], rows).to_pandas()

    def _show(self) -> None:
        show_runs(self.runs)


def train(
    routers: str | Sequence[str] = "softmax_topk", *, study: str = "", text: Sequence[PathLike] = (),
    out: PathLike | None = None, steps: int = 600, seeds: int = 1, progress: bool | None = None,
    **settings: Any,
) -> Trainings:  # fmt: skip
    """Train small language models that differ in their router alone, on the same text from the same weights.

    study      a study of `mrb train` instead, such as "routers", which takes minutes to an hour
    text       files to learn; none: made-up text, the same everywhere
    out        the folder for runs, which go on from there; None: kept as long as the result
    settings   of a run (batch, learning_rate, evaluations, pieces, seed, ...) and sizes (layers, D, F, E, K,
               sequence, ...)

    >>> sizes = dict(layers=1, D=16, heads=2, kv_heads=1, head_dim=8, F=16, E=4, K=2, sequence=32)
    >>> trained = mrb.train(["switch", "softmax_topk"], steps=2, batch=2, pieces=2, **sizes)
    >>> [run.rule for run in trained.runs]
    ['switch', 'softmax_topk']
    """
    quiet = not is_wanted(progress)
    of_run = {one.name for one in fields(Run)} - {"rule", "size", "steps", "sources", "begin", "corpus"}
    known = [*of_run, *(one.name for one in fields(Size))]
    if unknown := next((name for name in settings if name not in known), None):
        hint = did_you_mean(unknown, known)
        raise TypeError(f"train has no setting {unknown!r}; {hint}there are {', '.join(sorted(known))}")
    corpus = read_texts([Path(one) for one in text]) if text else synthetic()
    size = studies()[study].size if study in studies() else Size()
    size = replace(size, **{name: settings.pop(name) for name in list(settings) if name not in of_run})
    warmup = {"warmup": min(40, max(1, steps // 5))}
    like = Run(
        rule=Rule(name="like"), size=size, steps=steps, **{**warmup, **settings}, corpus=corpus.hash[:16]
    )
    with ExitStack() as stack, torch_threads(torch.get_num_threads()), torch.random.fork_rng(devices=()):
        folder = temporary_folder(stack) if out is None else Path(out)
        if study:
            rates = (like.learning_rate,) if "learning_rate" in settings else RATES
            work = StudyRun(study, corpus, folder, like=like, seeds=seeds, jobs=core_count(), rates=rates)
            with bar(f"study {study}", quiet=quiet) as shown, without_main_module():
                work.run(partial(show_study, shown))
            return Trainings(read_trainings(folder), folder, stack.pop_all())
        runs = []
        for router, seed in product(
            [routers] if isinstance(routers, str) else routers, range(like.seed, like.seed + seeds)
        ):
            run = replace(like, rule=rule_named(router, size), seed=seed)
            with bar(run.rule.name, quiet=quiet) as shown:

                def on_event(event: Event, run: Run = run, shown: Bar = shown) -> None:
                    if isinstance(event, Stepped):
                        show_step(shown, run, event)

                runs.append(execute(run, corpus, folder, on_event=on_event))
        return Trainings(runs, folder, stack.pop_all())
