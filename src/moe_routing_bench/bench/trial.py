"""Tries each subject by itself: are its results right, does it behave, is its clock honest?

Only subjects that pass take part in the rounds. Code from outside is tried in a process of its own. Our own
implementations are tried one after another in one process, which then measures them too: making weights,
packing them and importing libraries happens once.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.messages import Calibrated, Called, Described, KitRun, Loaded
from moe_routing_bench.bench.hosts.shared import Reuse, SharedHost, audit, check_call, check_threads
from moe_routing_bench.bench.hosts.shared_worker import MAX_CALLS
from moe_routing_bench.bench.identity import folders_of
from moe_routing_bench.bench.kit import PassedKits
from moe_routing_bench.bench.loaded import not_in_the_key
from moe_routing_bench.bench.setup import GATE_CALLS, PATIENCE, Numbers, Setup, Trial
from moe_routing_bench.bench.spans.span import ranked, span_named
from moe_routing_bench.bench.status import Status, SubjectError
from moe_routing_bench.bench.untrusted import read_file
from moe_routing_bench.core.fork_server import server_harm
from moe_routing_bench.workloads.experiment import LONG_CALL, ImplementationRef


class OutOfTimeError(SubjectError):
    """Its trial took too long; its process has answered everything and can go on."""

    def __init__(self, reason: str):
        super().__init__(Status.NO_TIME, reason)


def try_alone(shared: SharedHost, subject: ImplementationRef) -> Trial:
    """shared: the host of our own code"""
    setup, outside = shared.setup, subject in shared.setup.outside
    host = SharedHost(setup, (subject,)) if outside else shared
    about = Described(label=subject.text)
    seen: dict[str, Any] = {}
    child, harmless = None, True
    try:
        if outside and ranked(setup.experiment):
            raise SubjectError(Status.UNSUPPORTED, "on several ranks code from outside is not measured")
        if host.harm():
            host.end()
        child, place = host.child, host.place(subject)
        child.begin_watch()
        about = child.ask("describe", Described, subject=place)
        if outside:  # what it is called and where it comes from is not for itself to say
            origin = "; ".join(sorted(set(span_named(setup.experiment.span).origins(subject.name))))
            about = about.model_copy(update={"label": subject.name, "origin": origin})
        kits, source = PassedKits(setup.experiment, outside=outside), setup.sources.get(subject, "")
        known = bool(source) and kits.knows(subject, source)
        shortest = _gate(child, place, subject, setup, shared.reuse, about, outside, seen)
        if outside or not known:  # sums over all the weights take a while; the rounds end with one
            host.check_weights()
        if outside or shortest < LONG_CALL:
            seen["calls"], seen["call_seconds"] = _calibrate(child, place, Numbers(), outside)
        else:
            seen["calls"], seen["call_seconds"] = 1, shortest
        seen["peak_rss_bytes"] = child.peak_bytes()
        child.called.add(place)
        if not known:
            with setup.budget.paused() if setup.budget.kit_apart else nullcontext():
                answer = child.ask("kit", KitRun, subject=place)
            check_kit(answer)
            if source:
                kits.add(subject, source)
        if outside or setup.experiment.include:
            _check_loaded(child, subject, setup)
        if not (outside and setup.can_freeze):  # what is frozen between turns may have threads that wait
            check_threads(child)
        if (touched := setup.watch()) is not None:
            raise SubjectError(Status.SUSPECT, touched)
        if outside and (harm := shared.harm() or server_harm()):
            reason = f"the process of other implementations {harm} while it was running"
            raise SubjectError(Status.SUSPECT, reason)
        seen["checks"] = _checks(subject, about, setup)
        status, reason = Status.PASSED, ""
    except SubjectError as failure:
        status, reason = failure.status, failure.reason
        harmless = isinstance(failure, OutOfTimeError) or status is Status.UNSUPPORTED
    if child is not None:
        seen.setdefault("peak_rss_bytes", child.peak_bytes())
        seen["log_tail"] = child.log_tail()
    if outside or not harmless:
        host.end()
    return Trial(status=status, reason=reason, about=about, **seen)


def _gate(
    child: Child, place: int, subject: ImplementationRef, setup: Setup, reuse: Reuse, about: Described,
    outside: bool, seen: dict[str, Any],
) -> float:  # fmt: skip
    """Checks results on two inputs, the first twice, and that inputs, weights and settings are unchanged.
    Returns the seconds of the shortest call."""
    judge, began, shortest, before = setup.judge, setup.budget.used, math.inf, ""
    first, second = GATE_CALLS
    calls = (("first", first, False), ("second", second, True), ("again", first, True))
    for name, (number, step), poison in calls:
        if (used := setup.budget.used - began) > PATIENCE * setup.budget.seconds and place:
            raise OutOfTimeError(
                f"its trial took {used:.0f} s, {seen['first_call']:.2g} s of it for one call; "
                "--seconds gives more time"
            )
        warm = name == "again" or (name == "second" and subject in reuse.call_seconds)
        if warm and setup.too_slow(shortest):
            seen["call_seconds"] = shortest
            raise OutOfTimeError(slow_reason(shortest, setup))
        answer = child.ask(
            "gate", Called, subject=place, number=number, step=step, poison=poison, name=name, then=outside
        )
        if answer.unsupported is not None:
            raise SubjectError(Status.UNSUPPORTED, answer.unsupported)
        shortest = min(shortest, answer.seconds)
        verdict = check_call(
            child, judge, answer, name=name, number=number, step=step, subject=subject, ties=about.ties
        )
        if not seen:
            seen |= {"verdict": verdict, "first_call": answer.seconds, "runs": answer.runs}
        if answer.aliases:
            raise SubjectError(Status.WRONG_STRUCTURE, "its result shares memory with an input")
        if answer.changed:
            changed = ", ".join(answer.changed)
            raise SubjectError(Status.SUSPECT, f"it changed {changed} for everybody in its process")
        earlier = name if outside else before
        if (
            earlier
            and not about.reuses_output
            and not _same_files(child.file(earlier), child.file(f"{earlier}-later"))
        ):
            raise SubjectError(Status.WRONG_VALUE, "the next call overwrote an earlier result")
        before = name
    files = child.file("first"), child.file("again")
    number, step = first
    if about.deterministic and not judge.same_bits(*files, number=number, step=step, subject=subject):
        raise SubjectError(Status.NONDETERMINISTIC, "a second run on the same input gave other bits")
    return shortest


def _checks(subject: ImplementationRef, about: Described, setup: Setup) -> tuple[str, ...]:
    """What a subject that passed was checked for, here and in the rounds."""
    span, outside = span_named(setup.experiment.span), subject in setup.outside
    timed_by_parent = outside and setup.can_freeze
    ran = {
        "right on two inputs": True,
        "right on the kit's hard cases": bool(span.named(subject.name)),
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
    """The hard cases of `mrb check`."""
    if answer.failed:
        cases = answer.passed + answer.failed
        reason = f"it fails {answer.failed} of {cases} hard cases (`mrb check`): {answer.first}"
        raise SubjectError(Status.WRONG_VALUE, reason)


def _check_loaded(child: Child, subject: ImplementationRef, setup: Setup) -> None:
    """All that its results hang on is in the resume key, or there is no time."""
    files = child.ask("loaded", Loaded).files
    folders = folders_of(span_named(setup.experiment.span), subject, setup.judge.inputs)
    if strange := not_in_the_key(files, setup.experiment, folders):
        raise SubjectError(
            Status.SUSPECT,
            f"it loaded {strange[0]}, which is not in the folder of --include-path: a change there would go "
            "unnoticed. Put it into the folder, under a name without a dot in front",
        )


def _same_files(one: Path, other: Path) -> bool:
    """Of two results, the first of which is judged: so its length is known to be reasonable."""
    try:
        first = read_file(one, sys.maxsize)
        return first == read_file(other, len(first))
    except ValueError:
        return False


def _calibrate(child: Child, place: int, numbers: Numbers, outside: bool) -> tuple[int, float]:
    """Calls per sample and seconds per call; SubjectError if the child's clock and ours disagree."""
    first = numbers.take(4 * MAX_CALLS)
    calls = child.ask("calibrate", Calibrated, subject=place, first=first).calls

    def sample() -> float:
        first = numbers.take(calls)
        timed, _ = child.sample(subject=place, first=first, step=0, calls=calls, keep=-1)
        return timed.seconds / calls

    short = min(sample(), sample())  # a single one may have been interrupted
    return calls, audit(child, place, short, numbers) if outside else short
