"""mrb check --tokens: where an implementation is wrong by number of tokens, also one from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.conformance.run import TokenMap, parse_tokens
from moe_routing_bench.core.names import ranges

WRONG = """
from moe_routing_bench.ops.combine.gather_sum import run as right

def unsupported(y_RD, gate_TK, plan):
    return "too many" if plan.num_tokens > 22 else None

def run(y_RD, gate_TK, plan):
    if plan.num_tokens == 20:
        import os
        os._exit(3) if {dies} else None
    return right(y_RD, gate_TK, plan) * (2 if plan.num_tokens in (3, 17, 18, 19) else 1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "combine").mkdir()
    for name, dies in (("wrong", False), ("dies", True)):
        (tmp_path / "combine" / f"{name}.py").write_text(WRONG.format(dies=dies))
    return tmp_path


def test_where_it_is_wrong(folder: Path) -> None:
    flags = ("--op", "combine", "--dtype", "float32", "--include-path", folder, "--tokens", "1..24")
    text = mrb("check", *flags, "--impl", "wrong", code=1).stdout
    assert "combine.wrong: wrong at T = 3,17-19" in text
    assert "       1  ..X.............XXX...--" in text
    died = mrb_json("check", *flags, "--impl", "dies", code=1)[0]
    assert died["status"]["20"] == "failed" and "21" not in died["status"]
    assert "code 3" in died["wrong"]["20"]


@pytest.mark.slow
def test_what_is_right_ends_with_zero() -> None:
    text = mrb("check", "--op", "combine", "--impl", "gather_sum", "--dtype", "float32", "--tokens", "1..70")
    assert "correct at every T that ran" in text.stdout and "\n      65  ......" in text.stdout


def test_ranges() -> None:
    assert parse_tokens("1..3,7") == [1, 2, 3, 7]
    assert parse_tokens("1-3,7,2") == [1, 2, 3, 7] and ranges([5, 6, 9]) == "5-6,9"
    for bad in ("x", "5..2", "1..99999999"):
        words = ("check", "--op", "combine", "--impl", "gather_sum", "--tokens", bad)
        assert "cannot read --tokens" in refused(*words)
    everywhere = TokenMap("op", "spec", dict.fromkeys(range(1, 513), "passed"))
    assert max(map(len, everywhere.lines())) <= 80
