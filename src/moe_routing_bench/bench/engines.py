"""The engines by name: what may run the cells of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from moe_routing_bench.bench.executor import Executor, LocalExecutor
from moe_routing_bench.bench.ray_engine import RayExecutor

ENGINES: dict[str, Callable[[], Executor]] = {"local": LocalExecutor, "ray": RayExecutor}
