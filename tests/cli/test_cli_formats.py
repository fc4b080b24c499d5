"""mrb model formats: the table and its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_routing_bench.cli import app
from moe_routing_bench.core import cpp
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.formats.named import NAMES
from moe_routing_bench.studies.format_losses import layer_losses, trained_losses
from moe_routing_bench.train.text import synthetic

SMALL = ["model", "formats", "--width", "256", "--hidden", "128", "--experts", "2", "--tokens", "8"]


def test_the_table_has_every_format() -> None:
    ran = CliRunner().invoke(app, SMALL)
    assert ran.exit_code == 0, ran.output
    assert [line.split()[0] for line in ran.output.splitlines()[1:]] == list(NAMES)


def test_json_and_the_order_of_errors() -> None:
    ran = CliRunner().invoke(app, [*SMALL, "--json"])
    rows = {row["name"]: row for row in json.loads(ran.output)["layer"]}
    assert (
        rows["q8_0"]["layer"] < rows["int8"]["layer"] < rows["int4_g32"]["layer"] < rows["int4_g128"]["layer"]
    )
    assert all(row["kernel"] is None or row["kernel"] < 0.004 for row in rows.values())
    rounded = {name: row["int8_rows"] for name, row in rows.items()}
    assert rounded.pop("fp8_block") is None and all(0.005 < one < 0.04 for one in rounded.values())


def test_numbers_do_not_change_with_the_run() -> None:
    shape = MoEShape(T=4, D=64, F=32, E=2, K=1)
    first, again = (list(layer_losses(shape, names=("int8", "mxfp4"))) for _ in range(2))
    assert first == again


def test_held_out_loss_by_format() -> None:
    losses = list(trained_losses(synthetic(size=20_000), steps=2))
    assert [one.name for one in losses] == ["float32", *NAMES]
    assert all(abs(one.more) < 0.5 and one.loss > 0 for one in losses)
    assert any(one.more != 0 for one in losses)
    rows = {one.name: one.int8_rows for one in losses}
    assert rows.pop("float32") is None and rows.pop("fp8_block") is None
    for one in losses:
        if cpp.why_not() is None and one.name in rows:
            assert one.int8_rows != one.more and one.int8_rows == pytest.approx(one.more, abs=0.02)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, [*SMALL, "--text", str(tmp_path / "none.txt")])
    assert ran.exit_code == 2 and "none.txt" in ran.output


pytestmark = pytest.mark.slow
