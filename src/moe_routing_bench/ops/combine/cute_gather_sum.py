"""CuTe DSL: a thread sums the K rows of a token, times their gates, in float32, for 16 bytes of columns.

Forward: y_TD[t] = sum over k of gate_TK[t, k] * y_RD[row_TK[t, k]], in the order of the choices, rounded
once.
Backward, a warp for each row r, with (t, k) the pair it holds:
  dy_RD[r]       = gate_TK[t, k] * dy_TD[t]      zero where the row holds no pair
  dgate_TK[t, k] = <dy_TD[t], y_RD[r]>           zero where the pair has no row
The 32 lanes write their parts of the product to shared memory. After a barrier one lane adds them in order.
(A shuffle would also work, but the CPU cannot execute it.) Rows without a pair are never read. One thread
stores each element, so every run gives the same bits.

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

CHOICES = 4  # of a token, which are loaded at the same time
LANES = 32
ROWS = THREADS // LANES  # of one block
PADDED = LANES + 1  # so that the lanes that add four rows read four banks


@cute.jit
def weighted_sum(
    block, thread, y_RD, gate_TK, row_P, y_TD, watch, stored, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr
):
    T, D = y_TD.shape
    chunks = cutlass.const_expr(D // WIDTH)
    place = cutlass.Int64(block) * THREADS + thread
    if place < T * chunks:
        t, chunk = place // chunks, place % chunks
        total = on.piece(WIDTH, cutlass.Float32)
        for first in cutlass.range(0, K, CHOICES):
            pieces, gates = [], []
            for j in cutlass.range_constexpr(CHOICES):
                values = on.piece(WIDTH, y_RD.element_type)
                gate = on.piece(1, gate_TK.element_type)
                if first + j < K:
                    row = on.number(row_P, t * K + first + j, watch)
                    if row >= 0:
                        on.load(values, y_RD, row, chunk, watch)
                        on.load(gate, gate_TK, t, first + j, watch)
                pieces.append(values)
                gates.append(gate)
            for j in cutlass.range_constexpr(CHOICES):
                weight = on.widened(gates[j])[0]
                total.store(total.load() + on.widened(pieces[j]).load() * weight)
        on.store(on.rounded(total, y_TD.element_type), y_TD, t, chunk, watch, stored)


@cute.jit
def spread(
    block, thread, dy_TD, y_RD, gate_TK, pair_R, dy_RD, parts, watch, stored, part_stored,
    K: cutlass.Constexpr, WIDTH: cutlass.Constexpr, WANTS_Y: cutlass.Constexpr, WANTS_GATE: cutlass.Constexpr,
):  # fmt: skip
    """Before the barrier: a lane's columns of one row, and its part of the gate's gradient."""
    R, D = y_RD.shape
    chunks = cutlass.const_expr(D // WIDTH)
    r, lane = cutlass.Int64(block) * ROWS + thread // LANES, thread % LANES
    product = on.piece(WIDTH, cutlass.Float32)
    if r < R:
        pair = on.number(pair_R, r, watch)
        gate = on.piece(1, gate_TK.element_type)
        if pair >= 0:
            on.load(gate, gate_TK, pair // K, pair % K, watch)
        weight = on.widened(gate)[0]
        for chunk in cutlass.range(lane, chunks, LANES):
            dy = on.piece(WIDTH, dy_TD.element_type)
            y = on.piece(WIDTH, y_RD.element_type)
            if pair >= 0:
                on.load(dy, dy_TD, pair // K, chunk, watch)
                if cutlass.const_expr(WANTS_GATE):
                    on.load(y, y_RD, r, chunk, watch)
            wide = on.widened(dy)
            product.store(product.load() + wide.load() * on.widened(y).load())
            if cutlass.const_expr(WANTS_Y):
                wide.store(wide.load() * weight)
                on.store(on.rounded(wide, dy_RD.element_type), dy_RD, r, chunk, watch, stored)
    if cutlass.const_expr(WANTS_GATE):
        part = on.piece(1, cutlass.Float32)
        for w in cutlass.range_constexpr(WIDTH):
            part[0] = part[0] + product[w]
        on.store(part, parts, thread // LANES, lane, watch, part_stored)


@cute.jit
def add_up(
    block, thread, pair_R, parts, dgate_TK, watch, stored, part_stored, K: cutlass.Constexpr
):  # fmt: skip
    """After the barrier: one lane of each row adds the parts of its 32 lanes."""
    r, lane = cutlass.Int64(block) * ROWS + thread // LANES, thread % LANES
    if lane == 0 and r < cute.size(pair_R):
        pair = on.number(pair_R, r, watch)
        if pair >= 0:
            total = on.piece(1, cutlass.Float32)
            for other in cutlass.range_constexpr(LANES):
                part = on.piece(1, cutlass.Float32)
                on.load_shared(part, parts, thread // LANES, other, watch, part_stored)
                total[0] = total[0] + part[0]
            value = on.rounded(total, dgate_TK.element_type)
            on.store(value, dgate_TK, pair // K, pair % K, watch, stored)


@cute.kernel
def _sum_kernel(
    y_RD: cute.Tensor, gate_TK: cute.Tensor, row_P: cute.Tensor, y_TD: cute.Tensor, K: cutlass.Constexpr,
    WIDTH: cutlass.Constexpr,
):  # fmt: skip
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    weighted_sum(block, thread, y_RD, gate_TK, row_P, y_TD, None, None, K, WIDTH)


@cute.kernel
def _spread_kernel(
    dy_TD: cute.Tensor, y_RD: cute.Tensor, gate_TK: cute.Tensor, pair_R: cute.Tensor, dy_RD: cute.Tensor,
    dgate_TK: cute.Tensor, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr, WANTS_Y: cutlass.Constexpr,
    WANTS_GATE: cutlass.Constexpr,
):  # fmt: skip
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    memory = cute.arch.alloc_smem(cutlass.Float32, ROWS * PADDED)
    parts = cute.make_tensor(memory, cute.make_layout((ROWS, LANES), stride=(PADDED, 1)))
    spread(block, thread, dy_TD, y_RD, gate_TK, pair_R, dy_RD, parts, None, None, None, K, WIDTH, WANTS_Y,
           WANTS_GATE)  # fmt: skip
    if cutlass.const_expr(WANTS_GATE):
        cute.arch.sync_threads()
        add_up(block, thread, pair_R, parts, dgate_TK, None, None, None, K)


@cute.jit
def _sum_all(
    y: cute.Pointer, gate: cute.Pointer, row: cute.Pointer, out: cute.Pointer, T: cutlass.Int64,
    R: cutlass.Int64, stride_R: cutlass.Int64, stride_D: cutlass.Int64, gate_stride_T: cutlass.Int64,
    gate_stride_K: cutlass.Int64, faults: cute.Pointer, stores: cute.Pointer, stream: cuda.CUstream,
    D: cutlass.Constexpr, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr, ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    y_RD = on.matrix(y, R, D, stride_R, stride_D, WIDTH)
    gate_TK = on.matrix(gate, T, K, gate_stride_T, gate_stride_K, 1)
    y_TD = on.matrix(out, T, D, cutlass.Int64(D), 1, WIDTH)
    row_P = on.vector(row, T * K)
    blocks = (T * (D // WIDTH) + THREADS - 1) // THREADS
    if cutlass.const_expr(ON_CPU):
        watch = on.vector(faults, len(on.FAULTS))
        stored = on.matrix(stores, T, D, cutlass.Int64(D), 1, 1)
        for block in cutlass.range(blocks):
            for thread in cutlass.range(THREADS):
                weighted_sum(block, thread, y_RD, gate_TK, row_P, y_TD, watch, stored, K, WIDTH)
    else:
        _sum_kernel(y_RD, gate_TK, row_P, y_TD, K, WIDTH).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )


@cute.jit
def _spread_all(
    dy: cute.Pointer, y: cute.Pointer, gate: cute.Pointer, pair: cute.Pointer, dy_out: cute.Pointer,
    dgate_out: cute.Pointer, T: cutlass.Int64, R: cutlass.Int64, dy_stride_T: cutlass.Int64,
    dy_stride_D: cutlass.Int64, stride_R: cutlass.Int64, stride_D: cutlass.Int64,
    gate_stride_T: cutlass.Int64, gate_stride_K: cutlass.Int64, faults: cute.Pointer, y_stores: cute.Pointer,
    gate_stores: cute.Pointer, scratch: cute.Pointer, scratch_stores: cute.Pointer, stream: cuda.CUstream,
    D: cutlass.Constexpr, K: cutlass.Constexpr, WIDTH: cutlass.Constexpr, WANTS_Y: cutlass.Constexpr,
    WANTS_GATE: cutlass.Constexpr, ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    dy_TD = on.matrix(dy, T, D, dy_stride_T, dy_stride_D, WIDTH)
    y_RD = on.matrix(y, R, D, stride_R, stride_D, WIDTH)
    gate_TK = on.matrix(gate, T, K, gate_stride_T, gate_stride_K, 1)
    pair_R = on.vector(pair, R)
    dy_RD = on.matrix(dy_out, R, D, cutlass.Int64(D), 1, WIDTH)
    dgate_TK = on.matrix(dgate_out, T, K, cutlass.Int64(K), 1, 1)
    blocks = (R + ROWS - 1) // ROWS
    if cutlass.const_expr(ON_CPU):
        watch = on.vector(faults, len(on.FAULTS))
        y_stored = on.matrix(y_stores, R, D, cutlass.Int64(D), 1, 1)
        gate_stored = on.matrix(gate_stores, T, K, cutlass.Int64(K), 1, 1)
        shared = cute.make_layout((ROWS, LANES), stride=(PADDED, 1))
        parts, part_stored = cute.make_tensor(scratch, shared), cute.make_tensor(scratch_stores, shared)
        for block in cutlass.range(blocks):
            on.forget(part_stored)
            for thread in cutlass.range(THREADS):
                spread(block, thread, dy_TD, y_RD, gate_TK, pair_R, dy_RD, parts, watch, y_stored,
                       part_stored, K, WIDTH, WANTS_Y, WANTS_GATE)  # fmt: skip
            if cutlass.const_expr(WANTS_GATE):
                for thread in cutlass.range(THREADS):
                    add_up(block, thread, pair_R, parts, dgate_TK, watch, gate_stored, part_stored, K)
    else:
        _spread_kernel(dy_TD, y_RD, gate_TK, pair_R, dy_RD, dgate_TK, K, WIDTH, WANTS_Y, WANTS_GATE).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )


@cache
def compiled(
    entry: str, arch: str, dtype: torch.dtype, gate_dtype: torch.dtype, D: int, K: int, width: int,
    *wants: bool,
) -> on.Launch:  # fmt: skip
    """entry: "weighted_sum" or "spread"; arch: "cpu", "gpu" (the one here) or a name such as "sm_90a"."""
    on_cpu = arch == "cpu"
    numbers, gates = on.pointer(None, dtype, width, on_cpu), on.pointer(None, gate_dtype, 1, on_cpu)
    index, scratch, no = (on.pointer(None, kind) for kind in (torch.int64, torch.float32, torch.int32))
    if entry == "weighted_sum":
        arguments: tuple[Any, ...] = (numbers, gates, index, numbers, *[cutlass.Int64(0)] * 6, no, no)
        return on.Launch(_sum_all, arguments, (D, K, width), arch)
    pointers = (numbers, numbers, gates, index, numbers, gates)
    arguments = (*pointers, *[cutlass.Int64(0)] * 8, no, no, no, scratch, no)
    return on.Launch(_spread_all, arguments, (D, K, width, *wants), arch)


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    reason = on.why_not(y_RD, gate_TK, plan.row_TK, plan.pair_R)
    return reason or rows.why_not_dtypes(y_RD, gate_TK)


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    rows.check_rows(y_RD, gate_TK, plan)
    return _gather_sum(y_RD, gate_TK, plan.row_TK.contiguous(), plan.pair_R.contiguous())


@torch.library.custom_op("moe_routing_bench::combine_cute_gather_sum", mutates_args=())
def _gather_sum(y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, pair_R: Tensor) -> Tensor:
    (T, K), (R, D) = row_TK.shape, y_RD.shape
    y_TD = y_RD.new_empty(T, D)
    if T and D:
        width, watch = on.width_for(D, y_RD, y_TD), on.Watch(y_RD.device, y_TD)
        compiled("weighted_sum", on.here(y_RD.device), y_RD.dtype, gate_TK.dtype, D, K, width)(
            y_RD.device,
            on.pointer(y_RD, width=width),
            on.pointer(gate_TK),
            on.pointer(row_TK),
            on.pointer(y_TD, width=width),
            cutlass.Int64(T),
            cutlass.Int64(R),
            *on.strides(y_RD),
            *on.strides(gate_TK),
            *watch.pointers(),
        )
        watch.check("weighted_sum")
    return y_TD


@torch.library.custom_op("moe_routing_bench::combine_cute_gather_sum_backward", mutates_args=())
def _gather_sum_backward(
    dy_TD: Tensor, y_RD: Tensor, gate_TK: Tensor, pair_R: Tensor, wants_y: bool, wants_gate: bool
) -> tuple[Tensor, Tensor]:
    """dy_RD and dgate_TK; an unwanted gradient has no elements."""
    (R, D), (T, K) = y_RD.shape, gate_TK.shape
    dy_RD = y_RD.new_empty((R, D) if wants_y else (0, D))
    dgate_TK = gate_TK.new_zeros((T, K) if wants_gate else (0, K))
    if R and D:
        device = y_RD.device
        width, watch = on.width_for(D, dy_TD, y_RD, dy_RD), on.Watch(device, dy_RD)
        gate_watch = on.Watch(device, dgate_TK)  # the gradient of pairs without a row is not stored
        scratch = [torch.empty(ROWS * PADDED, dtype=kind) for kind in (torch.float32, torch.int32)]
        wants = (wants_y, wants_gate)
        compiled("spread", on.here(device), y_RD.dtype, gate_TK.dtype, D, max(K, 1), width, *wants)(
            device,
            on.pointer(dy_TD, width=width),
            on.pointer(y_RD, width=width),
            on.pointer(gate_TK),
            on.pointer(pair_R),
            on.pointer(dy_RD, width=width),
            on.pointer(dgate_TK),
            cutlass.Int64(T),
            cutlass.Int64(R),
            *on.strides(dy_TD),
            *on.strides(y_RD),
            *on.strides(gate_TK),
            *watch.pointers(),
            gate_watch.pointers()[1],
            *map(on.pointer, scratch),
        )
        watch.check("spread")
    return dy_RD, dgate_TK


@_gather_sum.register_fake
def _(y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, pair_R: Tensor) -> Tensor:
    return y_RD.new_empty(row_TK.shape[0], y_RD.shape[1])


@_gather_sum_backward.register_fake
def _(
    dy_TD: Tensor, y_RD: Tensor, gate_TK: Tensor, pair_R: Tensor, wants_y: bool, wants_gate: bool
) -> tuple[Tensor, Tensor]:
    (R, D), (T, K) = y_RD.shape, gate_TK.shape
    return y_RD.new_empty((R, D) if wants_y else (0, D)), gate_TK.new_empty((T, K) if wants_gate else (0, K))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_RD, gate_TK, _, pair_R = inputs
    ctx.save_for_backward(y_RD, gate_TK, pair_R)


def _backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    wants_y, wants_gate = ctx.needs_input_grad[:2]
    dy_RD, dgate_TK = _gather_sum_backward(dy_TD, *ctx.saved_tensors, wants_y, wants_gate)
    return dy_RD if wants_y else None, dgate_TK if wants_gate else None, None, None


_gather_sum.register_autograd(_backward, setup_context=_keep)
