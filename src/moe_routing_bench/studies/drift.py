"""Measures how fast balance controllers react when the data changes. All see the same stream of drifting
topics.

A token is 0.8 * the centre of its topic + 0.6 * noise. The frequencies of the topics drift all the time and
are drawn again at two jumps. All subjects start from the same router weights W_0 and see the same tokens. A
batch is routed and its statistics are taken before the controller steps. The padded plan has the capacity
ceil(1.25 T K / E) for every rule, also for those that choose more than K experts.

There is no model behind the router. A pull back to W_0 takes the place of the model's loss: weights change by

    W -= LEARNING_RATE * (gradient of the router's own losses + PULL * (W - W_0))

so weights without a loss stay at W_0, and those with a loss settle between W_0 and its minimum. The study
shows how fast the load becomes balanced again and how many choices that changes. It shows nothing about the
quality of a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.controllers.controller import Counts, controller_for
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.moe.statistics import RoutingStatistics
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.routers.router import Router, build

LEARNING_RATE = 0.1
PULL = 0.1
CAPACITY_FACTOR = 1.25
EVEN_WITHIN = 0.15
# name and meaning of each number that is recorded at each step
SERIES = {
    "max_violation": "most loaded expert over the mean load, minus 1",
    "entropy_bits": "entropy of the load, in bits; log2(E) if it is even",
    "drop_rate": "share of pairs over the capacity",
    "experts_per_token": "mean over tokens",
    "agreement": "mean over tokens of experts shared with the router without control, over experts of either",
    "label_share": "information the experts carry about the topic, over the topic's entropy",
}
OnStep = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The tokens of a step, which depend only on these numbers and the step.

    Stream(steps=600).tokens(0) is 512 x 64 numbers and 512 topics of 0 .. 31; jumps are at steps 200 and 400.
    """

    steps: int = 600
    seed: int = 0
    T: int = 512
    D: int = 64
    E: int = 16
    K: int = 2
    topics: int = 32

    def __post_init__(self) -> None:
        if not 3 <= self.steps <= 100_000:
            raise ValueError(f"{self.steps} steps; give between 3 and 100000: two jumps divide them in three")

    @property
    def jumps(self) -> tuple[int, int]:
        return self.steps // 3, 2 * self.steps // 3

    def w_DE(self) -> Tensor:
        """Returns the weights that every router starts with: logits of variance 1."""
        return torch.randn(self.D, self.E, generator=self._dice(1)) / math.sqrt(self.D)

    def chance_L(self, step: int) -> Tensor:
        """Returns how often each topic occurs at a step."""
        epoch = sum(step >= jump for jump in self.jumps)
        base_L = torch.randn(self.topics, generator=self._dice(2, epoch))
        phase_L = 2 * math.pi * torch.rand(self.topics, generator=self._dice(3))
        swing_L = torch.sin(2 * math.pi * step / 200 + phase_L)
        return (1.8 * base_L + 0.6 * swing_L).softmax(0)

    def tokens(self, step: int) -> tuple[Tensor, Tensor]:
        dice = self._dice(4, step)
        centre_LD = torch.randn(self.topics, self.D, generator=self._dice(5))
        label_T = torch.multinomial(self.chance_L(step), self.T, replacement=True, generator=dice)
        return 0.8 * centre_LD[label_T] + 0.6 * torch.randn(self.T, self.D, generator=dice), label_T

    def _dice(self, what: int, step: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 16 + what) * 1_000_000 + step)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A controlled router: Subject(name="sign_bias", router="sigmoid_bias", controller="sign_bias")."""

    name: str
    router: str
    controller: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the controller
    losses: Mapping[str, float] = field(default_factory=dict)


SUBJECTS = (
    Subject(name="no control", router="softmax_topk"),
    Subject(name="switch loss, weight 0.1", router="softmax_topk", losses={"switch": 0.1}),
    Subject(name="switch loss, weight 1", router="softmax_topk", losses={"switch": 1.0}),
    Subject(name="sign_bias", router="sigmoid_bias", controller="sign_bias"),
    Subject(name="centred_bias", router="sigmoid_bias", controller="centred_bias"),
    Subject(
        name="sign_bias, rate 0.01", router="sigmoid_bias", controller="sign_bias", options={"rate": 0.01}
    ),
    Subject(name="quantile", router="quantile", controller="quantile"),
    Subject(name="l1_strength", router="relu", controller="l1_strength", losses={"relu": 1.0}),
    Subject(name="p_threshold", router="top_p", controller="p_threshold"),
    Subject(name="threshold_ema", router="expert_threshold", controller="threshold_ema"),
)


@dataclass(frozen=True, kw_only=True)
class Track:
    """The numbers of one subject: for each name in SERIES one at each step.

    Track(subject=..., series={"max_violation": [0.9, 0.8, ...], ...}, seconds=2.1)
    """

    subject: Subject
    series: Mapping[str, list[float]]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A track as a row of a table. With 600 steps and jumps at 200 and 400:

    settled        every series' mean over the last 50 steps of each third (150-199, 350-399, 550-599)
    after_jump     every series' mean over the 20 steps from each jump on (200-219, 400-419)
    steps_to_even  (31, None): steps from each jump to the first ten whose mean max_violation is within
                   EVEN_WITHIN of what chance gives; None: none before the next jump
    """

    settled: Mapping[str, float]
    after_jump: Mapping[str, float]
    steps_to_even: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class BalanceStudy:
    """All tracks over one stream. chance: mean max_violation if every token drew its K experts at random."""

    stream: Stream
    chance: float
    tracks: tuple[Track, ...]
    seconds: float

    def summary(self, track: Track) -> Summary:
        jumps, steps = self.stream.jumps, self.stream.steps
        ends = (*jumps, steps)
        last = max(1, min(50, steps // 6))
        early = max(1, min(20, steps // 6))
        settled = [step for end in ends for step in range(end - last, end)]
        after = [step for jump in jumps for step in range(jump, jump + early)]

        def mean(name: str, at: Sequence[int]) -> float:
            return fmean(track.series[name][step] for step in at)

        def steps_to_even(jump: int, end: int) -> int | None:
            violation = track.series["max_violation"][jump:end]
            width = min(10, len(violation))
            for n in range(len(violation) - width + 1):
                if fmean(violation[n : n + width]) <= self.chance + EVEN_WITHIN:
                    return n
            return None

        return Summary(
            settled={name: mean(name, settled) for name in SERIES},
            after_jump={name: mean(name, after) for name in SERIES},
            steps_to_even=tuple(map(steps_to_even, jumps, ends[1:])),
        )

    def to_dict(self, command: str) -> dict[str, Any]:
        """Returns all numbers, the settings and the machine, for a JSON file."""
        return {
            "command": command,
            "machine": this_machine().to_dict(),
            "seconds": round(self.seconds, 1),
            "stream": {**asdict(self.stream), "jumps": self.stream.jumps},
            "learning_rate": LEARNING_RATE,
            "pull": PULL,
            "capacity_factor": CAPACITY_FACTOR,
            "chance_max_violation": _short(self.chance),
            "even_within": EVEN_WITHIN,
            "series": SERIES,
            "tracks": [
                {
                    "subject": asdict(track.subject),
                    "seconds": round(track.seconds, 1),
                    "summary": _shortened(asdict(self.summary(track))),
                    "series": {name: list(map(_short, values)) for name, values in track.series.items()},
                }
                for track in self.tracks
            ],
        }


def study_balance(
    stream: Stream, subjects: Sequence[Subject] = SUBJECTS, *, on_progress: OnStep = lambda done, total: None
) -> BalanceStudy:
    """Runs one subject after the other over the whole stream, on one thread: the matrices are small."""
    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    tracks: list[Track] = []
    try:
        for number, subject in enumerate(subjects):
            before, total = number * stream.steps, len(subjects) * stream.steps
            tracks.append(follow(stream, subject, on_step=partial(_step_done, on_progress, before, total)))
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - started
    return BalanceStudy(stream=stream, chance=_chance(stream), tracks=tuple(tracks), seconds=seconds)


def _step_done(on_progress: OnStep, before: int, total: int, step: int) -> None:
    on_progress(before + step, total)


def without_control(stream: Stream) -> list[Routing]:
    """Returns what a router without a controller chooses at each step."""
    free = _router(stream, "softmax_topk").eval()
    with torch.no_grad():
        return [free(stream.tokens(step)[0]) for step in range(stream.steps)]


def _router(stream: Stream, name: str, **options: Any) -> Router:
    router = build(name, stream.D, stream.E, stream.K, **options)
    router.get_parameter("w_DE").data.copy_(stream.w_DE())
    return router


def follow(stream: Stream, subject: Subject, *, on_step: Callable[[int], None] = lambda step: None) -> Track:
    started = time.perf_counter()
    E, K = stream.E, stream.K
    start_DE = stream.w_DE()
    free = _router(stream, "softmax_topk").eval()
    router = _router(stream, subject.router, loss_weights=subject.losses).train()
    controller = controller_for(router, subject.controller, **subject.options) if subject.controller else None
    capacity = Layout.padded(capacity_factor=CAPACITY_FACTOR).capacity_for(stream.T, K, E)
    seen: list[RoutingStatistics] = []
    for step in range(stream.steps):
        x_TD, label_T = stream.tokens(step)
        routing = router(x_TD)
        assert isinstance(routing, Routing)
        with torch.no_grad():
            plan = make_plan(routing, Layout.padded(capacity=capacity))
            seen.append(
                RoutingStatistics.of(
                    routing, plan, previous=free(x_TD), label_T=label_T, num_labels=stream.topics
                )
            )
        if routing.aux_loss is not None:
            w_DE = router.get_parameter("w_DE")
            (slope_DE,) = torch.autograd.grad(routing.aux_loss, w_DE)
            w_DE.data.sub_(LEARNING_RATE * (slope_DE + PULL * (w_DE.data - start_DE)))
        if controller is not None:
            controller.step(Counts.of(routing))
        on_step(step + 1)
    series = {name: [_number(statistics, name) for statistics in seen] for name in SERIES}
    return Track(subject=subject, series=series, seconds=time.perf_counter() - started)


def _number(statistics: RoutingStatistics, name: str) -> float:
    value = getattr(statistics.load if hasattr(statistics.load, name) else statistics, name)
    return float(value)


def _chance(stream: Stream, draws: int = 200) -> float:
    dice = torch.Generator().manual_seed(stream.seed)
    violations = []
    for _ in range(draws):
        expert_TK = torch.rand(stream.T, stream.E, generator=dice).argsort(1)[:, : stream.K]
        count_E = torch.bincount(expert_TK.flatten(), minlength=stream.E)
        violations.append(float(count_E.max() / (stream.T * stream.K / stream.E) - 1))
    return fmean(violations)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _shortened(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _shortened(value) for name, value in document.items()}
    return _short(document) if isinstance(document, float) else document
