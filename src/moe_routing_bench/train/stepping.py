"""The time of a training step of several runs, taken in turns: what people pay for a rule.

Times of whole runs are taken hours apart, on a machine that is not the same all day. Here all runs of a study
go on from their final states, one step each in every round of the benchmark's own loop (bench/series.py), in
one process. Ratios are of steps in the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_routing_bench.bench.hosts.host import Reading, Turn
from moe_routing_bench.bench.series import Samples, Series, take_rounds
from moe_routing_bench.train.loop import Event, State, Stepped, train
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.text import Corpus
from moe_routing_bench.workloads.experiment import ImplementationRef

WARM_UP = 2  # rounds that are not kept


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """seconds["switch"][round], and the same by part of a step: parts["switch"]["forward"][round]."""

    seconds: dict[str, list[float]]
    parts: dict[str, dict[str, list[float]]]
    loads: dict[str, float]  # experts of a token while it was timed


class StepHost:
    """Trains in this process: a sample is the next step of a run."""

    def __init__(self) -> None:
        self._going: dict[Series, Iterator[Event]] = {}
        self.loads: dict[str, float] = {}

    def add(self, run: Run, corpus: Corpus, state: State | None, steps: int) -> Series:
        """ValueError if another run has its name: one would hide the other."""
        series = Series("candidate", ImplementationRef(name=run.rule.name))
        if series in self._going:
            raise ValueError(f"two of the runs to time are called {run.rule.name}; give each its own name")
        first = 0 if state is None else state.step
        # evaluated at its end only, which never comes
        longer = replace(run, steps=first + steps + 1, evaluations=1)
        self._going[series] = train(longer, corpus.only(run.sources), state)
        return series

    def sample(self, turn: Turn) -> Reading:
        step = next(event for event in self._going[turn.series] if isinstance(event, Stepped))
        self.loads[turn.series.implementation.name] = step.pairs_per_token
        return Reading(seconds=sum(step.seconds.values()), stages=step.seconds)


def step_times(
    runs: Sequence[tuple[Run, State | None]], corpus: Corpus, *, rounds: int, seed: int = 0,
    on_round: Callable[[int], None] = lambda done: None,
) -> StepTimes:  # fmt: skip
    """Times by the names of rules. ValueError if two runs have the same."""
    host, all_rounds = StepHost(), rounds + WARM_UP
    samples = {host.add(run, corpus, state, all_rounds): Samples() for run, state in runs}

    def take(series: Series, done: int) -> None:
        reading = host.sample(Turn(series=series))
        if done >= WARM_UP:
            samples[series].seconds.append(reading.seconds)
            samples[series].stages.append(dict(reading.stages))

    def is_over(done: int) -> bool:
        on_round(done)
        return done == all_rounds

    take_rounds(list(samples), random.Random(seed), take, is_over)
    named = {series.implementation.name: seen for series, seen in samples.items()}
    return StepTimes(
        seconds={name: seen.seconds for name, seen in named.items()},
        parts={
            name: {part: [stages[part] for stages in seen.stages] for part in seen.stages[0]}
            for name, seen in named.items()
        },
        loads=host.loads,
    )
