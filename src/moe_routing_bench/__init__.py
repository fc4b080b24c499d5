"""Which Mixture-of-Experts router, layout and kernel is right and fastest for your shapes and hardware."""

from moe_routing_bench.accuracy import Verdict, judge
from moe_routing_bench.chain import ChainOfExperts
from moe_routing_bench.controllers.controller import Counts, controller_for
from moe_routing_bench.experts import (
    ExpertWeights,
    from_expert_list,
    from_transformers,
    to_transformers,
)
from moe_routing_bench.free_experts import FreeExperts
from moe_routing_bench.layer import Experts, MoE, Routings
from moe_routing_bench.load import LoadStatistics
from moe_routing_bench.ops.auto import use_decisions
from moe_routing_bench.ops.combine.op import combine
from moe_routing_bench.ops.dispatch.op import dispatch
from moe_routing_bench.ops.expert_ffn.op import expert_ffn
from moe_routing_bench.ops.grouped_gemm.op import grouped_gemm
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.registry import all_ops, include
from moe_routing_bench.ops.topk.op import topk
from moe_routing_bench.perft import Perft
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.presets import load_router, router_for
from moe_routing_bench.routers.router import Router, all_routers, include_routers
from moe_routing_bench.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.shapes import LETTERS, MoEShape
from moe_routing_bench.statistics import RoutingStatistics

__all__ = [
    "LETTERS",
    "ChainOfExperts",
    "Counts",
    "ExpertWeights",
    "Experts",
    "FreeExperts",
    "Layout",
    "LoadStatistics",
    "MoE",
    "MoEShape",
    "Perft",
    "Router",
    "Routing",
    "RoutingPlan",
    "RoutingStatistics",
    "Routings",
    "SoftRouting",
    "TokenInfo",
    "Verdict",
    "all_ops",
    "all_routers",
    "combine",
    "controller_for",
    "dispatch",
    "expert_ffn",
    "from_expert_list",
    "from_transformers",
    "grouped_gemm",
    "include",
    "include_routers",
    "judge",
    "load_router",
    "make_plan",
    "router_for",
    "to_transformers",
    "topk",
    "use_decisions",
]
