"""Tree: a child process with all threads and processes that come of it, held by ptrace from before its first
line of code from outside.

PTRACE_SEIZE needs no privilege for one's own descendants. What a held process starts is held too, before it
has run, whoever its parent is; a process in a ptrace stop runs again only when its tracer says so, whatever
signals and timers wake it; and all of them end when this process ends, also by SIGKILL. The system asks the
tracer about every signal and every new thread, so somebody must `serve` while the child runs.

ptrace belongs to a thread: the one that made the Tree stops and resumes it. Any thread may end it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from weakref import WeakSet

from moe_routing_bench.bench.hosts.freezing import FREEZE_SECONDS, GoneError

CONT, GETEVENTMSG, SEIZE, INTERRUPT = 7, 0x4201, 0x4206, 0x4207
FORK, VFORK, CLONE, STOP = 1, 2, 3, 128  # events
OPTIONS = 1 << FORK | 1 << VFORK | 1 << CLONE | 1 << 20  # the last: kill them when the tracer ends
WNOHANG, WALL = 1, 0x40000000
JOB_CONTROL = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_trees: WeakSet[Tree] = WeakSet()  # that are to stop, or were


@cache
def _watch() -> threading.Thread:
    """One thread for all trees: whoever stops a tree waits for it, and cannot look at the time."""

    def run() -> None:
        while True:
            time.sleep(1.0)
            for tree in tuple(_trees):
                tree.kill_if_late()

    thread = threading.Thread(target=run, name="mrb-holding", daemon=True)
    thread.start()
    return thread


def _watch_over(tree: Tree) -> None:
    _trees.add(tree)
    _watch()


@cache
def _calls() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    return libc.ptrace, libc.waitpid


def _ptrace(request: int, tid: int, data: int | ctypes.Array[ctypes.c_ulong] = 0) -> bool:
    """False if there is no such thread, or it is not in a stop."""
    given = ctypes.addressof(data) if isinstance(data, ctypes.Array) else data
    if _calls()[0](request, tid, None, given) == 0:
        return True
    if (code := ctypes.get_errno()) != errno.ESRCH:
        raise OSError(code, os.strerror(code))
    return False


class Tree:
    """tree = Tree(pid); tree.stop(); tree.watch(); tree.has_moved(); tree.resume(); tree.serve()"""

    def __init__(self, pid: int):
        self.pid = pid
        self._running: set[int] = set()  # threads of all processes
        self._stopped: dict[int, int] = {}  # thread: the signal it gets when it goes on, 0 for none
        self._still: dict[int, tuple[bytes, ...]] = {}
        self._leaders: dict[int, int] = {}  # the process of each thread
        self._stopping, self._deadline = False, math.inf
        if not _ptrace(SEIZE, pid, OPTIONS):
            raise GoneError
        self._running.add(pid)

    @property
    def threads(self) -> set[int]:
        return self._running | self._stopped.keys()

    def serve(self) -> bool:
        """Handle what the system asks about: was there anything? Never waits."""
        ever = False
        while any([self._heard(tid) for tid in tuple(self._running)]):
            ever = True
        return ever

    def stop(self) -> None:
        """Returns when no thread of any process can run."""
        self._stopping, self._deadline = True, time.monotonic() + FREEZE_SECONDS
        _watch_over(self)
        for tid in tuple(self._running):
            _ptrace(INTERRUPT, tid)
        while self._running:  # also those born in between, which stop before they run
            for tid in tuple(self._running):
                self._heard(tid, wait=True)
        late, self._deadline = time.monotonic() > self._deadline, math.inf
        if late:
            raise TimeoutError(f"its threads did not stop within {FREEZE_SECONDS:g} s")
        if self.pid not in self._stopped:
            raise GoneError

    def resume(self) -> None:
        self._stopping = False
        stopped, self._stopped = self._stopped, {}
        for tid, number in stopped.items():
            self._go_on(tid, number)

    def watch(self) -> None:
        """From here on, until it is resumed, no thread may run."""
        for tid in self._stopped:
            _ptrace(GETEVENTMSG, tid, (ctypes.c_ulong * 1)())  # returns when it has left its core
        self._still = {tid: _counted(tid) for tid in self._stopped}

    def has_moved(self) -> bool:
        """Has the system counted CPU time of a thread, or a switch to it, since `watch`?"""
        return any(_counted(tid) != before for tid, before in self._still.items())

    def others(self) -> int:
        """How many processes there are besides the child."""
        self._leaders |= {tid: _leader(tid) for tid in self.threads - self._leaders.keys()}
        return len({self._leaders[tid] for tid in self.threads} - {self.pid, 0})

    def end(self) -> None:
        """Kill all of them, and return when there is none."""
        self._stopping = False
        deadline = time.monotonic() + FREEZE_SECONDS
        self._running |= self._stopped.keys()
        self._stopped = {}
        while self._running and time.monotonic() < deadline:
            self.kill()
            self.serve()
            time.sleep(1e-4)

    def kill(self) -> None:
        for tid in tuple(self._running):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(tid, signal.SIGKILL)

    def kill_if_late(self) -> None:
        """What does not stop is killed, so that nobody waits for it any longer."""
        if time.monotonic() > self._deadline:
            self.kill()

    def _heard(self, tid: int, *, wait: bool = False) -> bool:
        """Takes a report of a thread, if there is one. What reports goes on, unless all shall stop."""
        status = ctypes.c_int()
        found = _calls()[1](tid, ctypes.byref(status), WALL if wait else WALL | WNOHANG)
        if found == 0 or (found < 0 and ctypes.get_errno() == errno.EINTR):
            return False
        value = status.value
        if found < 0 or value & 0x7F != 0x7F:  # it is gone, or another thread of its process called exec
            self._running.discard(tid)
            return True
        number, event = value >> 8 & 0xFF, value >> 16
        if event in (FORK, VFORK, CLONE):
            born = (ctypes.c_ulong * 1)()
            if _ptrace(GETEVENTMSG, tid, born):
                self._running.add(int(born[0]))
        # a signal is handed on, but nobody stops what is held but its holder
        handed = 0 if event or number in JOB_CONTROL else number
        if self._stopping:
            self._running.discard(tid)
            self._stopped[tid] = handed
        else:
            self._go_on(tid, handed)
        return True

    def _go_on(self, tid: int, number: int) -> None:
        self._running.add(tid)
        _ptrace(CONT, tid, number)  # if it is gone, its end is heard of next


def _counted(tid: int) -> tuple[bytes, ...]:
    """CPU time and how often it was switched to."""
    try:
        with open(f"/proc/{tid}/schedstat", "rb") as file:  # noqa: PTH123  # a tenth of Path's time
            ran, _, switches = file.read().split()
            return ran, switches
    except FileNotFoundError:  # the system does not count so finely
        return tuple(re.findall(rb"ctxt_switches:\s+(\d+)", _status(tid)))


def _status(tid: int) -> bytes:
    try:
        with open(f"/proc/{tid}/status", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _leader(tid: int) -> int:
    """The process of a thread; 0 if it is gone."""
    found = re.search(rb"^Tgid:\s+(\d+)", _status(tid), re.M)
    return int(found[1]) if found else 0


@cache
def can_hold() -> bool:
    """Does this system let a process trace its children?"""
    if sys.platform != "linux":
        return False
    child = os.posix_spawnp("sleep", ["sleep", "60"], os.environ, setpgroup=0)
    try:
        tree = Tree(child)
        tree.stop()
        tree.end()
        return True
    except (OSError, GoneError, TimeoutError):
        return False
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
