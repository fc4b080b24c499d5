"""Whole blocks timed in this process: judged first, then interleaved rounds with a twin of the baseline.

For what does not fit a worker: a decoder block, Transformers' modules, weights read from a checkpoint.
Rounds, statistics and verdicts are those of `mrb bench`; what is missing is the isolation. Contenders are our
own code and Transformers, trusted not to cheat, share one process, and a crash ends the run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.bench.cell import Policy
from moe_routing_bench.bench.clock import HostClock
from moe_routing_bench.bench.verdict import Comparison, aa_floor, compare_cells, stop_reason

TWIN = -1
PART_CALLS = 5  # calls in which the parts inside are timed
FEW = 8  # rounds there always are: results to judge are taken in them
LONG_CALL = 0.05  # seconds; a call this long fills the caches itself, many times over
Tell = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One thing to time: Contender(name="ours", label="sdpa + expert_ffn.native", call=block, parts={...}).

    call       x -> y; never writes to x
    parts      modules inside whose share of the time is wanted; one within another is taken out of it
    missing    why it cannot run here; then there is no call
    """

    name: str
    label: str = ""
    call: Callable[[Any], Tensor] | None = None
    parts: Mapping[str, Sequence[nn.Module]] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a contender. samples: seconds of each round; shares: of the parts, summing to 1.

    difference: the largest from the first contender's result, on the same input.
    """

    contender: Contender
    judged: Verdict | None = None
    difference: float | None = None
    samples: tuple[float, ...] = ()
    comparison: Comparison | None = None
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        return median(self.samples) if self.samples else None

    @property
    def reason(self) -> str:
        if self.contender.missing:
            return self.contender.missing
        return self.judged.sentence if self.judged is not None and not self.judged.passed else ""


@dataclass(frozen=True, kw_only=True)
class Race:
    """All rows in the order given; the first that passed is the baseline of the ratios."""

    rows: tuple[Row, ...]
    rounds: int = 0
    stop_reason: str = "nothing passed its check"
    aa_floor: float | None = None
    checked: int = 0  # results of timed calls that were judged

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.samples), None)


@torch.no_grad()
def race(
    contenders: Sequence[Contender],
    *,
    x_of: Callable[[int], Any],
    judge: Callable[[Tensor, int], Verdict],
    policy: Policy,
    tell: Tell = lambda what, share: None,
    device: str = "cpu",
) -> Race:
    """x_of(n) makes the input of call n, new for every call; judge(y, n) says whether y is right for it."""
    with threads_set(policy.threads):
        return _race(contenders, x_of, judge, policy, tell, HostClock(device))


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _race(
    contenders: Sequence[Contender], x_of: Callable[[int], Any], judge: Callable[[Tensor, int], Verdict],
    policy: Policy, tell: Tell, clock: HostClock,
) -> Race:  # fmt: skip
    rows: dict[int, Row] = {}
    first: Tensor | None = None
    for index, one in enumerate(contenders):
        tell(f"checking {one.name}", 0.2 * index / len(contenders))
        rows[index] = Row(contender=one)
        if one.call is not None:
            y = one.call(x_of(0))
            first = y if first is None else first
            difference = (y.double() - first.double()).abs().max().item() if y.shape == first.shape else None
            rows[index] = replace(rows[index], judged=judge(y, 0), difference=difference)
    alive = [i for i, row in rows.items() if row.judged is not None and row.judged.passed]
    if not alive:
        return Race(rows=tuple(rows.values()))
    calls = {i: _call_of(contenders[i if i != TWIN else alive[0]]) for i in (*alive, TWIN)}
    samples, kept, reason = _rounds(calls, x_of, policy, tell, clock)
    for index, number, y in kept:
        if not (found := judge(y, number)).passed:
            rows[index] = replace(rows[index], judged=found)
            samples.pop(index, None)
    alive = [i for i in alive if i in samples]
    if not alive:
        return Race(rows=tuple(rows.values()), stop_reason="no result of a timed call was right")
    floor = aa_floor(samples[alive[0]], samples[TWIN])
    against = [(samples[alive[0]], samples[i]) for i in alive[1:]]
    compared = dict(zip(alive[1:], compare_cells(against, aa_floor=floor), strict=True))
    for i in alive:
        tell(f"parts of {contenders[i].name}", 0.95)
        shares = part_shares(contenders[i], x_of) if contenders[i].parts else {}
        rows[i] = replace(
            rows[i], samples=tuple(samples[i]), comparison=compared.get(i), shares=shares
        )  # fmt: skip
    return Race(
        rows=tuple(rows.values()),
        rounds=len(samples[TWIN]),
        stop_reason=reason,
        aa_floor=floor,
        checked=sum(index in alive for index, _, _ in kept),
    )


def _rounds(
    calls: Mapping[int, Callable[[Any], Tensor]], x_of: Callable[[int], Any], policy: Policy, tell: Tell,
    clock: HostClock,
) -> tuple[dict[int, list[float]], list[tuple[int, int, Tensor]], str]:  # fmt: skip
    """Seconds by contender, results of timed calls to judge (contender, number, y), and why it stopped."""
    order = random.SystemRandom()
    samples: dict[int, list[float]] = {i: [] for i in calls}
    baseline, *others = (i for i in calls if i != TWIN)
    checks: dict[int, dict[int, int]] = {}  # by contender: in which round the call to be judged
    for i in (baseline, *others):
        rounds = order.sample(range(FEW), min(policy.checked, FEW))
        checks[i] = {done: number for number, done in enumerate(rounds, start=1)}
    kept: list[tuple[int, int, Tensor]] = []
    number, started, reason = 1000, time.perf_counter(), None
    next_look = 0
    while reason is None:
        done = len(samples[TWIN])
        for i in order.sample(list(calls), len(calls)):
            # numbers to be judged are the same for all contenders, each in a round of its own
            at = checks.get(i, {}).get(done, number)
            x, out = x_of(at), _Kept()
            if not samples[i] or samples[i][-1] < LONG_CALL:
                calls[i](x_of(number + 1))  # hot caches: the same code just before
            samples[i].append(clock.span([partial(out.keep, calls[i], x)]))
            if at != number:
                kept.append((i, at, out.value.clone()))  # some use their result's memory again
            number += 2
        seconds = time.perf_counter() - started
        tell("rounds", 0.2 + 0.75 * min(1.0, max(seconds / policy.max_seconds, done / policy.max_rounds)))
        late = seconds >= policy.max_seconds
        # as in rounds.py: fewer rounds could not decide whatever they showed
        fewest = math.ceil(math.log2(200 * max(1, len(others))))
        if done + 1 < (min(fewest, policy.max_rounds) if late else policy.min_rounds):
            continue
        if done + 1 < next_look and not late and done + 1 < policy.max_rounds:
            continue
        next_look = int(1.2 * (done + 1)) + 1
        reasons = [
            stop_reason(
                samples[baseline], samples[i], target=policy.target, min_rounds=policy.min_rounds,
                max_rounds=policy.max_rounds, seconds=seconds, max_seconds=policy.max_seconds,
            )
            for i in (others or [TWIN])
        ]  # fmt: skip
        reason = None if None in reasons else reasons[-1]
    return samples, kept, reason


@torch.no_grad()
def part_shares(one: Contender, x_of: Callable[[int], Any]) -> dict[str, float]:
    """The share of each part, and the rest, over a few calls; modules are timed by hooks around them."""
    call, clock = _call_of(one), HostClock()
    spent: dict[str, float] = dict.fromkeys(one.parts, 0.0)
    open_parts: list[tuple[str, float]] = []
    handles: list[Any] = []

    def enter(name: str) -> None:
        if open_parts:  # time inside an inner part is not the outer one's
            spent[open_parts[-1][0]] += time.perf_counter() - open_parts[-1][1]
        open_parts.append((name, time.perf_counter()))

    def leave(name: str) -> None:
        _, since = open_parts.pop()
        spent[name] += time.perf_counter() - since
        if open_parts:
            open_parts[-1] = (open_parts[-1][0], time.perf_counter())

    whole = 0.0
    try:
        for name, modules in one.parts.items():
            for module in modules:
                handles.append(module.register_forward_pre_hook(lambda m, a, name=name: enter(name)))
                handles.append(module.register_forward_hook(lambda m, a, y, name=name: leave(name)))
        for n in range(PART_CALLS):
            whole += clock.span([partial(call, x_of(900 + n))])
    finally:
        for handle in handles:
            handle.remove()
    return {
        **{name: seconds / whole for name, seconds in spent.items()},
        "rest": max(0.0, 1 - sum(spent.values()) / whole),
    }


class _Kept:
    """The result of a timed call."""

    value: Tensor

    def keep(self, call: Callable[[Any], Tensor], x: Any) -> None:
        self.value = call(x)


def _call_of(one: Contender) -> Callable[[Any], Tensor]:
    assert one.call is not None
    return one.call
