"""The rows of mrb list suites: what `mrb sweep SUITE` would measure, and what has been measured of it."""

from __future__ import annotations

import inspect
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_routing_bench.bench.estimate import estimate
from moe_routing_bench.cli.choosing import made_cells, suite_cases
from moe_routing_bench.cli.options import MeasureOptions, SizeOptions, WhatOptions
from moe_routing_bench.cli.terminal import two_columns
from moe_routing_bench.results.committed import measured_cases
from moe_routing_bench.workloads.cases import SUITES, cases

ORIGINAL_PLAN = "the project's original plan"


def describe_suites() -> list[dict[str, Any]]:
    """document: where its sizes come from; None: they are our own. measured: cells with a committed record,
    None if there are none here. minutes: about, for `mrb sweep SUITE --full` on this machine."""
    measured = measured_cases()
    rows = []
    for name, suite in SUITES.items():
        cells = made_cells(
            suite_cases(name, SizeOptions(full=True), WhatOptions()),
            WhatOptions(),
            MeasureOptions().policy(name),
            own_threads=True,
        )
        rows.append(
            {
                "name": name,
                "document": ORIGINAL_PLAN if name.startswith("seed-") else None,
                "purpose": inspect.getdoc(suite) or "",
                "cells": len(cells),
                "measured": None if measured is None else len({one.name for one in cases(name)} & measured),
                "minutes": round(sum(map(estimate, cells)) / 60, 1),
            }
        )
    return rows


def suite_table(rows: list[dict[str, Any]]) -> Table:
    table = two_columns(first_width=26)
    for row in rows:
        measured = "measured: not known here" if row["measured"] is None else f"measured: {row['measured']}"
        numbers = f"{row['cells']} cells, {measured}, about {row['minutes']:g} minutes"
        lines = [Text(row["purpose"]), Text(numbers, "dim")]
        table.add_row(Text(f"  {row['name']}", "bold"), Text("\n").join(lines))
    return table
