"""Kills or stops the other workers, moves them to a single core, or gives them the lowest priority."""

import contextlib
import os
import signal

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_calls = [0]


def rivals():
    """The other workers: processes with the same parent."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            if parent == os.getppid() and int(name) != os.getpid():
                found.append(int(name))
    return found


def harm(pid, how):
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    elif how == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif how == "move":
        os.sched_setaffinity(pid, {0})
    elif how == "slow":
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    else:
        raise ValueError(how)


def run(y_RD, gate_TK, plan, *, how):
    _calls[0] += 1
    if _calls[0] % 40 == 0:
        for pid in rivals():
            with contextlib.suppress(OSError):
                harm(pid, how)
    return honest(y_RD, gate_TK, plan)
