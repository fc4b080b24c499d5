"""mrb bench expert_ffn --store: from the command to records, and code from outside on stored weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.results.folder import iterate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = ["--tokens", 24, "--width", 64, "--hidden", 32, "--experts", 8, "--topk", 2, "--dtype", "float32"]
QUICK = ["--threads", 1, "--rounds", 8, "--seconds", 180, "--checked", 1]
OUTSIDE = '''"""Stores weights as it is asked to, or only says so."""
from dataclasses import replace

from moe_routing_bench.formats.named import quantise
from moe_routing_bench.ops.expert_ffn.op import reference


def stored(weights, *, store):
    name = store.removesuffix("_a8")
    kept = {n: quantise(getattr(weights, n), name).decoded().weights() for n in ("w_in_EDG", "w_out_EFD")}
    return replace(weights, **kept)


def unsupported(x_TD, gate_TK, plan, weights, *, store=None):
    return None


def run(x_TD, gate_TK, plan, weights, *, store=None):
    return reference(x_TD, gate_TK, plan, WEIGHTS)
'''


def test_stored_weights_from_the_command_to_the_overview(tmp_path: Path) -> None:
    out = tmp_path / "kept"
    text = mrb("bench", "expert_ffn", *SMALL, *QUICK, "--store", "int4_g32", "--out", out).stdout
    assert "own/24x64x32-e8-k2-int4_g32: expert_ffn" in text and "stored as int4_g32" in text
    records = {r.implementation.spec: r for r in iterate(out) if r.implementation.role != "twin"}
    assert list(records)[:3] == ["native", "native(store=int4_g32_a8)", "native(store=int4_g32)"]
    for spec, record in records.items():
        assert record.timing is not None, f"{spec}: {record.correctness.reason}"
        assert record.experiment.store == "int4_g32" and record.experiment.case.endswith("-int4_g32")
        assert record.work is not None and record.work.weight_bytes < 0.15 * 3 * 8 * 64 * 32 * 4
        rows_of_8_bits = (record.correctness.error or 0) > 1e-3
        assert record.correctness.error and rows_of_8_bits == spec.endswith("_a8)")
        assert "--store int4_g32" in record.repro
    overview = mrb("results", "--folder", out).stdout
    assert "error" in overview and "-int4_g32" in overview
    rows = mrb_json("results", "query", "SELECT DISTINCT store, error > 0 FROM records", "--folder", out)[
        "rows"
    ]
    assert rows == [["int4_g32", True]]
    assert "int4_g32" in refused("tune", "decide", out)


def test_what_cannot_be_measured_says_so_and_what_to_do() -> None:
    words = ["--impl", "staged,native(store=int8)"]
    (cell,) = mrb_json("bench", "expert_ffn", *SMALL, *QUICK, *words, "--store", "mxfp4", code=1)
    staged, stored, _ = cell["implementations"]
    assert staged["error"] > 0 and "mxfp4" in stored["reason"]
    assert "in expert_ffn" in refused("bench", "layer", *SMALL, "--store", "int8")
    assert "'int5'" in refused("bench", "expert_ffn", *SMALL, "--store", "int5")


def test_code_from_outside_is_judged_by_what_is_stored(tmp_path: Path) -> None:
    (tmp_path / "expert_ffn").mkdir()
    kernels = {"keeps": "stored(weights, store=store).to(dtype=x_TD.dtype)", "ignores": "weights"}
    for name, weights in kernels.items():
        (tmp_path / "expert_ffn" / f"{name}.py").write_text(OUTSIDE.replace("WEIGHTS", weights))
    words = ["--include-path", tmp_path, "--store", "int4_g32", "--no-save", "--impl"]
    specs = [f"{name}(store={store})" for store in ("int4_g32", "int4_g32_a8") for name in kernels]
    for baseline in ("staged", "native(store=int4_g32)"):
        (cell,) = mrb_json(
            "bench", "expert_ffn", *SMALL, *QUICK, *words, ",".join([baseline, *specs]), code=1
        )
        reached = {one["spec"]: one for one in cell["implementations"] if one["role"] != "beside"}
        for store in ("int4_g32", "int4_g32_a8"):
            assert reached[f"keeps(store={store})"]["status"] == "PASSED", reached[f"keeps(store={store})"]
            assert reached[f"ignores(store={store})"]["status"] == "WRONG_VALUE"
