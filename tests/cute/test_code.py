"""CuTe kernels as machine code: read as it is, and held to what must hold of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_routing_bench.layouts.phases import Agent, Ring, faults_of
from moe_routing_bench.studies.cute_code import (
    as_compiled,
    compile_all,
    faults,
    implementations,
    why_not,
)

pytest.importorskip("triton", reason="its cuobjdump reads machine code")
KEPT = json.loads((Path(__file__).parents[2] / "measurements/gpu/quack_compile.json").read_text())
MODEL = "qwen3-30b-a3b"


def test_our_kernels_are_compiled_as_in_the_table() -> None:
    rows = compile_all("cute", "sm_90a", [MODEL])
    known = [row for row in KEPT["ours"] if (row["arch"], row["model"]) == ("sm_90a", MODEL)]
    for row, old in zip(rows, known, strict=True):
        assert faults(row) == [], row
        assert (row["kernel"], row["registers"], row["spills"]) == (old["kernel"], old["registers"], 0)
        code = as_compiled(row)
        assert code.warps == 4 and code.programs_per_unit > 0 and code.wrong == ()
        assert (code.wide_loads > 0) == (code.op != "make_plan")
        assert f"{code.op}.{code.impl}" in implementations("cute")


@pytest.mark.parametrize("row", KEPT["quack"], ids=lambda row: f"{row['kernel']} {row['arch']}")
def test_rows_of_quack_are_rows_of_the_same_table(row) -> None:
    code = as_compiled(row)
    assert code.model == "any model" and code.tensor_core > 0 and code.descriptor_loads > 0
    assert code.programs_per_unit == 1 and code.warps >= 4 and code.wrong == ()


@pytest.mark.parametrize("row", KEPT["quack"], ids=lambda row: f"{row['kernel']} {row['arch']}")
def test_loads_by_tma_announce_the_bytes_of_their_tiles(row) -> None:
    """Tiles of 64 bfloat16 in depth. Where threads gather the rows of A, TMA loads B alone."""
    (m, n), first = row["tile"], row["barriers"][0]
    gathers = row["barriers"][0]["arrivals"] != 1
    assert gathers == ("gather" in row["kernel"] or row["kernel"].startswith("dh"))
    assert first["by"] == "TmaLoad" and first["bytes"] == 2 * 64 * (n if gathers else m + n)
    if row["arch"] == "sm_90a":
        # with two warpgroups in turn four warps read a stage, else eight; those of every block it was sent to
        warps = 8 if row["kernel"].startswith("dh") else 4
        assert row["barriers"][1]["arrivals"] == warps * sum(row["cluster"][:2], -1)


def rings_of(row: dict[str, Any]) -> list[Ring]:
    """The rings of stages that a kernel of QuACK makes, in the order in which it does: `full`, then `empty`.

    Threads that arrive alike are two agents, so that one may be ahead of the other; with a TMA load beside
    copies by threads, that load is one of them. Without rings whose arrivals the kernel computes as it runs.
    """
    made = []
    for full, empty in zip(row["barriers"][::2], row["barriers"][1::2], strict=True):
        if full["arrivals"] is None or empty["arrivals"] is None:
            continue
        assert full["stages"] == empty["stages"], row
        # one of many arrivals is the TMA load, the rest are threads that copy
        one = 1 if full["by"] == "TmaLoad" and full["arrivals"] > 1 else full["arrivals"] // 2
        fillers, readers = (
            tuple(Agent(part) for part in (barrier["arrivals"] - less, less) if part)
            for barrier, less in ((full, one), (empty, empty["arrivals"] // 2))
        )
        ring = {"stages": full["stages"], "full": full["arrivals"], "empty": empty["arrivals"]}
        made.append(Ring(**ring, fillers=fillers, readers=readers))
    return made


def test_no_pipeline_of_quack_stands_still_or_overwrites() -> None:
    rings = {ring for row in KEPT["quack"] for ring in rings_of(row)}
    assert len(rings) > 10 and {ring.stages for ring in rings} == {1, 2, 3, 4, 5, 6}
    for ring in rings:
        assert faults_of(ring) == [], ring
        assert faults_of(replace(ring, empty=ring.empty + 1)), "one who never arrives goes unnoticed"


@pytest.mark.parametrize(
    "planted, words",
    [
        ({"spills": 3}, "spills: 3"),
        ({"seen": {"UTMALDG": 1}}, "no HGMMA"),
        ({"seen": {"HGMMA": 1}}, "no UTMALDG"),
        ({"shared": 10**6}, "bytes of shared memory"),
        ({"error": "ValueError: no"}, "does not compile"),
    ],
)
def test_what_does_not_hold_is_said(planted, words) -> None:
    (row,) = [row for row in KEPT["quack"] if (row["kernel"], row["arch"]) == ("dx", "sm_90a")]
    assert words in "; ".join(as_compiled({**row, **planted}).wrong)


def test_where_they_are_not_compiled_is_said() -> None:
    assert why_not("quack", "sm_80") == "only for sm_90a, sm_100a"
    assert why_not("cute", "sm_80") is None
