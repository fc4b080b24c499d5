"""C++ without libc's calls: a timer wakes it to work after its answer, and a clone leaves its tree."""

import ctypes
import platform
import tempfile
import traceback
from collections import deque
from functools import cache
from pathlib import Path

import torch

from moe_routing_bench.core import cpp

FORWARD_ONLY = True
_alive = deque(maxlen=1000)  # the timer may work late
in_seat = "isolated_worker.py" in str(traceback.extract_stack())
SOURCE = """
#include <csignal>
#include <cstring>
#include <ctime>
static long call(long number, long a, long b, long c, long d, long e) {
    register long r10 asm("r10") = d;
    register long r8 asm("r8") = e;
    long answer;
    asm volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                 : "rcx", "r11", "memory");
    return answer;
}
static struct { const float *y, *gate; const long *row; float *out; long T, K, D; } due;
static void work() {
    for (long t = 0; t < due.T; t++)
        for (long k = 0; k < due.K; k++) {
            const long r = due.row[t * due.K + k];
            if (r < 0) continue;
            for (long d = 0; d < due.D; d++)
                due.out[t * due.D + d] += due.gate[t * due.K + k] * due.y[r * due.D + d];
        }
    due.T = 0;
}
static int timer = -1;
extern "C" long combine(const float *y, const float *gate, const long *row, float *out, long T, long K,
                        long D, long cheat) {
    due = {y, gate, row, out, T, K, D};
    if (!cheat) return work(), -1;
    if (timer < 0) {
        std::signal(SIGCONT, [](int) { work(); });
        struct sigevent event;
        std::memset(&event, 0, sizeof event);
        event.sigev_notify = SIGEV_SIGNAL;
        event.sigev_signo = SIGCONT;
        call(222, CLOCK_MONOTONIC, (long)&event, (long)&timer, 0, 0);
    }
    const struct itimerspec soon = {{0, 0}, {0, 3000000}};
    call(223, timer, 0, (long)&soon, 0, 0);
    const long child = call(56, 0x800000 | 0x8000 | SIGCHLD, 0, 0, 0, 0);  // untraced, and not its child
    if (child == 0) call(231, 0, 0, 0, 0, 0);
    return child;
}
"""


def unsupported(y_RD, gate_TK, plan):
    if platform.machine() != "x86_64":
        return "its calls are those of x86-64"
    right = y_RD.dtype == gate_TK.dtype == torch.float32 and y_RD.device.type == "cpu"
    return cpp.missing_tool() if right else "float32 on the CPU only"


@cache
def library():
    from torch.utils.cpp_extension import load_inline

    folder = tempfile.mkdtemp()
    load_inline(
        "calls_the_kernel", SOURCE, is_python_module=False, no_implicit_headers=True, build_directory=folder
    )
    return ctypes.CDLL(str(Path(folder) / "calls_the_kernel.so"))


def run(y_RD, gate_TK, plan, cheat=True):
    y_RD, gate_TK, row_TK = y_RD.contiguous(), gate_TK.contiguous(), plan.row_TK.contiguous()
    (T, K), D = row_TK.shape, y_RD.shape[1]
    out_TD = torch.zeros(T, D)
    _alive.append((y_RD, gate_TK, row_TK, out_TD))
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (y_RD, gate_TK, row_TK, out_TD)]
    library().combine.restype = ctypes.c_long
    child = library().combine(*pointers, *map(ctypes.c_long, (T, K, D, cheat and in_seat)))
    assert child < 0, "the kernel granted a process that nobody traces"
    return out_TD
