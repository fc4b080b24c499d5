"""The engines that can run the cells of a sweep, by name."""

from __future__ import annotations

from collections.abc import Callable

from moe_routing_bench.core.names import no_such, parse_spec
from moe_routing_bench.fleet.executor import Executor, LocalExecutor
from moe_routing_bench.fleet.ray_engine import RayExecutor

ENGINES: dict[str, Callable[..., Executor]] = {"local": LocalExecutor, "ray": RayExecutor}


def engine_named(spec: str) -> Executor:
    """engine_named("ray(gpu=h100)") uses the Ray nodes with that label."""
    name, labels = parse_spec(spec)
    if name not in ENGINES:
        raise no_such("engine", name, ENGINES)
    if name == "ray":
        return RayExecutor({key: str(value) for key, value in labels.items()})
    if labels:
        raise ValueError(f"the engine {name} takes no labels: write --engine {name}")
    return ENGINES[name]()
