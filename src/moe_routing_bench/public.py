"""The library's public names, by import. The package lists them and loads this file when one is first asked
for. The names of api.py are not here: they need more than torch."""

# ruff: noqa: F401
from moe_routing_bench.controllers.controller import controller_for
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.experts import (
    ExpertWeights,
    from_expert_list,
    from_transformers,
    to_transformers,
)
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.moe.chain import ChainOfExperts
from moe_routing_bench.moe.forward import moe_forward
from moe_routing_bench.moe.free_experts import FreeExperts
from moe_routing_bench.moe.layer import Experts, MoE
from moe_routing_bench.moe.perft import Perft
from moe_routing_bench.moe.presets import load_router, router_for
from moe_routing_bench.moe.statistics import RoutingStatistics
from moe_routing_bench.ops.auto import use_decisions
from moe_routing_bench.ops.combine.op import combine
from moe_routing_bench.ops.dispatch.op import dispatch
from moe_routing_bench.ops.expert_ffn.op import expert_ffn
from moe_routing_bench.ops.grouped_gemm.op import grouped_gemm
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.topk.op import topk
from moe_routing_bench.routers.router import Router, all_routers
from moe_routing_bench.routers.router import include_folder as include
