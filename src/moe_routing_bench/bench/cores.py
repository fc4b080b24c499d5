"""Counts the cores to measure on and finds those that are idle now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from moe_routing_bench.core.machine import torch_threads

BUSY = 50.0  # per cent of the last moment that others used a core
LOOK_SECONDS = 0.2


def core_count() -> int:
    """Returns the number of physical cores this process may use. Two threads on one core share its units."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def idle_count() -> int:
    """Returns how many cores are idle now, at least 1. If one thread runs on a busy core, all threads wait
    for it at the end of every loop, and calls become up to fifty times slower."""
    busy = sum(share > BUSY for share in psutil.cpu_percent(LOOK_SECONDS, percpu=True))
    return max(1, core_count() - busy)


def quiet_cores(threads: int) -> tuple[int, ...]:
    """Returns the least busy cores, one for each thread; empty if the system cannot pin threads to cores."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = os.sched_getaffinity(0)
    busy = dict(enumerate(psutil.cpu_percent(LOOK_SECONDS, percpu=True)))
    return tuple(sorted(sorted(allowed, key=lambda core: (busy.get(core, 0.0), -core))[:threads]))


@contextmanager
def judging_threads() -> Iterator[None]:
    """Lets the oracle in this process use no more threads than there are idle cores."""
    with torch_threads(min(torch.get_num_threads(), idle_count())):
        yield
