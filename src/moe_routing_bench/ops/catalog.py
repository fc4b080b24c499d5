"""Lists all implementations, also those that cannot be loaded, for listings, checks and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moe_routing_bench.core.names import base_name
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.registry import BUILT_IN, Op


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One implementation, or one configuration of it, whether or not it can be loaded.

    Listing(spec="mine", origin="file combine/mine.py", state="broken", reason="SyntaxError: invalid syntax")
    """

    spec: str
    origin: str
    state: Literal["ready", "absent", "broken"]  # absent: a library it needs is not installed
    reason: str = ""
    implementation: Implementation | None = None


def find(op: Op, spec: str, config: Mapping[str, Any] | None = None) -> Listing:
    """Finds `spec`, with the options in `config` added. Errors in code from outside are in the result. Errors
    in built-in code are raised, and so is ValueError for a name that does not exist."""
    try:
        implementation = op.get(spec)
        if config:
            spec = replace(implementation, config=config).label
            implementation = op.get(spec)
        return Listing(spec=spec, origin=implementation.origin, state="ready", implementation=implementation)
    except Exception as error:
        name = base_name(spec)
        origin = op.origin(name) if name in op.names() else BUILT_IN
        if isinstance(error, NotImplementedError):
            reason = str(error).partition(": ")[2] or str(error)
            return Listing(spec=spec, origin=origin, state="absent", reason=reason)
        if origin == BUILT_IN:
            raise
        return Listing(spec=spec, origin=origin, state="broken", reason=f"{type(error).__name__}: {error}")


def find_all(op: Op, *, configs: bool, only: str | None = None) -> Iterator[Listing]:
    """Every implementation of the op, or of one origin; with `configs` also what a tuner may try."""
    for name in op.names():
        if only not in (None, op.origin(name)):
            continue
        plain = find(op, name)
        yield plain
        if configs and plain.implementation is not None:
            for config in plain.implementation.configs:
                if config:
                    yield find(op, name, config)
