"""Series of samples: what the rounds collect, and about what they will cost.

A series is a subject, the baseline's TWIN, or the baseline beside a subject from outside (beside(s)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from moe_routing_bench.bench.supervisor import SubjectError
from moe_routing_bench.bench.trial import Setup, Trial

TWIN = -1
NEAR = 4.0
SLOW = 5.0  # so many times the best time, a subject leaves early
SAMPLE_OVERHEAD = 2e-3  # making inputs and asking, beside the calls


@dataclass(kw_only=True)
class Measured:
    """Seconds per call by series, a list with one number for each round; TWIN is the baseline again.

    A subject that left early has fewer: those of the first rounds.
    """

    samples: dict[int, list[float]]  # beside(s): the baseline beside a subject s from outside
    calls: dict[int, int]  # in each sample
    stages: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    checked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, SubjectError] = field(default_factory=dict)
    rounds_by_process: list[int] = field(default_factory=list)
    paired: set[int] = field(default_factory=set)  # timed by the parent, as the baseline beside them
    notes: list[str] = field(default_factory=list)
    stop_reason: str = ""

    def against(self, s: int) -> list[float]:
        """What a subject is compared with: the baseline in the same process and rounds."""
        series = beside(s) if s >= 0 and beside(s) in self.samples else next(iter(self.samples))
        return self.samples[series][: len(self.samples[s])]

    def stage_medians(self, subject: int) -> dict[str, float]:
        seen = self.stages.get(subject, [])
        return {name: median(times.get(name, 0.0) for times in seen) for name in seen[0]} if seen else {}


def beside(s: int) -> int:
    """The series of the baseline in the process of subject s."""
    return -2 - s


def calls_of(alive: list[int], trials: Mapping[int, Trial]) -> dict[int, int]:
    """Calls in a sample: the baseline's number, unless a subject is several times slower or faster.

    The first call of a sample is slower than the rest, so the times of the same code with 16 and with 4
    calls differ by up to a tenth.
    """
    baseline = trials[alive[0]]

    def calls(trial: Trial) -> int:
        near = 1 / NEAR <= trial.call_seconds / baseline.call_seconds <= NEAR
        return baseline.calls if near else trial.calls

    return {s: calls(trials[s]) for s in alive}


def fewest_rounds(subjects: int) -> int:
    """n rounds all on one side have the p-value 2 / 2^n, which must reach 1 % after the correction for so
    many comparisons."""
    return math.ceil(math.log2(200 * max(1, subjects)))


def slow_ones(setup: Setup, alive: list[int], trials: Mapping[int, Trial]) -> set[int]:
    """Subjects so much slower than the best that a few rounds show it; none with the policy's `all`."""
    best = min(trials[s].call_seconds for s in alive)
    keep = setup.experiment.all
    return set() if keep else {s for s in alive[1:] if trials[s].call_seconds > SLOW * best}


def round_seconds(setup: Setup, alive: list[int], trials: Mapping[int, Trial]) -> dict[int, float]:
    """About how long each subject's part of a round takes: its sample, and the call before it that fills the
    caches; the baseline's twin counts as the baseline's."""
    calls, seconds = calls_of(alive, trials), {}
    for s in alive:
        before = 0 if trials[s].long and s not in setup.outside else 1
        sample = (calls[s] + before) * trials[s].call_seconds + SAMPLE_OVERHEAD
        copies = 2 if s == alive[0] or s in setup.outside else 1
        seconds[s] = copies * sample
    return seconds
