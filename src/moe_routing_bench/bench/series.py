"""Series of samples: which take part in the rounds, in which order, and what the rounds collect.

An implementation is one series. The baseline is several: its twin says how much the same code differs from
itself, and code from outside is compared with a copy of the baseline that is timed as it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeAlias

from moe_routing_bench.bench.status import ImplementationError
from moe_routing_bench.workloads.experiment import ImplementationRef

Role: TypeAlias = Literal["baseline", "candidate", "twin", "beside"]
SAMPLE_OVERHEAD = 2e-3  # seconds for making inputs and asking, beside the calls


@dataclass(frozen=True)
class Series:
    """One sample of it is taken in every round.

    Series("candidate", mine)
    Series("twin", baseline)            the baseline again
    Series("beside", baseline, mine)    the baseline again, timed as `mine` is
    """

    role: Role
    implementation: ImplementationRef  # what runs
    beside: ImplementationRef | None = None

    @property
    def owner(self) -> ImplementationRef:
        """The implementation that gets no time if this series fails."""
        return self.beside or self.implementation


def lineup_of(
    implementations: Sequence[ImplementationRef], outside: Collection[ImplementationRef]
) -> list[Series]:
    """All series of these implementations, of which the first is the baseline."""
    baseline, *others = implementations
    alone = [one for one in others if one in outside or baseline in outside]
    return [
        Series("baseline", baseline),
        *(Series("candidate", one) for one in others),
        Series("twin", baseline),
        *(Series("beside", baseline, one) for one in alone),
    ]


def in_turn(lineup: Sequence[Series], dice: random.Random) -> list[Series]:
    """Returns a new random order. A series and the baseline beside it stay neighbours, so that what disturbs
    one disturbs both."""
    groups: dict[tuple[bool, ImplementationRef], list[Series]] = {}
    for series in dice.sample(lineup, len(lineup)):
        groups.setdefault((series.role == "twin", series.owner), []).append(series)
    return [series for group in groups.values() for series in group]


def take_rounds(
    lineup: Sequence[Series], dice: random.Random, take: Callable[[Series, int], None],
    is_over: Callable[[int], bool],
) -> None:  # fmt: skip
    """The only loop over rounds: every series of the lineup takes its turn, in a new order each time.

    lineup: may lose members meanwhile. take(series, round); is_over(rounds so far).
    """
    done = 0
    while not (done and is_over(done)):
        for series in in_turn(lineup, dice):
            if series in lineup:  # else it was dropped in this round
                take(series, done)
        done += 1


@dataclass(kw_only=True)
class Samples:
    """What the rounds saw of one series: seconds per call, a number for each round.

    isolated: timed by the parent, in a process of its own
    used, launches: what timed them on a device, and the host's seconds to launch a call, for each round
    """

    calls: int = 1  # in a sample
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    checked: int = 0  # calls that were judged
    isolated: bool = False
    used: str = ""
    launches: list[float] = field(default_factory=list)
    held: str = ""  # what keeps its process still between turns

    def stage_medians(self) -> dict[str, float]:
        names = self.stages[0] if self.stages else ()
        return {name: median(times.get(name, 0.0) for times in self.stages) for name in names}


@dataclass(kw_only=True)
class Measured:
    """The samples of all rounds, the baseline first. An implementation that left early has the samples of the
    first rounds only. One that failed has none."""

    samples: dict[Series, Samples]
    failed: dict[ImplementationRef, ImplementationError] = field(default_factory=dict)
    rounds_by_process: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stop_reason: str = ""

    @property
    def baseline(self) -> Series:
        return next(iter(self.samples))

    @property
    def twin(self) -> Series:
        return Series("twin", self.baseline.implementation)

    def of(self, implementation: ImplementationRef) -> Series:
        mine = Series("candidate", implementation)
        return mine if mine in self.samples else self.baseline

    def partner(self, series: Series) -> Series:
        """Returns what it is compared with: the baseline that is timed in the same way."""
        beside = Series("beside", self.baseline.implementation, series.implementation)
        return beside if beside in self.samples else self.baseline

    def against(self, series: Series) -> list[float]:
        """The partner's samples in the same rounds."""
        return self.samples[self.partner(series)].seconds[: len(self.samples[series].seconds)]


def fewest_rounds(implementations: int) -> int:
    """If all n rounds are on one side, the p-value is 2 / 2^n. It must reach 1 % after the correction for so
    many comparisons."""
    return math.ceil(math.log2(200 * max(1, implementations)))
