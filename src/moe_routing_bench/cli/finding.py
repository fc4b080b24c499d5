"""Ops and routers by name, and folders of --include-path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.terminal import pick, user_mistakes
from moe_routing_bench.ops.registry import Op, all_ops
from moe_routing_bench.routers.router import Router, all_routers, include_folder

IncludePath = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Also use the implementations in DIR/<op>/<name>.py and the routers in DIR/routers/<name>.py. "
        "Repeatable.",
    ),
]
ROUTERS = "routers"


def include_all(folders: list[Path] | None) -> None:
    with user_mistakes():
        for folder in folders or ():
            include_folder(folder)
        for op in all_ops().values():
            op.names()  # raises if a name exists twice


def op_named(name: str) -> Op:
    ops = all_ops()
    return ops[pick("op", name, ops)]


def routers_found() -> dict[str, type[Router]]:
    """Every router. An error in an included folder is shown as the user's mistake."""
    with user_mistakes():
        return all_routers()
