"""Every implementation of every operation on every hard case, and every router.

MRB_CHECK=combine.mine,dispatch.* narrows it to some implementations; MRB_INCLUDE_PATH=DIR adds a folder of
private ones (<op>/<name>.py, routers/<name>.py); MRB_DEVICE=cuda runs it there, held to the same oracles.
"""

from __future__ import annotations

import fnmatch
import os

import pytest

from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells, check
from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.routers.router import all_routers, include_folder

if folder := os.environ.get("MRB_INCLUDE_PATH"):
    include_folder(folder)

PATTERNS = [pattern for pattern in os.environ.get("MRB_CHECK", "").split(",") if pattern]


def _wanted(cell: KitCell) -> bool:
    return not PATTERNS or any(fnmatch.fnmatchcase(f"{cell.op}.{cell.spec}", p) for p in PATTERNS)


CELLS = [cell for cell in cells(device=os.environ.get("MRB_DEVICE", "cpu")) if _wanted(cell)]


def test_something_is_checked() -> None:
    assert CELLS, f"no implementation matches MRB_CHECK={','.join(PATTERNS)}"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_conforms(cell: KitCell) -> None:
    outcome = check(cell)
    if outcome.status == "unsupported":
        pytest.skip(outcome.sentences[0])
    assert outcome.status == "passed", "\n".join(outcome.sentences)


@pytest.mark.parametrize("op", sorted({cell.op for cell in CELLS}))
def test_some_implementation_ran(op: str) -> None:
    cells = [cell for cell in CELLS if cell.op == op]
    mine = [cell for cell in cells if cell.case == cells[0].case]
    assert any(check(cell).status != "unsupported" for cell in mine), f"no implementation of {op} runs here"


@pytest.mark.skipif(bool(PATTERNS), reason="MRB_CHECK names implementations")
@pytest.mark.parametrize("name", list(all_routers()))
def test_router_conforms(name: str) -> None:
    assert check_router(name) == []


@pytest.mark.skipif(bool(PATTERNS), reason="MRB_CHECK names implementations")
def test_every_op_is_covered() -> None:
    assert {cell.op for cell in CELLS} == set(all_ops())
