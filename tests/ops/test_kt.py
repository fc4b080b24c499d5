"""KTransformers' kernel, an implementation of expert_ffn from a folder; what needs the package is skipped
without it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import tiny_layers
from moe_routing_bench.ops.expert_ffn.op import op
from repository import ROOT

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("kt_kernel", "gguf"))
needs_kt = pytest.mark.skipif(not INSTALLED, reason="kt-kernel is not installed")


@pytest.fixture
def kt() -> Any:
    file = ROOT / "examples" / "kt_kernel" / "expert_ffn" / "kt.py"
    spec = importlib.util.spec_from_file_location("kt_from_a_folder", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_it_uses_comes_with_the_line_that_installs_it(kt: Any) -> None:
    assert {"kt_kernel", "gguf"} == set(kt.NEEDS)
    assert all(line.startswith("pip install --no-deps kt-kernel==") for line in kt.NEEDS.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "bfloat16, not torch.float32"),
        ({"dtype": torch.bfloat16, "bias": True}, "no biases"),
        ({"dtype": torch.bfloat16, "activation": "geglu"}, "swiglu, not geglu"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(kt: Any, changes: dict[str, Any], reason: str) -> None:
    assert reason in kt.unsupported(*tiny_layers.arguments(**changes))


def test_weights_frozen_for_another_kernel_are_refused(kt: Any) -> None:
    x_TD, gate_TK, plan, weights = tiny_layers.arguments(dtype=torch.bfloat16)
    assert kt.unsupported(x_TD, gate_TK, plan, weights) is None
    frozen = kt.freeze(weights)
    assert kt.unsupported(x_TD, gate_TK, plan, frozen) is None
    assert "frozen for kt" in str(op.get("native").unsupported(x_TD, gate_TK, plan, frozen))


@needs_kt
@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize("T", [1, 37, 1100])
def test_it_is_right(kt: Any, T: int, absent: float) -> None:
    x_TD, gate_TK, plan, weights = tiny_layers.arguments(T, 2, 5, 48, 40, dtype=torch.bfloat16, absent=absent)
    with torch.no_grad():
        for given in (weights, kt.freeze(weights)):
            tiny_layers.assert_right(kt.run(x_TD, gate_TK, plan, given), x_TD, gate_TK, plan, weights)
    assert torch.tensor(2.0**-126) / 2 != 0  # loading it changes how this thread treats denormals
