"""For few tokens: Triton reads each active expert's weights once, split over columns and depth; GPU.

1. z_sp = x_t(p) @ w_in, the part of slice s of the depth, for every pair p, in float32
2. h_p = activate(sum over s of z_sp)
3. z_sp = h_p @ w_out, as in 1
4. y_t = sum over k of gate_tk * (sum over s of z_sp)

With few rows per expert the time is the time to read weights. So one program reads each weight and uses it
for all rows of its expert: the rows are one tile. Weights are the left factor, transposed, because tensor
cores need 64 rows or more on the left and only 16 columns on the right. They are also split in depth, so that
a few experts keep all multiprocessors busy. The next kernel adds the slices in order: no atomics, the same
bits every time. For backward it keeps its inputs, like triton_fused.

Options:
  block_n, block_k        columns and depth of a tile of weights: either may be the contiguous one
  split                   slices of the depth; 0: as many as give about PROGRAMS programs
  num_warps, num_stages   warps of 32 lanes; tiles that are loaded ahead, to hide the memory's latency
  pdl=1                   sm_90 and newer: each kernel is launched before the previous one has ended; not with
                          torch.compile, which ignores it

It was verified in the interpreter and compiled for four architectures, but not timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
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
from moe_routing_bench.ops.targets import Target, target_of

DEFAULT = {"block_n": 64, "block_k": 128, "split": 0, "num_warps": 4, "num_stages": 4}
CONFIGS: tuple[dict[str, int], ...] = (
    {},
    {"block_n": 128, "block_k": 64},
    {"block_k": 16, "split": 3},
    {"pdl": 1},
)
GRADIENTS = op.get("staged(dispatch=triton_gather,grouped_gemm=triton_ragged,combine=triton_gather_sum)")
LARGEST_PAIRS = 64  # the rows of one expert are one tile
PROGRAMS = 512  # about four for each multiprocessor of an H100
SUM_ROWS, SUM_COLUMNS = 8, 128


@triton.jit(do_not_specialize=["P"])
def _stream(
    x, w, b, z, pair_R, offset_E1, count_E, P, x_p, x_d, w_e, w_d, w_n, b_e, b_n,
    K: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, AFTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z_SPN = x_p @ w, slice by slice of the depth. Row p // K of x is pair p's: K = 1 for a row per pair."""
    if PDL:
        gdc_launch_dependents()
    if AFTER and PDL:
        gdc_wait()  # before any load, because a previous kernel may have written what is read
    expert_E = tl.arange(0, E_PADDED)
    count = tl.load(count_E + expert_E, mask=expert_E < E, other=0)
    # the active expert with program_id(0) active ones before it
    expert = tl.sum((tl.cumsum((count > 0).to(tl.int32), 0) <= tl.program_id(0)).to(tl.int32), 0)
    if expert < E:
        first = tl.load(offset_E1 + expert)
        rank = tl.arange(0, ROWS)
        holds = rank < tl.load(count_E + expert)
        pair = tl.load(pair_R + first + rank, mask=holds, other=0)
        piece = tl.program_id(2)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        STEPS: tl.constexpr = (DEPTH + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K)
        d = piece * STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        w_at = w + expert.to(tl.int64) * w_e + n[:, None] * w_n + d[None, :] * w_d
        x_at = x + (pair // K)[None, :] * x_p + d[:, None] * x_d
        acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        for step in range(STEPS):
            left = DEPTH - step * BLOCK_K
            w_tile = tl.load(w_at, mask=(n[:, None] < COLUMNS) & (d[None, :] < left), other=0.0)
            x_tile = tl.load(x_at, mask=holds[None, :] & (d[:, None] < left), other=0.0)
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
            w_at += BLOCK_K * w_d
            x_at += BLOCK_K * x_d
        if HAS_BIAS:
            if piece == 0:
                b_at = b + expert.to(tl.int64) * b_e + n * b_n
                acc += tl.load(b_at, mask=n < COLUMNS, other=0.0).to(tl.float32)[:, None]
        at = z + (piece * P + pair[None, :]) * COLUMNS + n[:, None]
        tl.store(at, acc, mask=holds[None, :] & (n[:, None] < COLUMNS))


@triton.jit(do_not_specialize=["P"])
def _activate(
    z, h, row_TK, row_t, row_k, P, K: tl.constexpr, F: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h_PF = activate(sum over s of z_SPG), for the pairs that have a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    f = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(row_TK + pair // K * row_t + pair % K * row_k, mask=pair < P, other=-1)
    holds = (row >= 0)[:, None] & (f < F)[None, :]
    gate = tl.zeros((HIGH, WIDTH), dtype=tl.float32)
    up = tl.zeros((HIGH, WIDTH), dtype=tl.float32)
    for s in range(SPLIT):
        at = z + (s * P + pair[:, None]) * G + f[None, :]
        gate += tl.load(at, mask=holds, other=0.0)
        if IS_GATED:
            up += tl.load(at + F, mask=holds, other=0.0)
    hidden = gpu.activated(gate, up, ACTIVATION)
    tl.store(h + pair[:, None] * F + f[None, :], hidden.to(h.dtype.element_ty), mask=holds)


@triton.jit(do_not_specialize=["T"])
def _combine(
    z, gate, out, row_TK, row_t, row_k, gate_t, gate_k, T, K: tl.constexpr, D: tl.constexpr,
    SPLIT: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_TD = sum over k of gate_TK * (sum over s of z_SPD)."""
    if PDL:
        gdc_wait()
    t = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    acc = tl.zeros((HIGH, WIDTH), dtype=tl.float32)
    for k in range(K):
        row = tl.load(row_TK + t * row_t + k * row_k, mask=t < T, other=-1)
        holds = (row >= 0)[:, None] & (d < D)[None, :]
        y = tl.zeros((HIGH, WIDTH), dtype=tl.float32)
        for s in range(SPLIT):
            at = z + (s * T * K + t[:, None] * K + k) * D + d[None, :]
            y += tl.load(at, mask=holds, other=0.0)
        # a pair without a row adds nothing, for any gate
        acc += y * tl.load(gate + t * gate_t + k * gate_k, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
    at = out + t[:, None] * D + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(t < T)[:, None] & (d < D)[None, :])


def _splits(pairs: int, E: int, columns: int, depth: int, block_n: int, block_k: int, split: int) -> int:
    """The number of slices of the depth: `split`, but none without work; 0: doubled until there are
    PROGRAMS."""
    steps = triton.cdiv(depth, block_k)
    if split == 0:
        programs = min(E, pairs) * triton.cdiv(columns, block_n)
        split = 1
        while programs * split < PROGRAMS and 2 * split <= steps:
            split *= 2
    per_slice = triton.cdiv(steps, min(split, steps))
    return triton.cdiv(steps, per_slice)


@triton_op("moe_routing_bench::expert_ffn_triton_decode", mutates_args=())
@gpu.on_its_device
def _decode(
    x_TD: Tensor, gate_TK: Tensor, row_TK: Tensor, pair_R: Tensor, offset_E1: Tensor, count_E: Tensor,
    w_in_EDG: Tensor, w_out_EFD: Tensor, b_in_EG: Tensor | None, b_out_ED: Tensor | None, activation: str,
    block_n: int, block_k: int, split: int, num_warps: int, num_stages: int, pdl: int,
) -> Tensor:  # fmt: skip
    (T, K), R = row_TK.shape, pair_R.shape[0]
    (E, F, D), G = w_out_EFD.shape, w_in_EDG.shape[2]
    P = T * K
    y_TD = x_TD.new_empty(T, D)
    if P == 0 or R == 0:
        return y_TD.zero_()
    later = {"launch_pdl": True} if pdl else {}
    block_k, rows = gpu.depth_of(block_k, x_TD), max(16, triton.next_power_of_2(P))
    tile = (block_n + rows) * block_k * x_TD.element_size()
    launch = target_of(x_TD.device).launch(num_warps=num_warps, num_stages=num_stages, tile=tile)
    experts = min(E, P)
    in_split = _splits(P, E, G, D, block_n, block_k, split)
    out_split = _splits(P, E, D, F, block_n, block_k, split)
    z_SPG = x_TD.new_empty(in_split, P, G, dtype=torch.float32)
    h_PF = x_TD.new_empty(P, F)
    z_SPD = x_TD.new_empty(out_split, P, D, dtype=torch.float32)
    shared = {
        "E": E, "E_PADDED": triton.next_power_of_2(E), "ROWS": rows,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "PDL": bool(pdl),
    }  # fmt: skip
    plan = (pair_R, offset_E1, count_E, P)
    b_in, b_out = (x_TD if b is None else b for b in (b_in_EG, b_out_ED))
    wrap_triton(_stream)[(experts, triton.cdiv(G, block_n), in_split)](
        x_TD, w_in_EDG, b_in, z_SPG, *plan, *x_TD.stride(), *w_in_EDG.stride(), *b_in.stride(), K=K, DEPTH=D,
        COLUMNS=G, HAS_BIAS=b_in_EG is not None, SPLIT=in_split, AFTER=False, **shared, **launch,
    )  # fmt: skip
    wrap_triton(_activate)[(triton.cdiv(P, SUM_ROWS), triton.cdiv(F, SUM_COLUMNS))](
        z_SPG, h_PF, row_TK, *row_TK.stride(), P, K=K, F=F, G=G, SPLIT=in_split, ACTIVATION=activation,
        IS_GATED=activation in GATED, HIGH=SUM_ROWS, WIDTH=SUM_COLUMNS, PDL=bool(pdl), **later,
    )  # fmt: skip
    wrap_triton(_stream)[(experts, triton.cdiv(D, block_n), out_split)](
        h_PF, w_out_EFD, b_out, z_SPD, *plan, *h_PF.stride(), *w_out_EFD.stride(), *b_out.stride(), K=1,
        DEPTH=F, COLUMNS=D, HAS_BIAS=b_out_ED is not None, SPLIT=out_split, AFTER=True, **shared, **launch,
        **later,
    )  # fmt: skip
    wrap_triton(_combine)[(triton.cdiv(T, SUM_ROWS), triton.cdiv(D, SUM_COLUMNS))](
        z_SPD, gate_TK, y_TD, row_TK, *row_TK.stride(), *gate_TK.stride(), T, K=K, D=D, SPLIT=out_split,
        HIGH=SUM_ROWS, WIDTH=SUM_COLUMNS, PDL=bool(pdl), **later,
    )  # fmt: skip
    return y_TD


_decode.register_fake(lambda x_TD, *others: x_TD.new_empty(x_TD.shape))


def unsupported(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, pdl: int = 0,
    block_n: int = DEFAULT["block_n"], block_k: int = DEFAULT["block_k"],
) -> str | None:  # fmt: skip
    if (reason := gpu.why_not_layer(x_TD, gate_TK, plan, weights)) is not None:
        return reason
    pairs = plan.num_tokens * plan.num_choices
    if pairs > LARGEST_PAIRS:
        return f"it takes at most {LARGEST_PAIRS} pairs of token and choice, not {pairs}; use triton_fused"
    tile = (block_n + LARGEST_PAIRS) * gpu.depth_of(block_k, x_TD) * x_TD.element_size()
    if not gpu.INTERPRETING and (reason := gpu.why_not_tile(tile, target_of(x_TD.device))) is not None:
        return reason
    return gpu.why_not_early(x_TD.device) if pdl else None


def run(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    block_n: int = DEFAULT["block_n"],
    block_k: int = DEFAULT["block_k"],
    split: int = DEFAULT["split"],
    num_warps: int = DEFAULT["num_warps"],
    num_stages: int = DEFAULT["num_stages"],
    pdl: int = 0,
) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    options = (block_n, block_k, split, num_warps, num_stages, pdl)

    def forward(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
        w, where = weights, (plan.row_TK, plan.pair_R, plan.offset_E1, plan.count_E)
        matrices = (w.w_in_EDG, w.w_out_EFD, w.b_in_EG, w.b_out_ED)
        return _decode(x_TD, gate_TK, *where, *matrices, w.activation, *options)

    return recomputed(forward, GRADIENTS, x_TD, gate_TK, plan, weights)


def compilations(sizes: MoEShape, target: Target, **options: int) -> Iterator[gpu.Compilation]:
    """The kernels that run() launches for the largest number of pairs: bfloat16, swiglu, no biases, weights
    contiguous in columns, and (.._by_depth) stored output-first as in Transformers."""
    D, F, E, K = sizes.D, sizes.F, sizes.E, sizes.K
    G, P = 2 * F, min(sizes.T * K, LARGEST_PAIRS // K * K)
    chosen = {**DEFAULT, "pdl": 0, **options}
    pdl, N, depth = bool(chosen["pdl"]), chosen["block_n"], chosen["block_k"]
    if pdl and not target.pdl:
        raise NotImplementedError("it has no programmatic dependent launch: leave the option pdl out")
    starts, waits = (("starts_next",), ("waits_for_previous",)) if pdl else ((), ())
    early = {"launch_pdl": True} if pdl else {}
    rows = max(16, triton.next_power_of_2(P))

    def stream(name: str, inputs: int, columns: int, group: int, strides: dict[str, str]) -> gpu.Compilation:
        split = _splits(P, E, columns, inputs, N, depth, chosen["split"])
        after = group == 1
        gemm = target.compiled(
            rows=N, num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
            tile=2 * (N + rows) * depth,
        )  # fmt: skip
        gemm["expects"] += starts + (waits if after else ())
        gemm["options"] |= early if after else {}
        reads = triton.cdiv(inputs, split)
        return gpu.Compilation(
            name=name,
            kernel=_stream,
            signature={
                **{pointer: "*bf16" for pointer in ("x", "w", "b")}, "z": "*fp32", "P": "i32",
                **{pointer: "*i64" for pointer in ("pair_R", "offset_E1", "count_E")},
                **{stride: "i32:16" for stride in ("x_p", "w_e", "b_e")}, **strides,
                "x_d": "i32:1", "b_n": "i32:1",
            },
            constexprs={
                "K": group, "DEPTH": inputs, "COLUMNS": columns, "HAS_BIAS": False, "E": E,
                "E_PADDED": triton.next_power_of_2(E), "ROWS": rows, "BLOCK_N": N, "BLOCK_K": depth,
                "SPLIT": split, "AFTER": after, "PDL": pdl,
            },
            **gemm,
            flops=2 * N * rows * reads,
            bytes=2 * reads * (N + rows) + 4 * N * rows,
        )  # fmt: skip

    by_columns, by_depth = {"w_d": "i32:16", "w_n": "i32:1"}, {"w_d": "i32:1", "w_n": "i32:16"}
    yield stream("stream_in", D, G, K, by_columns)
    yield stream("stream_in_by_depth", D, G, K, by_depth)
    yield stream("stream_out", F, D, 1, by_columns)
    yield stream("stream_out_by_depth", F, D, 1, by_depth)
    movers: dict[str, Any] = {"num_warps": 4, "num_stages": min(3, target.most_stages), "options": early}
    rows_of = {"row_TK": "*i64", "row_t": "i32", "row_k": "i32:1"}
    split = _splits(P, E, G, D, N, depth, chosen["split"])
    yield gpu.Compilation(
        name="activate",
        kernel=_activate,
        signature={"z": "*fp32", "h": "*bf16", "P": "i32", **rows_of},
        constexprs={
            "K": K, "F": F, "G": G, "SPLIT": split, "ACTIVATION": "swiglu", "IS_GATED": True,
            "HIGH": SUM_ROWS, "WIDTH": SUM_COLUMNS, "PDL": pdl,
        },
        **movers,
        expects=("vector_load", *starts, *waits),
        flops=8 * SUM_ROWS * SUM_COLUMNS,
        bytes=SUM_ROWS * SUM_COLUMNS * (8 * split + 2),
    )  # fmt: skip
    split = _splits(P, E, D, F, N, depth, chosen["split"])
    yield gpu.Compilation(
        name="combine",
        kernel=_combine,
        signature={
            "z": "*fp32", "out": "*bf16", "gate": "*fp32", "gate_t": "i32", "gate_k": "i32:1", "T": "i32",
            **rows_of,
        },
        constexprs={
            "K": K, "D": D, "SPLIT": split, "HIGH": SUM_ROWS, "WIDTH": SUM_COLUMNS, "PDL": pdl,
        },
        **movers,
        expects=("vector_load", *waits),
        flops=2 * K * SUM_ROWS * SUM_COLUMNS,
        bytes=SUM_ROWS * SUM_COLUMNS * (4 * split * K + 2),
    )  # fmt: skip
