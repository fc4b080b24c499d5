"""Ops and routers by name, and folders of --include-path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from moe_routing_bench.cli.terminal import user_mistakes
from moe_routing_bench.ops.registry import BUILT_IN, NO_IMPLEMENTATIONS, all_ops, files_of
from moe_routing_bench.routers.router import Router, all_routers, built_in_names, include_folder

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


@dataclass(frozen=True, kw_only=True)
class OutsideFile:
    """OutsideFile(op="combine", name="mine", path=.../combine/mine.py); its op is `routers` for a router, its
    name `op` for a new operation."""

    op: str
    name: str
    path: Path

    @property
    def origin(self) -> str:
        return f"file {self.path}"


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The folders of --include-path and their files. Nothing in them is loaded here: apart.py does that."""

    folders: tuple[Path, ...]
    files: tuple[OutsideFile, ...]

    @property
    def ops(self) -> list[OutsideFile]:
        """The new operations."""
        return [file for file in self.files if file.name == "op" and file.op != ROUTERS]

    def of(self, op_pattern: str) -> Iterator[OutsideFile]:
        """Implementations of the operations that match, or routers."""
        for file in self.files:
            if fnmatchcase(file.op, op_pattern) and (
                file.name not in NO_IMPLEMENTATIONS or file.op == ROUTERS
            ):
                yield file


def found_outside(folders: Sequence[Path] | None) -> Outside:
    """ValueError if a name exists twice."""
    ops = all_ops()
    taken = {(name, spec): op.origin(spec) for name, op in ops.items() for spec in op.names()}
    taken |= {(ROUTERS, name): BUILT_IN for name in built_in_names()}
    files = []
    for path in files_of(folders or ()):
        file = OutsideFile(op=path.parent.name, name=path.stem, path=path)
        if file.name == "op" and file.op in ops:
            raise ValueError(f"{path}: there is an operation {file.op} already; rename the folder")
        if (other := taken.setdefault((file.op, file.name), file.origin)) != file.origin:
            raise ValueError(f"{file.op}.{file.name} exists twice: {other} and {file.origin}; rename one")
        files.append(file)
    return Outside(folders=tuple(folders or ()), files=tuple(files))


def routers_found() -> dict[str, type[Router]]:
    """Every router. An error in an included folder is shown as the user's mistake."""
    with user_mistakes():
        return all_routers()
