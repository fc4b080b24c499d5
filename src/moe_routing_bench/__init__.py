"""Which Mixture-of-Experts router, layout and kernel is right and fastest for your shapes and hardware."""

# ruff: noqa: F405
from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_routing_bench.api import (
        Experiment,
        ImplementationRef,
        Results,
        bench,
        check,
        open,
        sweep,
        train,
        tune,
    )
    from moe_routing_bench.public import *  # noqa: F403

__all__ = [
    "ChainOfExperts",
    "Experiment",
    "ExpertWeights",
    "Experts",
    "FreeExperts",
    "ImplementationRef",
    "Layout",
    "MoE",
    "MoEShape",
    "Perft",
    "Results",
    "Router",
    "Routing",
    "RoutingPlan",
    "RoutingStatistics",
    "SoftRouting",
    "TokenInfo",
    "all_ops",
    "all_routers",
    "bench",
    "check",
    "combine",
    "controller_for",
    "dispatch",
    "expert_ffn",
    "from_expert_list",
    "from_transformers",
    "grouped_gemm",
    "include",
    "judge",
    "load_router",
    "make_plan",
    "moe_forward",
    "open",
    "router_for",
    "sweep",
    "to_transformers",
    "topk",
    "train",
    "tune",
    "use_decisions",
]
_OF_API = ("Experiment", "ImplementationRef", "Results", "check", "open", "sweep", "tune")
_FOLDERS = ("bench", "train")  # called, they are the functions of api.py
# no longer public: where each name is. They warn for one release
_DROPPED = {
    "LETTERS": "core.shapes",
    "Counts": "controllers.controller",
    "Routings": "moe.layer",
    "Verdict": "core.accuracy",
    "LoadStatistics": "core.load",
    "include_routers": "routers.router",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: `mrb --help` must not wait for torch."""
    if name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    if (home := _DROPPED.get(name)) is not None:
        instead = "include" if name == "include_routers" else f"{__name__}.{home}.{name}"
        warnings.warn(
            f"{__name__}.{name} leaves the public names in the next release; use {instead}",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "api" if name in _OF_API else "public"
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
