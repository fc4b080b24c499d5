"""Stop and wake a process, and what the system knows about it: threads, children, CPU time.

SIGSTOP cannot be caught or refused. A process is frozen when the system shows every thread of it as stopped;
processes it started are not frozen but ended, since no kernel may leave any.
"""

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
    """The process is no more."""


def freeze(pid: int) -> None:
    """Stop all threads of a process, and return only when they stand still."""
    try:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + FREEZE_SECONDS
        while not all(_state(pid, tid) in "TZX" for tid in os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
            if time.monotonic() > deadline:
                raise TimeoutError(f"its threads did not stop within {FREEZE_SECONDS:g} s")
            time.sleep(1e-5)  # this process may be on the very core that they need to stop
        if _state(pid, str(pid)) != "T":
            raise GoneError
    except (ProcessLookupError, FileNotFoundError):
        raise GoneError from None


def thaw(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


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
    """Processes that this one started, and theirs."""
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
    """Page faults of children that ended and were waited for: more than before means that there was one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[8])
    except (OSError, IndexError, ValueError):
        return 0


def adopt_orphans() -> None:
    """Make orphans among the descendants children of this process, where they can be seen and ended."""
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
    """Also if its parent has not asked how. A process whose first thread has ended may have others."""
    try:
        return all(_state(pid, tid) in "ZX" for tid in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except (FileNotFoundError, ProcessLookupError):
        return True


class Strangers:
    """Processes that workers left behind, wherever they hid.

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
