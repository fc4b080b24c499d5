"""The conformance kit on CuTe implementations: their threads run on the CPU, memory poisoned and watched."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import pytest

from moe_routing_bench.conformance.arguments import arguments
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells, check
from moe_routing_bench.ops.registry import all_ops

CUTE = [(op, name) for op in all_ops().values() for name in op.names() if name.startswith("cute_")]
PATTERNS = [pattern for pattern in os.environ.get("MRB_CHECK", "").split(",") if pattern]
CELLS = [
    cell
    for cell in cells(specs="cute_*")
    if not PATTERNS or any(fnmatchcase(f"{cell.op}.{cell.spec}", pattern) for pattern in PATTERNS)
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_conforms(cell: KitCell) -> None:
    outcome = check(cell)
    if outcome.status == "unsupported":
        pytest.skip(outcome.sentences[0])
    assert outcome.status == "passed", "\n".join(outcome.sentences)


@pytest.mark.skipif(bool(PATTERNS), reason="MRB_CHECK names implementations")
@pytest.mark.parametrize("op,name", CUTE, ids=str)
def test_the_default_is_checked(op, name: str) -> None:
    """An implementation that calls everything unsupported must not look checked."""
    plain = [cell for cell in CELLS if (cell.op, cell.spec, cell.case.name) == (op.name, name, "plain")]
    why_nots = [op.why_not(name, *arguments(op.name, c.case, c.layout, c.dtype).values()) for c in plain]
    assert plain and why_nots == [None] * len(plain)
