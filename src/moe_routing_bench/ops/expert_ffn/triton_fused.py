"""Two Triton GEMMs with gather, activation and gates inside, then a sum; tiles found on the device; GPU.

1. h_r = activate(x_t(r) @ w_in + b_in): rows of x are gathered when they are read, and gate and up columns
are
   computed side by side, so h_RG is never written to memory.
2. y_r = gate_r * (h_r @ w_out + b_out).
3. y_t = the sum of its K rows, in order, in float32: no atomics, the same bits every time.

Only rows that hold a pair are computed, in every layout. A program finds its expert and rows from count_E on
the device. The grid is large enough for any routing of these sizes, and programs after the last tile end at
once. For backward it keeps its inputs; gradients are those of `staged` with the Triton parts.

Options:
  block_m, block_n, block_k   rows, columns, depth of a tile; if gated, half of the first columns are gate
  num_warps, num_stages       warps of 32 lanes; tiles of the depth that are loaded ahead
  group                       row tiles that use one column of weights together, while it is in L2
  persistent=1                one program per multiprocessor takes tile after tile
  prefetch=1                  with persistent: one loop over tiles and depth, so that the next tile is loaded
                              while this one ends (see `mrb gpu compile`); needs registers, so block_n=64
  pdl=1                       sm_90 and newer: the second GEMM and the sum are launched before the previous
                              kernel has ended

It was verified in the interpreter and compiled for four architectures, but not timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_routing_bench.core.experts import GATED, ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops import gpu
from moe_routing_bench.ops.expert_ffn.op import check_sizes, op, recomputed
from moe_routing_bench.ops.gpu_gemm import grouped_order
from moe_routing_bench.ops.targets import Target, target_of

DEFAULT = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3, "group": 8}
CONFIGS: tuple[dict[str, int], ...] = (
    {},
    {"block_m": 64, "num_warps": 4},
    {"block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4},
    {"block_m": 64, "block_n": 256, "num_stages": 4},
    {"persistent": 1},
    {"block_n": 64, "persistent": 1, "prefetch": 1},
    {"pdl": 1},
)
GRADIENTS = op.get("staged(dispatch=triton_gather,grouped_gemm=triton_ragged,combine=triton_gather_sum)")
SUM_ROWS, SUM_COLUMNS = 4, 512


@triton.jit
def _rows_of_tile(tile, offset_E1, count_E, E: tl.constexpr, E_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert, first row and end of the rows of a tile: an expert's pairs are cut into tiles of BLOCK_M.

    Counts [3, 0, 5] at offsets [0, 4, 4], tiles of 4: tile 0 -> (0, 0, 3), 1 -> (2, 4, 9), 2 -> (2, 8, 9).
    Past the last tile the expert is E or more.
    """
    expert_E = tl.arange(0, E_PADDED)
    count = tl.load(count_E + expert_E, mask=expert_E < E, other=0).to(tl.int32)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(expert_E < expert, tiles, 0), 0)
    start = tl.load(offset_E1 + expert, mask=expert < E, other=0)
    rows = tl.load(count_E + expert, mask=expert < E, other=0)
    return expert, start + (tile - before) * BLOCK_M, start + rows


@triton.jit
def _num_tiles(count_E, E: tl.constexpr, E_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    count = tl.load(count_E + tl.arange(0, E_PADDED), mask=tl.arange(0, E_PADDED) < E, other=0).to(tl.int32)
    return tl.sum((count + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _hidden_tile(
    expert, first, end, column_tile, x, w, b, h, pair_R, x_t, x_d, w_e, w_d, w_g, b_e, b_g,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, BLOCK_M)
    holds = row < end
    token = tl.load(pair_R + row, mask=holds, other=0) // K
    n = tl.arange(0, BLOCK_N)
    f = column_tile * BLOCK_N + n
    columns = F - column_tile * BLOCK_N
    d = tl.arange(0, BLOCK_K)
    x_at = x + token[:, None] * x_t + d[None, :] * x_d
    w_at = w + expert.to(tl.int64) * w_e + d[:, None] * w_d + f[None, :] * w_g
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        x_tile = tl.load(x_at, mask=holds[:, None] & (d[None, :] < D - start), other=0.0)
        # with places in the tile; with f itself, flattened loops lose its alignment, and then the prefetch
        inside = (d[:, None] < D - start) & (n[None, :] < columns)
        gate = tl.dot(x_tile, tl.load(w_at, mask=inside, other=0.0), gate, input_precision="ieee")
        if IS_GATED:
            w_up = tl.load(w_at + F * w_g, mask=inside, other=0.0)
            up = tl.dot(x_tile, w_up, up, input_precision="ieee")
        x_at += BLOCK_K * x_d
        w_at += BLOCK_K * w_d
    if HAS_BIAS:
        b_at = b + expert.to(tl.int64) * b_e + f * b_g
        gate += tl.load(b_at, mask=f < F, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up += tl.load(b_at + F * b_g, mask=f < F, other=0.0).to(tl.float32)[None, :]
    hidden = gpu.activated(gate, up, ACTIVATION)
    at = h + row[:, None] * F + f[None, :]
    tl.store(at, hidden.to(h.dtype.element_ty), mask=holds[:, None] & (f[None, :] < F))


@triton.jit(do_not_specialize=["row_tiles"])
def _hidden(
    x, w, b, h, pair_R, offset_E1, count_E, row_tiles, x_t, x_d, w_e, w_d, w_g, b_e, b_g,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PERSISTENT: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h_RF = activate(x_t(r) @ w_in + b_in)."""
    COLUMN_TILES: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    if PDL:
        gdc_launch_dependents()
    if PERSISTENT:
        tiles = _num_tiles(count_E, E, E_PADDED, BLOCK_M)
        for number in tl.range(tl.program_id(0), tiles * COLUMN_TILES, tl.num_programs(0), flatten=PREFETCH):
            row_tile, column_tile = grouped_order(number, tiles, COLUMN_TILES, GROUP)
            expert, first, end = _rows_of_tile(row_tile, offset_E1, count_E, E, E_PADDED, BLOCK_M)
            _hidden_tile(
                expert, first, end, column_tile, x, w, b, h, pair_R, x_t, x_d, w_e, w_d, w_g, b_e, b_g,
                K, D, F, ACTIVATION, IS_GATED, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        row_tile, column_tile = grouped_order(tl.program_id(0), row_tiles, COLUMN_TILES, GROUP)
        expert, first, end = _rows_of_tile(row_tile, offset_E1, count_E, E, E_PADDED, BLOCK_M)
        if expert < E:
            _hidden_tile(
                expert, first, end, column_tile, x, w, b, h, pair_R, x_t, x_d, w_e, w_d, w_g, b_e, b_g,
                K, D, F, ACTIVATION, IS_GATED, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _weighted_tile(
    expert, first, end, column_tile, h, w, b, gate, y, pair_R, w_e, w_f, w_d, b_e, b_d, gate_t, gate_k,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, BLOCK_M)
    holds = row < end
    n = tl.arange(0, BLOCK_N)
    d = column_tile * BLOCK_N + n
    columns = D - column_tile * BLOCK_N
    f = tl.arange(0, BLOCK_K)
    h_at = h + row[:, None] * F + f[None, :]
    w_at = w + expert.to(tl.int64) * w_e + f[:, None] * w_f + d[None, :] * w_d
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, F, BLOCK_K):
        h_tile = tl.load(h_at, mask=holds[:, None] & (f[None, :] < F - start), other=0.0)
        w_tile = tl.load(w_at, mask=(f[:, None] < F - start) & (n[None, :] < columns), other=0.0)
        acc = tl.dot(h_tile, w_tile, acc, input_precision="ieee")
        h_at += BLOCK_K
        w_at += BLOCK_K * w_f
    if HAS_BIAS:
        bias = tl.load(b + expert.to(tl.int64) * b_e + d * b_d, mask=d < D, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    pair = tl.load(pair_R + row, mask=holds, other=0)
    gate_at = gate + pair // K * gate_t + pair % K * gate_k
    acc = acc * tl.load(gate_at, mask=holds, other=0.0).to(tl.float32)[:, None]
    at = y + row[:, None] * D + d[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=holds[:, None] & (d[None, :] < D))


@triton.jit(do_not_specialize=["row_tiles"])
def _weighted(
    h, w, b, gate, y, pair_R, offset_E1, count_E, row_tiles, w_e, w_f, w_d, b_e, b_d, gate_t, gate_k,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PERSISTENT: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_RD = gate of the pair * (h_r @ w_out + b_out)."""
    COLUMN_TILES: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    if PDL:
        gdc_launch_dependents()
    if PERSISTENT:
        if PDL:
            gdc_wait()  # before any load, because a previous kernel may have written what is read
        tiles = _num_tiles(count_E, E, E_PADDED, BLOCK_M)
        for number in tl.range(tl.program_id(0), tiles * COLUMN_TILES, tl.num_programs(0), flatten=PREFETCH):
            row_tile, column_tile = grouped_order(number, tiles, COLUMN_TILES, GROUP)
            expert, first, end = _rows_of_tile(row_tile, offset_E1, count_E, E, E_PADDED, BLOCK_M)
            _weighted_tile(
                expert, first, end, column_tile, h, w, b, gate, y, pair_R, w_e, w_f, w_d, b_e, b_d, gate_t,
                gate_k, K, D, F, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        if PDL:
            gdc_wait()
        row_tile, column_tile = grouped_order(tl.program_id(0), row_tiles, COLUMN_TILES, GROUP)
        expert, first, end = _rows_of_tile(row_tile, offset_E1, count_E, E, E_PADDED, BLOCK_M)
        if expert < E:
            _weighted_tile(
                expert, first, end, column_tile, h, w, b, gate, y, pair_R, w_e, w_f, w_d, b_e, b_d, gate_t,
                gate_k, K, D, F, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _sum_rows(
    y, out, row_TK, row_t, row_k, T, K: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_TD = the sum over k of a token's rows of y_RD, which are already multiplied by their gates."""
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(K):
        row = tl.load(row_TK + t * row_t + k * row_k, mask=t < T, other=-1)
        inside = (row >= 0)[:, None] & (d[None, :] < D)
        acc += tl.load(y + row[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = out + t[:, None] * D + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(t < T)[:, None] & (d[None, :] < D))


@triton_op("moe_routing_bench::expert_ffn_triton_fused", mutates_args=())
@gpu.on_its_device
def _fused(
    x_TD: Tensor, gate_TK: Tensor, row_TK: Tensor, pair_R: Tensor, offset_E1: Tensor, count_E: Tensor,
    w_in_EDG: Tensor, w_out_EFD: Tensor, b_in_EG: Tensor | None, b_out_ED: Tensor | None, activation: str,
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, group: int, persistent: int,
    prefetch: int, pdl: int,
) -> Tensor:  # fmt: skip
    (T, K), R = row_TK.shape, pair_R.shape[0]
    E, F, D = w_out_EFD.shape
    y_TD = x_TD.new_empty(T, D)
    if T == 0 or R == 0:
        return y_TD.zero_()
    h_RF, y_RD = x_TD.new_empty(R, F), x_TD.new_empty(R, D)
    depth = gpu.depth_of(block_k, x_TD)
    tile = (block_m + block_n) * depth * x_TD.element_size()
    launch = target_of(x_TD.device).launch(num_warps=num_warps, num_stages=num_stages, tile=tile)
    row_tiles = _most_row_tiles(min(R, T * K), E, block_m)
    plan = (pair_R, offset_E1, count_E, row_tiles)
    sizes = {"K": K, "D": D, "F": F, "E": E, "E_PADDED": triton.next_power_of_2(E)}
    blocks = {
        "BLOCK_M": block_m, "BLOCK_K": depth, "GROUP": group, "PERSISTENT": bool(persistent),
        "PREFETCH": bool(prefetch), "PDL": bool(pdl),
    }  # fmt: skip
    early = {"launch_pdl": True} if pdl else {}

    def grid(columns: int, width: int) -> tuple[int]:
        tiles = row_tiles * triton.cdiv(columns, width)
        return (min(tiles, gpu.multiprocessors(x_TD.device)) if persistent else tiles,)

    gated = activation in GATED
    width = block_n // 2 if gated else block_n
    b_in, b_out = (x_TD if b is None else b for b in (b_in_EG, b_out_ED))
    wrap_triton(_hidden)[grid(F, width)](
        x_TD, w_in_EDG, b_in, h_RF, *plan, *x_TD.stride(), *w_in_EDG.stride(), *b_in.stride(), **sizes,
        ACTIVATION=activation, IS_GATED=gated, HAS_BIAS=b_in_EG is not None, BLOCK_N=width, **blocks,
        **launch,
    )  # fmt: skip
    wrap_triton(_weighted)[grid(D, block_n)](
        h_RF, w_out_EFD, b_out, gate_TK, y_RD, *plan, *w_out_EFD.stride(), *b_out.stride(), *gate_TK.stride(),
        **sizes, HAS_BIAS=b_out_ED is not None, BLOCK_N=block_n, **blocks, **launch, **early,
    )  # fmt: skip
    wrap_triton(_sum_rows)[(triton.cdiv(T, SUM_ROWS), triton.cdiv(D, SUM_COLUMNS))](
        y_RD, y_TD, row_TK, *row_TK.stride(), T, K, D, SUM_ROWS, SUM_COLUMNS, bool(pdl), **early,
    )  # fmt: skip
    return y_TD


_fused.register_fake(lambda x_TD, *others: x_TD.new_empty(x_TD.shape))


def _most_row_tiles(pairs: int, E: int, block_m: int) -> int:
    """For any routing: every expert with pairs wastes at most block_m - 1 rows."""
    return (pairs + min(E, pairs) * (block_m - 1)) // block_m


def unsupported(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, persistent: int = 0,
    prefetch: int = 0, pdl: int = 0, block_m: int = DEFAULT["block_m"], block_n: int = DEFAULT["block_n"],
    block_k: int = DEFAULT["block_k"],
) -> str | None:  # fmt: skip
    if (reason := gpu.why_not_layer(x_TD, gate_TK, plan, weights)) is not None:
        return reason
    if prefetch and not persistent:
        return "prefetch=1 needs persistent=1, because else a program has no next tile"
    tile = (block_m + block_n) * gpu.depth_of(block_k, x_TD) * x_TD.element_size()
    if not gpu.INTERPRETING and (reason := gpu.why_not_tile(tile, target_of(x_TD.device))) is not None:
        return reason
    return gpu.why_not_early(x_TD.device) if pdl else None


def compilations(sizes: MoEShape, target: Target, **options: int) -> Iterator[gpu.Compilation]:
    """The three kernels that run() launches for contiguous bfloat16 weights, swiglu, no biases."""
    D, F, E, K = sizes.D, sizes.F, sizes.E, sizes.K
    chosen = {**DEFAULT, "persistent": 0, "prefetch": 0, "pdl": 0, **options}
    persistent, prefetch, pdl = (bool(chosen[name]) for name in ("persistent", "prefetch", "pdl"))
    if pdl and not target.pdl:
        raise NotImplementedError("it has no programmatic dependent launch: leave the option pdl out")
    M, N, depth = chosen["block_m"], chosen["block_n"], chosen["block_k"]
    gemm = target.compiled(
        rows=M, num_warps=chosen["num_warps"], num_stages=chosen["num_stages"], tile=2 * (M + N) * depth
    )
    gemm["expects"] += ("next_tile",) if prefetch else ()
    starts, waits = (("starts_next",), ("waits_for_previous",)) if pdl else ((), ())
    early = {"launch_pdl": True} if pdl else {}
    plan = {"pair_R": "*i64", "offset_E1": "*i64", "count_E": "*i64", "row_tiles": "i32"}
    constants = {
        "K": K, "D": D, "F": F, "E": E, "E_PADDED": triton.next_power_of_2(E), "HAS_BIAS": False,
        "BLOCK_M": M, "BLOCK_K": depth, "GROUP": chosen["group"], "PERSISTENT": persistent,
        "PREFETCH": prefetch, "PDL": pdl,
    }  # fmt: skip
    yield gpu.Compilation(
        name="hidden",
        kernel=_hidden,
        signature={
            **{name: "*bf16" for name in ("x", "w", "b", "h")}, **plan,
            **{name: "i32:16" for name in ("x_t", "w_e", "w_d", "b_e")},
            **{name: "i32:1" for name in ("x_d", "w_g", "b_g")},
        },
        constexprs={**constants, "ACTIVATION": "swiglu", "IS_GATED": True, "BLOCK_N": N // 2},
        **{**gemm, "expects": gemm["expects"] + starts},
        flops=2 * M * N * D,
        bytes=2 * (D * (M + N) + M * N // 2),
    )  # fmt: skip
    yield gpu.Compilation(
        name="weighted",
        kernel=_weighted,
        signature={
            **{name: "*bf16" for name in ("h", "w", "b", "y")}, "gate": "*fp32", **plan,
            **{name: "i32:16" for name in ("w_e", "w_f", "b_e")},
            **{name: "i32:1" for name in ("w_d", "b_d", "gate_k")}, "gate_t": "i32",
        },
        constexprs={**constants, "BLOCK_N": N},
        **{**gemm, "expects": gemm["expects"] + starts + waits, "options": {**gemm["options"], **early}},
        flops=2 * M * N * F,
        bytes=2 * (F * (M + N) + M * N),
    )  # fmt: skip
    yield gpu.Compilation(
        name="sum_rows",
        kernel=_sum_rows,
        signature={
            "y": "*bf16", "out": "*bf16", "row_TK": "*i64", "row_t": "i32", "row_k": "i32:1", "T": "i32",
        },
        constexprs={"K": K, "D": D, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS, "PDL": pdl},
        num_warps=4,
        num_stages=min(3, target.most_stages),
        expects=("vector_load", *waits),
        options=early,
        flops=K * SUM_ROWS * SUM_COLUMNS,
        bytes=2 * (K + 1) * SUM_ROWS * SUM_COLUMNS,
    )  # fmt: skip


def run(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    block_m: int = DEFAULT["block_m"],
    block_n: int = DEFAULT["block_n"],
    block_k: int = DEFAULT["block_k"],
    num_warps: int = DEFAULT["num_warps"],
    num_stages: int = DEFAULT["num_stages"],
    group: int = DEFAULT["group"],
    persistent: int = 0,
    prefetch: int = 0,
    pdl: int = 0,
) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    options = (block_m, block_n, block_k, num_warps, num_stages, group, persistent, prefetch, pdl)

    def forward(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
        w, where = weights, (plan.row_TK, plan.pair_R, plan.offset_E1, plan.count_E)
        matrices = (w.w_in_EDG, w.w_out_EFD, w.b_in_EG, w.b_out_ED)
        return _fused(x_TD, gate_TK, *where, *matrices, w.activation, *options)

    return recomputed(forward, GRADIENTS, x_TD, gate_TK, plan, weights)
