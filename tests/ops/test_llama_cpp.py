"""llama.cpp's experts as an implementation of expert_ffn; what needs the package is skipped without it."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_layers
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.formats.stored import E2M1
from moe_routing_bench.ops.expert_ffn import llama_cpp
from moe_routing_bench.ops.expert_ffn.op import op

pytestmark = pytest.mark.slow

INSTALLED = importlib.util.find_spec("llama_cpp") is not None
needs_llama_cpp = pytest.mark.skipif(not INSTALLED, reason="llama-cpp-python is not installed")
STORES = ("q8_0", "q4_k", "mxfp4")


def test_mxfp4_as_gguf_has_it() -> None:
    """17 bytes: the exponent, then weight i in the lower and weight 16 + i in the upper half of byte i."""
    stored = quantise(torch.randn(2, 64, 3), "mxfp4")
    byte_ENgB = llama_cpp._blocks(stored).unflatten(2, (-1, 17))
    scale_ENg1 = torch.exp2(byte_ENgB[..., :1].double() - 127)
    code_ENgi = torch.cat((byte_ENgB[..., 1:] & 15, byte_ENgB[..., 1:] >> 4), dim=-1)
    weight_ENK = (torch.tensor(E2M1, dtype=torch.float64)[code_ENgi.int()] * scale_ENg1).flatten(2)
    assert torch.equal(weight_ENK.transpose(1, 2), stored.decoded().weights())


def test_absent_experts_become_different_ones() -> None:
    given = torch.tensor([[1, -1, -1], [-1, 0, -1], [3, 2, 1], [-1, -1, -1]])
    wanted = torch.tensor([[1, 0, 2], [1, 0, 2], [3, 2, 1], [0, 1, 2]])
    assert torch.equal(llama_cpp._some_expert(given, 4), wanted)


@needs_llama_cpp
@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_right(dtype: torch.dtype, activation: str, absent: float) -> None:
    args = tiny_layers.arguments(
        37, 2, 5, 48, 40, dtype=dtype, absent=absent, activation=activation, bias=activation == "swiglu_oai"
    )
    with torch.no_grad():
        tiny_layers.assert_right(op.get("llama_cpp")(*args), *args)


@needs_llama_cpp
@pytest.mark.parametrize("sizes", [(256, 512), (40, 24), (264, 56)], ids=str)
@pytest.mark.parametrize("store", STORES)
def test_stored_weights_are_computed_with_as_they_are_stored(store: str, sizes: tuple[int, int]) -> None:
    x_TD, gate_TK, plan, weights = tiny_layers.arguments(19, 2, 5, *sizes, dtype=torch.bfloat16, absent=0.2)
    experts = QuantisedExperts(
        w_in=quantise(weights.w_in_EDG, store), w_out=quantise(weights.w_out_EFD, store)
    )
    implementation = op.get(f"llama_cpp(store={store}_a8)")
    assert implementation.freeze_stored is not None and implementation.plain is not None
    frozen = implementation.freeze_stored(experts, torch.bfloat16)
    with torch.no_grad():
        y_TD = implementation(x_TD, gate_TK, plan, frozen)
        exact_TD = op.reference(x_TD.double(), gate_TK.double(), plan, experts.dequantised())
        plain_TD = implementation.plain(x_TD, gate_TK, plan, experts.dequantised(torch.bfloat16))
    assert _right(y_TD, exact_TD, plain_TD)
    assert not _right(y_TD.roll(1, dims=1), exact_TD, plain_TD)


def _right(y_TD: Tensor, exact_TD: Tensor, plain_TD: Tensor) -> bool:
    return judge(y_TD, exact_TD, plain_TD).passed


@needs_llama_cpp
def test_many_layers_and_sizes_give_their_memory_back() -> None:
    def once(T: int) -> None:
        args = tiny_layers.arguments(T, 2, 8, 512, 512)
        with torch.no_grad():
            op.get("llama_cpp")(*args)

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for T in (1, 2, 3):
        once(T)
    before = resident()
    for T in range(4, 24):
        once(T)  # 25 MB of weights each
    assert resident() - before < 100e6


@needs_llama_cpp
def test_a_format_it_does_not_have_is_refused_in_words() -> None:
    args = tiny_layers.arguments()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="q8_0_a8, q4_k_a8, mxfp4_a8"):
        op.get("llama_cpp(store=int4_g32_a8)")(*args)
