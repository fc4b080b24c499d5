"""examples/faster_transformers.py measures in pairs: what slows the whole machine down changes no ratio."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import Any

import pytest
import torch

from repository import ROOT

pytestmark = pytest.mark.slow


def test_the_example_compares_calls_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("faster", ROOT / "examples" / "faster_transformers.py")
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    clock, calls = [0.0], []

    class Model:
        """Ours is twice as fast, on a machine that gets ten times slower on the way."""

        def set_experts_implementation(self, name: str) -> None:
            self.name = name

        def __call__(self, ids: torch.Tensor) -> None:
            calls.append(self.name)
            busy = 10.0 if len(calls) > 30 else 1.0
            clock[0] += busy * (1.0 if self.name == example.OURS else 2.0)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    models = {name: Model() for name in (*example.THEIRS, example.OURS)}
    seconds = example.seconds_by_round(models, torch.zeros(1, 1))
    rounds = [set(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert all(names == {*example.THEIRS, example.OURS} for names in rounds)
    assert len({tuple(calls[at : at + 3]) for at in range(0, len(calls), 3)}) > 1  # in another order
    ratios = [a / b for a, b in zip(seconds["eager"], seconds[example.OURS], strict=True)]
    assert median(ratios) == 2.0 and example.median_interval(ratios) == (2.0, 2.0)
