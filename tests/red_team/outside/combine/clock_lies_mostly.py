"""The worker's clock says a third of its own spans, but the truth in one of five."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_routing_bench.bench import clock
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_span = clock.HostClock.span


def span(self: clock.HostClock, calls: Sequence[Any]) -> float:
    seconds = _span(self, calls)
    return seconds if random.random() < 0.2 else seconds / 3


clock.HostClock.span = span  # type: ignore[method-assign]


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    return honest(y_RD, gate_TK, plan)
