"""mrb list: the operations with their implementations, and the routers."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from moe_routing_bench.cli.finding import IncludePath, include_all
from moe_routing_bench.cli.terminal import Json, heading, pick, show, show_json, two_columns
from moe_routing_bench.ops.catalog import Found, find_all
from moe_routing_bench.ops.registry import BUILT_IN, Op, all_ops
from moe_routing_bench.routers.router import Router, all_routers

KINDS = ("ops", "routers")


def list_command(
    kind: Annotated[str | None, typer.Argument(metavar="ops|routers", help="Default: both.")] = None,
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """What there is: operations with their implementations, and routers.

    \b
    Examples:
      mrb list
      mrb list ops --include-path my_kernels
      mrb list --json | jq '.ops.combine.implementations | keys'
    """
    kinds = KINDS if kind is None else (pick("list of", kind, KINDS),)
    include_all(include_path)
    document: dict[str, Any] = {}
    if "ops" in kinds:
        document["ops"] = {op.name: _describe_op(op) for op in all_ops().values()}
    if "routers" in kinds:
        document["routers"] = {name: _describe_router(rule) for name, rule in all_routers().items()}
    if as_json:
        show_json(document)
        return
    for name, op in document.get("ops", {}).items():
        show(heading(name, op["summary"]), _op_table(op), "")
    if "routers" in document:
        show(
            heading("routers", "which experts each token goes to, and with what weight"),
            _router_table(document["routers"]),
        )


def _describe_op(op: Op) -> dict[str, Any]:
    return {
        "summary": op.summary.removeprefix(f"{op.name}: "),
        "parameters": op.parameters(),
        "default": op.default,
        "implementations": {found.spec: _describe(op, found) for found in find_all(op, configs=False)},
    }


def _describe(op: Op, found: Found) -> dict[str, Any]:
    """The same keys for every implementation; null where a file that could not be loaded would say."""
    one = found.implementation
    options = None if one is None else [*inspect.signature(one.run).parameters][len(op.parameters()) :]
    return {
        "state": found.state,
        "reason": found.reason or None,
        "origin": found.origin,
        "default": found.spec == op.default,
        "summary": one and one.summary,
        "options": options,
        "configs": one and [dict(config) for config in one.configs],
        "forward_only": one and one.forward_only,
        "host_sync": one and (one.host_sync or None),
        "deterministic": one and one.deterministic,
        "reuses_output": one and one.reuses_output,
        "ties": one and (one.ties if op.name == "topk" else None),
    }


def _describe_router(rule: type[Router]) -> dict[str, Any]:
    summary = (inspect.getdoc(sys.modules[rule.__module__]) or "").partition("\n")[0]
    return {
        "summary": summary,
        "causal": rule.causal,
        "batch_dependent": rule.batch_dependent,
        "gate_sum": rule.gate_sum,
        "fixed_K": rule.fixed_K,
        "losses": [*rule.loss_names],
        "paper": rule.paper,
    }


def _op_table(op: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    for impl_name, one in op["implementations"].items():
        label = Text.assemble("  ", (impl_name, "bold"), (" (default)" if one["default"] else "", "green"))
        table.add_row(label, _lines(one))
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
            "reuses its output" if one["reuses_output"] else "",
            "ties in any order" if one["ties"] == "any" else "",
        ]
        lines = [Text(one["summary"] or "")]
        if said := "; ".join(filter(None, flags)):
            lines.append(Text(said, "yellow"))
        if one["options"]:
            lines.append(Text(f"options: {', '.join(map(_option(one), one['options']))}", "dim"))
    if one["origin"] != BUILT_IN:
        lines.append(Text(one["origin"], "magenta"))
    return Text("\n").join(lines)


def _option(one: dict[str, Any]) -> Any:
    """grouped_gemm=padded_bmm|block_sparse: an option and the values its configurations hold."""

    def text(option: str) -> str:
        values = dict.fromkeys(str(config[option]) for config in one["configs"] if option in config)
        return f"{option}={'|'.join(values)}" if values else option

    return text


def _router_table(routers: dict[str, Any]) -> Table:
    table = two_columns(first_width=26)
    for name, rule in routers.items():
        facts = [
            "causal" if rule["causal"] else "not causal: later tokens matter",
            "depends on the batch" if rule["batch_dependent"] else "each token alone",
            f"gate sum: {rule['gate_sum']}",
            f"K={rule['fixed_K']} only" if rule["fixed_K"] else "",
        ]
        lines = [
            Text(rule["summary"]),
            Text("; ".join(filter(None, facts)), "yellow" if rule["batch_dependent"] else ""),
            Text(rule["paper"], "dim"),
        ]
        table.add_row(Text(f"  {name}", "bold"), Text("\n").join(lines))
    return table
