"""The part of arm_kit.py that runs in the guest: what the kit says of implementations, as lines of JSON.

python measurements/cpu/arm_guest.py all '[["combine", "native"]]'        or: first, to end at a failure
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch

from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells_of, check


def too_slow(cell: KitCell) -> bool:
    """Under qemu: cases of gigabytes; products that compare batches; other layouts than compact for weights
    that are stored in a format, as their kernel is the same with any plan."""
    multiplies = cell.op in ("grouped_gemm", "expert_ffn")
    stored = "store=" in cell.spec and cell.layout != "compact"
    return cell.case.beyond_int32 or (multiplies and cell.case.batches) or stored


def judged(op: str, spec: str, until_failed: bool) -> dict[str, Any]:
    by_dtype: dict[str, Counter[str]] = {}
    failures = []
    for cell in cells_of(op, spec):
        if too_slow(cell):
            by_dtype.setdefault(cell.dtype, Counter())["left out"] += 1
            continue
        outcome = check(cell)
        by_dtype.setdefault(cell.dtype, Counter())[outcome.status] += 1
        if outcome.status == "failed":
            failures.append([str(cell), outcome.sentences[0]])
            if until_failed:
                break
    return {"op": op, "spec": spec, "by_dtype": by_dtype, "failures": failures}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for op, spec in json.loads(sys.argv[2]):
        line = json.dumps(judged(op, spec, sys.argv[1] == "first"))
        print(line, flush=True)
        print(line, file=sys.stderr, flush=True)
