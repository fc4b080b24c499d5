"""Sweeps measure many cells into one results folder. They can be stopped and resumed.

A cell is identified by the hash of everything that could change its result (bench/identity.py), and one that
has results is not measured again. The records of a cell are written together, in one synced write, so a crash
loses only the cell that is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_routing_bench.bench.cell import Cell
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

FINE = frozenset({Status.PASSED, Status.UNSUPPORTED})


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """SweepPlan(todo=(...,), done=12, failed=1): 12 cells have been measured, one of them did not pass."""

    todo: tuple[Cell, ...]
    done: int
    failed: int

    @property
    def seconds(self) -> float:
        """The estimated time (bench/estimate.py)."""
        return sum(estimate(cell) for cell in self.todo)


def plan_sweep(
    cells: Sequence[Cell], folder: Path, *, retry_failed: bool = False, executor: Executor | None = None
) -> SweepPlan:
    """Returns what is left to do. A cell is done if all of it was measured, on a machine equal to one of
    those the executor uses."""
    known = latest_states(folder)
    todo, done, failed = [], 0, 0
    for cell, keys in zip(cells, (executor or LocalExecutor()).keys(cells), strict=True):
        measured = [known[key] for key in keys if key in known]
        measured = [states for states in measured if Status.NO_TIME not in states]
        if not measured:
            todo.append(cell)
            continue
        states = min(measured, key=lambda found: not found <= FINE)
        if not states <= FINE:
            failed += 1
            if retry_failed:
                todo.append(cell)
                continue
        done += 1
    return SweepPlan(todo=tuple(todo), done=done, failed=failed)


def latest_states(folder: Path) -> dict[str, set[Status]]:
    """Returns by cell key how its implementations ended when it was last measured."""
    if not folder.is_dir() or not any(folder.glob("session=*")):
        return {}
    states: dict[str, set[Status]] = {}
    query = """SELECT cell_key, status FROM records JOIN
        (SELECT cell_key, max(session) AS session FROM records GROUP BY cell_key) USING (cell_key, session)"""
    with views(folder) as connection:
        for key, status in connection.execute(query).fetchall():
            states.setdefault(key, set()).add(Status[status])
    return states


def run_sweep(
    cells: Sequence[Cell],
    folder: Path,
    executor: Executor,
    *,
    suite: str = "",
    roofs: Roofs | None = None,
    on_progress: Callable[[Cell, Progress], None] = lambda cell, progress: None,
    on_session: Callable[[str], None] = lambda session: None,
) -> Iterator[CellOutcome]:
    """Measures the cells. Each outcome is on disk before it is yielded. on_session gets the session's id.

    Raises ValueError before anything is measured if the folder cannot be written to. If a later write fails,
    the outcome is yielded first and ValueError is raised after it.
    """
    if not cells:
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

        for outcome in executor.run(cells, roofs=roofs, on_progress=on_progress, watch=watch):
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
                    f"the records of {outcome.cell.name} could not be written into {folder}: "
                    f"{failure.strerror or failure}. Cells before it are there; the same command goes on"
                )
