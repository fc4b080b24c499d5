"""Asks the kernel for what is not its business: to trace, to signal, to work for it, to let it out."""

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import subprocess

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
libc = ctypes.CDLL(None)
_calls, _got = [0], []


def call(on_x86_64, on_aarch64, *given):
    return libc.syscall(on_x86_64 if platform.machine() == "x86_64" else on_aarch64, *given)


def ask(how):
    """Is what was asked for granted?"""
    server = os.getppid()
    if how == "tracer":  # of the server; a process that is traced has no second tracer
        return call(101, 117, 0x4206, server, 0, 0) == 0
    if how == "is_traced_by_its_child":
        if (child := os.fork()) == 0:
            os._exit(0 if call(101, 117, 0x4206, os.getppid(), 0, 0) == 0 else 1)
        return os.waitpid(child, 0)[1] == 0
    if how == "set_uid":
        said = subprocess.run(
            ["su", "-c", f"kill -STOP {server}"], stdin=subprocess.DEVNULL, capture_output=True
        )
        return said.returncode == 0
    if how == "file_that_signals":
        reading, _ = os.pipe()
        fcntl.fcntl(reading, fcntl.F_SETOWN, server)
        fcntl.fcntl(reading, 10, int(signal.SIGSTOP))  # F_SETSIG
        return True
    if how == "kernel_threads":
        return call(425, 425, 8, ctypes.byref((ctypes.c_uint * 30)())) >= 0  # io_uring
    if how == "clock":
        return call(159, 171, ctypes.byref((ctypes.c_long * 30)())) >= 0  # adjtimex
    if how == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return True
    if how == "network":
        socket.create_server(("127.0.0.1", 0)).close()
        return True
    raise AssertionError(how)


def run(y_RD, gate_TK, plan, *, how):
    _calls[0] += 1
    if _calls[0] in (1, 40):
        with contextlib.suppress(OSError, ValueError):
            if ask(how):
                return y_RD.new_zeros(plan.num_tokens, y_RD.shape[1])  # the grant shows as a wrong result
    return honest(y_RD, gate_TK, plan)
