"""Shared by the Triton grouped GEMMs: the product of a tile, the order of tiles, gradients of weights,
biases.

It needs triton, like gpu.py. One program sums a tile in float32 over the whole depth, so results do not
depend on the order in which programs run. float32 is multiplied as float32 ("ieee"), never as TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_routing_bench.ops.gpu import Compilation, depth_of, on_its_device
from moe_routing_bench.ops.targets import Target, target_of


@triton.jit
def grouped_order(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> (row tile, column tile), going down GROUP_M row tiles before the next column.

    Programs that run at the same time then read GROUP_M row tiles and few column tiles, which stay in L2.
    With GROUP_M=2 and 3 x 2 tiles: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % per_group
    return first_m + inside % height, inside // height


@triton.jit
def tile_product(
    x, w, live_M, column_N, depth, stride_xr, stride_wd, stride_wf,
    D: tl.constexpr, F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of x times some columns of one expert's matrix, in float32.

    x: the first row; live_M: rows that count, the others are read as zero; w: the expert's own matrix;
    depth: D, or 0 for a tile without a live row. Offsets inside a tile fit 32 bits; the pointers have 64.
    Weights of another type (fp8) are converted to x's type, which holds all their values.
    """
    k_K = tl.arange(0, BLOCK_K)
    x_MK = tl.arange(0, BLOCK_M)[:, None] * stride_xr + k_K[None, :]
    w_KN = k_K[:, None] * stride_wd + column_N[None, :] * stride_wf
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        mask_MK = live_M[:, None]
        mask_KN = (column_N < F)[None, :]
        if D % BLOCK_K != 0:
            mask_MK = mask_MK & (k_K < D - k)[None, :]
            mask_KN = mask_KN & (k_K < D - k)[:, None]
        x_tile = tl.load(x + x_MK, mask=mask_MK, other=0.0)
        if D % BLOCK_K == 0 and F % BLOCK_N == 0:
            w_tile = tl.load(w + w_KN)
        else:
            w_tile = tl.load(w + w_KN, mask=mask_KN, other=0.0)
        sum_MN = tl.dot(x_tile, w_tile.to(x_tile.dtype), sum_MN, input_precision="ieee")
        x += BLOCK_K
        w += BLOCK_K * stride_wd
    return sum_MN


@triton.jit
def store_tile(
    sum_MN, y, b, scale, row_M, mask_M, column_N, expert, stride_be, F: tl.constexpr
):  # fmt: skip
    """Applies scale_EF and b_EF where given, rounds once and stores; y and scale_EF are contiguous."""
    if scale is not None:
        scale_N = tl.load(scale + expert * F + column_N, mask=column_N < F, other=0.0)
        sum_MN *= scale_N[None, :]
    if b is not None:
        bias_N = tl.load(b + expert * stride_be + column_N, mask=column_N < F, other=0.0)
        sum_MN += bias_N.to(tl.float32)[None, :]
    mask_MN = mask_M[:, None] & (column_N < F)[None, :]
    tl.store(y + row_M[:, None] * F + column_N[None, :], sum_MN.to(y.dtype.element_ty), mask=mask_MN)


@triton.jit
def _outer_product(
    upper, lower, out, offset_E1, count_E, order_E, stride_ur, stride_lr,
    ABOVE: tl.constexpr, BELOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out_e = sum over expert e's pairs of upper_r, a column, times lower_r, a row; one tile a program."""
    tiles_m = tl.cdiv(ABOVE, BLOCK_M)
    tiles_n = tl.cdiv(BELOW, BLOCK_N)
    program = tl.program_id(0)
    expert = tl.load(order_E + program // (tiles_m * tiles_n))
    tile_m, tile_n = grouped_order(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    above_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    below_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(offset_E1 + expert)
    count = tl.load(count_E + expert).to(tl.int32)
    rank_K = tl.arange(0, BLOCK_K)
    upper_MK = rank_K[None, :] * stride_ur + above_M[:, None]
    lower_KN = rank_K[:, None] * stride_lr + below_N[None, :]
    upper += first * stride_ur
    lower += first * stride_lr
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, count, BLOCK_K):
        # mask both sides: a row that no expert owns may hold NaN, and 0 * NaN is NaN
        live_K = rank_K < count - k
        mask_MK = live_K[None, :]
        mask_KN = live_K[:, None]
        if ABOVE % BLOCK_M != 0:
            mask_MK = mask_MK & (above_M < ABOVE)[:, None]
        if BELOW % BLOCK_N != 0:
            mask_KN = mask_KN & (below_N < BELOW)[None, :]
        upper_tile = tl.load(upper + upper_MK, mask=mask_MK, other=0.0)
        lower_tile = tl.load(lower + lower_KN, mask=mask_KN, other=0.0)
        sum_MN = tl.dot(upper_tile, lower_tile, sum_MN, input_precision="ieee")
        upper += BLOCK_K * stride_ur
        lower += BLOCK_K * stride_lr
    place_MN = expert.to(tl.int64) * ABOVE * BELOW + above_M[:, None] * BELOW + below_N[None, :]
    mask_MN = (above_M < ABOVE)[:, None] & (below_N < BELOW)[None, :]
    tl.store(out + place_MN, sum_MN.to(out.dtype.element_ty), mask=mask_MN)


@triton.jit
def _sum_rows(
    dy, out, offset_E1, count_E, stride_r, F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out_e = sum over expert e's pairs of dy_r; some columns a program."""
    expert = tl.program_id(0)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(offset_E1 + expert)
    count = tl.load(count_E + expert).to(tl.int32)
    rank_K = tl.arange(0, BLOCK_K)
    sum_KN = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for k in range(0, count, BLOCK_K):
        mask_KN = (rank_K < count - k)[:, None] & (column_N < F)[None, :]
        place_KN = (first + k + rank_K)[:, None] * stride_r + column_N[None, :]
        sum_KN += tl.load(dy + place_KN, mask=mask_KN, other=0.0).to(tl.float32)
    place_N = expert.to(tl.int64) * F + column_N
    tl.store(out + place_N, tl.sum(sum_KN, 0).to(out.dtype.element_ty), mask=column_N < F)


OUTER = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}
OUTER_LAUNCH = {"num_warps": 8, "num_stages": 3}
SUM = {"BLOCK_K": 32, "BLOCK_N": 128}
SUM_LAUNCH = {"num_warps": 4, "num_stages": 2}


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor with contiguous rows, which kernels need; copied only if necessary."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def rows_too_far_apart(x_RD: Tensor) -> str | None:
    """Why the rows are too far apart: offsets in a tile of up to 128 rows have 32 bits. None if they are
    not."""
    if x_RD.stride(1) == 1 and 128 * x_RD.stride(0) >= 2**31:
        return f"rows are {x_RD.stride(0)} elements apart, which is too far; call contiguous() first"
    return None


def weight_gradient(x_RD: Tensor, dy_RF: Tensor, w_EDF: Tensor, offset_E1: Tensor, count_E: Tensor) -> Tensor:
    """dw_e = x_e^T dy_e, zero for experts without pairs; stored output-first if the weights are."""
    if w_EDF.stride(1) == 1:
        return outer_product(in_rows(dy_RF), in_rows(x_RD), offset_E1, count_E).transpose(1, 2)
    return outer_product(in_rows(x_RD), in_rows(dy_RF), offset_E1, count_E)


@triton_op("moe_routing_bench::span_outer_product", mutates_args=())
@on_its_device
def outer_product(upper_RA: Tensor, lower_RB: Tensor, offset_E1: Tensor, count_E: Tensor) -> Tensor:
    E, above, below = count_E.shape[0], upper_RA.shape[1], lower_RB.shape[1]
    out_EAB = torch.empty(E, above, below, dtype=upper_RA.dtype, device=upper_RA.device)
    # programs of a larger expert take longer, so they start first; in the forward pass all are equally long
    order_E = torch.argsort(count_E, descending=True, stable=True)
    tiles = triton.cdiv(above, OUTER["BLOCK_M"]) * triton.cdiv(below, OUTER["BLOCK_N"])
    blocks = {**OUTER, "BLOCK_K": depth_of(OUTER["BLOCK_K"], upper_RA)}
    tile = (OUTER["BLOCK_M"] + OUTER["BLOCK_N"]) * blocks["BLOCK_K"] * upper_RA.element_size()
    wrap_triton(_outer_product)[(E * tiles,)](
        upper_RA, lower_RB, out_EAB, offset_E1, count_E, order_E, upper_RA.stride(0), lower_RB.stride(0),
        ABOVE=above, BELOW=below, **blocks, **target_of(upper_RA.device).launch(**OUTER_LAUNCH, tile=tile),
    )  # fmt: skip
    return out_EAB


@triton_op("moe_routing_bench::span_row_sums", mutates_args=())
@on_its_device
def row_sums(dy_RF: Tensor, offset_E1: Tensor, count_E: Tensor) -> Tensor:
    E, F = count_E.shape[0], dy_RF.shape[1]
    out_EF = torch.empty(E, F, dtype=dy_RF.dtype, device=dy_RF.device)
    wrap_triton(_sum_rows)[(E, triton.cdiv(F, SUM["BLOCK_N"]))](
        dy_RF, out_EF, offset_E1, count_E, dy_RF.stride(0), F=F, **SUM,
        **target_of(dy_RF.device).launch(**SUM_LAUNCH),
    )  # fmt: skip
    return out_EF


def bias_gradient(dy_RF: Tensor, offset_E1: Tensor, count_E: Tensor) -> Tensor:
    return row_sums(in_rows(dy_RF), offset_E1, count_E)


def register_gradients(multiply: Any) -> None:
    """Registers the gradients of an op (x_RD, w_EDF, b_EF, offset_E1, count_E, options) -> y_RF.

    The gradient of x is the op itself with transposed weights. The functions above compute the others.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_RD, w_EDF, _, offset_E1, count_E, ctx.options = inputs
        ctx.save_for_backward(x_RD, w_EDF, offset_E1, count_E)

    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, w_EDF, offset_E1, count_E = ctx.saved_tensors
        dx_RD = dw_EDF = db_EF = None
        if ctx.needs_input_grad[0]:
            dx_RD = multiply(dy_RF, w_EDF.transpose(1, 2), None, offset_E1, count_E, ctx.options)
        if ctx.needs_input_grad[1]:
            dw_EDF = weight_gradient(x_RD, dy_RF, w_EDF, offset_E1, count_E)
        if ctx.needs_input_grad[2]:
            db_EF = bias_gradient(dy_RF, offset_E1, count_E)
        return dx_RD, dw_EDF, db_EF, None, None, None

    multiply.register_autograd(backward, setup_context=keep)


def gradient_compilations(D: int, F: int, target: Target) -> Iterator[Compilation]:
    sums = target.launch(**SUM_LAUNCH)
    rows = OUTER["BLOCK_K"]
    tile = 2 * (OUTER["BLOCK_M"] + OUTER["BLOCK_N"]) * rows
    yield Compilation(
        name="weight_gradient",
        kernel=_outer_product,
        signature={
            "upper": "*bf16", "lower": "*bf16", "out": "*bf16", "offset_E1": "*i64", "count_E": "*i64",
            "order_E": "*i64", "stride_ur": "i32:16", "stride_lr": "i32:16",
        },
        constexprs={"ABOVE": D, "BELOW": F, **OUTER},
        **target.compiled(rows=OUTER["BLOCK_M"], **OUTER_LAUNCH, tile=tile),
        flops=2 * OUTER["BLOCK_M"] * OUTER["BLOCK_N"] * rows,
        bytes=tile + 2 * OUTER["BLOCK_M"] * OUTER["BLOCK_N"],
    )  # fmt: skip
    yield Compilation(
        name="bias_gradient",
        kernel=_sum_rows,
        signature={
            "dy": "*bf16", "out": "*bf16", "offset_E1": "*i64", "count_E": "*i64", "stride_r": "i32:16",
        },
        constexprs={"F": F, **SUM},
        num_warps=sums.pop("num_warps"),
        num_stages=sums.pop("num_stages"),
        options=sums,
        expects=("vector_load",),
        flops=SUM["BLOCK_K"] * SUM["BLOCK_N"],
        bytes=2 * SUM["BLOCK_K"] * SUM["BLOCK_N"] + 2 * SUM["BLOCK_N"],
    )  # fmt: skip
