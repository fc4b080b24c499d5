"""What impl="auto" tries on each class of machine, best first, and the evidence for that order.

The table of an operation is `ops/<op>/preferences.py`:

    PREFERENCES = (Preference(machines=("amx",), order=("native",), evidence="measurements/..."), ...)

An implementation outside the table runs only by name or by a measured decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from moe_routing_bench import cpp
from moe_routing_bench.ops.registry import OURS, Op
from moe_routing_bench.ops.targets import TARGETS, target_of

# processors for which C++ is compiled and was timed: amx, vnni, avx512, avx2
COMPILED = tuple(level for level in cpp.LEVELS if level not in ("neon", cpp.PRETENDED))
PLAIN = "plain"  # torch's own operations: other processors and devices, or no compiler
GPUS = tuple(TARGETS)
MACHINES = (*COMPILED, PLAIN, *GPUS)
NO_GPU = (
    "not timed: plain torch runs on every GPU; the Triton kernels are verified and compiled, but no GPU has "
    "run them (docs/gpu.md)"
)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One row. The first of `order` that can run the arguments runs; after the last comes the op's default.

    Preference(machines=("amx",), order=("native",), evidence="measurements/...", most_tokens=64)
    is for calls of at most 64 tokens; of several rows for a machine, the first that allows the call's tokens.
    """

    machines: tuple[str, ...]
    order: tuple[str, ...]
    evidence: str  # the records behind the order, or "not timed: " and the reason for the order
    most_tokens: int | None = None


def machine_of(device: torch.device) -> str:
    """The class of machine that computes on a device."""
    if device.type == "cpu":
        return PLAIN if cpp.why_not() is not None else timed_level() or PLAIN
    return target_of(device).name if device.type == "cuda" else PLAIN


def timed_level() -> str | None:
    return level if (level := cpp.best_level()) in COMPILED else None


def preferences(op: Op, machine: str) -> Iterator[Preference]:
    """The rows for a machine, in order; the last leaves only the default, for any number of tokens."""
    if Path(op.file).with_name("preferences.py").is_file() and op.package.startswith(f"{OURS}."):
        for row in import_module(f"{op.package}.preferences").PREFERENCES:
            if machine in row.machines:
                yield row
    yield Preference(machines=MACHINES, order=(), evidence="no preference is noted for this machine")
