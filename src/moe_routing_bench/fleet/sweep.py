"""Sweeps measure many cells into one results folder. They can be stopped and resumed.

A cell is identified by the hash of everything that could change its result (bench/identity.py), and one that
has results is not measured again. The records of a cell are written together, in one synced write, so a crash
loses only the cell that is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moe_routing_bench.bench.estimate import estimate
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.runner import Progress
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.executor import Executor, LocalExecutor
from moe_routing_bench.fleet.host import environment_document
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.query import views
from moe_routing_bench.results.writing import record_outcome
from moe_routing_bench.workloads.experiment import Experiment
from moe_routing_bench.workloads.gpu_cases import step_of

FINE = frozenset({Status.PASSED, Status.UNSUPPORTED})


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """SweepPlan(todo=(...,), done=12, failed=1): 12 cells have been measured, one of them did not pass."""

    todo: tuple[Experiment, ...]
    done: int
    failed: int

    @property
    def seconds(self) -> float:
        """About how long it will take (bench/estimate.py)."""
        return sum(self.steps.values())

    @cached_property
    def steps(self) -> dict[str, float]:
        """About how long each step of gpu-hour will take; other suites have one, without a name."""
        seconds: dict[str, float] = {}
        for experiment in self.todo:
            step = step_of(experiment.case)
            seconds[step] = seconds.get(step, 0.0) + estimate(experiment)
        return seconds


def plan_sweep(
    experiments: Sequence[Experiment], folder: Path, *, retry_failed: bool = False,
    executor: Executor | None = None,
) -> SweepPlan:  # fmt: skip
    """A cell is done if it was measured on a machine like one of those that the executor runs cells on, and
    there was time for all of it."""
    known = latest_states(folder)
    todo, done, failed = [], 0, 0
    for experiment, keys in zip(experiments, (executor or LocalExecutor()).keys(experiments), strict=True):
        measured = [known[key] for key in keys if key in known]
        measured = [states for states in measured if Status.NO_TIME not in states]
        if not measured:
            todo.append(experiment)
            continue
        states = min(measured, key=lambda found: not found <= FINE)
        if not states <= FINE:
            failed += 1
            if retry_failed:
                todo.append(experiment)
                continue
        done += 1
    return SweepPlan(todo=tuple(todo), done=done, failed=failed)


def latest_states(folder: Path) -> dict[str, set[Status]]:
    """Returns by cell key how its implementations ended when it was last measured."""
    if not folder.is_dir():
        return {}
    query = """SELECT cell_key, list(DISTINCT status) FROM records JOIN
        (SELECT cell_key, max(session) AS session FROM records GROUP BY cell_key) USING (cell_key, session)
        GROUP BY cell_key"""
    with views(folder) as connection:
        rows = connection.execute(query).fetchall()
    return {key: {Status[status] for status in states} for key, states in rows}


def run_sweep(
    experiments: Sequence[Experiment],
    folder: Path,
    executor: Executor,
    *,
    suite: str = "",
    roofs: Roofs | None = None,
    on_progress: Callable[[Experiment, Progress], None] = lambda experiment, progress: None,
    on_session: Callable[[str], None] = lambda session: None,
    complete: Callable[[CellOutcome], CellOutcome] = lambda outcome: outcome,
) -> Iterator[CellOutcome]:
    """Measures the cells. Each outcome is on disk before it is yielded. on_session gets the session's id.
    complete adds to an outcome before it is written.

    Raises ValueError before anything is measured if the folder cannot be written to. If a later write fails,
    the outcome is yielded first and ValueError is raised after it.
    """
    if not experiments:
        return
    try:
        session = Session.start(folder)
        environment = session.put_environment(environment_document(this_machine(), roofs))
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror or error}") from None
    on_session(session.id)
    with session:

        def watch() -> str | None:
            if (touched := session.tampered()) is None:
                return None
            session.repair()
            return f"{touched} while it ran; no other process may write there"

        measured = executor.run(experiments, roofs=roofs, on_progress=on_progress, watch=watch)
        for outcome in map(complete, measured):
            failure: OSError | None = None
            try:
                there = environment
                if outcome.environment is not None:
                    there = session.put_environment(outcome.environment)
                record_outcome(outcome, session, suite=suite, environment=there)
            except OSError as error:
                failure = error
            yield outcome
            if failure is not None:
                raise ValueError(
                    f"the records of {outcome.experiment.title} could not be written into {folder}: "
                    f"{failure.strerror or failure}. Cells before it are there; the same command goes on"
                )
