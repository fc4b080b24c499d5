"""docs/which_router.md has the numbers of the measurements that are committed."""

from __future__ import annotations

import sys

from moe_routing_bench.routers.router import built_in_names
from repository import ROOT

sys.path.insert(0, str(ROOT / "measurements"))

import marked
import which_router


def test_the_tables_are_those_of_the_measurements() -> None:
    for page, tables in (
        (which_router.DOCUMENT, which_router.tables()),
        (which_router.README, {"routers": which_router.in_short()}),
    ):
        text = page.read_text()
        assert marked.filled(text, tables) == text, "run python measurements/which_router.py"


def test_every_router_is_in_the_table() -> None:
    table = which_router.facts()
    assert all(f"| `{name}` |" in table for name in built_in_names())
