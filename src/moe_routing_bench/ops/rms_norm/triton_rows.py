"""Triton: one program per block of tokens reads them twice, for their squares and for the result; forward.

The second read of a token comes from a cache unless it is wider than one. Sums are in float32, in one order;
the result is rounded once. Options: block_d columns of one step and block_t tokens of a program.
It was verified in Triton's interpreter and compiled, but not timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops import gpu
from moe_routing_bench.ops.targets import Target, target_of

FORWARD_ONLY = True
BLOCK_D, BLOCK_T, NUM_WARPS = 2048, 1, 4
CONFIGS = ({"block_d": 512, "block_t": 8, "num_warps": 8}, {"block_d": 4096, "block_t": 1, "num_warps": 8})


@triton.jit(do_not_specialize=["T", "eps"])
def _norm_rows(
    x_TD,
    norm_D,
    y_TD,
    T,
    eps,
    stride_T,
    stride_D,
    stride_norm,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + column
        exists = (t < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_TD + (t * stride_T)[:, None] + (d * stride_D)[None, :], mask=exists, other=0.0)
        squares += x.to(tl.float32) * x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 1) / D + eps)
    for start in range(0, D, BLOCK_D):
        d = start + column
        exists = (t < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_TD + (t * stride_T)[:, None] + (d * stride_D)[None, :], mask=exists, other=0.0)
        norm = tl.load(norm_D + d * stride_norm, mask=d < D, other=0.0)
        y = x.to(tl.float32) * scale[:, None] * norm.to(tl.float32)[None, :]
        tl.store(y_TD + (t * D)[:, None] + d[None, :], y.to(y_TD.dtype.element_ty), mask=exists)


def unsupported(x_TD: Tensor, norm_D: Tensor, eps: float) -> str | None:
    if x_TD.dtype not in FLOATS or norm_D.dtype not in FLOATS:
        return f"it computes float32, bfloat16 and float16, not {x_TD.dtype} with {norm_D.dtype}"
    return gpu.why_not(x_TD, norm_D)


def run(
    x_TD: Tensor, norm_D: Tensor, eps: float, block_d: int = BLOCK_D, block_t: int = BLOCK_T,
    num_warps: int = NUM_WARPS,
) -> Tensor:  # fmt: skip
    gpu.check_powers_of_two(block_d=block_d, block_t=block_t, num_warps=num_warps)
    return _normed(x_TD, norm_D, eps, block_d, block_t, num_warps)


@triton_op("moe_routing_bench::rms_norm_triton_rows", mutates_args=())
@gpu.on_its_device
def _normed(x_TD: Tensor, norm_D: Tensor, eps: float, block_d: int, block_t: int, num_warps: int) -> Tensor:
    T, D = x_TD.shape
    y_TD = x_TD.new_empty(T, D)
    if T and D:
        block_t, block_d = gpu.tile_sides(block_t, block_d, D)
        wrap_triton(_norm_rows)[(triton.cdiv(T, block_t),)](
            x_TD,
            norm_D,
            y_TD,
            T,
            eps,
            x_TD.stride(0),
            x_TD.stride(1),
            norm_D.stride(0),
            D=D,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            **target_of(x_TD.device).moving(num_warps),
        )
    return y_TD


@_normed.register_fake
def _(x_TD: Tensor, norm_D: Tensor, eps: float, block_d: int, block_t: int, num_warps: int) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


def compilations(
    sizes: MoEShape, target: Target, *, block_d: int = BLOCK_D, block_t: int = BLOCK_T,
    num_warps: int = NUM_WARPS,
) -> Iterator[gpu.Compilation]:  # fmt: skip
    block_t, block_d = gpu.tile_sides(block_t, block_d, sizes.D)
    yield gpu.Compilation(
        name="norm_rows",
        kernel=_norm_rows,
        signature={
            "x_TD": "*bf16", "norm_D": "*bf16", "y_TD": "*bf16", "T": "i32", "eps": "fp32",
            "stride_T": "i32:16", "stride_D": "i32:1", "stride_norm": "i32:1",
        },
        constexprs={"D": sizes.D, "BLOCK_T": block_t, "BLOCK_D": block_d},
        **target.moving(num_warps),
        expects=("vector_load",),
        flops=4 * block_t * sizes.D,
        bytes=2 * 2 * block_t * sizes.D,
    )  # fmt: skip
