"""An axis is declared once: it then is in the command, the key, the record and the repro line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_routing_bench.results.compare import LIKE
from moe_routing_bench.results.parquet import COLUMNS
from moe_routing_bench.results.winners import SAME_CASE, told_apart
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment
from repository import SOURCE

DECLARED = (
    '    fog: int = _what(0, "How thick the fog is.", flag="--fog", asks=True, compare="row", since=3)\n'
)
LAST = (
    '    sequences: int = _what(1, "Sequences in the batch.", flag="--sequences", asks=True, compare="row")\n'
)
BENCH = (
    "bench", "combine", "--tokens", "8", "--width", "16", "--experts", "4", "--topk", "2", "--rounds", "8",
    "--dtype", "float32", "--impl", "gather_sum", "--seconds", "20", "--threads", "1",
)  # fmt: skip


def test_every_axis_is_a_column_and_says_how_it_is_compared() -> None:
    columns = {column.name for column in COLUMNS}
    for one, facts in axes_of(Experiment):
        name = facts.column or one.name
        assert name in columns or name in ("implementations", "include")
        assert (name in SAME_CASE) == (facts.compare != "free") and facts.help.endswith(".")
        assert (name in LIKE) == (facts.compare == "agree") == bool(facts.plural)


def test_rows_of_two_cases_with_one_label_are_told_apart() -> None:
    row = dict.fromkeys(SAME_CASE, 0)
    rows = [row, {**row, "bias": True}, {**row, "span": "other"}]
    assert told_apart(rows, lambda one: one["span"]) == [" bias=0", " bias=True", ""]


@pytest.mark.slow
def test_an_axis_is_added_by_editing_one_file(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src" / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
    axes = tmp_path / "src" / SOURCE.name / "workloads" / "experiment.py"
    text = axes.read_text()
    assert text.count(LAST) == 1
    axes.write_text(text.replace(LAST, LAST + DECLARED))

    def mrb(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "200"}
        command = [sys.executable, "-m", SOURCE.name, *words]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout

    assert "--fog" in mrb("bench", "combine", "--help")
    folder = str(tmp_path / "r")
    for fog in ("3", "0"):
        mrb(*BENCH, "--fog", fog, "--out", folder)
    (session, _) = sorted((tmp_path / "r").glob("session=*"))
    record = json.loads((session / "records.jsonl").read_bytes().splitlines()[0])
    assert record["experiment"]["fog"] == 3 and "--fog 3" in record["repro"]
    select = "SELECT DISTINCT fog, cell_key, contains(repro, '--fog') FROM records ORDER BY fog"
    (clear, clear_key, said), (thick, thick_key, said_thick) = json.loads(
        mrb("results", "query", select, "--folder", folder, "--json")
    )["rows"]
    assert (clear, thick, said, said_thick) == (0, 3, False, True) and clear_key != thick_key
    overview = mrb("results", "--folder", folder)
    assert "fog=3" in overview and "fog=0" in overview
