"""A static constructor of its C++ extension starts a thread that never rests, as it is loaded."""

import tempfile
from functools import cache
from pathlib import Path

from moe_routing_bench.core import cpp
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
SOURCE = """
#include <chrono>
#include <thread>
struct Thread {
    Thread() {
        std::thread([] {
            const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
            while (std::chrono::steady_clock::now() < end) {}
        }).detach();
    }
};
static Thread thread;
"""


@cache
def load():
    import ctypes

    from torch.utils.cpp_extension import load_inline

    folder = tempfile.mkdtemp()
    load_inline(
        "thread_before_main", SOURCE, is_python_module=False, no_implicit_headers=True,
        build_directory=folder,
    )  # fmt: skip
    return ctypes.CDLL(str(Path(folder) / "thread_before_main.so"))


def unsupported(y_RD, gate_TK, plan):
    return cpp.missing_tool()


def run(y_RD, gate_TK, plan, cheat=True):
    if cheat:
        load()
    return honest(y_RD, gate_TK, plan)
