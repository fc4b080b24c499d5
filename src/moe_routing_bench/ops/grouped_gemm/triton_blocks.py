"""Triton: a block-sparse product for the block layout, one program per block of rows and tile of columns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.gpu import (
    INTERPRETING,
    Compilation,
    depth_of,
    expert_of_row,
    on_its_device,
    why_not,
    why_not_spans,
    why_not_tile,
)
from moe_routing_bench.ops.gpu_gemm import (
    gradient_compilations,
    grouped_order,
    in_rows,
    register_gradients,
    rows_too_far_apart,
    store_tile,
    tile_product,
)
from moe_routing_bench.ops.targets import Target, target_of

# A tile has block_n columns of y, a step block_k of the depth; group_m tiles share columns (grouped_order).
# The rows of a tile are those of the layout's block: at least 16 (for a tensor core), at most 128.
CONFIGS = ({"block_n": 256, "num_warps": 8}, {"block_k": 128, "num_stages": 2, "group_m": 1})


@triton.jit(do_not_specialize=["num_blocks"])
def _blocks(
    x, w, b, y, offset_E1, count_E, num_blocks, stride_xr, stride_we, stride_wd, stride_wf, stride_be,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A block of BLOCK_ROWS rows has one or more tiles of BLOCK_M; its expert is found among the spans."""
    tiles_in_block: tl.constexpr = (BLOCK_ROWS + BLOCK_M - 1) // BLOCK_M
    tiles_n: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    tile_m, tile_n = grouped_order(tl.program_id(0), num_blocks * tiles_in_block, tiles_n, GROUP_M)
    block_first = (tile_m // tiles_in_block).to(tl.int64) * BLOCK_ROWS
    expert = expert_of_row(block_first, offset_E1, E, E_PADDED)
    if expert < E:
        inside_M = tile_m % tiles_in_block * BLOCK_M + tl.arange(0, BLOCK_M)
        row_M = block_first + inside_M
        column_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        first = block_first + tile_m % tiles_in_block * BLOCK_M
        end = tl.load(offset_E1 + expert) + tl.load(count_E + expert)
        live_M = (inside_M < BLOCK_ROWS) & (row_M < end)
        # a tile with only padding is written with finite numbers, but not computed
        depth = tl.where(first < end, D, 0)
        sum_MN = tile_product(
            x + first * stride_xr, w + expert.to(tl.int64) * stride_we, live_M, column_N, depth,
            stride_xr, stride_wd, stride_wf, D, F, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        store_tile(sum_MN, y, b, None, row_M, inside_M < BLOCK_ROWS, column_N, expert, stride_be, F)


def unsupported(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    block_n: int = 128,
    block_k: int = 64,
) -> str | None:
    if plan.layout.kind != "block":
        return f"it needs the block layout (spans of whole blocks), not {plan.layout}"
    if x_RD.dtype not in FLOATS or w_EDF.dtype != x_RD.dtype:
        return f"it computes float32, float16 or bfloat16 throughout, not {x_RD.dtype} with {w_EDF.dtype}"
    if reason := rows_too_far_apart(x_RD) or why_not(x_RD, w_EDF, plan.offset_E1, b_EF):
        return reason
    assert plan.layout.block_rows is not None
    rows = _tile_rows(plan.layout.block_rows)
    tile = (rows + block_n) * depth_of(block_k, x_RD) * x_RD.element_size()
    return why_not_spans(w_EDF) or (None if INTERPRETING else why_not_tile(tile, target_of(x_RD.device)))


def run(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    *,
    block_n: int = 128,
    block_k: int = 64,
    group_m: int = 8,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    assert plan.layout.block_rows is not None
    options = [plan.layout.block_rows, block_n, block_k, group_m, num_warps, num_stages]
    return multiply(x_RD, w_EDF, b_EF, plan.offset_E1, plan.count_E, options)


def _tile_rows(block_rows: int) -> int:
    return min(128, max(16, triton.next_power_of_2(block_rows)))


@triton_op("moe_routing_bench::grouped_gemm_triton_blocks", mutates_args=())
@on_its_device
def multiply(
    x_RD: Tensor, w_EDF: Tensor, b_EF: Tensor | None, offset_E1: Tensor, count_E: Tensor, options: list[int]
) -> Tensor:
    block_rows, block_n, block_k, group_m, num_warps, num_stages = options
    x_RD = in_rows(x_RD)
    b_EF = None if b_EF is None else in_rows(b_EF)
    E, D, F = w_EDF.shape
    y_RF = torch.empty(x_RD.shape[0], F, dtype=x_RD.dtype, device=x_RD.device)
    num_blocks = x_RD.shape[0] // block_rows
    if num_blocks == 0:
        return y_RF
    block_m = _tile_rows(block_rows)
    block_k = depth_of(block_k, x_RD)
    tile = (block_m + block_n) * block_k * x_RD.element_size()
    if x_RD.dtype == torch.float32:  # no tensor core: registers spill with more than 64 sums per lane
        num_warps = max(num_warps, block_m * block_n // (32 * 64))
    grid = num_blocks * triton.cdiv(block_rows, block_m) * triton.cdiv(F, block_n)
    wrap_triton(_blocks)[(grid,)](
        x_RD, w_EDF, b_EF, y_RF, offset_E1, count_E, num_blocks, x_RD.stride(0), *w_EDF.stride(),
        0 if b_EF is None else b_EF.stride(0), D=D, F=F, E=E, E_PADDED=triton.next_power_of_2(E),
        BLOCK_ROWS=block_rows, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m,
        **target_of(x_RD.device).launch(num_warps=num_warps, num_stages=num_stages, tile=tile),
    )  # fmt: skip
    return y_RF


register_gradients(multiply)


def compilations(
    sizes: MoEShape,
    target: Target,
    *,
    block_n: int = 128,
    block_k: int = 64,
    group_m: int = 8,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Iterator[Compilation]:
    """Blocks of 64 rows: D x F, the gradient of x (transposed weights), the gradients of the weights."""
    block_m = _tile_rows(64)
    tile = 2 * (block_m + block_n) * block_k
    for name, D, F in (("forward", sizes.D, sizes.F), ("input_gradient", sizes.F, sizes.D)):
        output_first = name == "input_gradient"
        yield Compilation(
            name=name,
            kernel=_blocks,
            signature={
                "x": "*bf16", "w": "*bf16", "y": "*bf16", "offset_E1": "*i64", "count_E": "*i64",
                "num_blocks": "i32", "stride_xr": "i32:16", "stride_we": "i32:16",
                "stride_wd": "i32:1" if output_first else "i32:16",
                "stride_wf": "i32:16" if output_first else "i32:1", "stride_be": "i32:16",
            },
            constexprs={
                "b": None, "D": D, "F": F, "E": sizes.E, "E_PADDED": triton.next_power_of_2(sizes.E),
                "BLOCK_ROWS": 64, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
                "GROUP_M": group_m,
            },
            **target.compiled(rows=block_m, num_warps=num_warps, num_stages=num_stages, tile=tile),
            flops=2 * block_m * block_n * D,
            bytes=2 * (block_m + block_n) * D + 2 * block_m * block_n,
        )  # fmt: skip
    yield from gradient_compilations(sizes.D, sizes.F, target)
