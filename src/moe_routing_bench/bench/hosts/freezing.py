"""Reads what the system knows about a process (threads, children, CPU time), and ends what is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FREEZE_SECONDS = 10.0


class GoneError(Exception):
    """The process has ended."""


def _state(pid: int, tid: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:  # noqa: PTH123  # a tenth of Path's time
            return file.read().rpartition(b")")[2].split(maxsplit=1)[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads so far, also of those that ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(pid) gives
    except OSError:
        return 0.0


def family(pid: int) -> set[int]:
    """Returns the processes that this one started, and those that they started."""
    members: set[int] = set()
    waiting = [pid]
    while waiting:
        new = set(_children(waiting.pop())) - members
        members |= new
        waiting += new
    return members


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def faults_of_ended_children(pid: int) -> int:
    """Returns the page faults of children that have ended. If the number grew, a child has run and ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[8])
    except (OSError, IndexError, ValueError):
        return 0


def adopt_orphans() -> None:
    """Makes orphans among the descendants children of this process, which can then see and end them."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end(pids: set[int]) -> None:
    """Returns when none of them runs any more."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + FREEZE_SECONDS
    while not all(map(_has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(1e-4)


def _has_ended(pid: int) -> bool:
    """True if the process has ended, even if its parent has not asked how. A process whose first thread has
    ended may have other threads."""
    try:
        return all(_state(pid, tid) in "ZX" for tid in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except (FileNotFoundError, ProcessLookupError):
        return True


class Strangers:
    """Processes that workers left behind.

    server: the process that starts the workers and adopts their orphans (adopting.py)
    """

    def __init__(self, server: int) -> None:
        self.server, self.known = server, family(server)

    def end(self) -> int:
        """End all of them; how many there were."""
        here = os.getsid(0)  # workers have sessions of their own, and nobody can join another's
        ours = {process.pid for process in multiprocessing.active_children()}  # some may be newer
        new = family(self.server) - self.known - ours
        strangers = {pid for pid in new if _session(pid) != here and not _has_ended(pid)}
        end(strangers)
        return len(strangers)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return os.getsid(0)
