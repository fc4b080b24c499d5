"""A new operation is one folder: listed, explained, checked and benchmarked without another edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_routing_bench.cli import app
from moe_routing_bench.ops import registry

pytestmark = pytest.mark.slow

FOLDER = next(p for p in Path(__file__).parents if p.name == "tests") / "data" / "toy_op"


@pytest.fixture(autouse=True)
def forget_the_folder():
    yield
    registry._included.clear()


def mrb(*words: str, code: int = 0) -> str:
    ran = CliRunner().invoke(app, [*words, "--include-path", str(FOLDER)])
    assert ran.exit_code == code, ran.output + ran.stderr
    return ran.stdout


def test_it_is_listed():
    text = mrb("list", "ops")
    assert "scale_rows: each token times the sum of its gates" in text and "a sum over choices" in text


def test_it_is_explained():
    document = json.loads(mrb("explain", "scale_rows", "--tokens", "16", "--json"))
    assert document["chosen"]["spec"] == "plain" and "2048" in document["arguments"]["x_TD"]
    assert {one["spec"] for one in document["others"]} == {"by_choice", "first_choice"}


def test_it_is_checked():
    assert "by_choice" in mrb("check", "--op", "scale_rows", "--impl", "by_choice")
    wrong = mrb("check", "--op", "scale_rows", "--impl", "first_choice", code=1)
    assert "largest error" in wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("direction", [pytest.param("forward", marks=pytest.mark.nightly), "train"])
def test_it_is_benchmarked(tmp_path: Path, direction: str):
    quick = ["--rounds", "8", "--seconds", "180", "--checked", "1", "--tokens", "16", "--width", "32"]
    words = ["bench", "scale_rows", *quick, "--direction", direction, "--out", str(tmp_path), "--json"]
    (cell,) = json.loads(mrb(*words, code=1))  # one of them is wrong
    status = {one["spec"]: one["status"] for one in cell["implementations"]}
    assert status["plain"] == status["by_choice"] == "PASSED"
    assert status["first_choice"] == "WRONG_VALUE"
    ran = CliRunner().invoke(app, ["results", "--folder", str(tmp_path), "--json"])
    assert "scale_rows" in ran.stdout


def test_an_operation_that_asks_for_something_unknown_says_so(tmp_path: Path):
    home = tmp_path / "odd_op"
    home.mkdir()
    text = (FOLDER / "scale_rows" / "op.py").read_text().replace("gate_TK", "phase_TK")
    (home / "op.py").write_text(text)
    (home / "plain.py").write_text((FOLDER / "scale_rows" / "plain.py").read_text().replace("gate", "phase"))
    ran = CliRunner().invoke(app, ["explain", "odd_op", "--include-path", str(tmp_path)])
    assert ran.exit_code == 2 and "takes phase_TK" in ran.stderr


def test_a_name_that_exists_is_refused(tmp_path: Path):
    (tmp_path / "combine").mkdir()
    (tmp_path / "combine" / "op.py").write_text((FOLDER / "scale_rows" / "op.py").read_text())
    ran = CliRunner().invoke(app, ["list", "ops", "--include-path", str(tmp_path)])
    assert ran.exit_code == 2 and "already" in ran.stderr
