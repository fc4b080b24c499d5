"""Executors run the cells of a sweep, on this machine or on a Ray cluster (ray_engine.py).

An executor takes cells and yields each outcome as soon as it is ready, in any order. It writes no files: the
caller stores results, so a crash loses only the cells that are running.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.compiling import compile_first
from moe_routing_bench.bench.estimate import share_of_rounds
from moe_routing_bench.bench.hosts.shared import Reuse
from moe_routing_bench.bench.identity import cell_key
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.roofs import Roofs
from moe_routing_bench.bench.runner import Progress, run_cell
from moe_routing_bench.bench.setup import Watch
from moe_routing_bench.bench.sources import looked_at_once
from moe_routing_bench.core.fork_server import start_server
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.workloads.experiment import Experiment

TRIALS_SHARE = 0.7  # of the time for several cells, the most that the trials of the next one may use
SCRATCH_BYTES = 4 << 20  # logs and small results of a cell's workers
OnCellProgress = Callable[[Experiment, Progress], None]


class Executor(Protocol):
    name: str

    def keys(self, experiments: Sequence[Experiment]) -> list[set[str]]:
        """For each cell its resume keys on the machines that would run it, taken there: their processors,
        versions and settings may not be those of the machine that plans."""
        ...

    def run(
        self, experiments: Sequence[Experiment], *, roofs: Roofs | None,
        on_progress: OnCellProgress, watch: Watch,
    ) -> Iterator[CellOutcome]: ...  # fmt: skip


class LocalExecutor:
    """Runs one cell after another on this machine. Two at a time would disturb each other's times."""

    name = "local"

    def __init__(self, budget: Budget | None = None):
        self.budget = budget  # for all cells; None: each cell has the budget of its policy

    def keys(self, experiments: Sequence[Experiment]) -> list[set[str]]:
        machine = this_machine()
        with looked_at_once():
            return [{cell_key(experiment, machine)} for experiment in experiments]

    def run(
        self, experiments: Sequence[Experiment], *, roofs: Roofs | None,
        on_progress: OnCellProgress, watch: Watch,
    ) -> Iterator[CellOutcome]:  # fmt: skip
        whole = self.budget
        start_server()
        if whole is not None and experiments:
            with whole.paused():
                compile_first(
                    experiments,
                    lambda what: on_progress(experiments[0], Progress(what=what, share=0.0, left=whole.left)),
                )
        with closing(Reuse()) as reuse:
            for place, experiment in enumerate(experiments):
                check_scratch(experiment)
                progress = partial(on_progress, experiment)
                budget = Budget(experiment.max_seconds, kit_apart=True)
                if whole is not None:
                    last = place == len(experiments) - 1
                    budget = Budget(max(whole.left, 0.0) * (1.0 if last else TRIALS_SHARE))
                yield run_cell(
                    experiment, roofs=roofs, on_progress=progress, watch=watch, budget=budget,
                    for_rounds=None if whole is None else partial(_share, whole, experiments[place:]),
                    reuse=reuse,
                )  # fmt: skip


def _share(whole: Budget, experiments: Sequence[Experiment], needed: float) -> float:
    """Seconds for the rounds of the first cell, which has been tried: its share, or what it needs for a
    decision if that leaves half of the time to the others."""
    left = max(whole.left, 0.0)
    return max(left * share_of_rounds(experiments), min(needed, left / 2))


def check_scratch(experiment: Experiment) -> None:
    """ValueError if workers have no place for their results: a kernel would be blamed for it."""
    # first, second and again, each twice, and what is handed over; with gradients, those of the weights too
    weights = experiment.weight_bytes if experiment.direction != "forward" else 0
    needed = SCRATCH_BYTES + 8 * (experiment.activation_bytes + weights)
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise ValueError(f"there is no folder for temporary files: {error.strerror or error}") from None
    if free < needed:
        raise ValueError(
            f"{place} has {free / 2**20:,.0f} MiB free, and the workers of {experiment.title} may need "
            f"{needed / 2**20:,.0f} MiB there; free some, or set TMPDIR to another folder"
        )
