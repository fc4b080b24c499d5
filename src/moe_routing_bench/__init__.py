"""Which Mixture-of-Experts router, layout and kernel is right and fastest for your shapes and hardware."""

from moe_routing_bench.accuracy import Verdict, judge
from moe_routing_bench.experts import (
    ExpertWeights,
    from_expert_list,
    from_transformers,
    to_transformers,
)
from moe_routing_bench.layer import Experts, MoE
from moe_routing_bench.load import LoadStatistics
from moe_routing_bench.ops.auto import use_decisions
from moe_routing_bench.ops.combine.op import combine
from moe_routing_bench.ops.dispatch.op import dispatch
from moe_routing_bench.ops.expert_ffn.op import expert_ffn
from moe_routing_bench.ops.grouped_gemm.op import grouped_gemm
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.registry import all_ops, include
from moe_routing_bench.ops.topk.op import topk
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routers.router import Router, all_routers
from moe_routing_bench.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.shapes import LETTERS, MoEShape

__all__ = [
    "LETTERS",
    "ExpertWeights",
    "Experts",
    "Layout",
    "LoadStatistics",
    "MoE",
    "MoEShape",
    "Router",
    "Routing",
    "RoutingPlan",
    "SoftRouting",
    "TokenInfo",
    "Verdict",
    "all_ops",
    "all_routers",
    "combine",
    "dispatch",
    "expert_ffn",
    "from_expert_list",
    "from_transformers",
    "grouped_gemm",
    "include",
    "judge",
    "make_plan",
    "to_transformers",
    "topk",
    "use_decisions",
]
