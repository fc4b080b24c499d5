"""vLLM's CPU kernel as an implementation of expert_ffn; what needs the package is skipped without it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tiny_layers
from moe_routing_bench.bench.sources import distribution_version
from moe_routing_bench.ops.expert_ffn import vllm_cpu
from moe_routing_bench.ops.expert_ffn.op import op

pytestmark = pytest.mark.slow

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vllm-cpu is not installed")


def test_a_version_is_found_by_the_name_of_the_module() -> None:
    assert distribution_version("yaml").partition(" ")[0] in ("PyYAML", "?")
    assert distribution_version("no_such_module") == "?"


def test_scratch_memory_past_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "_kernels", lambda: None)
    args = tiny_layers.arguments(11, 2, 5, 32, 32)
    assert vllm_cpu.unsupported(*args) is None
    monkeypatch.setattr(vllm_cpu, "MAX_BYTES", 22 * (4 * 32 + 4 * 32))
    assert "32 bits" in str(vllm_cpu.unsupported(*args))


def test_float32_is_refused_where_its_sums_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "_kernels", lambda: None)
    for dtype, D, F, fits in (
        (torch.float32, 1024, 64, True),
        (torch.float32, 2048, 64, False),
        (torch.float32, 64, 2048, False),
        (torch.bfloat16, 2048, 64, True),
    ):
        reason = vllm_cpu.unsupported(*tiny_layers.arguments(3, 1, 1, D, F, dtype=dtype))
        assert (reason is None) == fits


@needs_vllm
@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_right(dtype: torch.dtype, absent: float) -> None:
    args = tiny_layers.arguments(37, 2, 5, 48, 40, dtype=dtype, absent=absent)
    with torch.no_grad():
        tiny_layers.assert_right(op.get("vllm_cpu")(*args), *args)


@needs_vllm
def test_weights_changed_in_place_are_noticed() -> None:
    args = tiny_layers.arguments()
    with torch.no_grad():
        before = op.get("vllm_cpu")(*args)
        args[3].w_out_EFD.mul_(-2)
        torch.testing.assert_close(op.get("vllm_cpu")(*args), -2 * before)
