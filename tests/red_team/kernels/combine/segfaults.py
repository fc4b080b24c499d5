"""Reads address zero."""

from __future__ import annotations

import ctypes

from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError("address zero could be read")
