"""The red team's kernels load, and those that should look honest at first are right at first.

Nothing is included or called in this process: a child does both, and the other tests never see these kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import expectations
from expectations import EXPECTED
from moe_routing_bench.core.names import parse_spec
from repository import SOURCE

pytestmark = pytest.mark.slow

CHILD = Path(__file__).parent / "first_call.py"


IDS = {f"{op}.{name}": (op, name) for op, name in EXPECTED}


def child(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE.parent),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run(
        [sys.executable, str(CHILD), *words],
        capture_output=True, text=True, timeout=380, env=environment, cwd=tmp_path,
    )  # fmt: skip


def test_every_kernel_has_an_expectation_and_every_expectation_a_kernel() -> None:
    files = {(path.parent.name, path.stem) for path in expectations.KERNELS.glob("*/*.py")}
    assert files == {(op, parse_spec(name)[0]) for op, name in EXPECTED}
    assert len(files) >= 30


def test_every_kernel_loads(tmp_path: Path) -> None:
    fine = [name for name, key in IDS.items() if key not in expectations.BREAK_ON_IMPORT]
    ran = child(tmp_path, "load", *fine)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout) == {name: "loaded" for name in fine}


def test_two_break_while_they_are_loaded(tmp_path: Path) -> None:
    raised = child(tmp_path, "load", "combine.raises_on_import")
    assert raised.returncode == 1 and "raises while it is loaded" in raised.stderr
    gone = child(tmp_path, "load", "combine.exits_on_import")
    assert gone.returncode == 0 and gone.stdout == ""


@pytest.mark.parametrize("cell", ["at", "right_at"])
def test_first_calls_are_what_the_table_says(tmp_path: Path, cell: str) -> None:
    """Each kernel's call runs in a fork of one child, so that no patch reaches the next kernel."""
    asked = {
        name: key
        for name, key in IDS.items()
        if EXPECTED[key].first_call != "dangerous" and (cell == "at" or EXPECTED[key].right_at is not None)
    }
    ran = child(tmp_path, cell, *asked)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout)
    assert said.keys() == asked.keys()
    surprises = []
    for name, key in asked.items():
        row, right = EXPECTED[key], said[name] == "right"
        # what is wrong by its sizes alone is wrong at once in its own cell, and right in the other
        if cell == "right_at":
            expected = True
        elif row.right_at is not None:
            expected = key in {("dispatch", "returns_its_input")}
        else:
            expected = row.first_call == "right"
        if name in ("combine.raises_at_random", "dispatch.unwritten_padding"):
            continue  # by chance either; that it can be called at all is shown
        if right != expected:
            surprises.append(f"{name}: {said[name]}")
    assert not surprises, "\n".join(surprises)


def test_each_fault_is_really_there(tmp_path: Path) -> None:
    """A simple gate sees the fault of every kernel that may not be PASSED: none is a blank shot."""
    ends = {"CRASHED", "TIMEOUT", "OOM"}
    asked = {
        name: key
        for name, key in IDS.items()
        if EXPECTED[key].first_call != "dangerous"
        and not EXPECTED[key].contained
        and not EXPECTED[key].states <= ends
    }
    assert len(asked) > 30
    ran = child(tmp_path, "symptom", *asked)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout)
    missed = [
        f"{name}: {state!r}" for name, state in said.items() if state not in EXPECTED[asked[name]].states
    ]
    assert not missed, "\n".join(missed)
