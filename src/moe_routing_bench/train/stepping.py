"""Times a training step of several runs in turns.

Times of whole runs are taken hours apart, on a machine whose speed changes. Here all runs of a study continue
from their final states in one process: one step each in every round, in a new order each time. Ratios compare
steps of the same round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_routing_bench.train.loop import Event, State, Stepped, train
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.text import Corpus

WARM_UP = 2  # rounds that are not kept


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """seconds["switch"][round], and the same by part of a step: parts["switch"]["forward"][round]."""

    seconds: dict[str, list[float]]
    parts: dict[str, dict[str, list[float]]]
    loads: dict[str, float]  # experts per token while it was timed


def step_times(
    runs: Sequence[tuple[Run, State | None]], corpus: Corpus, *, rounds: int, seed: int = 0,
    on_round: Callable[[int], None] = lambda done: None,
) -> StepTimes:  # fmt: skip
    """Returns times by the names of rules. Raises ValueError if two runs have the same name."""
    going: dict[str, Iterator[Event]] = {}
    for run, state in runs:
        if run.rule.name in going:
            raise ValueError(f"two of the runs to time are called {run.rule.name}; give each its own name")
        first = 0 if state is None else state.step
        # evaluated at its end only, which never comes
        longer = replace(run, steps=first + rounds + WARM_UP + 1, evaluations=1)
        going[run.rule.name] = train(longer, corpus.only(run.sources), state)
    seconds: dict[str, list[float]] = {name: [] for name in going}
    parts: dict[str, dict[str, list[float]]] = {name: {} for name in going}
    loads: dict[str, float] = {}
    order, draw = list(going), random.Random(seed)
    for number in range(rounds + WARM_UP):
        draw.shuffle(order)
        for name in order:
            step = next(event for event in going[name] if isinstance(event, Stepped))
            if number >= WARM_UP:
                seconds[name].append(sum(step.seconds.values()))
                loads[name] = step.pairs_per_token
                for part, value in step.seconds.items():
                    parts[name].setdefault(part, []).append(value)
        on_round(number + 1)
    return StepTimes(seconds=seconds, parts=parts, loads=loads)
