"""Tunes the knobs of implementations: searches, then ranks the best again beside the default.

A race of a search is an ordinary cell: every setting is checked, then all are timed in paired rounds, and its
records go into the results folder. So a tuning that was killed goes on with the same command: races that are
in the folder are read and not run, and their seconds count. `mrb tune decide` makes decisions of the folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.choosing import (
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    check_device,
    chosen_cases,
    made_experiments,
)
from moe_routing_bench.bench.compiling import compile_first
from moe_routing_bench.bench.hosts.shared import Reuse
from moe_routing_bench.bench.identity import cell_key
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.runner import Progress, run_cell
from moe_routing_bench.bench.setup import Watch
from moe_routing_bench.bench.spans.span import span_named, stand_ins
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.fork_server import start_server
from moe_routing_bench.core.frozen import Form, Frozen
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.names import base_name
from moe_routing_bench.fleet.executor import LocalExecutor, OnCellProgress, check_scratch
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.results.query import views
from moe_routing_bench.results.record import RANKED
from moe_routing_bench.tuning.search import SEARCHES, KnobSpace
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

FINALISTS = 10
FINAL_SHARE = 0.4  # of the time of a case, to rank the best settings again
MIN_RACE_SECONDS = 3.0  # a shorter race ranks nothing
# a cell may use more than its budget: its last round, its last check, statistics, and 2 s of rounds at least
OVERRUN, MARGIN = 1.2, 2.5
TOKENS = "1,8,64,512,4096"  # the default for a model


@dataclass(frozen=True, kw_only=True)
class Known:
    """A race that the folder holds: ratios by the name of the setting. ranked: of the best settings."""

    ratios: dict[str, float]
    seconds: float
    ranked: bool = False


@dataclass(kw_only=True)
class Tuned:
    """What the tuning of one case did. ranked: there was time to rank the best settings again."""

    experiment: Experiment
    races: int = 0
    evaluations: int = 0  # settings in all races, with the default
    seconds: float = 0.0
    ranked: bool = False
    seen: dict[str, float] = field(default_factory=dict)  # the last ratio of every setting
    failed: dict[str, str] = field(default_factory=dict)  # a crash or no memory is a result


def known_races(folder: Path) -> dict[str, Known]:
    """Returns the races in a folder, by the key of their cell, without those that had no time."""
    if not folder.is_dir() or not any(folder.glob("session=*")):
        return {}
    races: dict[str, Known] = {}
    query = """SELECT cell_key, suite, impl_spec, role, status, ratio, cell_seconds FROM records
        WHERE role IN ('baseline', 'candidate')
        AND cell_key NOT IN (SELECT cell_key FROM records WHERE status = 'NO_TIME')"""
    with views(folder) as connection:
        for key, suite, spec, role, status, ratio, seconds in connection.execute(query).fetchall():
            race = races.setdefault(key, Known(ratios={}, seconds=seconds or 0.0, ranked=suite == RANKED))
            passed = 1.0 if role == "baseline" else ratio
            timed = status == Status.PASSED and passed is not None
            race.ratios[ImplementationRef.read(spec).name] = passed if timed else math.inf
    return races


def tuning_experiments(
    span: str, sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions
) -> list[Experiment]:
    """Makes a case for each number of tokens, with the implementations whose settings are searched."""
    if sizes.model and sizes.tokens is None:
        sizes = replace(sizes, tokens=TOKENS)  # what is asked for by number has its full size
    what = replace(what, impl=what.impl or ["auto"])
    how = measure.settled(sizes.case or "")
    check_device(how["device"])
    return made_experiments(chosen_cases(span_named(span), sizes, what), what, how)


def space_of(experiment: Experiment) -> KnobSpace:
    """Returns the settings of the case's implementations. ValueError if there is nothing to choose."""
    span, first = span_named(experiment.span), experiment.implementations[0]
    if not span.decides:
        raise ValueError(f"{span.name} is several operations; tune one of {', '.join(span.ops)}")
    op, source = all_ops()[span.decides], stand_ins(first, experiment)
    if first.frozen:
        source.weights = _as_if_frozen(source.weights, base_name(first.name))
    space = KnobSpace(
        op=op,
        starts=tuple(one.name for one in experiment.implementations),
        args=tuple(op.arguments(source).values()),
    )
    if len(space.starts) == 1 and not space.stages(first.name):
        raise ValueError(f"{op.name}.{first.name} has no knobs; name others to choose from with --impl")
    return space


def _as_if_frozen(weights: ExpertWeights, kernel: str) -> ExpertWeights:
    """Returns weights that look packed; nothing is packed."""

    def packed(matrix: str) -> Frozen:
        w_EKN = getattr(weights, matrix)
        E, depth, columns = w_EKN.shape
        return Frozen(w_EKN[:0], Form(kernel=kernel, size=(E, depth, columns), dtype=w_EKN.dtype))

    return replace(weights, w_in_EDG=packed("w_in_EDG"), w_out_EFD=packed("w_out_EFD"))


class Tuner(LocalExecutor):
    """Runs the races of every case, as an executor of a sweep whose cells are known only as it goes.

    Tuner(600, search="greedy", known=known_races(folder)): ten minutes for all cases together.
    """

    name = "local"

    def __init__(self, seconds: float, *, search: str, known: dict[str, Known], began: float | None = None):
        super().__init__(Budget(seconds, began))
        self.search, self.known, self.tuned = SEARCHES[search], known, list[Tuned]()

    def run(
        self, experiments: Sequence[Experiment], *, roofs: Roofs | None,
        on_progress: OnCellProgress, watch: Watch,
    ) -> Iterator[CellOutcome]:  # fmt: skip
        whole = self.budget
        assert whole is not None
        start_server()
        with whole.paused():
            compile_first(
                experiments,
                lambda what: on_progress(experiments[0], Progress(what=what, share=0.0, left=whole.left)),
            )
        with closing(Reuse()) as reuse:
            for place, experiment in enumerate(experiments):
                check_scratch(experiment)
                self.tuned.append(Tuned(experiment=experiment))
                measure = partial(run_cell, roofs=roofs, watch=watch, reuse=reuse)
                share = whole.left / (len(experiments) - place)
                yield from self._tune(self.tuned[-1], Budget(share), measure, on_progress)

    def _tune(
        self, tuned: Tuned, case: Budget, measure: Callable[..., CellOutcome], on_progress: OnCellProgress
    ) -> Iterator[CellOutcome]:
        """Runs the races of a search, then one of the best settings."""

        def race(names: Sequence[str], seconds: float, suite: str = "") -> Iterator[CellOutcome]:
            """Times these settings beside the default, unless the folder holds this race."""
            default, *_ = tuned.experiment.implementations
            asked = (default, *(replace(default, name=name) for name in names if name != default.name))
            cell = replace(tuned.experiment, implementations=asked)
            known, began = self.known.get(cell_key(cell, this_machine())), time.perf_counter()
            if known is None or (suite == RANKED and not known.ranked):
                budget = Budget(seconds, kit_apart=True)  # the kit is passed once, not in every race
                outcome = measure(cell, budget=budget, on_progress=partial(on_progress, cell))
                yield replace(outcome, suite=suite)
                known = Known(ratios=ratios_of(outcome), seconds=time.perf_counter() - began)
                tuned.failed |= {
                    one.implementation.name: f"{one.status}: {one.reason}"
                    for one in outcome.implementations
                    if not one.samples
                }
            else:  # these seconds were used before
                assert self.budget is not None
                case.seconds, self.budget.seconds = (
                    case.seconds - known.seconds,
                    self.budget.seconds - known.seconds,
                )
            tuned.seen |= known.ratios
            tuned.races, tuned.evaluations = tuned.races + 1, tuned.evaluations + len(asked)
            tuned.seconds += known.seconds

        search, for_final = self.search(space_of(tuned.experiment)), FINAL_SHARE * case.seconds
        with suppress(StopIteration):
            asked = next(search)
            while (left := case.left - for_final - MARGIN) > MIN_RACE_SECONDS:
                yield from race(asked.settings, max(MIN_RACE_SECONDS, left * asked.share / OVERRUN))
                asked = search.send({name: tuned.seen[name] for name in asked.settings})
        best = sorted(tuned.seen, key=tuned.seen.__getitem__)[:FINALISTS]
        best = [name for name in best if math.isfinite(tuned.seen[name])]
        if len(best) > 1 and (left := (case.left - MARGIN) / OVERRUN) > MIN_RACE_SECONDS:
            yield from race(best, left, RANKED)
            tuned.ranked = True


def ratios_of(race: CellOutcome) -> dict[str, float]:
    """Returns by name the time as a multiple of the default's; infinite without a time."""
    return {
        one.implementation.name: 1.0
        if one.role == "baseline"
        else one.comparison.ratio
        if one.comparison
        else math.inf
        for one in race.implementations
    }
