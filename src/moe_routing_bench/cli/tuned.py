"""mrb tune check: audits tuned files of vLLM, of SGLang and our own."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.cli.options import Json, fail, pick, reading, show_json
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report.console import show, spinner
from moe_routing_bench.report.overview import table_of
from moe_routing_bench.studies.tuned_audit import KINDS, Audit, audit
from moe_routing_bench.studies.tuned_files import DTYPES, Project

if TYPE_CHECKING:
    from moe_routing_bench.studies.triton_tiles import TileCompiler

MAX_SHOWN = 20
COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def check_command(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR...", help="Tuned files, or folders.")],
    project: Annotated[
        str | None, typer.Option(metavar="vllm|sglang", help="Whose loader reads them. Default: by the name.")
    ] = None,
    compile_tiles: Annotated[
        str | None,
        typer.Option(
            "--compile", metavar="doubtful|all", help="Also compile tiles for their GPU, about 2 s each."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write counts and names of files as JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Can tuned files of vLLM and SGLang do what they say? Reads and computes; nothing is timed.

    \b
    Examples:
      mrb tune check /path/to/vllm/model_executor/layers/fused_moe/configs
      mrb tune check "E=8,N=768,device_name=NVIDIA_H200.json" --json
      mrb tune check vllm/configs sglang/configs --compile doubtful --out tuned.json

    It also reads files of `mrb tune decide`. Fails (exit code 1) if it finds an
    error: a file that no loader asks for or can read, or a tile that cannot run.
    """
    wanted: Project | None = None if project is None else pick("project", project, DTYPES)  # type: ignore[assignment]
    with spinner("reading") as doing, reading():
        compiler = None if compile_tiles is None else _compiler(compile_tiles, doing)
        found = audit(paths, wanted, compiler, doing)
    document = _document(found, compiler)
    if out is not None:
        with reading():
            write_whole(out, json.dumps(document, indent=1) + "\n")
    if as_json:
        show_json(
            {**document, "findings": [{"severity": one.severity, **asdict(one)} for one in found.findings]}
        )
    else:
        _show(found, compiler)
    if found.has_errors:
        raise typer.Exit(1)


def _compiler(which: str, doing: Any) -> TileCompiler:
    if importlib.util.find_spec("triton") is None:
        fail("--compile needs triton, which is not installed: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        fail("TRITON_INTERPRET=1 makes triton interpret kernels instead of compiling them; unset it")
    from moe_routing_bench.studies.triton_tiles import TileCompiler  # it needs triton

    return TileCompiler(pick("choice", which, ("doubtful", "all")), doing)  # type: ignore[arg-type]


def _document(found: Audit, compiler: TileCompiler | None) -> dict[str, Any]:
    names: dict[str, list[str]] = {}
    for one in found.findings:
        if one.file not in names.setdefault(one.kind, []):
            names[one.kind].append(one.file)
    return {
        "what": "tuned files, read and not timed, by `mrb tune check`",
        "files": found.files,
        "rows": found.rows,
        "others": found.others,
        "compared": found.compared,
        "compiled": compiler and {
            "kernel": compiler.kernel,
            "triton": compiler.triton,
            "tiles": len(compiler.compiled),
            "not_doubtful": len(compiler.not_doubtful),
            "not_compiled": len(compiler.not_compiled),
        },
        "counts": found.counts,
        "names": names,
    }  # fmt: skip


def _show(found: Audit, compiler: TileCompiler | None) -> None:
    for one in found.findings[:MAX_SHOWN]:
        show(
            Text(f"{one.severity}: {one.kind}: {one.file}", COLOURS[one.severity]), Text(f"  {one.sentence}")
        )
    if len(found.findings) > MAX_SHOWN:
        show(f"and {len(found.findings) - MAX_SHOWN:,} more; all of them: --json")
    columns = [(project, what) for project in found.files for what in ("files", "rows")]
    rows = []
    for kind, by_project in found.counts.items():
        severity, meaning = KINDS[kind]
        numbers = [by_project.get(project, {}).get(what, 0) for project, what in columns]
        rows.append((Text(kind, COLOURS[severity]), severity, *numbers, meaning))
    if rows:
        titles = ("finding", "class", *(" ".join(column) for column in columns), "meaning")
        show("", table_of(titles, rows, words=("meaning",)))
    for project, files in found.files.items():
        show(Text(f"{project}: {files:,} files, {found.rows.get(project, 0):,} rows"))
    for kind, number in found.compared.items():
        show(Text(f"compared for {kind!r}: {number:,}", "dim"))
    if compiler is not None:
        tiles = f"{len(compiler.compiled):,} tiles compiled with {compiler.kernel}, triton {compiler.triton}"
        others = (
            f"{len(compiler.not_doubtful):,} not in doubt, {len(compiler.not_compiled):,} not possible here"
        )
        show(Text(f"{tiles}; {others}", "dim"))
    if not found.has_errors:
        show(Text("no error", "green"))
