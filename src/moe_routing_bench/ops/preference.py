"""The implementations that impl="auto" tries on each class of machine, best first, and the evidence.

The table of an operation is `ops/<op>/preferences.py`:

    PREFERENCES = (Preference(machines=("amx",), order=("native",), evidence="measurements/..."), ...)

An implementation that is not in the table runs only if it is named or if a measured decision names it.
measurements/preferences.py made the rows with conditions from records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.registry import OURS, Op
from moe_routing_bench.ops.targets import TARGETS, target_of

# levels of C++ that were timed: amx, vnni, avx512, avx2
COMPILED = tuple(level for level in cpp.LEVELS if level not in ("neon", cpp.PRETENDED))
PLAIN = "plain"  # torch's own operations, for other processors and devices and without a compiler
GPUS = tuple(TARGETS)
MACHINES = (*COMPILED, PLAIN, *GPUS)
NO_GPU = (
    "not timed: plain torch runs on every GPU; the Triton kernels are verified and compiled, but no GPU has "
    "run them (docs/gpu.md)"
)
NO_WAITING = (
    "not timed: no GPU has run them (docs/gpu.md); the order is by what each avoids: tiles that are mostly "
    "empty if there are few pairs, rows written between its products, then a loop over experts, which waits "
    "for the device in every call"
)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One row of the table. The first of `order` that can run the arguments runs, else the op's default.

    Preference(machines=("amx",), order=("native",), evidence="measurements/...", most_rows=2)
    is for calls with at most 2 rows per expert. If a machine has several rows, the first that fits is used.
    """

    machines: tuple[str, ...]
    order: tuple[str, ...]
    evidence: str  # the records for this order, or "not timed: " and the reason for the order
    dtype: torch.dtype | None = None  # of the first argument; None: any
    most_rows: float | None = None  # pairs of token and choice per expert, for an op that takes a plan
    most_elements: int | None = None  # numbers in the first argument: tokens x experts, or rows x width
    most_queries: int | None = None  # that share a head of keys, for attention
    gradients: bool | None = None  # True: with gradients, False: without; None: both

    @property
    def always(self) -> bool:
        conditions = self.dtype, self.most_rows, self.most_elements, self.most_queries, self.gradients
        return all(one is None for one in conditions)


def fits(row: Preference, args: tuple[Any, ...]) -> bool:
    """True if the row is for a call with these arguments. torch.compile could not trace a method of the
    row."""
    if row.dtype is not None and leading(args).dtype != row.dtype:
        return False
    if row.most_elements is not None and leading(args).numel() > row.most_elements:
        return False
    if row.most_queries is not None and queries_per_key(*args) > row.most_queries:
        return False
    if row.most_rows is not None and rows_per_expert(args) > row.most_rows:
        return False
    return row.gradients is None or row.gradients == wants_gradients(args)


def leading(args: tuple[Any, ...]) -> Tensor:
    """The first tensor among the arguments; of a routing, its ids."""
    first = args[0]
    return first.expert_TK if type(first) is Routing else first


def rows_per_expert(args: tuple[Any, ...]) -> float:
    for value in args:
        if type(value) is RoutingPlan:
            return value.row_TK.numel() / max(value.count_E.numel(), 1)
    raise ValueError("a preference with most_rows is for operations that take a plan")


def queries_per_key(q_BHNA: Tensor, k_BJMA: Tensor, *others: Any) -> float:
    return q_BHNA.shape[1] * q_BHNA.shape[2] / max(k_BJMA.shape[1], 1)


def wants_gradients(args: tuple[Any, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    matrices = [
        w for value in args if type(value) is ExpertWeights for w in (value.w_in_EDG, value.w_out_EFD)
    ]
    return any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *matrices))


def machine_of(device: torch.device) -> str:
    """The class of machine of a device."""
    if device.type == "cpu":
        return PLAIN if cpp.why_not() is not None else timed_level() or PLAIN
    return target_of(device).name if device.type == "cuda" else PLAIN


def timed_level() -> str | None:
    return level if (level := cpp.best_level()) in COMPILED else None


def preferences(op: Op, machine: str) -> Iterator[Preference]:
    """The rows for a machine, in order. The last one fits every call and leaves only the op's default."""
    if Path(op.file).with_name("preferences.py").is_file() and op.package.startswith(f"{OURS}."):
        for row in import_module(f"{op.package}.preferences").PREFERENCES:
            if machine in row.machines:
                yield row
    yield Preference(machines=MACHINES, order=(), evidence="no preference is noted for this machine")
