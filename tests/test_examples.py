"""Every example runs as it is. faster_transformers.py and parallel_restart.py have tests of their own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from repository import ROOT

EXAMPLES = ROOT / "examples"
# what is passed to it, and a word that it must print
RUN = {
    "quickstart.py": ((), "gradients reach every expert"),
    "replay_a_trace.py": (("{tmp}/routing.safetensors",), "largest difference"),
    "train_two_routers.py": (("4",), "sigmoid_bias  step   4"),
}
ELSEWHERE = {"faster_transformers.py", "parallel_restart.py"}


@pytest.mark.parametrize("name", RUN)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected = RUN[name]
    monkeypatch.setattr(sys, "argv", [name, *(word.format(tmp=tmp_path) for word in words)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert expected in capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUN.keys() | ELSEWHERE
