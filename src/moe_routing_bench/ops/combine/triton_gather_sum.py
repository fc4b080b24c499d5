"""Triton: each program reads the K rows of its tokens and sums them, times their gates, in float32.

Forward: y_TD[t] = sum over k of gate_TK[t, k] * y_RD[row_TK[t, k]], in the order of the choices, rounded
once. Backward: one program per tile of rows goes over all columns. With (t, k) the pair of row r,
  dy_RD[r]      = gate_TK[t, k] * dy_TD[t]       zero where the row holds no pair
  dgate_TK[t,k] = <dy_TD[t], y_RD[r]>            zero where the pair has no row
Rows without a pair are never read. It uses no atomics, so every run gives the same bits.

Options: block_d columns and block_t tokens (rows in the backward pass) per program, num_warps of 32 lanes.
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
BLOCK_D, BLOCK_T, NUM_WARPS = 1024, 2, 4
CONFIGS = (
    {"block_d": 256, "block_t": 8, "num_warps": 4},
    {"block_d": 512, "block_t": 1, "num_warps": 2},
    {"block_d": 1024, "block_t": 1, "num_warps": 4},
    {"block_d": 2048, "block_t": 2, "num_warps": 8},
)
# how many choices are loaded at the same time
UNROLLED = 4


@triton.jit(do_not_specialize=["T"])
def _weighted_sum(
    y_RD,
    gate_TK,
    row_TK,
    y_TD,
    T,
    y_stride_R,
    y_stride_D,
    gate_stride_T,
    gate_stride_K,
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
        gate = tl.load(gate_TK + t * gate_stride_T + k * gate_stride_K, mask=row >= 0, other=0.0)
        y = tl.load(
            y_RD + (row * y_stride_R)[:, None] + (d * y_stride_D)[None, :],
            mask=(row >= 0)[:, None] & exists,
            other=0.0,
        )
        total += gate.to(tl.float32)[:, None] * y.to(tl.float32)
    tl.store(y_TD + (t * D)[:, None] + d[None, :], total.to(y_TD.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["R"])
def _spread(
    dy_TD,
    y_RD,
    gate_TK,
    pair_R,
    dy_RD,
    dgate_TK,
    R,
    dy_stride_T,
    dy_stride_D,
    y_stride_R,
    y_stride_D,
    gate_stride_T,
    gate_stride_K,
    D: tl.constexpr,
    K: tl.constexpr,
    WANTS_Y: tl.constexpr,
    WANTS_GATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    pair = tl.load(pair_R + r, mask=r < R, other=-1)
    holds = pair >= 0
    t = pair // K
    gate = tl.load(gate_TK + t * gate_stride_T + pair % K * gate_stride_K, mask=holds, other=0.0)
    gate = gate.to(tl.float32)[:, None]
    # one partial sum per column of the tile; they are added at the end
    dgate = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in tl.range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D).to(tl.int64)
        inside = (d < D)[None, :]
        dy = tl.load(
            dy_TD + (t * dy_stride_T)[:, None] + (d * dy_stride_D)[None, :],
            mask=holds[:, None] & inside,
            other=0.0,
        ).to(tl.float32)
        if WANTS_GATE:
            y = tl.load(
                y_RD + (r * y_stride_R)[:, None] + (d * y_stride_D)[None, :],
                mask=holds[:, None] & inside,
                other=0.0,
            )
            dgate += dy * y.to(tl.float32)
        if WANTS_Y:
            tl.store(
                dy_RD + (r * D)[:, None] + d[None, :],
                (gate * dy).to(dy_RD.dtype.element_ty),
                mask=(r < R)[:, None] & inside,
            )
    if WANTS_GATE:
        tl.store(dgate_TK + pair, tl.sum(dgate, 1).to(dgate_TK.dtype.element_ty), mask=holds)


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    reason = gpu.why_not(y_RD, gate_TK, plan.row_TK, plan.pair_R)
    return reason or rows.why_not_dtypes(y_RD, gate_TK)


def run(
    y_RD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    block_d: int = BLOCK_D,
    block_t: int = BLOCK_T,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    rows.check_rows(y_RD, gate_TK, plan)
    gpu.check_powers_of_two(block_d=block_d, block_t=block_t, num_warps=num_warps)
    row_TK, pair_R = plan.row_TK.contiguous(), plan.pair_R.contiguous()
    return _gather_sum(y_RD, gate_TK, row_TK, pair_R, block_d, block_t, num_warps)


@triton_op("moe_routing_bench::combine_triton_gather_sum", mutates_args=())
@gpu.on_its_device
def _gather_sum(
    y_RD: Tensor,
    gate_TK: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    block_d: int,
    block_t: int,
    num_warps: int,
) -> Tensor:
    (T, K), D = row_TK.shape, y_RD.shape[1]
    y_TD = y_RD.new_empty(T, D)
    if T and D:
        block_t, block_d = gpu.tile_sides(block_t, block_d, D)
        wrap_triton(_weighted_sum)[(triton.cdiv(T, block_t) * triton.cdiv(D, block_d),)](
            y_RD,
            gate_TK,
            row_TK,
            y_TD,
            T,
            *y_RD.stride(),
            *gate_TK.stride(),
            D=D,
            K=K,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            UNROLL=UNROLLED,
            **target_of(y_RD.device).moving(num_warps),
        )
    return y_TD


@triton_op("moe_routing_bench::combine_triton_gather_sum_backward", mutates_args=())
@gpu.on_its_device
def _gather_sum_backward(
    dy_TD: Tensor,
    y_RD: Tensor,
    gate_TK: Tensor,
    pair_R: Tensor,
    wants_y: bool,
    wants_gate: bool,
    block_d: int,
    block_r: int,
    num_warps: int,
) -> tuple[Tensor, Tensor]:
    """dy_RD and dgate_TK; an unwanted gradient has no elements."""
    (R, D), (T, K) = y_RD.shape, gate_TK.shape
    dy_RD = y_RD.new_empty((R, D) if wants_y else (0, D))
    dgate_TK = gate_TK.new_zeros((T, K) if wants_gate else (0, K))
    if R and D:
        block_r, block_d = gpu.tile_sides(block_r, block_d, D)
        wrap_triton(_spread)[(triton.cdiv(R, block_r),)](
            dy_TD,
            y_RD,
            gate_TK,
            pair_R,
            dy_RD,
            dgate_TK,
            R,
            *dy_TD.stride(),
            *y_RD.stride(),
            *gate_TK.stride(),
            D=D,
            K=max(K, 1),
            WANTS_Y=wants_y,
            WANTS_GATE=wants_gate,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            **target_of(y_RD.device).moving(num_warps),
        )
    return dy_RD, dgate_TK


@_gather_sum.register_fake
def _(
    y_RD: Tensor,
    gate_TK: Tensor,
    row_TK: Tensor,
    pair_R: Tensor,
    block_d: int,
    block_t: int,
    num_warps: int,
) -> Tensor:
    return y_RD.new_empty(row_TK.shape[0], y_RD.shape[1])


@_gather_sum_backward.register_fake
def _(
    dy_TD: Tensor,
    y_RD: Tensor,
    gate_TK: Tensor,
    pair_R: Tensor,
    wants_y: bool,
    wants_gate: bool,
    block_d: int,
    block_r: int,
    num_warps: int,
) -> tuple[Tensor, Tensor]:
    (R, D), (T, K) = y_RD.shape, gate_TK.shape
    return y_RD.new_empty((R, D) if wants_y else (0, D)), gate_TK.new_empty((T, K) if wants_gate else (0, K))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_RD, gate_TK, _, pair_R, *ctx.options = inputs
    ctx.save_for_backward(y_RD, gate_TK, pair_R)


def _backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    wants_y, wants_gate = ctx.needs_input_grad[:2]
    dy_RD, dgate_TK = _gather_sum_backward(dy_TD, *ctx.saved_tensors, wants_y, wants_gate, *ctx.options)
    return dy_RD if wants_y else None, dgate_TK if wants_gate else None, None, None, None, None, None


_gather_sum.register_autograd(_backward, setup_context=_keep)


def compilations(
    sizes: MoEShape,
    target: Target,
    *,
    block_d: int = BLOCK_D,
    block_t: int = BLOCK_T,
    num_warps: int = NUM_WARPS,
) -> Iterator[gpu.Compilation]:
    block_t, block_d = gpu.tile_sides(block_t, block_d, sizes.D)
    tile = block_t * block_d
    yield gpu.Compilation(
        name="weighted_sum",
        kernel=_weighted_sum,
        signature={
            "y_RD": "*bf16", "gate_TK": "*fp32", "row_TK": "*i64", "y_TD": "*bf16", "T": "i32",
            "y_stride_R": "i32:16", "y_stride_D": "i32:1", "gate_stride_T": "i32", "gate_stride_K": "i32:1",
        },
        constexprs={
            "D": sizes.D, "K": sizes.K, "BLOCK_T": block_t, "BLOCK_D": block_d, "UNROLL": UNROLLED,
        },
        **target.moving(num_warps),
        expects=("vector_load",),
        flops=2 * sizes.K * tile,
        bytes=sizes.K * (block_t * 12 + tile * 2) + tile * 2,
    )  # fmt: skip
    yield gpu.Compilation(
        name="spread",
        kernel=_spread,
        signature={
            "dy_TD": "*bf16", "y_RD": "*bf16", "gate_TK": "*fp32", "pair_R": "*i64", "dy_RD": "*bf16",
            "dgate_TK": "*fp32", "R": "i32", "dy_stride_T": "i32:16", "dy_stride_D": "i32:1",
            "y_stride_R": "i32:16", "y_stride_D": "i32:1", "gate_stride_T": "i32", "gate_stride_K": "i32:1",
        },
        constexprs={
            "D": sizes.D, "K": sizes.K, "WANTS_Y": True, "WANTS_GATE": True, "BLOCK_R": block_t,
            "BLOCK_D": block_d,
        },
        **target.moving(num_warps),
        expects=("vector_load",),
        flops=3 * block_t * sizes.D,
        bytes=block_t * (8 + 4 + 4 + 3 * sizes.D * 2),
    )  # fmt: skip
