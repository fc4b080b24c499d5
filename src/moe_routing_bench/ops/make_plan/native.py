"""Histogram, prefix sum and rank in one C++ pass each. Compiled at first use; CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_routing_bench.core import cpp
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing

SOURCE = Path(__file__).with_name("native.cpp")
# about a millisecond of counting; with fewer pairs a second thread can cost more time than it saves
PAIRS_FOR_THREADS = 2**18
_make_plan = cpp.Function(SOURCE, "mrb_make_plan", fields=12)


def unsupported(routing: Routing, layout: Layout, level: str = "") -> str | None:
    expert_TK = routing.expert_TK
    if expert_TK.dtype != torch.int64:
        return f"it reads int64 ids, not {expert_TK.dtype}"
    if layout.kind == "padded" and layout.drop == "probs":
        return "it drops only by position; drop=probs needs a sort by gate"
    return cpp.unsupported(SOURCE, level, expert_TK)


def run(routing: Routing, layout: Layout, level: str = "") -> RoutingPlan:
    expert_TK = routing.expert_TK.contiguous()
    (T, K), E, int64 = expert_TK.shape, routing.num_experts, torch.int64
    P, R = T * K, layout.num_rows(T, K, E)
    row_TK, pair_R = recycled.empty(T, K, dtype=int64), recycled.empty(R, dtype=int64)
    offset_E1, count_E = torch.empty(E + 1, dtype=int64), torch.empty(E, dtype=int64)
    dropped_E = torch.empty(E, dtype=int64)
    # each thread keeps E counters
    threads = torch.get_num_threads() if P >= PAIRS_FOR_THREADS and P >= 8 * E else 1
    failed = _make_plan(
        level,
        expert_TK.data_ptr(),
        P,
        E,
        layout.capacity_for(T, K, E) if layout.kind == "padded" else -1,
        layout.block_rows or 1,
        R,
        threads,
        row_TK.data_ptr(),
        pair_R.data_ptr(),
        offset_E1.data_ptr(),
        count_E.data_ptr(),
        dropped_E.data_ptr(),
    )
    if failed == 1:
        raise MemoryError(f"no memory for {threads} x {E} counters")
    assert not failed, f"the spans of {layout} do not fit {R} rows"
    return RoutingPlan(
        row_TK=row_TK,
        pair_R=pair_R,
        offset_E1=offset_E1,
        count_E=count_E,
        dropped_E=dropped_E,
        layout=layout,
        filled=layout.kind == "compact" and not routing.ragged,
    )
