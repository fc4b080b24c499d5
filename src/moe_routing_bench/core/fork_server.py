"""The fork server of this process, which starts workers, checks of code from outside and training runs.

It has imported torch, so a process starts in 20 ms instead of 2 s. It adopts what workers leave behind
(hosts/adopting.py). Python has one such server in a process, and only what is named before it starts is
imported. So it is set up here alone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

OTHER_SETTINGS = "was given other cores or another priority"
PRELOAD = tuple(
    f"moe_routing_bench.bench.hosts.{name}" for name in ("adopting", "shared_worker", "isolated_worker")
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the system runs a process: Settings(cores=frozenset({1}), priority=0, scheduler=0)."""

    cores: frozenset[int]
    priority: int
    scheduler: int

    def fits(self, expected: Settings) -> bool:
        """OpenMP may bind a process to some of its cores, if the user has asked for that."""
        return self.cores <= expected.cores and replace(self, cores=expected.cores) == expected


_begun_with: dict[int, Settings | None] = {}  # of a server before anything ran, by its process id


def fork_server(*more: str) -> ForkServerContext:
    """Starts processes. more: modules that the server imports too, unless it runs already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *more])
    return context


def start_server(*more: str) -> None:
    """Start importing torch for the workers now, beside what this process does before it needs one. more:
    modules that they will want too; absent ones are passed over."""
    server_pid(*more)


def server_pid(*more: str) -> int:
    """The process id of the server, which is started if there is none."""
    fork_server(*more)
    with without_main_module():
        forkserver.ensure_running()
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    _begun_with.setdefault(pid, settings_of(pid))
    return pid


def settings_of(pid: int) -> Settings | None:
    """None if it has ended, or if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        cores, priority = os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid)
        return Settings(cores=frozenset(cores), priority=priority, scheduler=os.sched_getscheduler(pid))
    except ProcessLookupError:
        return None


def expected_settings(cores: tuple[int, ...]) -> Settings | None:
    """Returns the settings that a worker on these cores must have: the rest is what the server began with."""
    usual = _begun_with[server_pid()]
    return usual if usual is None or not cores else replace(usual, cores=frozenset(cores))


def server_harm() -> str:
    """Says what somebody did to the server, and undoes it if this process may. Empty if nothing."""
    pid = server_pid()
    usual, now = _begun_with[pid], settings_of(pid)
    if usual is None or now is None or now.fits(usual):
        return ""
    with suppress(OSError):  # not allowed: then the next worker says that it began with these settings
        os.sched_setaffinity(pid, usual.cores)
        os.sched_setscheduler(pid, usual.scheduler, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, usual.priority)
    return OTHER_SETTINGS


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


def settle(scratch: Path, keep: Collection[int]) -> None:
    """Gives this child process its own group and the log `scratch`/log, and makes it die with its parent.

    It closes all other files but `keep`, so that kernels cannot write to those of the server.
    """
    os.setsid()
    if sys.platform == "linux":
        for fd in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
            if fd > 2 and fd not in keep:
                with suppress(OSError):
                    os.close(fd)
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
