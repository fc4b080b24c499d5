"""Triton: counts per tile of pairs, a prefix sum along the tiles, and ranks by comparisons in chunks of a
tile.

There are three kernels. The host does not wait, and every number is written once:
  count   a histogram of each tile of 1024 pairs                             P / 1024 programs
  sum     load_NE[n, e] = pairs of expert e in the tiles before n            E / 16 programs, 64 tiles a step
  place   chunk by chunk of 128 pairs: the row of a pair is the next free row of its expert plus the number of
          earlier pairs of the chunk with the same expert                    P / 1024 programs, 8 chunks each
A plan of one tile needs no sum. It reads and writes 16 bytes per pair, and keeps 4 bytes per tile and counter
between the kernels, with E + 1 counters rounded up to a power of two: 40 MB for P = 10^7 and E = 512, where
sum takes 153 steps. tl.histogram is tested at the first use on a device. If it is wrong, pairs are compared
with all counters instead. For drop=probs, torch's sorts first find the pairs to keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.utils._python_dispatch import _disable_current_modes

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops import gpu
from moe_routing_bench.ops.make_plan.op import Counted, plan_by_counting
from moe_routing_bench.ops.targets import Target, assumed, target_of
from moe_routing_bench.ops.tracing import while_tracing

# count and place hold one number for each expert in registers or shared memory
MAX_EXPERTS = 2048
TILE, CHUNK = 1024, 128
NUM_WARPS = 4
SUM_EXPERTS, SUM_TILES = 16, 64
MAX_PAIRS = 2**31 - 1
MAX_COMPARED = 16384  # comparisons of one step without a histogram
_right: dict[torch.device, bool] = {}  # whether tl.histogram is right on a device
# counters in shared memory come in whole warps, which have 64 lanes on AMD
MIN_COUNTERS = 64


def unsupported(routing: Routing, layout: Layout) -> str | None:
    expert_TK = routing.expert_TK
    if expert_TK.dtype != torch.int64:
        return f"it reads int64 ids, not {expert_TK.dtype}"
    if routing.num_experts > MAX_EXPERTS:
        return f"it counts up to {MAX_EXPERTS} experts, not {routing.num_experts}"
    if expert_TK.numel() > MAX_PAIRS:
        return f"it counts pairs in 32 bits, up to {MAX_PAIRS}, not {expert_TK.numel()}"
    return gpu.why_not(expert_TK, routing.gate_TK)


def run(routing: Routing, layout: Layout) -> RoutingPlan:
    filled = layout.kind == "compact" and not routing.ragged
    by_histogram = histogram_is_right(routing.expert_TK.device)

    def counting(*sizes: Any) -> Counted:
        return make_plan_counting(*sizes, filled, by_histogram)

    return plan_by_counting(routing, layout, counting)


@triton_op("moe_routing_bench::make_plan_counting", mutates_args={})
@gpu.on_its_device
def make_plan_counting(
    expert_P: Tensor,
    E: int,
    R: int,
    capacity: int,
    block_rows: int,
    filled: bool,
    by_histogram: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """row_P, pair_R, offset_E1, count_E, dropped_E. A capacity below 0 means no limit: nothing is dropped."""
    P = expert_P.shape[0]
    num_tiles = max(1, triton.cdiv(P, TILE))
    counters = _counters(E)
    chunk = CHUNK if by_histogram else _compared(counters)
    num_warps = target_of(expert_P.device).warps(NUM_WARPS)
    row_P = torch.empty_like(expert_P)
    pair_R = expert_P.new_empty(R) if filled else expert_P.new_full((R,), -1)
    offset_E1, count_E, dropped_E = (expert_P.new_empty(n) for n in (E + 1, E, E))
    # row n: pairs in the tiles before n; the last row is the load
    load_NE = expert_P.new_empty(num_tiles + 1, counters, dtype=torch.int32)
    wrap_triton(_count)[(num_tiles,)](
        expert_P,
        load_NE,
        P,
        E=E,
        COUNTERS=counters,
        TILE=TILE,
        CHUNK=chunk,
        HISTOGRAM=by_histogram,
        num_warps=num_warps,
    )
    if num_tiles > 1:
        wrap_triton(_sum)[(triton.cdiv(counters, SUM_EXPERTS),)](
            load_NE, num_tiles, COUNTERS=counters, EXPERTS=SUM_EXPERTS, TILES=SUM_TILES, num_warps=num_warps
        )
    wrap_triton(_place)[(num_tiles,)](
        expert_P,
        load_NE,
        load_NE.select(0, num_tiles),
        row_P,
        pair_R,
        offset_E1,
        count_E,
        dropped_E,
        P,
        capacity,
        block_rows,
        E=E,
        COUNTERS=counters,
        TILE=TILE,
        CHUNK=chunk,
        PADDED=capacity >= 0,
        HISTOGRAM=by_histogram,
        num_warps=num_warps,
    )
    return row_P, pair_R, offset_E1, count_E, dropped_E


def _counters(E: int) -> int:
    return max(MIN_COUNTERS, triton.next_power_of_2(E + 1))  # one for pairs without an expert


def _compared(counters: int) -> int:
    """How many pairs are compared with all counters in one step, without a histogram."""
    return min(CHUNK, MAX_COMPARED // counters)


@while_tracing
def histogram_is_right(device: torch.device) -> bool:
    """True if tl.histogram is right on a device. In earlier versions of Triton it was right when interpreted
    and wrong on GPUs. The first use tests it and waits for the device. While a graph is captured waiting is
    impossible, so an untested histogram is not used."""
    if assumed() is not None or (device.type == "cuda" and not torch.cuda.is_available()):
        return True  # nothing runs
    if device not in _right:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        with _disable_current_modes():
            _right[device] = _counts_right(device)
    return _right[device]


def _counts_right(device: torch.device) -> bool:
    """Two tiles, the last one cut, with pairs that have no expert."""
    E, expert_P = 61, torch.arange(2 * TILE - 3) ** 2 % 61 - 1
    found_NE = _counted(expert_P.to(device), E).cpu().long()
    right = all(
        torch.equal(found_NE[n, :E], torch.bincount(tile_P[tile_P >= 0], minlength=E))
        for n, tile_P in enumerate(expert_P.split(TILE), 1)
    )
    if not right:
        warnings.warn(
            f"tl.histogram counts wrong on {device} with triton {triton.__version__}: "
            "make_plan.triton_counting compares instead, which is slower",
            RuntimeWarning,
            stacklevel=4,
        )
    return right


@gpu.on_its_device
def _counted(expert_P: Tensor, E: int) -> Tensor:
    counters = _counters(E)
    load_NE = expert_P.new_empty(3, counters, dtype=torch.int32)
    _count[(2,)](
        expert_P, load_NE, expert_P.shape[0], E=E, COUNTERS=counters, TILE=TILE, CHUNK=CHUNK, HISTOGRAM=True,
        num_warps=target_of(expert_P.device).warps(NUM_WARPS),
    )  # fmt: skip
    return load_NE


@triton.jit
def _compared_counts(expert_C, COUNTERS: tl.constexpr):
    return tl.sum((expert_C[:, None] == tl.arange(0, COUNTERS)[None, :]).to(tl.int32), 0)


@triton.jit
def _experts_of(expert_P, pair_C, P, E: tl.constexpr):
    """The expert of each pair; E where there is none. Without P all of them are pairs."""
    if P is None:
        expert_C = tl.load(expert_P + pair_C)
    else:
        expert_C = tl.load(expert_P + pair_C, mask=pair_C < P, other=-1)
    return tl.where((expert_C >= 0) & (expert_C < E), expert_C, E).to(tl.int32)


@triton.jit(do_not_specialize=["P"])
def _count(
    expert_P,
    load_NE,
    P,
    E: tl.constexpr,
    COUNTERS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    counter = tl.arange(0, COUNTERS)
    if HISTOGRAM:
        pair_C = tile * TILE + tl.arange(0, TILE)
        if (tile + 1) * TILE <= P:  # a whole tile is read 128 bits at a time
            count = tl.histogram(_experts_of(expert_P, pair_C, None, E), COUNTERS)
        else:
            count = tl.histogram(_experts_of(expert_P, pair_C, P, E), COUNTERS)
    else:
        count = tl.zeros((COUNTERS,), tl.int32)
        for first in range(tile * TILE, (tile + 1) * TILE, CHUNK):
            count += _compared_counts(_experts_of(expert_P, first + tl.arange(0, CHUNK), P, E), COUNTERS)
    tl.store(load_NE + (tile + 1) * COUNTERS + counter, count)
    if tile == 0:
        tl.store(load_NE + counter, tl.zeros((COUNTERS,), tl.int32))


@triton.jit(do_not_specialize=["num_tiles"])
def _sum(load_NE, num_tiles, COUNTERS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr):
    """Row n + 1 holds the counts of tile n, and then the sum of rows 1 .. n + 1."""
    expert_e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    tile_n = tl.arange(0, TILES)
    before_e = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_tiles, TILES):
        row_n = (first + 1 + tile_n).to(tl.int64)
        place_ne = load_NE + row_n[:, None] * COUNTERS + expert_e[None, :]
        here_n1 = (row_n <= num_tiles)[:, None]
        count_ne = tl.load(place_ne, mask=here_n1, other=0)
        tl.store(place_ne, before_e[None, :] + tl.cumsum(count_ne, 0), mask=here_n1)
        before_e += tl.sum(count_ne, 0)


@triton.jit(do_not_specialize=["P", "capacity"])
def _place(
    expert_P,
    load_NE,
    load_E,
    row_P,
    pair_R,
    offset_E1,
    count_E,
    dropped_E,
    P,
    capacity,
    block_rows,
    E: tl.constexpr,
    COUNTERS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    counter = tl.arange(0, COUNTERS)
    load = tl.load(load_E + counter).to(tl.int64)
    if PADDED:
        kept = tl.minimum(load, capacity)
        start = counter.to(tl.int64) * capacity
    else:
        kept = load
        span = tl.where(counter < E, (load + block_rows - 1) // block_rows * block_rows, 0)
        start = tl.cumsum(span, 0) - span
    if tile == 0:
        tl.store(offset_E1 + counter, start, mask=counter <= E)
        tl.store(count_E + counter, kept, mask=counter < E)
        tl.store(dropped_E + counter, load - kept, mask=counter < E)

    next_row = start + tl.load(load_NE + tile * COUNTERS + counter)
    place_C = tl.arange(0, CHUNK)
    for first in range(tile * TILE, tl.minimum((tile + 1) * TILE, P), CHUNK):
        pair_C = first + place_C
        expert_C = _experts_of(expert_P, pair_C, P, E)
        # down a column: the number is one of 0 .. place - 1 for earlier pairs of the column's expert alone
        key_C = expert_C * CHUNK + place_C
        before_CC = (key_C[None, :] - key_C[:, None] - 1).to(tl.uint32)
        earlier_CC = before_CC < place_C[None, :].to(tl.uint32)
        row_C = tl.gather(next_row, expert_C, 0) + tl.sum(earlier_CC.to(tl.int32), 0)
        if HISTOGRAM:
            next_row += tl.histogram(expert_C, COUNTERS)
        else:
            next_row += _compared_counts(expert_C, COUNTERS)
        stays_C = expert_C < E
        if PADDED:
            stays_C = stays_C & (row_C < (expert_C + 1).to(tl.int64) * capacity)
        tl.store(row_P + pair_C, tl.where(stays_C, row_C, -1), mask=pair_C < P)
        tl.store(pair_R + row_C, pair_C, mask=stays_C)


def compilations(sizes: MoEShape, target: Target) -> Iterator[gpu.Compilation]:
    counters, num_warps = _counters(sizes.E), target.warps(NUM_WARPS)
    shared = {"E": sizes.E, "COUNTERS": counters, "TILE": TILE, "CHUNK": CHUNK, "HISTOGRAM": True}
    yield gpu.Compilation(
        name="count",
        kernel=_count,
        signature={"expert_P": "*i64", "load_NE": "*i32", "P": "i32"},
        constexprs=shared,
        num_warps=num_warps,
        num_stages=1,
        expects=("vector_load",),
        bytes=8 * TILE + 4 * counters,
    )
    yield gpu.Compilation(
        name="sum",
        kernel=_sum,
        signature={"load_NE": "*i32", "num_tiles": "i32"},
        constexprs={"COUNTERS": counters, "EXPERTS": SUM_EXPERTS, "TILES": SUM_TILES},
        num_warps=num_warps,
        num_stages=1,
        bytes=8 * SUM_EXPERTS * -(-sizes.num_pairs // TILE),
    )
    for layout in ("compact", "padded"):
        yield gpu.Compilation(
            name=f"place_{layout}",
            kernel=_place,
            signature={
                "expert_P": "*i64", "load_NE": "*i32", "load_E": "*i32", "row_P": "*i64", "pair_R": "*i64",
                "offset_E1": "*i64", "count_E": "*i64", "dropped_E": "*i64", "P": "i32", "capacity": "i32",
                "block_rows": "i32:1" if layout == "padded" else "i32",
            },
            constexprs={**shared, "PADDED": layout == "padded"},
            num_warps=num_warps,
            num_stages=1,
            bytes=24 * TILE + 8 * counters,
        )  # fmt: skip
