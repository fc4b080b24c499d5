"""Runs the part of one machine in a sweep whose results go to a store on a URL.

Results are first written into a folder here, as those of any sweep, then published cell by cell. If the store
cannot be reached any more, that folder stays and `mrb results merge` takes it.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.paths import home
from moe_routing_bench.fleet.executor import Executor, OnCellProgress
from moe_routing_bench.fleet.host import environment_document
from moe_routing_bench.fleet.leases import Leases, lease_seconds
from moe_routing_bench.fleet.store import RemoteStore, mirror
from moe_routing_bench.fleet.sweep import FINE, SweepPlan, latest_states
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.writing import record_outcome
from moe_routing_bench.workloads.experiment import Experiment

PAUSE_SECONDS = (1.0, 15.0)  # between two looks at cells that other machines are measuring
LISTED_AT_ONCE, MIN_LISTED = 1000, 20_000  # cells in one request


@dataclass(frozen=True, kw_only=True)
class FleetPlan(SweepPlan):
    """attempts: by resume key, the number that the next measurement of the cell gets."""

    attempts: dict[str, int] = field(default_factory=dict)
    by_key: dict[str, Experiment] = field(default_factory=dict)


def plan_fleet(
    experiments: Sequence[Experiment], store: RemoteStore, executor: Executor, *, retry_failed: bool,
    resume: bool,
) -> FleetPlan:  # fmt: skip
    known = store.attempts()
    fine: Collection[str] = known
    if known and retry_failed and resume:
        states = latest_states(mirror(store.objects.url, rows=True).folder)
        fine = {key for key, found in states.items() if found <= FINE}  # others failed or are not valid
    todo: list[Experiment] = []
    attempts, by_key, done, failed = {}, {}, 0, 0
    for experiment, keys in zip(experiments, executor.keys(experiments), strict=True):
        measured = [key for key in keys if key in known]
        if measured and resume:
            if measured[0] in fine:
                done += 1
                continue
            failed += 1
        todo.append(experiment)
        for key in keys:
            attempts[key], by_key[key] = known.get(key, 0) + 1, experiment
    return FleetPlan(todo=tuple(todo), done=done, failed=failed, attempts=attempts, by_key=by_key)


def run_fleet(
    plan: FleetPlan,
    store: RemoteStore,
    executor: Executor,
    *,
    suite: str = "",
    claim: bool = False,
    roofs: Roofs | None = None,
    on_progress: OnCellProgress = lambda experiment, progress: None,
    leases: Leases | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[CellOutcome]:
    """Measures the cells of the plan. Each outcome is in the store before it is yielded. An outcome that
    another machine published first is not yielded. With claim, the call ends when every cell has a result, of
    any machine."""
    if not plan.todo:
        return
    writer = _Writer(store, plan, suite, roofs)
    run = partial(executor.run, roofs=roofs, on_progress=on_progress, watch=writer.watch)
    if claim:
        worker = f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
        leases = leases or Leases(store.objects, worker)
        outcomes = _claimed(plan, store, leases, lambda one: next(iter(run([one]))), sleep)
    else:
        outcomes = run(plan.todo)
    with writer:
        for outcome in outcomes:
            if writer.publish(outcome):
                yield outcome


def _claimed(
    plan: FleetPlan,
    store: RemoteStore,
    leases: Leases,
    measure: Callable[[Experiment], CellOutcome],
    sleep: Callable[[float], None],
) -> Iterator[CellOutcome]:
    """Measures cells that no other machine is measuring, in a random order, until all have results."""
    waiting = list(plan.by_key)
    random.Random(leases.worker).shuffle(waiting)
    pause, longest = PAUSE_SECONDS
    while waiting:
        done, left, rest = store.attempts(), [], iter(waiting)
        took = False
        for key in rest:
            attempt, experiment = plan.attempts[key], plan.by_key[key]
            if done.get(key, 0) >= attempt:
                continue
            if not leases.take(key, attempt, lease_seconds(experiment)):
                left.append(key)
                if LISTED_AT_ONCE * len(left) > max(len(done), MIN_LISTED):
                    break  # to continue would take more requests than a new list of the results
                continue
            took = True
            try:
                if not store.has(key, attempt):
                    yield measure(experiment)
            finally:
                with suppress(OSError):
                    leases.give_back(key, attempt)
        waiting = [*rest, *left]
        if waiting and not took:
            sleep(pause)
            pause = min(2 * pause, longest)
        else:
            pause = PAUSE_SECONDS[0]


class _Writer:
    """Writes outcomes to a local folder, then publishes them."""

    def __init__(self, store: RemoteStore, plan: FleetPlan, suite: str, roofs: Roofs | None):
        self.store, self.plan, self.suite = store, plan, suite
        place = home() / "unsent"
        try:
            place.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(dir=place))
            self.session = Session.start(self.folder)
        except OSError as error:
            raise ValueError(f"cannot write into {place}: {error.strerror or error}") from None
        self.here = environment_document(this_machine(), roofs)
        self.unsent = False

    def watch(self) -> str | None:
        if (touched := self.session.tampered()) is None:
            return None
        self.session.repair()
        return f"{touched} while it ran; no other process may write there"

    def publish(self, outcome: CellOutcome) -> bool:
        session, document, before = self.session, outcome.environment or self.here, self.session.sizes
        try:
            environment = session.put_environment(document)
            record_outcome(outcome, session, suite=self.suite, environment=environment)
        except OSError as error:
            raise ValueError(
                f"the records of {outcome.experiment.title} could not be written into {self.folder}: "
                f"{error.strerror or error}. Cells before it are in the store; the same command goes on"
            ) from None
        records, samples = session.since(before)
        key = outcome.identity.key
        # a machine that could not be reached when the plan was made has its own key
        attempt = self.plan.attempts.get(key, 1)
        try:
            self.store.put_environment(document)
            return self.store.publish(key, attempt, records, samples, before[1])
        except OSError as error:
            self.unsent = True
            raise ValueError(
                f"{error}. The results of {outcome.experiment.title} are in {self.folder}; the same command "
                "goes on when the store is there again"
            ) from None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *about: object) -> None:
        self.session.close()
        if not self.unsent:
            shutil.rmtree(self.folder, ignore_errors=True)
