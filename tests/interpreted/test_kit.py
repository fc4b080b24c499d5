"""The conformance kit on every Triton implementation, interpreted, with memory that watches and random order.

MRB_CHECK=combine.triton_* narrows it. The defaults meet every hard case in three dtypes; what a tuner may try
meets a few, because an interpreted program takes milliseconds.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import pytest

from moe_routing_bench.conformance.arguments import arguments
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells, check
from moe_routing_bench.conformance.instrumented import instrumented
from moe_routing_bench.ops.registry import all_ops

TRITON = {op.name: [name for name in op.names() if name.startswith("triton_")] for op in all_ops().values()}
PLAIN = ("plain", "dense", "heads_plain")  # of layers around the experts too
FOR_CONFIGS = (
    "plain",
    "odd_widths",
    "ragged_rows",
    "biased",
    "dense_odd",
    "heads_many_queries",
    "heads_rotary",
)
PATTERNS = [pattern for pattern in os.environ.get("MRB_CHECK", "").split(",") if pattern]


def wanted(cell: KitCell) -> bool:
    if PATTERNS and not any(fnmatchcase(f"{cell.op}.{cell.spec}", pattern) for pattern in PATTERNS):
        return False
    if cell.case.batches:  # no Triton file says BATCH_INVARIANT: the interpreter's products are not a GPU's
        return False
    if (
        cell.case.name == "wide" and cell.op == "expert_ffn"
    ):  # ten seconds each; the width is what it is about
        return "(" not in cell.spec and cell.layout == cell.case.layouts[-1]
    if "(" not in cell.spec:
        return True
    return cell.case.name in FOR_CONFIGS and cell.dtype == "bfloat16" and cell.layout == cell.case.layouts[-1]


CELLS = [cell for cell in cells(specs="triton_*") if wanted(cell)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_conforms(cell: KitCell) -> None:
    with instrumented(order="random", seed=1) as seen:
        outcome = check(cell)
    if outcome.status == "unsupported":
        pytest.skip(outcome.sentences[0])
    assert outcome.status == "passed", "\n".join(outcome.sentences)
    empty = cell.case.T == 0 or "no_" in cell.case.name or cell.case.name == "nowhere"
    assert seen.programs or empty, "no Triton kernel ran"


@pytest.mark.parametrize("order", ["forward", "reversed"])
@pytest.mark.parametrize(
    "cell",
    [c for c in CELLS if c.case.name in PLAIN and c.dtype == "bfloat16" and "(" not in c.spec],
    ids=str,
)
def test_conforms_in_order_and_backwards(cell: KitCell, order: str) -> None:
    with instrumented(order=order):  # type: ignore[arg-type]
        outcome = check(cell)
    if outcome.status == "unsupported":
        pytest.skip(outcome.sentences[0])
    assert outcome.status == "passed", "\n".join(outcome.sentences)


@pytest.mark.skipif(bool(PATTERNS), reason="MRB_CHECK names implementations")
@pytest.mark.parametrize("op,name", [(op, name) for op, names in TRITON.items() for name in names])
def test_the_default_is_checked_in_three_dtypes(op: str, name: str) -> None:
    """An implementation that calls everything unsupported must not look checked."""
    implementation = all_ops()[op].get(name)
    plain = [cell for cell in CELLS if (cell.op, cell.spec) == (op, name) and cell.case.name in PLAIN]
    taken = {
        cell.dtype
        for cell in plain
        if implementation.why_not(*arguments(op, cell.case, cell.layout, cell.dtype).values()) is None
    }
    assert taken == {"float32", "float16", "bfloat16"}
