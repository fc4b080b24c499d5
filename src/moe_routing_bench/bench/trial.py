"""Checks each implementation alone before timing: right results, no forbidden behaviour, an honest clock.

Only implementations that pass take part in the rounds. Code from outside is tried in a process of its own.
Our own implementations are tried one after another in one process, which then measures them too: making
weights, packing them and importing libraries happens once.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

from moe_routing_bench.bench.hosts.host import Host, Judged, Turn
from moe_routing_bench.bench.hosts.messages import Described, KitRun
from moe_routing_bench.bench.hosts.shared import Reuse, SharedHost
from moe_routing_bench.bench.identity import folders_of
from moe_routing_bench.bench.kit import PassedKits
from moe_routing_bench.bench.loaded import not_in_the_key
from moe_routing_bench.bench.series import Series
from moe_routing_bench.bench.setup import GATE_CALLS, PATIENCE, Numbers, Setup, Trial
from moe_routing_bench.bench.spans.span import ranked, span_named
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.core.fork_server import server_harm
from moe_routing_bench.workloads.experiment import LONG_CALL, ImplementationRef

# five thousand steps of the timer. Longer samples are no better: noise comes in bursts of many milliseconds,
# so in the same time, samples of 16 calls give twice the variance of 1 to 4 (calls of 0.3 ms)
SAMPLE_SECONDS = 5e-4


class OutOfTimeError(ImplementationError):
    """The trial took too long. The process has answered everything and can go on."""

    def __init__(self, reason: str):
        super().__init__(Status.NO_TIME, reason)


def try_alone(shared: SharedHost, implementation: ImplementationRef) -> Trial:
    """Tries one implementation. `shared` is the host of our own code."""
    setup, outside = shared.setup, implementation in shared.setup.outside
    host = SharedHost(setup, (implementation,)) if outside else shared
    series = Series("candidate", implementation)
    about = Described(label=implementation.text)
    seen: dict[str, Any] = {}
    harmless = True
    try:
        if outside and ranked(setup.experiment):
            raise ImplementationError(
                Status.UNSUPPORTED, "on several ranks code from outside is not measured"
            )
        if host.harm():
            host.end()
        about = host.describe(implementation)
        if outside:  # it does not decide its own name and origin
            origin = "; ".join(sorted(set(span_named(setup.experiment.span).origins(implementation.name))))
            about = about.model_copy(update={"label": implementation.name, "origin": origin})
        setup.described[implementation] = about
        kits, source = PassedKits(setup.experiment, outside=outside), setup.sources.get(implementation, "")
        known = bool(source) and kits.knows(implementation, source)
        shortest = _first_calls(host, series, shared.reuse, outside, seen)
        if outside or not known:  # summing all weights takes a while, and the rounds end with it
            host.check_weights()
        if outside or shortest < LONG_CALL:
            most = (
                1 if setup.experiment.cache != "hot" else host.max_calls
            )  # caches are cold for the first call only
            seen["calls"], short = calibrate(host, series, setup.numbers, most)
            seen["call_seconds"] = host.audit(series, short) if outside else short
        else:
            seen["calls"], seen["call_seconds"] = 1, shortest
        seen["peak_rss_bytes"], _ = host.memory_and_log()
        if not known:
            apart = setup.budget.kit_apart
            with setup.budget.paused() if apart or setup.compiles(implementation) else nullcontext():
                answer = host.kit(implementation)
            check_kit(answer)
            if source:
                kits.add(implementation, source)
        if outside or setup.experiment.include:
            _check_loaded(host.loaded(), implementation, setup)
        if not (outside and setup.can_freeze):  # a frozen process may have threads that wait
            host.check_threads()
        if others := host.left_running():
            raise ImplementationError(Status.SUSPECT, f"it left {others} processes running")
        if (touched := setup.watch()) is not None:
            raise ImplementationError(Status.SUSPECT, touched)
        if outside and (harm := shared.harm() or server_harm()):
            reason = f"the process of other implementations {harm} while it was running"
            raise ImplementationError(Status.SUSPECT, reason)
        seen["checks"] = _checks(implementation, about, setup)
        status, reason = Status.PASSED, ""
    except ImplementationError as failure:
        status, reason = failure.status, failure.reason
        harmless = isinstance(failure, OutOfTimeError) or status is Status.UNSUPPORTED
    peak_rss_bytes, seen["log_tail"] = host.memory_and_log()
    seen.setdefault("peak_rss_bytes", peak_rss_bytes)
    if outside or not harmless:
        host.end()
    return Trial(status=status, reason=reason, about=about, **seen)


def _first_calls(
    host: SharedHost, series: Series, reuse: Reuse, outside: bool, seen: dict[str, Any]
) -> float:
    """Judges calls on two inputs, the first one twice, and returns the seconds of the shortest call."""
    setup, implementation = host.setup, series.implementation
    began, shortest = setup.budget.used, math.inf
    # torch.compile compiles again for a poisoned call, because that changes torch's settings
    compiles = not outside and setup.about(implementation).compiles
    first, second = GATE_CALLS
    calls = [("first", first, False), ("second", second, True), ("again" if outside else "", first, True)]
    if outside:  # a call must follow each judged one
        calls.append(("", second, False))
    judged: list[Judged] = []
    for place, (name, (number, step), poison) in enumerate(calls):
        used = setup.budget.used - began
        if used > PATIENCE * setup.budget.seconds and host.place(implementation):
            raise OutOfTimeError(
                f"its trial took {used:.0f} s, {seen['first_call']:.2g} s of it for one call; "
                "--seconds gives more time"
            )
        warm = place > 1 or (place == 1 and implementation in reuse.call_seconds)
        if warm and not compiles and setup.too_slow(shortest):
            seen["call_seconds"] = shortest
            raise OutOfTimeError(slow_reason(shortest, setup))
        turn = Turn(series=series, first=number, step=step, keep=0, hot=False, poison=poison, name=name)
        with setup.budget.paused() if place <= compiles and setup.compiles(implementation) else nullcontext():
            seconds = host.sample(turn).seconds
        shortest = seconds if compiles else min(shortest, seconds)
        judged.append(host.judge(turn))
        if place == 0:
            seen |= {"verdict": judged[0].verdict, "first_call": seconds, "runs": judged[0].runs}
    number, step = first
    files = judged[0].file, judged[2].file
    deterministic = setup.about(implementation).deterministic
    if deterministic and not setup.judge.same_bits(
        *files, number=number, step=step, implementation=implementation
    ):
        raise ImplementationError(Status.NONDETERMINISTIC, "a second run on the same input gave other bits")
    return shortest


def calibrate(host: Host, series: Series, numbers: Numbers, most: int) -> tuple[int, float]:
    """Doubles the calls of a sample, up to `most`, until the sample is long enough for the clock. Returns the
    calls and the seconds of one call. It takes the better of two samples, so that a single interruption does
    not count as a slow call."""

    def shorter(calls: int) -> float:
        turns = [Turn(series=series, first=numbers.take(calls), calls=calls) for _ in range(2)]
        return min(host.sample(turn).seconds for turn in turns)

    calls, seconds = 1, shorter(1)
    while calls * seconds < SAMPLE_SECONDS and calls < most:
        calls = min(2 * calls, most)
        seconds = shorter(calls)
    return calls, seconds


def _checks(implementation: ImplementationRef, about: Described, setup: Setup) -> tuple[str, ...]:
    """Lists what an implementation that passed was checked for, here and in the rounds."""
    span, outside = span_named(setup.experiment.span), implementation in setup.outside
    timed_by_parent = outside and setup.can_freeze
    ran = {
        "right on two inputs": True,
        "right on the kit's hard cases": bool(span.named(implementation.name)),
        "memory poisoned": True,
        "inputs unchanged": True,
        "weights unchanged": span.weights and not ranked(setup.experiment),
        "same bits twice": about.deterministic,
        "earlier results left alone": not about.reuses_output,
        "no threads left": not timed_by_parent,
        "no more cores than threads": timed_by_parent,
        "no processes left": timed_by_parent,
        "torch's settings left alone": True,
        "time agrees with the parent's clock": outside,
    }
    return tuple(name for name, did in ran.items() if did)


def slow_reason(call_seconds: float, setup: Setup) -> str:
    return (
        f"a call takes {call_seconds:.2g} s, {call_seconds / setup.best_seconds:.0f} times the best; "
        "its rounds would take the time of the others; --seconds gives more"
    )


def check_kit(answer: KitRun) -> None:
    """ImplementationError if it fails hard cases of `mrb check`."""
    if answer.failed:
        cases = answer.passed + answer.failed
        reason = f"it fails {answer.failed} of {cases} hard cases (`mrb check`): {answer.first}"
        raise ImplementationError(Status.WRONG_VALUE, reason)


def _check_loaded(files: tuple[str, ...], implementation: ImplementationRef, setup: Setup) -> None:
    """ImplementationError if it loaded a file that is not in the resume key: a change there would go
    unnoticed."""
    folders = folders_of(span_named(setup.experiment.span), implementation, setup.judge.inputs)
    if strange := not_in_the_key(files, setup.experiment, folders):
        raise ImplementationError(
            Status.SUSPECT,
            f"it loaded {strange[0]}, which is not in the folder of --include-path: a change there would go "
            "unnoticed. Put it into the folder, under a name without a dot in front",
        )
