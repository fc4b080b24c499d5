"""mrb gpu compile: compiles every GPU kernel, in Triton and in CuTe DSL, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.cli.options import IncludePath, Json, fail, include_all, pick_all, show_json
from moe_routing_bench.conformance.check import matches
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.targets import TARGETS, Target
from moe_routing_bench.report.console import console, fitted, show, spinner

if TYPE_CHECKING:
    from moe_routing_bench.studies.compiled import Compiled

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "gfx942")  # of the table that is compared
FAMILIES = {"cute": "our CuTe kernels", "quack": "QuACK's GEMMs, about three minutes"}
DEFAULT_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")


def compile_command(
    arch: Annotated[str, typer.Option(help="GPU architectures, separated by commas.")] = ",".join(
        ARCHITECTURES
    ),
    model: Annotated[str, typer.Option(help="Models whose sizes are compiled in.")] = ",".join(
        DEFAULT_MODELS
    ),
    op: Annotated[str, typer.Option(help="Operations, as a shell pattern.")] = "*",
    impl: Annotated[str, typer.Option(help="Implementations, as a shell pattern.")] = "*",
    configs: Annotated[
        bool, typer.Option("--configs", help="Also compile every configuration a tuner may try.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answer as JSON, and the tables beside it.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fail if a kernel needs more than in this --out file.")
    ] = None,
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """Compile GPU kernels without a GPU and show what their machine code needs. Runs nothing.

    Triton's, ours in CuTe DSL, and those of QuACK that we call, which take minutes;
    --impl "triton*" leaves them out.

    \b
    Examples:
      mrb gpu compile --arch sm_90a --model qwen3-30b-a3b
      mrb gpu compile --op grouped_gemm --json
      mrb gpu compile --impl "triton_fused*" --configs --arch sm_90a
      mrb gpu compile --out tests/data/compile.json
      mrb gpu compile --against tests/data/compile.json

    Fails (exit code 1) if a kernel spills registers, needs more shared memory
    than the GPU has, lacks what it promises (tensor cores, 128-bit loads, loads
    ahead of use), or needs more than in the file of --against.
    """
    include_all(include_path)
    if importlib.util.find_spec("triton") is None:
        fail("compiling needs triton, which is not installed: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        fail("TRITON_INTERPRET=1 makes triton interpret kernels instead of compiling them; unset it")
    architectures = pick_all("architecture", arch, TARGETS)
    models = pick_all("model", model, MODELS)
    before = None if against is None else _read(against)
    rows = _compile_all(architectures, models, op, impl, configs)
    if not rows:
        fail(f"no GPU implementation matches --op {op} --impl {impl}")
    document = _document(rows)
    table = _tables(rows)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, _as_lines(document))
        write_whole(out.with_suffix(".txt"), _as_text(_tables(rows, room=1000), document))
    worse = [] if before is None else _compared(before, rows, document)
    if as_json:
        show_json({**document, "worse": worse})
    else:
        show(*table)
        for sentence in worse:
            show(Text(sentence, "red"))
        show("", _summary(rows, worse, against))
    if worse or any(row.wrong for row in rows):
        raise typer.Exit(1)


def _compile_all(
    architectures: list[str], models: list[str], op: str, impl: str, configs: bool
) -> list[Compiled]:
    from moe_routing_bench.studies.triton_code import compile_implementation

    rows: list[Compiled] = []
    with spinner("compiling") as doing:
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
    from moe_routing_bench.studies import cute_code
    from moe_routing_bench.studies.compiled import Compiled

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


def _document(rows: list[Compiled]) -> dict[str, Any]:
    import triton

    return {
        "what": "compiled ahead of time, not run: see docs/gpu.md",
        "triton": triton.__version__,
        "kernels": [asdict(row) for row in rows],
    }


def _as_lines(document: dict[str, Any]) -> str:
    """JSON with a line for each kernel, so that changes show in a diff; without what is 0 or empty."""
    head = {name: value for name, value in document.items() if name != "kernels"}
    kernels = [{name: value for name, value in row.items() if value} for row in document["kernels"]]
    lines = ",\n".join(json.dumps({"kernel": "", **row}, separators=(",", ":")) for row in kernels)
    return f'{json.dumps(head)[:-1]}, "kernels": [\n{lines}\n]}}\n'


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        assert isinstance(document["triton"], str) and isinstance(document["kernels"], list)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        fail(f"{path} is not a file that `mrb gpu compile --out` wrote: {type(error).__name__} {error}")
    return document


def _compared(before: dict[str, Any], rows: list[Compiled], document: dict[str, Any]) -> list[str]:
    from moe_routing_bench.studies.compiled import Compiled, worse_than

    if before["triton"] != document["triton"]:
        fail(
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


COLUMNS: dict[str, Callable[[Compiled], str]] = {
    "warps": lambda row: str(row.warps),
    "registers": lambda row: str(row.registers),
    "spills": lambda row: str(row.spill_bytes),
    "shared KiB": lambda row: f"{row.shared_bytes / 1024:.1f}",
    "programs/unit": lambda row: str(row.programs_per_unit),
    "occupancy": lambda row: f"{100 * row.occupancy:.0f} %",
    "tensor core": lambda row: str(row.tensor_core or row.small_multiplies),
    "wide loads": lambda row: str(row.wide_loads),
    "overlap": lambda row: row.overlap,
    "code KiB": lambda row: f"{row.code_bytes / 1024:.1f}",
    "MFLOP": lambda row: f"{row.flops / 1e6:.1f}" if row.flops else "",
    "KiB": lambda row: f"{row.bytes / 1024:.0f}" if row.bytes else "",
    "FLOP/byte": lambda row: f"{row.intensity:.0f}" if row.flops else "",
    "passes": lambda row: f"{row.passes:.1f}" if row.passes else "",
}


def _tables(rows: list[Compiled], room: int | None = None) -> list[Any]:
    shown: list[Any] = []
    for architecture, name in dict.fromkeys((row.arch, row.model) for row in rows):
        here = [row for row in rows if (row.arch, row.model) == (architecture, name)]
        made = [row for row in here if not row.not_made]
        numbers = {title: [cell(row) for row in made] for title, cell in COLUMNS.items()}
        shown += ["", Text(f"{architecture}, {name}", "bold cyan")]
        shown += fitted({"kernel": [row.name for row in made]}, numbers, room=room) if made else []
        shown += [Text(f"{row.name}: {sentence}", "red") for row in here for sentence in row.wrong]
        shown += [Text(f"{row.name}: not compiled, {row.not_made}", "dim") for row in here if row.not_made]
    notes = (
        "MFLOP, KiB and FLOP/byte: what one program does at least, by the kernel's own estimate.",
        "overlap: what the code loads ahead of its use, how, and whether kernels start before others end.",
        "passes: how often the loop around the tensor-core instructions must run for that.",
    )
    return [*shown, "", *(Text(note, "dim") for note in notes)]


def _as_text(table: list[Any], document: dict[str, Any]) -> str:
    out = console()
    out.width = 1000
    with out.capture() as captured:
        out.print(*table, sep="\n")
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([f"{document['what']}; triton {document['triton']}", *lines, ""])


def _summary(rows: list[Compiled], worse: list[str], against: Path | None) -> Text:
    wrong = sum(bool(row.wrong) for row in rows)
    text = Text(f"{sum(not row.not_made for row in rows)} kernels compiled, not run: ")
    text.append(f"{wrong} with something wrong" if wrong else "nothing wrong", "red" if wrong else "green")
    if against is not None:
        more = f"{len(worse)} need more than in {against}" if worse else f"none needs more than in {against}"
        text.append(f"; {more}", "red" if worse else "green")
    return text
