"""The smallest case of every GPU kernel against the oracle.

Each implementation runs in a process of its own: a kernel that reads where it must not spoils all that its
process computes afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from moe_routing_bench.conformance.cases import CASES, Case, KitCell, layouts_for
from moe_routing_bench.conformance.check import check, matches
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import BUILT_IN, all_ops, get_op

GPU_KERNELS = ("triton_*", "cute_*", "quack_*")
SECONDS = 600  # of one implementation, with compiling
PLAIN = next(case for case in CASES if case.name == "plain")
# for kernels that read whole tiles alone
WHOLE_TILES = Case(name="whole_tiles", guards=PLAIN.guards, D=64, F=64, ragged=False)


class Tried(NamedTuple):
    """Tried(name="combine.triton_gather_sum", answer="right", reason="9 cells: ...")"""

    name: str
    answer: Literal["right", "wrong", "not tried"]
    reason: str


def try_all(device: str, pattern: str) -> Iterator[Tried]:
    for op in all_ops().values():
        for entry in find_all(op, configs=True, only=BUILT_IN):
            if any(matches(entry.spec, kernels) for kernels in GPU_KERNELS) and matches(entry.spec, pattern):
                name = f"{op.name}.{entry.spec}"
                if entry.implementation is None:
                    yield Tried(name, "not tried", entry.reason)
                else:
                    yield tried_isolated(op.name, entry.spec, device)


def tried_isolated(op: str, spec: str, device: str) -> Tried:
    name = f"{op}.{spec}"
    code = f"from {__name__} import answer; answer({op!r}, {spec!r}, {device!r})"
    try:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Tried(name, "wrong", f"it did not end within {SECONDS} s")
    try:
        return Tried(name, *json.loads(ran.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        words = " ".join(ran.stderr.split())[-300:]
        return Tried(name, "wrong", f"its process ended with code {ran.returncode}: {words}")


def answer(op: str, spec: str, device: str) -> None:
    """Runs in the process of one implementation; the last line is the answer."""
    torch.set_num_threads(1)
    print(json.dumps(tried(op, spec, device)[1:]))


def tried(op: str, spec: str, device: str) -> Tried:
    name, right = f"{op}.{spec}", 0
    reasons: list[str] = []
    for case in (PLAIN, WHOLE_TILES):
        for layout in layouts_for(get_op(op), case):
            for dtype in DTYPES:
                cell = KitCell(op=op, spec=spec, case=case, layout=layout, dtype=dtype, device=device)
                outcome = check(cell)
                if outcome.status == "failed":
                    return Tried(name, "wrong", f"{dtype}, {layout}: {outcome.sentences[0]}")
                right += outcome.status == "passed"
                reasons += outcome.sentences[:1]
        if right:
            return Tried(name, "right", f"{right} small cells, forward and backward where it has one")
    return Tried(name, "not tried", reasons[-1])
