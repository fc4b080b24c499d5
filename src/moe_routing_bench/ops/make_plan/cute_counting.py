"""CuTe DSL: one thread per expert reads a tile of pairs twice, to count its pairs and to place them.

  count   load_NE[n, e] = pairs of expert e in tile n             P / TILE blocks; thread e, e + THREADS, ...
  place   thread e knows its next free row and gives it to each of its pairs, in their order
Between them torch sums the counts along the tiles. All threads of a warp read the same pair at the same time,
so a tile is read from memory once. There are P * (E + 1) comparisons, 128 per block at a time. Pairs without
an expert belong to an extra expert E, which stores -1. It uses no shared memory and no atomics: one thread
stores each number, and every run gives the same plan. For drop=probs, torch's sorts first find the pairs to
keep.

It was verified on the CPU, where the same code runs for every thread (ops/cute_threads.py), and compiled for
sm_80, sm_90a and sm_100a. It has not run on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops import cute_threads as on
from moe_routing_bench.ops.cute_threads import THREADS, cuda, cute, cutlass
from moe_routing_bench.ops.make_plan.op import plan_by_counting, spans_of

TILE = 1024  # pairs
MAX_EXPERTS = 2048  # every pair is compared with every expert


@cute.jit
def expert_of(expert_P, place, E, watch):
    """The expert of a pair; E where there is none."""
    expert = on.number(expert_P, place, watch)
    if expert < 0 or expert > E:
        expert = cutlass.Int64(E)
    return expert


@cute.jit
def tile_of(block, P):
    """The first pair of a tile and the pair after its last."""
    first = cutlass.Int64(block) * TILE
    end = first + TILE
    if end > P:
        end = cutlass.Int64(P)
    return first, end


@cute.jit
def put(value, target, row, column, watch, stored):
    one = on.piece(1, target.element_type)
    one[0] = value.to(target.element_type)
    on.store(one, target, row, column, watch, stored)


@cute.jit
def count(block, thread, expert_P, load_NC, watch, stored):
    """C counters: one per expert, and one for pairs without an expert."""
    P, counters = expert_P.shape[0], load_NC.shape[1]
    first, end = tile_of(block, P)
    for turn in cutlass.range((counters + THREADS - 1) // THREADS):
        expert = cutlass.Int64(turn) * THREADS + thread
        if expert < counters:
            mine = cutlass.Int64(0)
            for pair in cutlass.range(first, end):
                if expert_of(expert_P, pair, counters - 1, watch) == expert:
                    mine += 1
            put(mine, load_NC, block, expert, watch, stored)


@cute.jit
def place(block, thread, expert_P, next_NC, limit_C, row_P, pair_R, watch, stored_P, stored_R):
    """next_NC: the first row for each expert's pairs of this tile. A row at the limit or above does not
    exist."""
    P, counters = expert_P.shape[0], next_NC.shape[1]
    first, end = tile_of(block, P)
    for turn in cutlass.range((counters + THREADS - 1) // THREADS):
        expert = cutlass.Int64(turn) * THREADS + thread
        if expert < counters:
            start = on.piece(1, next_NC.element_type)
            on.load(start, next_NC, block, expert, watch)
            row = start[0]
            limit = on.number(limit_C, expert, watch)
            for pair in cutlass.range(first, end):
                if expert_of(expert_P, pair, counters - 1, watch) == expert:
                    given = cutlass.Int64(-1)
                    if row < limit:
                        given = row
                        put(pair, pair_R, row, 0, watch, stored_R)
                    put(given, row_P, pair, 0, watch, stored_P)
                    row += 1


@cute.kernel
def _count_kernel(expert_P: cute.Tensor, load_NC: cute.Tensor):
    count(cute.arch.block_idx()[0], cute.arch.thread_idx()[0], expert_P, load_NC, None, None)


@cute.kernel
def _place_kernel(
    expert_P: cute.Tensor, next_NC: cute.Tensor, limit_C: cute.Tensor, row_P: cute.Tensor, pair_R: cute.Tensor
):
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    place(block, thread, expert_P, next_NC, limit_C, row_P, pair_R, None, None, None)


@cute.jit
def _count_all(
    experts: cute.Pointer, load: cute.Pointer, P: cutlass.Int64, C: cutlass.Int64, faults: cute.Pointer,
    stores: cute.Pointer, stream: cuda.CUstream, ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    blocks = (P + TILE - 1) // TILE
    expert_P, load_NC = on.vector(experts, P), on.matrix(load, blocks, C, C, 1, 1)
    if cutlass.const_expr(ON_CPU):
        watch, stored = on.vector(faults, len(on.FAULTS)), on.matrix(stores, blocks, C, C, 1, 1)
        for block in cutlass.range(blocks):
            for thread in cutlass.range(THREADS):
                count(block, thread, expert_P, load_NC, watch, stored)
    else:
        _count_kernel(expert_P, load_NC).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def _place_all(
    experts: cute.Pointer, next_rows: cute.Pointer, limits: cute.Pointer, rows: cute.Pointer,
    pairs: cute.Pointer, P: cutlass.Int64, C: cutlass.Int64, R: cutlass.Int64, faults: cute.Pointer,
    row_stores: cute.Pointer, pair_stores: cute.Pointer, stream: cuda.CUstream, ON_CPU: cutlass.Constexpr,
):  # fmt: skip
    blocks = (P + TILE - 1) // TILE
    expert_P, limit_C = on.vector(experts, P), on.vector(limits, C)
    next_NC = on.matrix(next_rows, blocks, C, C, 1, 1)
    row_P, pair_R = on.matrix(rows, P, 1, 1, 1, 1), on.matrix(pairs, R, 1, 1, 1, 1)
    if cutlass.const_expr(ON_CPU):
        watch = on.vector(faults, len(on.FAULTS))
        stored_P, stored_R = on.matrix(row_stores, P, 1, 1, 1, 1), on.matrix(pair_stores, R, 1, 1, 1, 1)
        for block in cutlass.range(blocks):
            for thread in cutlass.range(THREADS):
                place(
                    block, thread, expert_P, next_NC, limit_C, row_P, pair_R, watch, stored_P, stored_R
                )  # fmt: skip
    else:
        _place_kernel(expert_P, next_NC, limit_C, row_P, pair_R).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )


@cache
def compiled(entry: str, arch: str) -> on.Launch:
    """entry: "count" or "place"; arch: "cpu", "gpu" (the one here) or a name such as "sm_90a"."""
    number, no, size = on.pointer(None, torch.int64), on.pointer(None), cutlass.Int64(0)
    if entry == "count":
        return on.Launch(_count_all, (number, number, size, size, no, no), (), arch)
    return on.Launch(_place_all, (*[number] * 5, *[size] * 3, no, no, no), (), arch)


def unsupported(routing: Routing, layout: Layout) -> str | None:
    if routing.expert_TK.dtype != torch.int64:
        return f"it reads int64 ids, not {routing.expert_TK.dtype}"
    if routing.num_experts > MAX_EXPERTS:
        return f"it compares pairs with up to {MAX_EXPERTS} experts, not {routing.num_experts}"
    return on.why_not(routing.expert_TK, routing.gate_TK)


def run(routing: Routing, layout: Layout) -> RoutingPlan:
    return plan_by_counting(routing, layout, _plan)


@torch.library.custom_op("moe_routing_bench::make_plan_cute_counting", mutates_args=())
def _plan(
    expert_P: Tensor, E: int, R: int, capacity: int, block_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    P, device = expert_P.shape[0], expert_P.device
    load_NC = expert_P.new_zeros(max(1, -(-P // TILE)), E + 1)
    row_P, pair_R = torch.empty_like(expert_P), expert_P.new_full((R,), -1)
    if P:
        _run("count", device, (expert_P, load_NC), (P, E + 1), load_NC)
    before_NC = load_NC.cumsum(0)
    load_E = before_NC[-1, :E].clone()
    offset_E1, count_E = spans_of(load_E, capacity, block_rows)
    if P:
        limit_C = torch.cat((offset_E1[:-1] + count_E, offset_E1.new_zeros(1)))
        next_NC = before_NC - load_NC + offset_E1
        _run("place", device, (expert_P, next_NC, limit_C, row_P, pair_R), (P, E + 1, R), row_P, pair_R)
    return row_P, pair_R, offset_E1, count_E.clone(), load_E - count_E


def _run(
    entry: str, device: torch.device, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], *results: Tensor
) -> None:
    watch = on.Watch(device, *results)
    pointers: list[Any] = [on.pointer(tensor) for tensor in tensors]
    compiled(entry, on.here(device))(device, *pointers, *map(cutlass.Int64, sizes), *watch.pointers())
    watch.stored[1:] = []  # rows without a pair keep their -1 and are not stored
    watch.check(entry)


@_plan.register_fake
def _(
    expert_P: Tensor, E: int, R: int, capacity: int, block_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    pair_R, offset_E1, count_E, dropped_E = (expert_P.new_empty(n) for n in (R, E + 1, E, E))
    return torch.empty_like(expert_P), pair_R, offset_E1, count_E, dropped_E
