"""CuTe DSL: each row reads its token, 16 bytes per thread and access; the gradient is a sum of rows.

Forward: x_RD[r] = x_TD[pair_R[r] // K], zero if the row holds no pair. All rows together are one list of
16-byte chunks. A block takes the next THREADS * CHUNKS of them, and thread i takes chunks i, i + THREADS, ...
So a warp reads and writes 512 contiguous bytes for any D, and all loads of a thread run at the same time.
Backward: dx_TD[t] = sum over k of dx_RD[row_TK[t, k]], in float32, in the order of the choices, rounded once.
Rows without a pair are never read. One thread stores each element, so every run gives the same bits.

It was verified on the CPU, where the same code runs for every thread (ops/cute_threads.py), and compiled for
sm_80, sm_90a and sm_100a. It has not run on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops import cute_threads as on
from moe_routing_bench.ops import rows
from moe_routing_bench.ops.cute_threads import THREADS, cuda, cute, cutlass

CHUNKS = 4  # of one thread
CHOICES = 4  # of a token, which are loaded at the same time


@cute.jit
def gather(block, thread, x_TD, pair_R, x_RD, watch, stored, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr):
    R, D = x_RD.shape
    chunks = cutlass.const_expr(D // WIDTH)
    pieces = []
    for j in cutlass.range_constexpr(CHUNKS):
        place = cutlass.Int64(block) * (THREADS * CHUNKS) + j * THREADS + thread
        values = on.piece(WIDTH, x_TD.element_type)
        if place < R * chunks:
            pair = on.number(pair_R, place // chunks, watch)
            if pair >= 0:
                on.load(values, x_TD, pair // K, place % chunks, watch)
        pieces.append(values)
    for j in cutlass.range_constexpr(CHUNKS):
        place = cutlass.Int64(block) * (THREADS * CHUNKS) + j * THREADS + thread
        if place < R * chunks:
            on.store(pieces[j], x_RD, place // chunks, place % chunks, watch, stored)


@cute.jit
def sum_rows(
    block, thread, dx_RD, row_P, dx_TD, watch, stored, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr
):
    T, D = dx_TD.shape
    chunks = cutlass.const_expr(D // WIDTH)
    place = cutlass.Int64(block) * THREADS + thread
    if place < T * chunks:
        t, chunk = place // chunks, place % chunks
        total = on.piece(WIDTH, cutlass.Float32)
        for first in cutlass.range(0, K, CHOICES):
            pieces = []
            for j in cutlass.range_constexpr(CHOICES):
                values = on.piece(WIDTH, dx_RD.element_type)
                if first + j < K:
                    row = on.number(row_P, t * K + first + j, watch)
                    if row >= 0:
                        on.load(values, dx_RD, row, chunk, watch)
                pieces.append(values)
            for j in cutlass.range_constexpr(CHOICES):
                total.store(total.load() + on.widened(pieces[j]).load())
        on.store(on.rounded(total, dx_TD.element_type), dx_TD, t, chunk, watch, stored)


@cute.kernel
def _gather_kernel(x_TD: cute.Tensor, pair_R: cute.Tensor, x_RD: cute.Tensor, K: cutlass.Constexpr,
                   WIDTH: cutlass.Constexpr):  # fmt: skip
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    gather(block, thread, x_TD, pair_R, x_RD, None, None, K, WIDTH)


@cute.kernel
def _sum_kernel(dx_RD: cute.Tensor, row_P: cute.Tensor, dx_TD: cute.Tensor, K: cutlass.Constexpr,
                WIDTH: cutlass.Constexpr):  # fmt: skip
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    sum_rows(block, thread, dx_RD, row_P, dx_TD, None, None, K, WIDTH)


@cute.jit
def _gather_all(
    x: cute.Pointer, pair: cute.Pointer, out: cute.Pointer, T: cutlass.Int64, R: cutlass.Int64,
    stride_T: cutlass.Int64, stride_D: cutlass.Int64, faults: cute.Pointer, stores: cute.Pointer,
    stream: cuda.CUstream, D: cutlass.Constexpr, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr,
    ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    x_TD = on.matrix(x, T, D, stride_T, stride_D, WIDTH)
    x_RD = on.matrix(out, R, D, cutlass.Int64(D), 1, WIDTH)
    pair_R = on.vector(pair, R)
    blocks = (R * (D // WIDTH) + THREADS * CHUNKS - 1) // (THREADS * CHUNKS)
    if cutlass.const_expr(ON_CPU):
        watch = on.vector(faults, len(on.FAULTS))
        stored = on.matrix(stores, R, D, cutlass.Int64(D), 1, 1)
        for block in cutlass.range(blocks):
            for thread in cutlass.range(THREADS):
                gather(block, thread, x_TD, pair_R, x_RD, watch, stored, K, WIDTH)
    else:
        _gather_kernel(x_TD, pair_R, x_RD, K, WIDTH).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )


@cute.jit
def _sum_all(
    dx: cute.Pointer, row: cute.Pointer, out: cute.Pointer, T: cutlass.Int64, R: cutlass.Int64,
    stride_R: cutlass.Int64, stride_D: cutlass.Int64, faults: cute.Pointer, stores: cute.Pointer,
    stream: cuda.CUstream, D: cutlass.Constexpr, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr,
    ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    dx_RD = on.matrix(dx, R, D, stride_R, stride_D, WIDTH)
    dx_TD = on.matrix(out, T, D, cutlass.Int64(D), 1, WIDTH)
    row_P = on.vector(row, T * K)
    blocks = (T * (D // WIDTH) + THREADS - 1) // THREADS
    if cutlass.const_expr(ON_CPU):
        watch = on.vector(faults, len(on.FAULTS))
        stored = on.matrix(stores, T, D, cutlass.Int64(D), 1, 1)
        for block in cutlass.range(blocks):
            for thread in cutlass.range(THREADS):
                sum_rows(block, thread, dx_RD, row_P, dx_TD, watch, stored, K, WIDTH)
    else:
        _sum_kernel(dx_RD, row_P, dx_TD, K, WIDTH).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )


@cache
def compiled(entry: str, arch: str, dtype: torch.dtype, D: int, K: int, width: int) -> on.Launch:
    """entry: "gather" or "sum_rows"; arch: "cpu", "gpu" (the one here) or a name such as "sm_90a"."""
    numbers = on.pointer(None, dtype, width, arch == "cpu")
    index, no = on.pointer(None, torch.int64), on.pointer(None)
    sizes = [cutlass.Int64(0)] * 4
    function = {"gather": _gather_all, "sum_rows": _sum_all}[entry]
    return on.Launch(function, (numbers, index, numbers, *sizes, no, no), (D, K, width), arch)


def unsupported(x_TD: Tensor, plan: RoutingPlan) -> str | None:
    return on.why_not(x_TD, plan.row_TK, plan.pair_R) or rows.why_not_dtypes(x_TD)


def run(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    rows.check_tokens(x_TD, plan)
    return _gather(x_TD, plan.row_TK.contiguous(), plan.pair_R.contiguous())


@torch.library.custom_op("moe_routing_bench::dispatch_cute_gather", mutates_args=())
def _gather(x_TD: Tensor, row_TK: Tensor, pair_R: Tensor) -> Tensor:
    x_RD = x_TD.new_empty(pair_R.shape[0], x_TD.shape[1])
    _move("gather", x_TD, pair_R, x_RD, x_TD.shape[0], pair_R.shape[0], max(row_TK.shape[1], 1))
    return x_RD


@torch.library.custom_op("moe_routing_bench::dispatch_cute_gather_backward", mutates_args=())
def _gather_backward(dx_RD: Tensor, row_TK: Tensor) -> Tensor:
    dx_TD = dx_RD.new_empty(row_TK.shape[0], dx_RD.shape[1])
    _move("sum_rows", dx_RD, row_TK, dx_TD, row_TK.shape[0], dx_RD.shape[0], row_TK.shape[1])
    return dx_TD


def _move(entry: str, source: Tensor, index: Tensor, result: Tensor, T: int, R: int, K: int) -> None:
    if not result.numel():
        return
    D, device = result.shape[1], result.device
    width = on.width_for(D, source, result)
    watch = on.Watch(device, result)
    compiled(entry, on.here(device), source.dtype, D, K, width)(
        device,
        on.pointer(source, width=width),
        on.pointer(index),
        on.pointer(result, width=width),
        cutlass.Int64(T),
        cutlass.Int64(R),
        *on.strides(source),
        *watch.pointers(),
    )
    watch.check(entry)


@_gather.register_fake
def _(x_TD: Tensor, row_TK: Tensor, pair_R: Tensor) -> Tensor:
    return x_TD.new_empty(pair_R.shape[0], x_TD.shape[1])


@_gather_backward.register_fake
def _(dx_RD: Tensor, row_TK: Tensor) -> Tensor:
    return dx_RD.new_empty(row_TK.shape[0], dx_RD.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor | None, ...]:
    return _gather_backward(dx_RD, *ctx.saved_tensors), None, None


_gather.register_autograd(_backward, setup_context=_keep)
