"""All GPU kernels compiled ahead of time, in Triton and in CuTe DSL, as a document that is compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import Any

import triton

from moe_routing_bench.conformance.check import matches
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.studies import cute_code
from moe_routing_bench.studies.compiled import Compiled, worse_than
from moe_routing_bench.studies.triton_code import compile_implementation

FAMILIES = {"cute": "our CuTe kernels", "quack": "QuACK's GEMMs, about three minutes"}


def compile_all(
    architectures: list[str], models: list[str], op: str, impl: str, *, configs: bool,
    doing: Callable[[str], None],
) -> list[Compiled]:  # fmt: skip
    """Every GPU kernel that matches, for every architecture and model."""
    rows: list[Compiled] = []
    for operation in all_ops().values():
        if not matches(operation.name, op):
            continue
        for entry in find_all(operation, configs=configs):
            if entry.implementation is None or not matches(entry.spec, impl):
                continue
            for name in models:
                for architecture in architectures:
                    doing(f"compiling {operation.name}.{entry.spec} for {architecture}, {name}")
                    target = Target.named(architecture)
                    rows += compile_implementation(entry.implementation, name, target)
    for family, architecture in product(FAMILIES, architectures):
        doing(f"compiling {FAMILIES[family]} for {architecture}")
        rows += _of_cute(family, architecture, models, op, impl)
    return rows


def _of_cute(family: str, architecture: str, models: list[str], op: str, impl: str) -> list[Compiled]:
    wanted = [
        (name, implementation)
        for name, _, implementation in (full.partition(".") for full in cute_code.implementations(family))
        if matches(name, op) and matches(implementation, impl)
    ]
    if not wanted:
        return []
    if (reason := cute_code.why_not(family, architecture)) is not None:
        about: dict[str, Any] = {
            "kernel": "",
            "model": cute_code.ANY_MODEL,
            "arch": architecture,
            "not_made": reason,
        }
        return [Compiled(op=name, impl=implementation, **about) for name, implementation in wanted]
    rows = map(cute_code.as_compiled, cute_code.compile_all(family, architecture, models))
    return [row for row in rows if (row.op, row.impl) in wanted]


def document_of(rows: list[Compiled]) -> dict[str, Any]:
    return {
        "what": "compiled ahead of time, not run: see docs/gpu.md",
        "triton": triton.__version__,
        "kernels": [asdict(row) for row in rows],
    }


def as_lines(document: dict[str, Any]) -> str:
    """JSON with a line for each kernel, so that changes show in a diff; without what is 0 or empty."""
    head = {name: value for name, value in document.items() if name != "kernels"}
    kernels = [{name: value for name, value in row.items() if value} for row in document["kernels"]]
    lines = ",\n".join(json.dumps({"kernel": "", **row}, separators=(",", ":")) for row in kernels)
    return f'{json.dumps(head)[:-1]}, "kernels": [\n{lines}\n]}}\n'


def compared(before: dict[str, Any], rows: list[Compiled], document: dict[str, Any]) -> list[str]:
    """What needs more than in an earlier document. ValueError if that is of another Triton."""
    if before["triton"] != document["triton"]:
        raise ValueError(
            f"the file was made with triton {before['triton']}, this is {document['triton']}, so their code "
            "cannot be compared; write another file with --out"
        )
    known = [Compiled(**{**row, "wrong": tuple(row.get("wrong", ()))}) for row in before["kernels"]]
    by_key = {row.key: row for row in known}
    return [
        f"{row.key}: {'; '.join(reasons)}"
        for row in rows
        if row.key in by_key and (reasons := worse_than(by_key[row.key], row))
    ]
