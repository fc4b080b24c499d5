"""Triton: each row reads its token, one program per tile of rows and columns; the gradient is a sum of rows.

Forward: x_RD[r] = x_TD[pair_R[r] // K], zero if the row holds no pair: one read and one write of R * D
numbers. The K reads of a token are far apart in R, so they come from device memory K times unless x_TD fits
in L2. Backward: dx_TD[t] = sum over k of dx_RD[row_TK[t, k]], in float32, in the order of the choices,
rounded once. Rows without a pair are never read. It uses no atomics, so every run gives the same bits.

Options: block_d columns and block_r rows (tokens in the backward pass) per program, num_warps of 32 lanes.
It was verified in Triton's interpreter and compiled, but not timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops import gpu, rows
from moe_routing_bench.ops.targets import Target, target_of

# 1024 columns of 2 bytes are one 16-byte load for each of 128 lanes
BLOCK_D, BLOCK_R, NUM_WARPS = 1024, 4, 4
CONFIGS = (
    {"block_d": 256, "block_r": 16, "num_warps": 4},
    {"block_d": 512, "block_r": 4, "num_warps": 2},
    {"block_d": 2048, "block_r": 1, "num_warps": 8},
    {"block_d": 2048, "block_r": 4, "num_warps": 8},
)
# how many choices are loaded at the same time
UNROLLED = 4


@triton.jit(do_not_specialize=["R"])
def _gather_rows(
    x_TD,
    pair_R,
    x_RD,
    R,
    stride_T,
    stride_D,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    r = (tl.program_id(0) // COLUMN_BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = (tl.program_id(0) % COLUMN_BLOCKS).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = (r < R)[:, None] & (d < D)[None, :]
    pair = tl.load(pair_R + r, mask=r < R, other=-1)
    x = tl.load(
        x_TD + (pair // K * stride_T)[:, None] + (d * stride_D)[None, :],
        mask=(pair >= 0)[:, None] & exists,
        other=0.0,
    )
    tl.store(x_RD + (r * D)[:, None] + d[None, :], x, mask=exists)


@triton.jit(do_not_specialize=["T"])
def _sum_rows(
    dx_RD,
    row_TK,
    dx_TD,
    T,
    stride_R,
    stride_D,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    t = (tl.program_id(0) // COLUMN_BLOCKS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = (tl.program_id(0) % COLUMN_BLOCKS).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = (t < T)[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.range(0, K, loop_unroll_factor=UNROLL):
        row = tl.load(row_TK + t * K + k, mask=t < T, other=-1)
        dx = tl.load(
            dx_RD + (row * stride_R)[:, None] + (d * stride_D)[None, :],
            mask=(row >= 0)[:, None] & exists,
            other=0.0,
        )
        total += dx.to(tl.float32)
    tl.store(dx_TD + (t * D)[:, None] + d[None, :], total.to(dx_TD.dtype.element_ty), mask=exists)


def unsupported(x_TD: Tensor, plan: RoutingPlan) -> str | None:
    return gpu.why_not(x_TD, plan.row_TK, plan.pair_R) or rows.why_not_dtypes(x_TD)


def run(
    x_TD: Tensor,
    plan: RoutingPlan,
    block_d: int = BLOCK_D,
    block_r: int = BLOCK_R,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    rows.check_tokens(x_TD, plan)
    gpu.check_powers_of_two(block_d=block_d, block_r=block_r, num_warps=num_warps)
    return _gather(x_TD, plan.row_TK.contiguous(), plan.pair_R.contiguous(), block_d, block_r, num_warps)


@triton_op("moe_routing_bench::dispatch_triton_gather", mutates_args=())
@gpu.on_its_device
def _gather(
    x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, block_d: int, block_r: int, num_warps: int
) -> Tensor:
    R, D, K = pair_R.shape[0], x_TD.shape[1], row_TK.shape[1]
    x_RD = x_TD.new_empty(R, D)
    if R and D:
        block_r, block_d = gpu.tile_sides(block_r, block_d, D)
        wrap_triton(_gather_rows)[(triton.cdiv(R, block_r) * triton.cdiv(D, block_d),)](
            x_TD,
            pair_R,
            x_RD,
            R,
            x_TD.stride(0),
            x_TD.stride(1),
            D=D,
            K=max(K, 1),
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            **target_of(x_TD.device).moving(num_warps),
        )
    return x_RD


@triton_op("moe_routing_bench::dispatch_triton_gather_backward", mutates_args=())
@gpu.on_its_device
def _gather_backward(dx_RD: Tensor, row_TK: Tensor, block_d: int, block_t: int, num_warps: int) -> Tensor:
    (T, K), D = row_TK.shape, dx_RD.shape[1]
    dx_TD = dx_RD.new_empty(T, D)
    if T and D:
        block_t, block_d = gpu.tile_sides(block_t, block_d, D)
        wrap_triton(_sum_rows)[(triton.cdiv(T, block_t) * triton.cdiv(D, block_d),)](
            dx_RD,
            row_TK,
            dx_TD,
            T,
            dx_RD.stride(0),
            dx_RD.stride(1),
            D=D,
            K=K,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            UNROLL=UNROLLED,
            **target_of(dx_RD.device).moving(num_warps),
        )
    return dx_TD


@_gather.register_fake
def _(x_TD: Tensor, row_TK: Tensor, pair_R: Tensor, block_d: int, block_r: int, num_warps: int) -> Tensor:
    return x_TD.new_empty(pair_R.shape[0], x_TD.shape[1])


@_gather_backward.register_fake
def _(dx_RD: Tensor, row_TK: Tensor, block_d: int, block_t: int, num_warps: int) -> Tensor:
    return dx_RD.new_empty(row_TK.shape[0], dx_RD.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, row_TK, _, *ctx.options = inputs
    ctx.save_for_backward(row_TK)


def _backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor | None, ...]:
    (row_TK,) = ctx.saved_tensors
    return _gather_backward(dx_RD, row_TK, *ctx.options), None, None, None, None, None


_gather.register_autograd(_backward, setup_context=_keep)


def compilations(
    sizes: MoEShape,
    target: Target,
    *,
    block_d: int = BLOCK_D,
    block_r: int = BLOCK_R,
    num_warps: int = NUM_WARPS,
) -> Iterator[gpu.Compilation]:
    block_r, block_d = gpu.tile_sides(block_r, block_d, sizes.D)
    tile = block_r * block_d
    yield gpu.Compilation(
        name="gather_rows",
        kernel=_gather_rows,
        signature={
            "x_TD": "*bf16", "pair_R": "*i64", "x_RD": "*bf16", "R": "i32",
            "stride_T": "i32:16", "stride_D": "i32:1",
        },
        constexprs={"D": sizes.D, "K": sizes.K, "BLOCK_R": block_r, "BLOCK_D": block_d},
        **target.moving(num_warps),
        expects=("vector_load",),
        bytes=block_r * 8 + 2 * tile * 2,
    )  # fmt: skip
    yield gpu.Compilation(
        name="sum_rows",
        kernel=_sum_rows,
        signature={
            "dx_RD": "*bf16", "row_TK": "*i64", "dx_TD": "*bf16", "T": "i32",
            "stride_R": "i32:16", "stride_D": "i32:1",
        },
        constexprs={
            "D": sizes.D, "K": sizes.K, "BLOCK_T": block_r, "BLOCK_D": block_d, "UNROLL": UNROLLED,
        },
        **target.moving(num_warps),
        expects=("vector_load",),
        flops=sizes.K * tile,
        bytes=sizes.K * (block_r * 8 + tile * 2) + tile * 2,
    )  # fmt: skip
