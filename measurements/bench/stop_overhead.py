"""What stopping a process costs in a sample: by SIGSTOP, as it was, and by ptrace, as it is.

    python measurements/bench/stop_overhead.py [seconds for each duration]

A child spins for 10 us, 1 ms or 100 ms when it is told to, and says so. The parent wakes it, waits and stops
it, as IsolatedChild.go does, by either way in random order. Overhead: what the parent's clock says beyond the
child's. The json beside this file says under which load it was measured.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

from moe_routing_bench.bench.hosts.holding import Tree

DURATIONS = {"10 us": 1e-5, "1 ms": 1e-3, "100 ms": 1e-1}
CHILD = """
import os, struct, sys, time
while data := os.read(0, 8):
    (seconds,) = struct.unpack("d", data)
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < seconds: pass
    os.write(1, struct.pack("d", took))
"""


def state(pid: int, tid: str) -> str:
    with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b")")[2].split(maxsplit=1)[0].decode()


class Spinner:
    """A child on the parent's core, stopped between turns."""

    def __init__(self, by_ptrace: bool):
        words = [sys.executable, "-c", CHILD]
        self.child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.tree = Tree(self.child.pid) if by_ptrace else None
        assert self.child.stdin is not None and self.child.stdout is not None
        self.to, self.back = self.child.stdin, self.child.stdout
        self.ask(1e-3)
        self.stop()

    def ask(self, seconds: float) -> float:
        self.to.write(struct.pack("d", seconds))
        while not select.select((self.back,), (), (), 1e-3)[0]:
            if self.tree is not None:
                self.tree.serve()
        return float(struct.unpack("d", self.back.read(8))[0])

    def stop(self) -> None:
        if self.tree is not None:
            self.tree.stop()
            return
        pid = self.child.pid
        os.kill(pid, signal.SIGSTOP)
        while not all(state(pid, tid) in "TZX" for tid in os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
            time.sleep(1e-5)

    def resume(self) -> None:
        if self.tree is not None:
            self.tree.resume()
        else:
            os.kill(self.child.pid, signal.SIGCONT)

    def sample(self, seconds: float) -> tuple[float, float]:
        """By the parent's clock and by the child's."""
        began = time.perf_counter()
        self.resume()
        own = self.ask(seconds)
        self.stop()
        return time.perf_counter() - began, own

    def end(self) -> None:
        if self.tree is not None:
            self.tree.end()
        self.child.kill()
        self.child.wait()


def main(each: float) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    ways = {"SIGSTOP": Spinner(False), "ptrace": Spinner(True)}
    found: dict[str, object] = {"load before": os.getloadavg()[0]}
    for name, seconds in DURATIONS.items():
        seen: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        until = time.monotonic() + each
        while time.monotonic() < until or len(seen["ptrace"]) < 20:
            for way in random.sample(list(ways), len(ways)):
                seen[way].append(ways[way].sample(seconds))
        found[name] = {way: _figures(pairs) for way, pairs in seen.items()}
    for spinner in ways.values():
        spinner.end()
    found["load after"] = os.getloadavg()[0]
    text = json.dumps(found, indent=1)
    Path(__file__).with_suffix(".json").write_text(text + "\n")
    print(text)


def _figures(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Quartiles in microseconds; spread: half the distance of the quartiles of whole samples, by their
    median."""
    over = [1e6 * (seen - own) for seen, own in pairs]
    low, middle, high = statistics.quantiles(over, n=4)
    whole = statistics.quantiles([seen for seen, _ in pairs], n=4)
    return {
        "samples": len(pairs),
        "overhead_us": round(middle, 1),
        "quartiles_us": [round(low, 1), round(high, 1)],
        "spread_percent": round(100 * (whole[2] - whole[0]) / 2 / whole[1], 2),
    }


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
