"""mrb tune check: audits tuned files of vLLM, of SGLang and our own.

mrb tune import and mrb tune export: from and to these files, with a file of proof.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moe_routing_bench.cli.options import Json, fail, pick, reading, show_json
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report.console import show
from moe_routing_bench.report.overview import table_of
from moe_routing_bench.studies.tuned_audit import KINDS, Audit, audit
from moe_routing_bench.studies.tuned_export import (
    export_of_imported,
    exports_of_results,
    specs,
    write_export,
    write_imported,
)
from moe_routing_bench.studies.tuned_files import DTYPES, PROOF, Project, read_proof, read_tuned

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
    wanted = None if project is None else _project(project)
    with reading() as doing:
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


def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tuned file of vLLM or SGLang.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Our form of it.")],
    project: Annotated[
        str | None, typer.Option(metavar="vllm|sglang", help="Whose file it is. Default: by the name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a tuned file, and show how to measure its tiles against the project's default with our kernel.

    \b
    Examples:
      mrb tune import "E=8,N=768,device_name=NVIDIA_H200.json" -o tuned.json
      mrb tune export tuned.json --to sglang --triton 3.5.1 -o configs
    """
    wanted = None if project is None else _project(project)
    with reading():
        try:
            read = read_tuned(file, wanted)
            proof = read_proof(file)
        except ValueError as error:
            raise ValueError(f"cannot import {file}: {error}") from None
        write_imported(read, output)
    tiles = specs(read)
    if as_json:
        pairs = {M: {"row": row, "default": default} for M, (row, default) in tiles.items()}
        has_proof = proof is not None
        show_json(
            {"file": str(output), "rows": len(read.rows), "has_proof": has_proof, "implementations": pairs}
        )
        return
    for M, (row, default) in tiles.items():
        both = ",".join(dict.fromkeys(filter(None, (default, row))))
        sizes = f"--experts {read.name.E} --hidden {read.name.N} --dtype bfloat16 --tokens {M}"
        show(Text(f'mrb bench expert_ffn --device cuda {sizes} --impl "{both}"'))
    known = "its proof is of this file" if proof is not None else f"it has no proof ({file.stem}{PROOF})"
    show(Text(f"Written to {output}: {len(read.rows)} rows; {known}."))


def export_command(
    source: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="Results, or a file of `mrb tune import`.")
    ],
    to: Annotated[str, typer.Option(metavar="vllm|sglang", help="Whose loader will read it.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write into.")],
    triton: Annotated[
        str, typer.Option(metavar="X.Y.Z", help="The version of Triton, which SGLang has in its paths.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write tuned files for vLLM or SGLang, each with a file of proof: records, gain with interval, machine.

    \b
    Examples:
      mrb tune export results --to vllm -o configs
      VLLM_TUNED_CONFIG_FOLDER=configs vllm serve ...

    From results, a tile is written only if it is faster than the project's default
    tile, measured in the same rounds with our kernel; ties keep the default.
    """
    project = _project(to)
    with reading():
        if source.is_dir():
            exports = exports_of_results(source, project)
        else:
            exports = [export_of_imported(read_tuned(source), source)]
        if triton and not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", triton):
            raise ValueError(f"--triton {triton} is not a version like 3.5.1")
        written = [write_export(one, project, output, triton) for one in exports]
    answers: list[dict[str, Any]] = [
        {"file": str(path), "rows": dict(Counter(why.origin for why in one.proof.values()))}
        for path, one in zip(written, exports, strict=True)
    ]
    if as_json:
        show_json({"written": answers})
        return
    for answer in answers:
        rows = ", ".join(f"{count} {origin}" for origin, count in answer["rows"].items())
        show(Text(printable(f"{answer['file']}: rows: {rows}")))


def _project(name: str) -> Project:
    return pick("project", name, DTYPES)  # type: ignore[return-value]
