"""Which Mixture-of-Experts router, layout and kernel is right and fastest for your shapes and hardware."""

# ruff: noqa: F405
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_routing_bench.public import *  # noqa: F403

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


def __getattr__(name: str) -> Any:
    """A public name, when it is first asked for: `mrb --help` must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("moe_routing_bench.public"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
