"""Sweeps whose cells take no time: an engine that makes times up, for tests of stores and fleets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from sample_outcomes import an_outcome

IMPLEMENTATIONS = (ImplementationRef(name="staged"), ImplementationRef(name="native"))


def made_cells(count: int) -> list[Experiment]:
    return [
        an_outcome(0.01, 0.02, implementations=IMPLEMENTATIONS, T=100 + n).experiment for n in range(count)
    ]


def key_of(experiment: Experiment) -> str:
    return hashlib.sha256(experiment.title.encode()).hexdigest()


class MadeUp:
    """measured: the names of the cells that were run, in order. failing: T of cells whose second crashes.
    twin: with one of each baseline."""

    name = "made up"

    def __init__(self, *, failing: Sequence[int] = (), twin: bool = False):
        self.measured: list[str] = []
        self.failing, self.twin = failing, twin

    def keys(self, cells: Sequence[Experiment]) -> list[set[str]]:
        return [{key_of(experiment)} for experiment in cells]

    def run(self, cells: Sequence[Experiment], **more: Any) -> Iterator[CellOutcome]:
        for experiment in cells:
            self.measured.append(experiment.title)
            T = experiment.T
            second = "CRASHED" if T in self.failing else T * 2e-4
            made = an_outcome(T * 1e-4, second, implementations=IMPLEMENTATIONS, T=T, twin=self.twin)
            yield replace(made, identity=replace(made.identity, key=key_of(experiment)))
