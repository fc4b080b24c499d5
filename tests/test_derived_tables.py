"""docs/quality.md and docs/which_router.md have the numbers of the measurements that are committed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from moe_routing_bench.routers.router import built_in_names
from repository import ROOT

sys.path.insert(0, str(ROOT / "measurements"))

import quality
import which_router


@pytest.mark.parametrize("script", [quality, which_router], ids=["quality", "which_router"])
def test_the_tables_are_those_of_the_measurements(script: Any) -> None:
    text = script.DOCUMENT.read_text()
    assert script.written(text) == text, f"run python {script.__file__}"


def test_every_router_is_in_the_table() -> None:
    table = which_router.facts()
    assert all(f"| `{name}` |" in table for name in built_in_names())
