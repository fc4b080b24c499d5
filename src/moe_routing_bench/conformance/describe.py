"""What an operation, an implementation and a router say of themselves. Files from outside are asked in a
process of their own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from moe_routing_bench.conformance.outside import (
    ROUTERS,
    Answer,
    IsolatedError,
    Outside,
    OutsideFile,
    Shown,
    answers,
)
from moe_routing_bench.ops.catalog import Listing, find, find_all
from moe_routing_bench.ops.preference import machine_of, preferences
from moe_routing_bench.ops.registry import BUILT_IN, Op, get_op
from moe_routing_bench.routers.router import GROUPS, Router, router_named

# where the parameters of routers are counted
ROUTER_SIZES = {"D": 2048, "E": 64}
# the layouts that take the rows of a rule as they come; padded drops rows unless its groups are equal
LAYOUTS = {
    "uneven": ["compact", "block", "padded, with drops"],
    "equal": ["compact", "block", "padded, without drops or waste"],
    "dense": ["compact", "block", "padded, without drops or waste"],
}


def described(file: OutsideFile, outside: Outside, row: type[Answer]) -> dict[str, Any]:
    """What a file from outside says of itself, asked in a process of its own."""
    try:
        (answer,) = answers(describe_file, str(file.path), include=outside.folders, answer=row)
    except (IsolatedError, ValueError) as reason:
        return broken_row(row, file, str(reason))
    return {**answer.model_dump(), "origin": file.origin}


def broken_row(row: type[Answer], file: OutsideFile, reason: str) -> dict[str, Any]:
    return {**dict.fromkeys(row.model_fields), "state": "broken", "reason": reason, "origin": file.origin}


def describe_file(path: str) -> Iterator[dict[str, Any]]:
    """Runs where files from outside are loaded."""
    name, op = Path(path).stem, Path(path).parent.name
    if op == ROUTERS:
        yield describe_router(router_named(name))
    elif name == "op":
        described = describe_op(get_op(op))
        yield {**described, "implementations": {}, "state": "ready", "reason": None, "origin": ""}
    else:
        yield describe(get_op(op), find(get_op(op), name))


class ImplementationRow(Answer):
    """What describe says."""

    state: Literal["ready", "absent", "broken"]
    reason: Shown | None
    origin: Shown
    default: bool
    summary: Shown | None
    options: list[Shown] | None
    configs: list[dict[Shown, Any]] | None
    forward_only: bool | None
    host_sync: Shown | None
    deterministic: bool | None
    batch_invariant: bool | None
    reuses_output: bool | None
    ties: Shown | None


class OpRow(Answer):
    """What describe_op says."""

    state: Literal["ready", "broken"]
    reason: Shown | None
    origin: Shown
    summary: Shown
    parameters: list[Shown]
    default: Shown
    preferred: list[dict[str, Any]]
    implementations: dict[str, Any]


class RouterRow(Answer):
    """What describe_router says."""

    state: Literal["ready", "broken"]
    reason: Shown | None
    summary: Shown
    origin: Shown
    causal: bool
    batch_dependent: bool
    experts_per_token: Shown
    fixed_K: int | None
    gate_sum: Shown
    groups: Literal[tuple(GROUPS)]  # type: ignore[valid-type]
    layouts: list[Shown]
    parameters: dict[Shown, int]
    parameters_at: dict[str, int]
    balance_state: list[Shown]
    controller: Shown | None
    host_sync: Shown | None
    losses: list[Shown]
    paper: Shown


def describe_op(op: Op) -> dict[str, Any]:
    machine = machine_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows = [asdict(row) for row in preferences(op, machine) if row.order]
    return {
        "summary": op.summary.removeprefix(f"{op.name}: "),
        "parameters": op.parameters(),
        "default": op.default,
        "preferred": [{**row, "machines": [machine]} for row in rows],
        "implementations": {
            entry.spec: describe(op, entry)
            for entry in find_all(op, configs=False)
            if not entry.origin.startswith("file ")
        },
    }


def describe(op: Op, entry: Listing) -> dict[str, Any]:
    """The same keys for every implementation; null where a file that could not be loaded would say."""
    one = entry.implementation
    options = None if one is None else [*inspect.signature(one.run).parameters][len(op.parameters()) :]
    return {
        "state": entry.state,
        "reason": entry.reason or None,
        "origin": entry.origin,
        "default": entry.spec == op.default,
        "summary": one and one.summary,
        "options": options,
        "configs": one and [dict(config) for config in one.configs],
        "forward_only": one and one.forward_only,
        "host_sync": one and (one.host_sync or None),
        "deterministic": one and one.deterministic,
        "batch_invariant": one and one.batch_invariant,
        "reuses_output": one and one.reuses_output,
        "ties": one and one.ties,
    }


def describe_router(rule: type[Router]) -> dict[str, Any]:
    module = sys.modules[rule.__module__]
    router = rule(ROUTER_SIZES["D"], ROUTER_SIZES["E"], rule.fixed_K or 1)
    built_in = rule.__module__.startswith(f"{Router.__module__.rpartition('.')[0]}.")
    return {
        "state": "ready",
        "reason": None,
        "summary": (inspect.getdoc(module) or "").partition("\n")[0],
        "origin": BUILT_IN if built_in else f"file {module.__file__}",
        "causal": rule.causal,
        "batch_dependent": rule.batch_dependent,
        "experts_per_token": rule.experts_per_token,
        "fixed_K": rule.fixed_K,
        "gate_sum": rule.gate_sum,
        "groups": rule.groups,
        "layouts": LAYOUTS[rule.groups],
        "parameters": {name: value.numel() for name, value in router.named_parameters()},
        "parameters_at": ROUTER_SIZES,
        "balance_state": [name for name, _ in router.named_buffers()],
        "controller": rule.controller,
        "host_sync": getattr(rule, "host_sync", None),
        "losses": [*rule.loss_names],
        "paper": rule.paper,
    }
