"""The fork server of this process, which starts workers, checks of code from outside and training runs.

It has imported torch, so a process starts in 20 ms instead of 2 s. It adopts what workers leave behind
(outside/adopting.py). Python has one such server in a process, and only what is named before it starts is
imported. So it is set up here alone.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver as forkserver
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from types import ModuleType

PRELOAD = tuple(f"moe_routing_bench.bench.{name}" for name in ("outside.adopting", "worker", "outside.serve"))


def fork_server(*more: str) -> ForkServerContext:
    """Starts processes. more: modules that the server imports too, unless it runs already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *more])
    return context


def start_server() -> None:
    """Start importing torch for the workers now, beside what this process does before it needs one."""
    fork_server()
    with without_main_module():
        forkserver.ensure_running()


def server_pid() -> int:
    start_server()
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


@contextmanager
def without_main_module() -> Iterator[None]:
    """Keeps multiprocessing from importing the parent's main module in every worker: that takes seconds, and
    a script without a guard would run twice. Workers do not need it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
