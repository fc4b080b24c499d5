"""Calls QuACK's kernels for our operations: where they run, what they need, their references on a CPU.

It needs quack-kernels (Apache-2.0), which needs nvidia-cutlass-dsl (NVIDIA's licence, which is not open).
Only `ops/<op>/quack_*.py` import this file. No code of QuACK is copied; its published functions are called.

On a GPU QuACK's kernels run (sm_90, sm_100). On a CPU, with MRB_QUACK_ON_CPU=1, QuACK's own references in
plain torch run (`gemm_ref`, ...). So the kit can judge our part: indices, spans, layouts, the order of calls
and gradients. It does not test the numerics of tensor cores.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

ON_CPU = os.environ.get("MRB_QUACK_ON_CPU") == "1"
if not torch.cuda.is_available():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # else importing it looks for a driver
    os.environ.setdefault("QUACK_ARCH", "90")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # QuACK 0.6.5 uses old names of cutlass-dsl 4.8
    from quack import gemm_interface as quack
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecLoad
    from quack.gemm_config import GemmConfig
    from quack.rmsnorm import rmsnorm, rmsnorm_ref

from moe_routing_bench.core.plan import RoutingPlan  # noqa: E402
from moe_routing_bench.ops.targets import assumed, target_of  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16)
TARGETS = ("sm_90a", "sm_100a")  # QuACK has varlen GEMMs for these, and they were compiled here
ALIGNED = 8  # elements of 16 bits: TMA moves rows of 16 bytes


def why_not(instead: str, rows: Tensor, *others: Tensor) -> str | None:
    """Why QuACK cannot multiply these tensors here; None if it can. `instead` names what can."""
    sm_80 = "QuACK 0.6.5 ends there with 'Gemm Sm80 is not implemented yet'"
    if (reason := why_not_here(instead, rows, *others, sm_80=sm_80)) is not None:
        return reason
    if rows.dtype == torch.float32:
        return f"QuACK multiplies float32 as TF32, which is not allowed here; {instead} does not"
    return None if rows.dtype in DTYPES else f"it computes bfloat16 and float16, not {rows.dtype}"


def why_not_here(instead: str, rows: Tensor, *others: Tensor, sm_80: str = "") -> str | None:
    """Why QuACK's kernels do not run where these tensors are; None if they do."""
    if len({tensor.device for tensor in (rows, *others)}) > 1:
        return "its tensors must be on one device"
    if assumed() is not None or rows.device.type == "cuda":
        target = target_of(rows.device)
        if target.name not in TARGETS:
            why = sm_80 if target.name == "sm_80" else ""
            why = why or f"we call QuACK only on {' and '.join(TARGETS)}"
            return f"not on {target.name}: {why}; {instead} runs there"
        if ON_CPU:
            return "with MRB_QUACK_ON_CPU=1 it needs CPU tensors"
    elif rows.device.type != "cpu" or not ON_CPU:
        return "it runs on a GPU; on a CPU QuACK's references run, to be tested, with MRB_QUACK_ON_CPU=1"
    return "it was not tested with torch.compile" if torch.compiler.is_compiling() else None


def why_not_matrix(w_EDF: Tensor, dtype: torch.dtype) -> str | None:
    if w_EDF.dtype != dtype:
        return f"weights must be of the rows' dtype {dtype}, not {w_EDF.dtype}"
    if w_EDF.shape[1] % ALIGNED or w_EDF.shape[2] % ALIGNED:
        width = f"{w_EDF.shape[1]} x {w_EDF.shape[2]}"
        return f"TMA needs widths that are multiples of {ALIGNED}, and a matrix is {width}"
    if not w_EDF.shape[0]:
        return "there are no experts"
    return None


def why_not_plan(plan: RoutingPlan) -> str | None:
    if max(plan.num_rows, plan.num_tokens) >= 2**31:
        return "QuACK's spans and indices have 32 bits"
    return None


def spans(plan: RoutingPlan) -> Tensor:
    """cu_seqlens: where each expert's rows begin and end, computed on the device."""
    return plan.offset_E1.to(torch.int32)


def as_stored(w: Tensor) -> Tensor:
    """The weights with one dense side and aligned strides; copied only if they are not so already."""
    dense = 1 in (w.stride(1), w.stride(2))
    aligned = all(stride == 1 or stride % ALIGNED == 0 for stride in w.stride())
    return w if dense and aligned and w.data_ptr() % 16 == 0 else w.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """Rows that TMA can read: contiguous numbers, rows at multiples of 16 bytes."""
    fits = x.stride(1) == 1 and x.stride(0) % ALIGNED == 0 and x.stride(0) >= x.shape[1]
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


@gemm_epilogue(ops={"score": ColVecLoad("score")})
def scaled(acc, score):
    """A row's result times its router score."""
    return {"D": acc * score}


def gemm(
    a: Tensor, b: Tensor, *, spans_m: Tensor | None = None, spans_k: Tensor | None = None,
    index: Tensor | None = None, concatenated: tuple[str, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Rows of each span times its matrix (spans_m), or columns times rows of each span (spans_k)."""
    named = {"cu_seqlens_m": spans_m, "cu_seqlens_k": spans_k, "A_idx": index, "concat_layout": concatenated}
    if ON_CPU:
        return quack.gemm_ref(a, b, **named)
    return quack.gemm(a, b, tuned=False, **named)


def gemm_gated(
    a: Tensor, b: Tensor, activation: str, *, spans_m: Tensor, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(a @ b, activated). In a @ b the columns of gate and up alternate; b has all of gate, then all of
    up."""
    named = {"activation": activation, "cu_seqlens_m": spans_m, "A_idx": index, "concat_layout": ("B",)}
    return quack.gemm_gated_ref(a, b, **named) if ON_CPU else quack.gemm_gated(a, b, tuned=False, **named)


def gemm_scaled(a: Tensor, b: Tensor, score_R: Tensor, *, spans_m: Tensor) -> Tensor:
    if ON_CPU:
        y_RD = quack.gemm_ref(a.float(), b.float(), cu_seqlens_m=spans_m)
        return (y_RD * score_R.unsqueeze(1)).to(a.dtype)
    return scaled(a, b, tuned=False, cu_seqlens_m=spans_m, score=score_R)["D"]


def dgated_config(major: int) -> GemmConfig:
    """Tiles of 128 x 128. With QuACK's untuned tiles this epilogue spills registers: 1224 loads and stores
    with 128 x 192 on sm_90a, 29 with 256 x 256 on sm_100a (measurements/gpu/quack_compile.py)."""
    return GemmConfig(
        tile_m=128, tile_n=128, cluster_m=1, cluster_n=1, pingpong=False, is_dynamic_persistent=False,
        device_capacity=major,
    )  # fmt: skip


def gemm_dgated(
    a: Tensor, b: Tensor, pre_RG: Tensor, activation: str, score_R: Tensor, *, spans_m: Tensor,
    index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With g = a @ b: the gradient of pre_RG under score * g, score * activated, and <activated, g>."""
    named = {"cu_seqlens_m": spans_m, "A_idx": index}
    if not ON_CPU:
        config = dgated_config(torch.cuda.get_device_capability(a.device)[0])
        return quack.gemm_dgated(
            a, b, pre_RG, activation, colvec_scale=score_R, colvec_reduce=True, tuned=False, config=config,
            dynamic_scheduler=False, **named,
        )  # fmt: skip
    # its reference has no scale and no sum, so rows are scaled first, in float32
    rows = a if index is None else a[index]
    wide = (rows * score_R.unsqueeze(1), b.float())
    with torch.enable_grad():
        dpre_RG, h_RF = quack.gemm_dgated_ref(*wide, pre_RG.float(), activation, cu_seqlens_m=spans_m)
    h_RF = h_RF.detach()
    g_RF = quack.gemm_ref(rows.float(), b.float(), cu_seqlens_m=spans_m)
    scaled_RF = h_RF * score_R.unsqueeze(1)
    return dpre_RG.to(a.dtype), scaled_RF.to(a.dtype), (h_RF * g_RF).sum(1)


def rms_norm(x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    return (rmsnorm_ref if ON_CPU else rmsnorm)(x_TD, norm_D, eps=eps)
