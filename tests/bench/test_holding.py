"""Code from outside is held: it stands still when it is stopped, what it starts is held too, and all ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_routing_bench.bench.hosts.filtering import ARCHITECTURES, REFUSED, landlock_version, steps
from moe_routing_bench.bench.hosts.freezing import GoneError, cpu_seconds
from moe_routing_bench.bench.hosts.holding import Tree, can_hold
from repository import SOURCE

pytestmark = pytest.mark.skipif(
    not can_hold(), reason="this system does not let a process trace its children"
)
SPIN = "\nprint('ready', flush=True)\nwhile True: sum(range(1000))\n"
# a timer that wakes a process stopped by SIGSTOP
WAKES_ITSELF = """
import ctypes, signal
libc = ctypes.CDLL(None)
signal.signal(signal.SIGCONT, lambda *_: None)
class Event(ctypes.Structure):
    _fields_ = [("v", ctypes.c_void_p), ("number", ctypes.c_int), ("pad", ctypes.c_char * 52)]
event, timer = Event(None, signal.SIGCONT, b""), ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
libc.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(0, 10**7, 0, 10**7)), None)
"""
THREADS = """
import threading
def spin():
    while True: sum(range(1000))
for _ in range(3): threading.Thread(target=spin, daemon=True).start()
"""
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: sum(range(1000))
    os._exit(0)
os.wait()
"""


@contextmanager
def held(code: str) -> Iterator[tuple[Tree, subprocess.Popen[bytes]]]:
    """A process that waits until it is held, runs the code and spins."""
    words = [sys.executable, "-c", f"import sys; sys.stdin.readline()\n{code}{SPIN}"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tree = Tree(child.pid)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        until = time.monotonic() + 60
        while child.stdout.read() is None and time.monotonic() < until:
            tree.serve()
            time.sleep(1e-3)
        yield tree, child
    finally:
        tree.end()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def run(tree: Tree, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        tree.serve()
        time.sleep(1e-3)


@pytest.mark.parametrize(
    "code", ["", WAKES_ITSELF, THREADS, DAEMON], ids=["plain", "timer", "threads", "daemon"]
)
def test_what_is_stopped_stands_still_until_it_is_resumed(code: str) -> None:
    with held(code) as (tree, child):
        for _ in range(3):
            tree.stop()
            tree.watch()
            before = cpu_seconds(child.pid)
            os.kill(child.pid, signal.SIGCONT)
            time.sleep(0.1)
            assert not tree.has_moved() and cpu_seconds(child.pid) == before
            tree.resume()
            while cpu_seconds(child.pid) == before:
                tree.serve()
            assert tree.has_moved()
        assert len(tree.threads) == {"": 1, WAKES_ITSELF: 1, THREADS: 4, DAEMON: 2}[code]
        assert tree.others() == (1 if code == DAEMON else 0)
    assert not tree.threads


def test_who_is_gone_cannot_be_stopped_or_held() -> None:
    with held("") as (tree, child):
        child.kill()
        with pytest.raises(GoneError):
            tree.stop()
    with pytest.raises(GoneError):
        Tree(child.pid)


def test_what_is_held_may_stop_nobody_not_even_itself() -> None:
    with held("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)") as (tree, child):
        before = cpu_seconds(child.pid)
        run(tree, 0.1)
        assert cpu_seconds(child.pid) > before


def test_all_of_them_end_with_their_holder_however_it_ends(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(SOURCE.parent)!r})
from moe_routing_bench.bench.hosts.holding import Tree
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline()" + {DAEMON + SPIN!r}],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
tree = Tree(child.pid)
child.stdin.write(b"\\n"); child.stdin.flush()
os.set_blocking(child.stdout.fileno(), False)
while child.stdout.read() is None:  # it is ready when the process in between has ended
    tree.serve()
    time.sleep(1e-3)
while len(tree.threads) != 2:
    tree.serve()
print(*tree.threads, flush=True)
while True: tree.serve()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        pids = [int(word) for word in holder.stdout.readline().split() if word.isdigit()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    until = time.monotonic() + 20
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# what a worker may not ask for, in Python
REQUESTS = {
    "socket": "import socket; socket.socket()",
    "signal to another": "os.kill(os.getppid(), 0)",
    "signal to all": "os.kill(-1, 0)",
    "limit of another": "resource.prlimit(os.getppid(), resource.RLIMIT_AS, (2**20, 2**20))",
    "limit of its own": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
    "cores of another": "os.sched_setaffinity(os.getppid(), {0})",
    "scheduling": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "a file that signals": "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
    "userfaultfd": "call(323, 282, 0)",
    "ptrace": "call(101, 117, 0, 0, 0, 0)",
    "memory of another": "call(310, 270, os.getppid(), 0, 0, 0, 0, 0)",
    "io_uring": "call(425, 425, 1, 0)",
    "mount": "call(165, 40, 0, 0, 0, 0, 0)",
    "new namespace": "call(272, 97, 0x20000)",
    "a process nobody traces": "call(56, 220, 0x00800000 | 17, 0, 0, 0, 0)",
    "a namespace by clone": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "clock": "call(227, 112, 0, 0)",
    "userfaultfd by its device": "fcntl.ioctl(os.open('/dev/null', os.O_RDWR), 0xAA00, 0)",
    "memory of its parent by a file": "os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)",
    "memory of its parent, read": "os.open(f'/proc/{os.getppid()}/mem', os.O_RDONLY)",
    "open files of its parent": "os.open(f'/proc/{os.getppid()}/fd/0', os.O_RDONLY)",
}
LANDLOCKS = [name for name in REQUESTS if "of its parent" in name]
ALLOWED = {
    "threads": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    "processes": "assert subprocess.run(['sh', '-c', 'exit 3']).returncode == 3",
    "signals to itself": "os.kill(os.getpid(), 0); signal.raise_signal(signal.SIGCONT)",
    "its own cores": "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "pipes between its own": "import socket; socket.socketpair()",
    "limits asked": "resource.getrlimit(resource.RLIMIT_AS)",
    "its own memory by a file": "os.close(os.open('/proc/self/mem', os.O_RDWR))",
    "moves between folders": "one, other = tempfile.mkdtemp(), tempfile.mkdtemp(); "
    "open(f'{one}/file', 'w').close(); os.replace(f'{one}/file', f'{other}/file')",
    "OpenMP": "import torch; torch.set_num_threads(2); torch.ones(300, 300) @ torch.ones(300, 300)",
    "a compiler": "import sysconfig; cc = sysconfig.get_config_var('CC').split()[0]; "
    "assert subprocess.run([cc, '-xc', '-', '-o', '/dev/null'], input=b'int main(){}').returncode == 0",
}
FILTERED = f"""
import ctypes, errno, fcntl, os, platform, resource, signal, subprocess, sys, tempfile
sys.path.insert(0, {str(SOURCE.parent)!r})
from moe_routing_bench.bench.hosts.filtering import forbid
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *given):
    if libc.syscall(x86 if platform.machine() == "x86_64" else arm, *given) < 0:
        raise OSError(ctypes.get_errno(), "")
forbid()
for line in sys.stdin:
    name, code = eval(line)
    try:
        exec(code)
        print(name)
    except (PermissionError, ValueError) as refused:
        pass
    sys.stdout.flush()
"""


def test_the_filter_refuses_what_is_not_a_workers_business_and_nothing_else() -> None:
    beyond = () if landlock_version() else LANDLOCKS
    requests = [pair for pair in (*REQUESTS.items(), *ALLOWED.items()) if pair[0] not in beyond]
    asked = "".join(f"{pair!r}\n" for pair in requests)
    ran = subprocess.run(
        [sys.executable, "-c", FILTERED], input=asked, capture_output=True, text=True, timeout=170
    )
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if line] == list(ALLOWED)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_jump_of_the_filter_ends_inside_it(machine: str) -> None:
    program = steps(1234, machine)
    for place, (code, if_true, if_false, _) in enumerate(program):
        assert place + 1 + max(if_true, if_false) < len(program) or code == 6
        assert max(if_true, if_false) < 256
    column = ARCHITECTURES[machine][0]
    assert len({numbers[column] for numbers in REFUSED.values()}) == len(REFUSED)
