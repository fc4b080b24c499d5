"""mrb check: checks every implementation against its oracle and every router against its contract."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moe_routing_bench.api import CheckReport
from moe_routing_bench.cli.options import IncludePath, Json, fail, show_json, user_mistakes
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.names import MistakeError
from moe_routing_bench.report.check_tables import show_legend_of_maps, show_map, show_rows


def check_command(
    op: Annotated[
        str, typer.Option(metavar="PATTERN", help="Operations, as a shell pattern, or `routers`.")
    ] = "*",
    impl: Annotated[
        str, typer.Option(metavar="PATTERN", help="Implementations or routers, as a shell pattern.")
    ] = "*",
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}. Repeatable. Default: all.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    tokens: Annotated[
        str | None,
        typer.Option(metavar="RANGE", help="Show for which numbers of tokens it is correct: 1-512."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the first case of each implementation.")
    ] = False,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every failure, and why a case is not supported.")
    ] = False,
    include_path: IncludePath = None,
) -> None:
    """Check results, gradients and memory of every implementation and router on hard cases.

    \b
    Examples:
      mrb check
      mrb check --op combine --impl "index_*" --dtype bfloat16
      mrb check --include-path my_kernels --impl mine --verbose
      mrb check --op routers --impl "soft*"
      mrb check --op expert_ffn --impl mine --include-path my_kernels --tokens 1-512

    Exit code 0: all passed. 1: something failed, or nothing of an operation
    or of an included implementation could run. 2: nothing was selected.
    """
    with user_mistakes():
        report = CheckReport.asked(dtype or (), device, tokens)
    try:
        report.select(op, impl, include_path or (), quick=quick)
    except MistakeError as mistake:  # any other ValueError is our bug
        fail(str(mistake))
    if tokens is not None:
        report.run_maps(on_map=lambda one_map: None if as_json else show_map(one_map))
        if as_json:
            show_json([vars(one_map) for one_map in report.maps])
        else:
            show_legend_of_maps()
    else:
        report.run(progress=True)
        if as_json:
            show_json(_document(report))
        else:
            show_rows(report.rows, report.dtypes, report.idle, verbose=verbose)
    raise typer.Exit(0 if report.passed else 1)


def _document(report: CheckReport) -> dict[str, Any]:
    rows = report.rows
    return {
        "healthy": report.passed,
        "passed": sum(row.passed.total() for row in rows),
        "failed": sum(row.failed.total() for row in rows),
        "unsupported": sum(row.unsupported.total() for row in rows),
        "ops_that_never_ran": report.idle,
        "results": [
            {
                "op": row.op,
                "implementation": row.spec,
                "origin": row.origin,
                "verdict": row.verdict,
                "passed": dict(row.passed),
                "failed": dict(row.failed),
                "unsupported": dict(row.unsupported),
                "failures": row.failures,
                "reasons": dict(row.reasons),
                "note": row.note,
            }
            for row in rows
        ],
    }
