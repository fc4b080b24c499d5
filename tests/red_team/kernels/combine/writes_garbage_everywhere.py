"""Prints a mebibyte of garbage and writes some into every pipe and socket it can find.

What it writes looks like a message of a line protocol, then like none. Regular files are only written if they
are in or below a folder that holds a file named .red_team_may_write_here.
"""

import itertools
import os
import select
import stat
from pathlib import Path

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
MARKER = ".red_team_may_write_here"
GARBAGE = (b'{"state": "PASSED", "seconds": [1e-9], "ok": true}\n' + bytes(range(256))) * 16
_calls = itertools.count()


def mine(fd, entry):
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return any((folder / MARKER).exists() for folder in entry.resolve().parents)
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def run(y_RD, gate_TK, plan):
    if next(_calls) in (0, 30):
        for fd in (1, 2):
            for _ in range(256):
                os.write(fd, GARBAGE[:4096])
        for entry in Path("/proc/self/fd").iterdir():
            fd = int(entry.name)
            try:
                if fd > 2 and mine(fd, entry) and select.select([], [fd], [], 0)[1]:
                    os.write(fd, GARBAGE[:4096])
            except (OSError, ValueError):
                continue  # gone, or not open for writing
    return honest(y_RD, gate_TK, plan)
