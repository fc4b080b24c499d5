"""Compiles the GPU kernels of some experiments before any clock starts, several processes at a time.

Each process makes one call of every implementation, in the worker that measures it, and runs its kit. What
it compiles stays in the caches of Triton and QuACK on disk; a kit that passed is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock

from moe_routing_bench.bench.hosts import shared_worker
from moe_routing_bench.bench.hosts.children import Child
from moe_routing_bench.bench.hosts.messages import Described, KitRun
from moe_routing_bench.bench.identity import identify
from moe_routing_bench.bench.kit import PassedKits
from moe_routing_bench.bench.spans.span import is_ours, span_named
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.trial import check_kit
from moe_routing_bench.core.fork_server import start_server
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.workloads.experiment import WORKLOAD, Experiment

MANY_BYTES = 2 * 2**30  # of weights: such layers are taken one at a time, because all processes share the GPU
_starting = Lock()  # the fork server takes one request at a time


def warm(experiments: Sequence[Experiment], jobs: int, say: Callable[[str], None]) -> list[str]:
    """Returns a sentence for each implementation that failed. Those that cannot run here are no failure."""
    start_server()
    # routings change no kernel
    sizes = list(
        dict.fromkeys(replace(e, case="", scaled_from="", workload=WORKLOAD, seed=0) for e in experiments)
    )
    small = [one for one in sizes if one.held_bytes <= MANY_BYTES]
    failed: list[str] = []
    for some, at_once in ((small, jobs), ([one for one in sizes if one not in small], 1)):
        with ThreadPoolExecutor(at_once) as pool:
            for done, sentences in enumerate(pool.map(_warm_one, some), 1):
                failed += sentences
                say(f"compiled for {done} of {len(some)} sizes, {at_once} at a time")
    return failed


def _warm_one(experiment: Experiment) -> list[str]:
    span = span_named(experiment.span)
    ours = tuple(one for one in experiment.implementations if all(map(is_ours, span.origins(one.name))))
    experiment = replace(experiment, implementations=ours)
    return [f"{experiment.title}: {sentence}" for sentence in _failures(experiment)]


def _failures(experiment: Experiment) -> Iterator[str]:
    sources = identify(experiment, this_machine()).sources
    kits = PassedKits(experiment, outside=False)
    child: Child | None = None
    for place, one in enumerate(experiment.implementations):
        try:
            if child is None:
                with _starting:
                    child = Child(experiment, (), shared_worker.serve)
                child.ready()
            child.ask("describe", Described, place=place)
            call = partial(child.sample, place=place, first=0, step=0, calls=1, keep=0, poison=False)
            call(warm=False)
            if not kits.knows(one, sources[one]):
                check_kit(child.ask("kit", KitRun, place=place, name=""))
                with _starting:
                    kits.add(one, sources[one])
        except ImplementationError as failure:
            if failure.status is Status.UNSUPPORTED:
                continue
            yield f"{one.text} is {failure.status}: {failure.reason}"
            if child is not None:  # it may have spoiled its process
                child.close()
                child = None
    if child is not None:
        child.close()
