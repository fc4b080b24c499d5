"""mrb list: lists operations with their implementations, routers, workloads, models and cases.

`mrb list suites` shows what `mrb sweep SUITE` would measure, and how much of it has been measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from moe_routing_bench.bench.choosing import (
    MeasureOptions,
    SizeOptions,
    WhatOptions,
    made_experiments,
    suite_cases,
)
from moe_routing_bench.bench.estimate import estimate
from moe_routing_bench.cli.options import IncludePath, Json, pick, show_json, user_mistakes
from moe_routing_bench.conformance.describe import (
    ROUTER_SIZES,
    ImplementationRow,
    OpRow,
    RouterRow,
    broken_row,
    describe_op,
    describe_router,
    described,
)
from moe_routing_bench.conformance.outside import ROUTERS, Outside, found_outside
from moe_routing_bench.core.names import base_name
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.ops.registry import BUILT_IN, all_ops
from moe_routing_bench.report.console import heading, show, two_columns
from moe_routing_bench.results.folder import measured_cases
from moe_routing_bench.routers.router import GROUPS, all_routers
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.cases import SUITES, cases, scaled
from moe_routing_bench.workloads.experiment import Experiment
from moe_routing_bench.workloads.families import FAMILIES
from moe_routing_bench.workloads.workload import (
    ALIASES,
    EXAMPLES,
    SUITE_VERSION,
    make_workload,
    parameters_of,
    type_of,
)

# the part of the project's original plan that a suite has its sizes from
DOCUMENTS = {
    "seed-fused": "fused experts for one token and for few",
    "seed-qwen": "a Qwen block beside Transformers'",
    "seed-pack": "rows to experts and back",
    "seed-grid": "padded layers",
    "seed-routing": "a layer without its experts",
    "seed-moe-block": "decoder blocks; the experts are ours",
    "seed-dense": "decoder blocks on an H100",
    "seed-linear": "tuning of a decoder's products",
    "seed-attention": "attention, and tuning of a decoder's; decoding and BERT are ours",
    "seed-rmsnorm": "RMSNorm on an H100",
    "seed-balance": "Table D; the sizes are ours",
}


def describe_suites() -> list[dict[str, Any]]:
    """Describes each suite. document: the source of its sizes; None if they are our own. measured: the number
    of cells with a committed record; None if there are no records here. minutes: an estimate for `mrb sweep
    SUITE --full` on this machine."""
    measured = measured_cases()
    rows = []
    for name, suite in SUITES.items():
        cells = made_experiments(
            suite_cases(name, SizeOptions(full=True), WhatOptions()),
            WhatOptions(),
            MeasureOptions().settled(name),
            own_threads=True,
        )
        rows.append(
            {
                "name": name,
                "document": f"original plan: {DOCUMENTS[name]}" if name in DOCUMENTS else None,
                "purpose": inspect.getdoc(suite) or "",
                "cells": len(cells),
                "measured": None if measured is None else len({one.case for one in cases(name)} & measured),
                "minutes": round(sum(map(estimate, cells)) / 60, 1),
            }
        )
    return rows


def suite_table(rows: list[dict[str, Any]]) -> Table:
    table = two_columns(first_width=26)
    for row in rows:
        measured = "measured: not known here" if row["measured"] is None else f"measured: {row['measured']}"
        source = row["document"] or "our own sizes"
        numbers = f"{source}; {row['cells']} cells, {measured}, about {row['minutes']:g} minutes"
        lines = [Text(row["purpose"]), Text(numbers, "dim")]
        table.add_row(Text(f"  {row['name']}", "bold"), Text("\n").join(lines))
    return table


KINDS = ("ops", "routers", "workloads", "models", "cases")
SUITE_ROWS = "suites"  # only shown if named, because the estimate of minutes probes the machine

# the sizes of the pictures of workloads: one line of 32 blocks, and 32 pairs per expert on average
REFERENCE = {"T": 512, "E": 32, "K": 2, "W": 8}
BLOCKS = "▁▂▃▄▅▆▇█"


def list_command(
    kind: Annotated[
        str | None, typer.Argument(metavar="|".join((*KINDS, SUITE_ROWS)), help="Default: all except suites.")
    ] = None,
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """List operations with their implementations, routers, workloads, models, cases and suites.

    \b
    Examples:
      mrb list
      mrb list ops --include-path my_kernels
      mrb list routers --include-path examples/add_a_router
      mrb list workloads
      mrb list suites --json
      mrb list --json | jq '.ops.combine.implementations | keys'
    """
    kinds = KINDS if kind is None else (pick("list of", kind, (*KINDS, SUITE_ROWS)),)
    with user_mistakes():
        outside = found_outside(include_path)
    document: dict[str, Any] = {}
    if "ops" in kinds:
        document["ops"] = _ops(outside)
    if "routers" in kinds:
        document["routers"] = {name: describe_router(rule) for name, rule in all_routers().items()}
        document["routers"] |= {
            file.name: described(file, outside, RouterRow) for file in outside.of(ROUTERS)
        }
    if "workloads" in kinds:
        document["workloads"] = {name: _describe_workload(name) for name in FAMILIES}
    if "models" in kinds:
        document["models"] = {name: asdict(one) for name, one in MODELS.items()}
    if "cases" in kinds:
        document["cases"] = {name: [_describe_case(case) for case in cases(name)] for name in SUITES}
    if SUITE_ROWS in kinds:
        document[SUITE_ROWS] = describe_suites()
    broken = any(row["state"] == "broken" for row in _rows(document))
    if as_json:
        show_json(document)
        raise typer.Exit(int(broken))
    for name, op in document.get("ops", {}).items():
        show(heading(name, op["summary"] or "broken"), _op_table(op), "")
    if "routers" in document:
        show(
            heading("routers", f"they choose the experts and weights of each token{_at_sizes()}"),
            _router_table(document["routers"]),
            "",
        )
    if "workloads" in document:
        sizes = ", ".join(f"{letter}={size}" for letter, size in REFERENCE.items())
        summary = f"Routing Suite v{SUITE_VERSION}, pairs of each expert at {sizes}, seed 0, step 0"
        show(heading("workloads", summary), _workload_table(document["workloads"]), "")
    if "models" in document:
        summary = "MoE layers of published models, their routing and attention"
        show(heading("models", summary), _model_table(document["models"]), "")
    if "cases" in document:
        summary = (
            "suites of sizes to measure (seed-...: from the project's original plan); a case is called "
            "SUITE/CASE, and the cases of a model MODEL/decode-1 ... prefill-16384"
        )
        show(heading("cases", summary), _case_table(document["cases"]))
    if SUITE_ROWS in document:
        summary = "what `mrb sweep SUITE --full` measures, and how much of it has a committed record"
        show(heading(SUITE_ROWS, summary), suite_table(document[SUITE_ROWS]))
    raise typer.Exit(int(broken))


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows that may be broken."""
    implementations = [
        row for op in document.get("ops", {}).values() for row in op["implementations"].values()
    ]
    return [*implementations, *document.get("routers", {}).values()]


def _ops(outside: Outside) -> dict[str, Any]:
    """Returns the operations of this package, then new ones. Implementations from outside come last."""
    ops = {op.name: describe_op(op) for op in all_ops().values()}
    for file in outside.ops:
        row = described(file, outside, OpRow)
        broken = row["state"] == "broken"
        ops[file.op] = {
            **row,
            "implementations": {"op.py": broken_row(ImplementationRow, file, row["reason"])}
            if broken
            else {},
        }
    for file in outside.of("*"):
        if file.op != ROUTERS and "op.py" not in ops[file.op]["implementations"]:
            ops[file.op]["implementations"][file.name] = described(file, outside, ImplementationRow)
    return ops


def _describe_workload(family: str) -> dict[str, Any]:
    parameters = {
        parameter.name: {
            "type": type_of(parameter).__name__,
            "default": None if parameter.default is parameter.empty else parameter.default,
        }
        for parameter in parameters_of(family)
    }
    aliases = [alias for alias, meaning in ALIASES.items() if base_name(meaning) == family]
    description: dict[str, Any] = {
        "summary": (inspect.getdoc(FAMILIES[family]) or "").partition("\n")[0],
        "parameters": parameters,
        "aliases": [*aliases, "maxvio(m)"] if family == "lognormal" else aliases,
        "example": EXAMPLES[family],
        "reference": None,
    }
    if family != "trace":  # a trace needs a file
        workload = make_workload(EXAMPLES[family], **REFERENCE)
        description["reference"] = {
            **REFERENCE,
            "name": workload.name,
            "checksum": workload.checksum,
            "load": workload.routing.load_E().tolist(),
            **{name: value for name, value in workload.statistics().to_dict().items() if value is not None},
        }
    return description


def _describe_case(case: Experiment) -> dict[str, Any]:
    sizes = {"shape": vars(case.shape), "twin": vars(scaled(case).shape), "fits_a_laptop": case.fits_a_laptop}
    return {"name": case.case, **values_of(case), **sizes}


def _op_table(op: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    preferred = {spec: row["machines"][0] for row in op["preferred"] or () for spec in row["order"][:1]}
    for impl_name, one in op["implementations"].items():
        words = [f"preferred on {preferred[impl_name]}"] if impl_name in preferred else []
        words += ["default"] if one["default"] else []
        marks = f" ({', '.join(words)})" if words else ""
        table.add_row(Text.assemble("  ", (impl_name, "bold"), (marks, "green")), _lines(one))
    return table


def _lines(one: dict[str, Any]) -> Text:
    if one["state"] == "absent":
        lines = [Text(one["reason"], "yellow")]
    elif one["state"] == "broken":
        lines = [Text(f"broken: {one['reason']}", "red")]
    else:
        flags = [
            "forward only" if one["forward_only"] else "",
            f"host sync: {one['host_sync']}" if one["host_sync"] else "",
            "" if one["deterministic"] else "not deterministic",
            "batch-invariant" if one["batch_invariant"] else "",
            "reuses its output" if one["reuses_output"] else "",
            "ties in any order" if one["ties"] == "any" else "",
        ]
        lines = [Text(one["summary"] or "")]
        if text := "; ".join(filter(None, flags)):
            lines.append(Text(text, "yellow"))
        if one["options"]:
            lines.append(Text(f"options: {', '.join(map(_option(one), one['options']))}", "dim"))
    if one["origin"] != BUILT_IN:
        lines.append(Text(one["origin"], "magenta"))
    return Text("\n").join(lines)


def _option(one: dict[str, Any]) -> Any:
    """Writes an option with its values: grouped_gemm=padded_bmm|block_sparse."""

    def text(option: str) -> str:
        values = dict.fromkeys(str(config[option]) for config in one["configs"] if option in config)
        return f"{option}={'|'.join(values)}" if values else option

    return text


def _at_sizes() -> str:
    return f"; parameters at D {ROUTER_SIZES['D']}, E {ROUTER_SIZES['E']}"


def _router_table(routers: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    for name, rule in routers.items():
        if rule["state"] == "broken":
            lines = [Text(f"broken: {rule['reason']}", "red"), Text(rule["origin"], "magenta")]
            table.add_row(Text(f"  {name}", "bold"), Text("\n").join(lines))
            continue
        facts = [
            "causal" if rule["causal"] else "not causal: later tokens matter",
            "depends on the batch" if rule["batch_dependent"] else "each token alone",
            f"experts per token: {rule['experts_per_token']}",
            f"gate sum: {rule['gate_sum']}",
        ]
        count = sum(rule["parameters"].values())
        parameters = f"{count:,} parameters ({', '.join(rule['parameters'])})" if count else "no parameters"
        kept = f"balanced by {rule['controller']}" if rule["controller"] else ""
        sync = f"host sync: {rule['host_sync']}" if rule["host_sync"] else ""
        lines = [
            Text(rule["summary"]),
            Text("; ".join(facts), "yellow" if rule["batch_dependent"] else ""),
            Text(f"{rule['groups']} groups: {GROUPS[rule['groups']]}"),
            Text("; ".join(filter(None, (parameters, kept, sync)))),
            Text(rule["paper"], "dim"),
        ]
        if rule["origin"] != BUILT_IN:
            lines.append(Text(rule["origin"], "magenta"))
        table.add_row(Text(f"  {name}", "bold"), Text("\n").join(lines))
    return table


def _workload_table(workloads: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    for one in workloads.values():
        lines = [Text(one["summary"])]
        if sample := one["reference"]:
            facts = (
                f"  max/mean {sample['max_over_mean']:.2f}, per rank {sample['max_violation_rank'] + 1:.2f}; "
                f"{sample['active_experts']} active; Gini {sample['gini']:.2f}"
            )
            lines.append(Text.assemble((_histogram(sample["load"]), "cyan"), facts))
        remarks = [
            f"{name}={value['default']}"
            for name, value in one["parameters"].items()
            if value["default"] is not None
        ]
        remarks = [f"defaults: {', '.join(remarks)}"] if remarks else []
        remarks += [f"also {', '.join(one['aliases'])}"] if one["aliases"] else []
        if remarks:
            lines.append(Text("; ".join(remarks), "dim"))
        table.add_row(Text(f"  {one['example']}", "bold"), Text("\n").join(lines))
    return table


def _histogram(load: list[int]) -> str:
    """Draws a block for each expert, or a dot for an expert without pairs."""
    top = max(load)
    return "".join(BLOCKS[(count * len(BLOCKS) - 1) // top] if count else "·" for count in load)


def _model_table(models: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    for name, one in models.items():
        routing, attention = one["routing"], one["attention"]
        sizes = f"D {one['D']}, F {one['F']} ({one['activation']}), {one['E']} experts, {one['K']} per token"
        shared = f", shared expert of width {one['shared_F']}" if one["shared_F"] else ""
        options = ", ".join(f"{option}={value}" for option, value in routing["options"].items())
        rule = f"routing: {routing['rule']}({options})".removesuffix("()")
        heads = f"{attention['heads']} heads of {attention['head_dim']}, {attention['kv_heads']} of k and v"
        lines = [
            "; ".join(filter(None, (f"{sizes}{shared}{', biases' if one['bias'] else ''}", one["note"]))),
            routing["missing"] or "; ".join(filter(None, (rule, routing["note"]))),
            attention["missing"] or "; ".join(filter(None, (f"attention: {heads}", attention["note"]))),
        ]
        table.add_row(Text(f"  {name}", "bold"), "\n".join(lines))
    return table


def _case_table(suites: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    for name, listed in suites.items():
        spans, dtype = ", ".join(dict.fromkeys(case["span"] for case in listed)), listed[0]["dtype"]
        ranges = ", ".join(
            f"{letter} {_range(case['shape'][letter] for case in listed)}" for letter in "TDFEK"
        )
        big = sum(not case["fits_a_laptop"] for case in listed)
        twins = f"; {big} of them have a scaled twin (append ~scaled)" if big else ""
        first = f"{listed[0]['name']} ... {listed[-1]['name']}" if len(listed) > 1 else listed[0]["name"]
        summary = inspect.getdoc(SUITES[name]) or ""
        sizes = f"{len(listed)} cases of {spans}, {dtype}: {ranges}"
        lines = [Text(summary), Text(sizes), Text(f"{first}{twins}", "dim")]
        table.add_row(Text(f"  {name}", "bold"), Text("\n").join(lines))
    return table


def _range(values: Iterable[int]) -> str:
    ordered = sorted(set(values))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"
