"""Triton: a tile of queries meets one tile of keys after another, with a running maximum; forward only.

A row of a tile is a query of one head. The heads that share keys lie together in a tile, so in decoding all
of them are rows of one tile, and keys are read once for all of them. If there are few tiles, as in decoding,
`splits` programs take a part of the keys each, and a second kernel joins their results by the logarithm of
their sums. With rotary, torch turns queries and keys before. Products of float32 are exact, sums are float32.

Options: block_r rows and block_m keys of a tile; splits: parts of the keys, 0 for as many as fill the GPU.
It was verified in Triton's interpreter and compiled, but not timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops import gpu
from moe_routing_bench.ops.attention.op import Rotary, rotated
from moe_routing_bench.ops.targets import Target, target_of

FORWARD_ONLY = True
MAX_WIDTH = 256  # of a head: a tile of it lies in registers
BLOCK_R, BLOCK_M, NUM_WARPS = 64, 64, 8
CONFIGS = ({"block_r": 16, "block_m": 128, "splits": 8},)
NO_PART = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["X", "N", "M", "J", "window", "scale"])
def _attend(
    q_BHNA,
    k_BJMA,
    v_BJMA,
    y_SXA,
    log_SX,
    X,
    N,
    M,
    J,
    window,
    scale,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qa,
    stride_kb,
    stride_kj,
    stride_km,
    stride_ka,
    stride_vb,
    stride_vj,
    stride_vm,
    stride_va,
    A: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    tiles = tl.cdiv(GROUP * N, BLOCK_R)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % SPLITS
    bj = (tl.program_id(0) // tiles // SPLITS).to(tl.int64)
    b, j = bj // J, bj % J
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    h, n = j * GROUP + r // N, r % N
    a = tl.arange(0, BLOCK_A)
    position = M - N + n
    here = (r < GROUP * N)[:, None] & (a < A)[None, :]
    # 64 bits to the tile and 32 inside it: twice as many would not fit the registers
    q_row = q_BHNA + (b * stride_qb + j * GROUP * stride_qh)
    q_row += (r // N * stride_qh + n * stride_qn)[:, None]
    q = tl.load(q_row + (a * stride_qa)[None, :], mask=here, other=0.0)

    # rows of a tile may be of several heads, so its first and last positions are those of all its rows
    first, last = tl.min(tl.where(r < GROUP * N, position, M)), tl.max(tl.where(r < GROUP * N, position, -M))
    begin, end = first * 0, first * 0 + M
    if CAUSAL:
        end = tl.minimum(end, last + 1)
    if WINDOWED:
        begin, end = tl.maximum(begin, first - window + 1), tl.minimum(end, last + window)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M), SPLITS) * BLOCK_M
    begin += split * share
    end = tl.minimum(end, begin + share)

    most = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    y = tl.zeros((BLOCK_R, BLOCK_A), tl.float32)
    row, far = tl.arange(0, BLOCK_M), bj * 0  # of 64 bits
    for start in tl.range(begin, end, BLOCK_M):
        m = start + row
        inside = (m < end)[:, None] & (a < A)[None, :]
        k_row = k_BJMA + (b * stride_kb + j * stride_kj + (far + start) * stride_km)
        k_row += (row * stride_km)[:, None]
        k = tl.load(k_row + (a * stride_ka)[None, :], mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (m < end)[None, :]
        if CAUSAL:
            seen = seen & (m[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (tl.abs(m[None, :] - position[:, None]) < window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        before = tl.exp(most - base)
        v_row = v_BJMA + (b * stride_vb + j * stride_vj + (far + start) * stride_vm)
        v_row += (row * stride_vm)[:, None]
        v = tl.load(v_row + (a * stride_va)[None, :], mask=inside, other=0.0)
        y = y * before[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * before + tl.sum(weight, 1)
        most = higher
    y = y / tl.where(total == 0.0, 1.0, total)[:, None]
    x = split.to(tl.int64) * X + (b * J * GROUP + h) * N + n
    tl.store(y_SXA + (x * A)[:, None] + a[None, :], y.to(y_SXA.dtype.element_ty), mask=here)
    if SPLITS > 1:
        log = tl.where(total == 0.0, NO_PART, most + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(log_SX + x, log, mask=r < GROUP * N)


@triton.jit(do_not_specialize=["X"])
def _join(
    part_SXA,
    log_SX,
    y_XA,
    X,
    A: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    x = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    a = tl.arange(0, BLOCK_A)
    here = (x < X)[:, None] & (a < A)[None, :]
    most = tl.full((BLOCK_X,), NO_PART, tl.float32)
    for s in range(SPLITS):
        most = tl.maximum(most, tl.load(log_SX + s * X + x, mask=x < X, other=NO_PART))
    base = tl.where(most == NO_PART, 0.0, most)
    total = tl.zeros((BLOCK_X,), tl.float32)
    y = tl.zeros((BLOCK_X, BLOCK_A), tl.float32)
    for s in range(SPLITS):
        weight = tl.exp(tl.load(log_SX + s * X + x, mask=x < X, other=NO_PART) - base)
        part = tl.load(part_SXA + ((s * X + x) * A)[:, None] + a[None, :], mask=here, other=0.0)
        y += weight[:, None] * part
        total += weight
    y = y / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(y_XA + (x * A)[:, None] + a[None, :], y.to(y_XA.dtype.element_ty), mask=here)


def unsupported(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None
) -> str | None:
    if q_BHNA.dtype not in FLOATS or not q_BHNA.dtype == k_BJMA.dtype == v_BJMA.dtype:
        return f"it computes float32, bfloat16 or float16 throughout, not {q_BHNA.dtype} with {k_BJMA.dtype}"
    if q_BHNA.shape[3] > MAX_WIDTH:
        return f"a head of {q_BHNA.shape[3]} numbers is wider than its tile of {MAX_WIDTH}"
    heads = q_BHNA.shape[1] // max(k_BJMA.shape[1], 1) * q_BHNA.stride(1) + q_BHNA.shape[2] * q_BHNA.stride(2)
    widest = max(q_BHNA.stride(3), *k_BJMA.stride()[2:], *v_BJMA.stride()[2:])
    if max(heads, widest * MAX_WIDTH) >= 2**31:
        return "a tile spans 2^31 elements or more, and offsets inside it have 32 bits"
    return gpu.why_not(q_BHNA, k_BJMA, v_BJMA)


def run(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, rotary: Rotary | None,
    block_r: int = BLOCK_R, block_m: int = BLOCK_M, splits: int = 0, num_warps: int = NUM_WARPS,
) -> Tensor:  # fmt: skip
    gpu.check_powers_of_two(block_r=block_r, block_m=block_m, num_warps=num_warps)
    q_BHNA, k_BJMA = rotated(q_BHNA, rotary), rotated(k_BJMA, rotary)
    (B, _, N, _), (_, J, M, _) = q_BHNA.shape, k_BJMA.shape
    tile = _tile(block_r, block_m, q_BHNA, J)
    tiles = max(1, B * J * triton.cdiv(q_BHNA.shape[1] // max(J, 1) * N, tile["BLOCK_R"]))
    if not splits:
        splits = triton.cdiv(gpu.multiprocessors(q_BHNA.device), tiles)
    splits = max(1, min(splits, triton.cdiv(M, tile["BLOCK_M"])))
    return _flash(q_BHNA, k_BJMA, v_BJMA, causal, window, block_r, block_m, splits, num_warps)


def _tile(block_r: int, block_m: int, q_BHNA: Tensor, J: int) -> dict[str, int]:
    """The sides of a tile; of float32 a quarter of the rows and keys, which are multiplied from registers."""
    H, N, A = q_BHNA.shape[1:]
    wide = q_BHNA.element_size() > 2
    rows = min(block_r // 4 if wide else block_r, triton.next_power_of_2(max(1, H // max(J, 1) * N)))
    return {
        "BLOCK_R": max(16, rows),
        "BLOCK_M": max(16, block_m // 4 if wide else block_m),
        "BLOCK_A": max(16, triton.next_power_of_2(A)),
    }


@triton_op("moe_routing_bench::attention_triton_flash", mutates_args=())
@gpu.on_its_device
def _flash(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, block_r: int,
    block_m: int, splits: int, num_warps: int,
) -> Tensor:  # fmt: skip
    (B, H, N, A), (_, J, M, _) = q_BHNA.shape, k_BJMA.shape
    y_BHNA = q_BHNA.new_empty(q_BHNA.shape)
    X = B * H * N
    if not X or not A:
        return y_BHNA
    if not M:
        return y_BHNA.zero_()
    tile = _tile(block_r, block_m, q_BHNA, J)
    part_SXA, log_SX = y_BHNA, y_BHNA
    if splits > 1:
        part_SXA = q_BHNA.new_empty(splits, X, A, dtype=torch.float32)
        log_SX = q_BHNA.new_empty(splits, X, dtype=torch.float32)
    target = target_of(q_BHNA.device)
    grid = triton.cdiv(H // J * N, tile["BLOCK_R"]) * splits * B * J
    wrap_triton(_attend)[(grid,)](
        q_BHNA,
        k_BJMA,
        v_BJMA,
        part_SXA,
        log_SX,
        X,
        N,
        M,
        J,
        window,
        A**-0.5,
        *q_BHNA.stride(),
        *k_BJMA.stride(),
        *v_BJMA.stride(),
        **_constants(A, H // J, causal, bool(window), splits),
        **tile,
        **target.launch(**_launch(tile, num_warps, q_BHNA.element_size())),
    )
    if splits > 1:
        rows = max(1, 1024 // tile["BLOCK_A"])
        wrap_triton(_join)[(triton.cdiv(X, rows),)](
            part_SXA,
            log_SX,
            y_BHNA,
            X,
            A=A,
            SPLITS=splits,
            BLOCK_X=rows,
            BLOCK_A=tile["BLOCK_A"],
            **target.moving(4),
        )
    return y_BHNA


@_flash.register_fake
def _(
    q_BHNA: Tensor, k_BJMA: Tensor, v_BJMA: Tensor, causal: bool, window: int, block_r: int,
    block_m: int, splits: int, num_warps: int,
) -> Tensor:  # fmt: skip
    return q_BHNA.new_empty(q_BHNA.shape)


def _launch(tile: dict[str, int], num_warps: int, size: int) -> dict[str, int]:
    return {
        "num_warps": num_warps if tile["BLOCK_R"] >= 64 else min(4, num_warps),
        "num_stages": 2,
        "tile": 2 * tile["BLOCK_M"] * tile["BLOCK_A"] * size,
    }


def _constants(A: int, group: int, causal: bool, windowed: bool, splits: int) -> dict[str, Any]:
    return {"A": A, "GROUP": group, "CAUSAL": causal, "WINDOWED": windowed, "SPLITS": splits}


def compilations(
    sizes: MoEShape, target: Target, *, block_r: int = BLOCK_R, block_m: int = BLOCK_M, splits: int = 0,
    num_warps: int = NUM_WARPS,
) -> Iterator[gpu.Compilation]:  # fmt: skip
    """A prompt and decoding with heads of 128, 8 to each head of keys: no model's sizes are given here."""
    A, group = 128, 8
    strides = {
        f"stride_{tensor}{side}": "i32:1" if side == "a" else "i32:16"
        for tensor, place in (("q", "h"), ("k", "j"), ("v", "j"))
        for side in ("b", place, "n" if tensor == "q" else "m", "a")
    }
    common = {"X": "i32", "N": "i32", "M": "i32", "J": "i32"}
    common |= {"window": "i32", "scale": "fp32", **strides}
    for name, rows, parts in (("prompt", block_r, 1), ("decode", 16, splits or 8)):
        tile = {"BLOCK_R": rows, "BLOCK_M": block_m, "BLOCK_A": A}
        launched = target.compiled(rows=rows, **_launch(tile, num_warps, 2))
        yield gpu.Compilation(
            name=name,
            kernel=_attend,
            signature={
                "q_BHNA": "*bf16", "k_BJMA": "*bf16", "v_BJMA": "*bf16",
                "y_SXA": "*bf16" if parts == 1 else "*fp32", "log_SX": "*fp32", **common,
            },
            constexprs={**_constants(A, group, True, False, parts), **tile},
            flops=4 * rows * block_m * A,
            bytes=2 * block_m * A * 2,
            **launched,
        )  # fmt: skip
    yield gpu.Compilation(
        name="join",
        kernel=_join,
        signature={"part_SXA": "*fp32", "log_SX": "*fp32", "y_XA": "*bf16", "X": "i32"},
        constexprs={"A": A, "SPLITS": splits or 8, "BLOCK_X": 1024 // A, "BLOCK_A": A},
        **target.moving(4),
        expects=("vector_load",),
    )
