"""Triton: the tiles of all experts' spans in one launch, found on the device; persistent, with optional TMA.

store=e4m3 computes with weights of 8 bits, w = scale * w8, with a scale for each expert and column. Rows are
not changed. This halves the bytes of weights, is less precise, has no backward, and is judged by
`stored(w_EDF)`. `run` converts the weights at every call, which costs more than it saves; `multiply_stored`
takes converted ones.
"""

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
    multiprocessors,
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

# A tile is block_m x block_n of y, a step block_k of the depth; group_m: tiles in a group (grouped_order);
# persistent: programs per multiprocessor, which take tile after tile; 0: one program for each possible tile;
# tma=1: read through tensor descriptors, which hardware moves from sm_90 on.
CONFIGS: tuple[dict[str, int | str], ...] = (
    {"persistent": 0},
    {"block_m": 16, "block_k": 128, "num_warps": 4},  # few rows an expert: decoding
    {"block_m": 64, "block_n": 256},
    {"tma": 1},
    {"store": "e4m3"},
)
E4M3_LARGEST = 448.0


@triton.jit
def _tile(
    tile, tiles_E, after_E, x, w, b, scale, y, x_desc, w_desc, offset_E1, count_E,
    stride_xr, stride_we, stride_wd, stride_wf, stride_be, D: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TMA: tl.constexpr, OUTPUT_FIRST: tl.constexpr,
):  # fmt: skip
    expert = tl.sum((after_E <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(after_E <= tile, tiles_E, 0), 0)
    first = tl.load(offset_E1 + expert)
    span = (tl.load(offset_E1 + expert + 1) - first).to(tl.int32)
    count = tl.load(count_E + expert).to(tl.int32)
    tile_m, tile_n = grouped_order(tile - before, tl.cdiv(span, BLOCK_M), tl.cdiv(F, BLOCK_N), GROUP_M)
    rank_M = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = first + rank_M
    column_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # a tile with only padding is written with finite numbers, but not computed
    depth = tl.where(tile_m * BLOCK_M < count, D, 0)
    if TMA:
        row = (first + tile_m * BLOCK_M).to(tl.int32)
        sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, depth, BLOCK_K):
            x_tile = x_desc.load([row, k])
            if OUTPUT_FIRST:
                w_tile = w_desc.load([expert, tile_n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w_tile = w_desc.load([expert, k, tile_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            sum_MN = tl.dot(x_tile, w_tile, sum_MN, input_precision="ieee")
    else:
        x_first = x + (first + tile_m * BLOCK_M) * stride_xr
        w_expert = w + expert.to(tl.int64) * stride_we
        sum_MN = tile_product(
            x_first, w_expert, rank_M < count, column_N, depth, stride_xr, stride_wd, stride_wf,
            D, F, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    store_tile(sum_MN, y, b, scale, row_M, rank_M < span, column_N, expert, stride_be, F)


@triton.jit(do_not_specialize=["num_rows"])
def _ragged(
    x, w, b, scale, y, offset_E1, count_E, num_rows, stride_xr, stride_we, stride_wd, stride_wf, stride_be,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PERSISTENT: tl.constexpr,
    TMA: tl.constexpr, OUTPUT_FIRST: tl.constexpr,
):  # fmt: skip
    """Tiles are numbered expert by expert. E_PADDED: E as a power of two."""
    expert_E = tl.arange(0, E_PADDED)
    start_E = tl.load(offset_E1 + expert_E, mask=expert_E < E, other=0)
    end_E = tl.load(offset_E1 + 1 + expert_E, mask=expert_E < E, other=0)
    tiles_E = tl.cdiv((end_E - start_E).to(tl.int32), BLOCK_M) * tl.cdiv(F, BLOCK_N)
    after_E = tl.cumsum(tiles_E, 0)
    num_tiles = tl.sum(tiles_E, 0)
    x_desc = None
    w_desc = None
    if TMA:
        x_desc = tl.make_tensor_descriptor(x, [num_rows, D], [stride_xr, 1], [BLOCK_M, BLOCK_K])
        if OUTPUT_FIRST:
            w_desc = tl.make_tensor_descriptor(w, [E, F, D], [stride_we, stride_wf, 1], [1, BLOCK_N, BLOCK_K])
        else:
            w_desc = tl.make_tensor_descriptor(w, [E, D, F], [stride_we, stride_wd, 1], [1, BLOCK_K, BLOCK_N])
    program = tl.program_id(0)
    if PERSISTENT:
        for tile in range(program, num_tiles, tl.num_programs(0)):
            _tile(
                tile, tiles_E, after_E, x, w, b, scale, y, x_desc, w_desc, offset_E1, count_E,
                stride_xr, stride_we, stride_wd, stride_wf, stride_be, D, F,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, TMA, OUTPUT_FIRST,
            )  # fmt: skip
    elif program < num_tiles:
        _tile(
            program, tiles_E, after_E, x, w, b, scale, y, x_desc, w_desc, offset_E1, count_E,
            stride_xr, stride_we, stride_wd, stride_wf, stride_be, D, F,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, TMA, OUTPUT_FIRST,
        )  # fmt: skip


def unsupported(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    tma: int = 0,
    store: str = "",
    block_m: int = 128,
    block_n: int = 128,
    block_k: int = 64,
) -> str | None:
    if x_RD.dtype not in FLOATS or w_EDF.dtype != x_RD.dtype:
        return f"it computes float32, float16 or bfloat16 throughout, not {x_RD.dtype} with {w_EDF.dtype}"
    target, block_n, depth = target_of(x_RD.device), _columns(block_n, x_RD), depth_of(block_k, x_RD)
    if tma and not INTERPRETING and not target.tma:
        return f"{target.name} has no TMA; leave the option tma out"
    if tma and not _fits_descriptor(w_EDF):
        return (
            "TMA needs rows of x, weights and result that start at a multiple of 16 bytes and are that long; "
            f"weights of {tuple(w_EDF.shape)} with strides {w_EDF.stride()} do not have them"
        )
    if tma and (w_EDF.shape[1] % depth or w_EDF.shape[2] % depth):
        return (
            f"TMA reads whole tiles of depth {depth}, forward and for gradients; D={w_EDF.shape[1]} and "
            f"F={w_EDF.shape[2]} are not both multiples of that: choose another block_k, or leave tma out"
        )
    if store not in ("", "e4m3"):
        return f"it stores weights as e4m3, not as {store}"
    if reason := rows_too_far_apart(x_RD) or why_not(x_RD, w_EDF, plan.offset_E1, b_EF):
        return reason
    tile = _tile_bytes(block_m, block_n, depth, x_RD.element_size(), 1 if store else x_RD.element_size())
    if reason := why_not_spans(w_EDF) or (None if INTERPRETING else why_not_tile(tile, target)):
        return reason
    if store and tma:
        return "store and tma cannot be used together; leave one out"
    if store and not INTERPRETING and not target.e4m3:
        return "Triton reads e4m3 from sm_89 on; leave the option store out"
    return None


def run(
    x_RD: Tensor,
    w_EDF: Tensor,
    plan: RoutingPlan,
    b_EF: Tensor | None = None,
    *,
    block_m: int = 128,
    block_n: int = 128,
    block_k: int = 64,
    group_m: int = 8,
    num_warps: int = 8,
    num_stages: int = 3,
    persistent: int = 1,
    tma: int = 0,
    store: str = "",
) -> Tensor:
    options = [block_m, block_n, block_k, group_m, num_warps, num_stages, persistent, tma]
    if store:
        w8_EDF, scale_EF = as_e4m3(w_EDF.detach())
        return multiply_stored(x_RD, w8_EDF, scale_EF, b_EF, plan.offset_E1, plan.count_E, options)
    return multiply(x_RD, w_EDF, b_EF, plan.offset_E1, plan.count_E, options)


def as_e4m3(w_EDF: Tensor) -> tuple[Tensor, Tensor]:
    """w8_EDF and scale_EF. The largest weight of an expert's column becomes 448, the largest e4m3 number."""
    scale_EF = (w_EDF.float().abs().amax(1) / E4M3_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (w_EDF.float() / scale_EF.unsqueeze(1)).to(torch.float8_e4m3fn), scale_EF


def stored(w_EDF: Tensor, *, store: str) -> Tensor:
    w8_EDF, scale_EF = as_e4m3(w_EDF)
    return w8_EDF.float() * scale_EF.unsqueeze(1)


@triton_op("moe_routing_bench::grouped_gemm_triton_ragged", mutates_args=())
def multiply(
    x_RD: Tensor, w_EDF: Tensor, b_EF: Tensor | None, offset_E1: Tensor, count_E: Tensor, options: list[int]
) -> Tensor:
    return _launch(x_RD, w_EDF, b_EF, None, offset_E1, count_E, options)


@triton_op("moe_routing_bench::grouped_gemm_triton_ragged_stored", mutates_args=())
def multiply_stored(
    x_RD: Tensor,
    w8_EDF: Tensor,
    scale_EF: Tensor,
    b_EF: Tensor | None,
    offset_E1: Tensor,
    count_E: Tensor,
    options: list[int],
) -> Tensor:
    return _launch(x_RD, w8_EDF, b_EF, scale_EF, offset_E1, count_E, options)


@on_its_device
def _launch(
    x_RD: Tensor,
    w_EDF: Tensor,
    b_EF: Tensor | None,
    scale_EF: Tensor | None,
    offset_E1: Tensor,
    count_E: Tensor,
    options: list[int],
) -> Tensor:
    block_m, block_n, block_k, group_m, num_warps, num_stages, persistent, tma = options
    x_RD = _for_descriptor(in_rows(x_RD)) if tma else in_rows(x_RD)
    b_EF = None if b_EF is None else in_rows(b_EF)
    R = x_RD.shape[0]
    E, D, F = w_EDF.shape
    y_RF = torch.empty(R, F, dtype=x_RD.dtype, device=x_RD.device)
    if R == 0:
        return y_RF
    block_n, block_k = _columns(block_n, x_RD), depth_of(block_k, x_RD)
    tile = _tile_bytes(block_m, block_n, block_k, x_RD.element_size(), w_EDF.element_size())
    # a span of n rows has fewer than n / block_m + 1 tiles
    grid = (R // block_m + min(E, R)) * triton.cdiv(F, block_n)
    if persistent:
        grid = min(grid, persistent * multiprocessors(x_RD.device))
    if tma and not INTERPRETING:
        triton.set_allocator(_scratch)
    wrap_triton(_ragged)[(grid,)](
        x_RD, w_EDF, b_EF, scale_EF, y_RF, offset_E1, count_E, R, x_RD.stride(0), *w_EDF.stride(),
        0 if b_EF is None else b_EF.stride(0), D=D, F=F, E=E, E_PADDED=triton.next_power_of_2(E),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, PERSISTENT=persistent > 0,
        TMA=tma > 0, OUTPUT_FIRST=w_EDF.stride(1) == 1,
        **target_of(x_RD.device).launch(num_warps=num_warps, num_stages=num_stages, tile=tile),
    )  # fmt: skip
    return y_RF


register_gradients(multiply)


def _columns(block_n: int, x: Tensor) -> int:
    """The columns of a tile: block_n, or half of it in float32, which spilled with 128 rows and columns."""
    return max(16, block_n if x.element_size() <= 2 else block_n // 2)


def _tile_bytes(block_m: int, block_n: int, block_k: int, x_bytes: int, w_bytes: int) -> int:
    """The bytes of both operands of one step. Weights of 8 bits are converted when they are loaded."""
    return block_k * (block_m * x_bytes + block_n * max(w_bytes, x_bytes))


def _fits_descriptor(w_EDF: Tensor) -> bool:
    """True if TMA can read the weights and, for the gradient of x, their transpose."""
    *outer, last = sorted(w_EDF.stride(), reverse=True)
    size = w_EDF.element_size()
    widths = (w_EDF.shape[1], w_EDF.shape[2])
    aligned = [*outer, *widths, w_EDF.storage_offset()]
    return last == 1 and all(number * size % 16 == 0 for number in aligned)


def _for_descriptor(x_RD: Tensor) -> Tensor:
    aligned = x_RD.stride(0) * x_RD.element_size() % 16 == 0 and x_RD.stride(0) > 0
    aligned = aligned and x_RD.storage_offset() * x_RD.element_size() % 16 == 0
    return x_RD if aligned else x_RD.clone(memory_format=torch.contiguous_format)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors that a kernel makes. on_its_device has set the current device."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def compilations(
    sizes: MoEShape,
    target: Target,
    *,
    block_m: int = 128,
    block_n: int = 128,
    block_k: int = 64,
    group_m: int = 8,
    num_warps: int = 8,
    num_stages: int = 3,
    persistent: int = 1,
    tma: int = 0,
    store: str = "",
) -> Iterator[Compilation]:
    """D x F, the gradient of x (transposed weights), the gradients of the weights."""
    if tma and not target.tma:
        raise NotImplementedError("it has no TMA: leave the option tma out")
    if store and not target.e4m3:
        raise NotImplementedError("Triton reads e4m3 from sm_89 on")
    tile = _tile_bytes(block_m, block_n, block_k, 2, 2)
    made = target.compiled(rows=block_m, num_warps=num_warps, num_stages=num_stages, tile=tile)
    if tma:
        made["expects"] += ("descriptor_load",)
    for name, D, F in (("forward", sizes.D, sizes.F), ("input_gradient", sizes.F, sizes.D)):
        output_first = name == "input_gradient"
        if store and output_first:
            continue  # forward only
        signature = {
            "x": "*bf16", "w": "*fp8e4nv" if store else "*bf16", "y": "*bf16", "offset_E1": "*i64",
            "count_E": "*i64", "num_rows": "i32", "stride_xr": "i32:16", "stride_we": "i32:16",
            "stride_wd": "i32:1" if output_first else "i32:16",
            "stride_wf": "i32:16" if output_first else "i32:1", "stride_be": "i32:16",
        }  # fmt: skip
        constexprs = {
            "b": None, "D": D, "F": F, "E": sizes.E, "E_PADDED": triton.next_power_of_2(sizes.E),
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group_m,
            "PERSISTENT": persistent > 0, "TMA": tma > 0, "OUTPUT_FIRST": output_first,
        }  # fmt: skip
        yield Compilation(
            name=name,
            kernel=_ragged,
            signature={**signature, "scale": "*fp32"} if store else signature,
            constexprs=constexprs if store else {**constexprs, "scale": None},
            **made,
            flops=2 * block_m * block_n * D,
            bytes=(2 * block_m + (1 if store else 2) * block_n) * D + 2 * block_m * block_n,
        )
    if not store:
        yield from gradient_compilations(sizes.D, sizes.F, target)
