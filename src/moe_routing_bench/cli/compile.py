"""mrb gpu compile: compiles every GPU kernel, in Triton and in CuTe DSL, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.cli.options import (
    IncludePath,
    Json,
    fail,
    include_all,
    pick_all,
    show_json,
    user_mistakes,
)
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.ops.targets import TARGETS
from moe_routing_bench.report.console import console, fitted, show, spinner

if TYPE_CHECKING:
    from moe_routing_bench.studies.compiled import Compiled

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "gfx942")  # of the table in tests/data
DEFAULT_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")


def compile_command(
    arch: Annotated[str, typer.Option(help="GPU architectures, separated by commas.")] = ",".join(
        ARCHITECTURES
    ),
    model: Annotated[str, typer.Option(help="Compile for the sizes of these models.")] = ",".join(
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
        Path | None,
        typer.Option(metavar="FILE", help="Fail if a kernel needs more than in this --out file, or is new."),
    ] = None,
    warm_device: Annotated[
        bool,
        typer.Option("--warm", help="Instead, build all that gpu-hour needs on the GPU of this machine."),
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="With --warm: processes at a time; each holds up to 3 GiB of the GPU.")
    ] = min(8, os.cpu_count() or 1),
    as_json: Json = False,
    include_path: IncludePath = None,
) -> None:
    """Compile GPU kernels without a GPU and show what their machine code needs. Nothing is run.

    It compiles kernels in Triton, our kernels in CuTe DSL, and the kernels of QuACK
    that we call. The last ones take minutes; --impl "triton*" leaves them out.

    \b
    Examples:
      mrb gpu compile --arch sm_90a --model qwen3-30b-a3b
      mrb gpu compile --op grouped_gemm --json
      mrb gpu compile --impl "triton_fused*" --configs --arch sm_90a
      mrb gpu compile --out tests/data/compile.json
      mrb gpu compile --against tests/data/compile.json
      mrb gpu compile --warm            on a GPU, before `mrb sweep gpu-hour`

    Fails (exit code 1) if a kernel spills registers, needs more shared memory
    than the GPU has, lacks what it promises (tensor cores, 128-bit loads, loads
    ahead of use), or needs more than in the file of --against, is not in it, or
    is in it and no longer here.
    """
    include_all(include_path)
    if warm_device:
        _warm(jobs)
        return
    if importlib.util.find_spec("triton") is None:
        fail("compiling needs triton, which is not installed: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        fail("TRITON_INTERPRET=1 makes triton interpret kernels instead of compiling them; unset it")
    architectures = pick_all("architecture", arch, TARGETS)
    models = pick_all("model", model, MODELS)
    before = None if against is None else _read(against)
    from moe_routing_bench.studies.compiling import (  # it needs triton
        as_lines,
        compared,
        compile_all,
        document_of,
    )

    with spinner("compiling") as doing:
        rows = compile_all(architectures, models, op, impl, configs=configs, doing=doing)
    if not rows:
        fail(f"no GPU implementation matches --op {op} --impl {impl}")
    document = document_of(rows)
    table = _tables(rows)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, as_lines(document))
        write_whole(out.with_suffix(".txt"), _as_text(_tables(rows, room=1000), document))
    with user_mistakes():
        worse = [] if before is None else compared(before, rows, document, op, impl, configs=configs)
    if as_json:
        show_json({**document, "worse": worse})
    else:
        show(*table)
        for sentence in worse:
            show(Text(sentence, "red"))
        show("", _summary(rows, worse, against))
    if worse or any(row.wrong for row in rows):
        raise typer.Exit(1)


def _warm(jobs: int) -> None:
    from moe_routing_bench.bench.choosing import (  # these need torch, and nothing else here does
        MeasureOptions,
        SizeOptions,
        WhatOptions,
        check_device,
        sweep_experiments,
    )
    from moe_routing_bench.bench.warming import warm

    with user_mistakes():
        check_device("cuda")
        experiments = sweep_experiments("gpu-hour", SizeOptions(), WhatOptions(), MeasureOptions())
        with spinner("compiling") as doing:
            failed = warm(experiments, jobs, doing)
    for sentence in failed:
        show(Text(sentence, "red"))
    show(f"{len(experiments)} cases are compiled for this GPU, {len(failed)} implementations failed")
    raise typer.Exit(int(bool(failed)))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        assert isinstance(document["triton"], str) and isinstance(document["kernels"], list)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        fail(f"{path} is not a file that `mrb gpu compile --out` wrote: {type(error).__name__} {error}")
    return document


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
        "MFLOP, KiB and FLOP/byte: the least work of one program, estimated by the kernel itself.",
        "overlap: what the code loads ahead, how, and whether a kernel starts before the last one ends.",
        "passes: how often the loop around the tensor-core instructions must run for that work.",
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
        more = (
            f"{len(worse)} need more than in {against}, are new or are gone"
            if worse
            else f"none needs more than in {against}, is new or is gone"
        )
        text.append(f"; {more}", "red" if worse else "green")
    return text
