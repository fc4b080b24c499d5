"""Tuned files for vLLM and SGLang from measurements, or from our own form, each with a file of proof.

Tiles are measured with our kernel `triton_fused`, not with the project's. A row is written only if its tile
is shown to be faster than the project's default tile in the same rounds; a tie keeps the default. Loaders
take the nearest row, so the usual M outside the measured range get the project's default too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.results.folder import CellRun, Run, environments, read_run
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.winners import Contest, contested, contests
from moe_routing_bench.studies.tuned_audit import default_row, wrong_option
from moe_routing_bench.studies.tuned_files import (
    PROOF,
    PROOF_SCHEMA,
    FlyRow,
    Project,
    Proof,
    Row,
    RowProof,
    TunedFile,
    TunedName,
    own_document,
    why_never_loaded,
)

KERNEL = "triton_fused"
USUAL_M = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
DTYPES = {"bfloat16": "", "float16": "", "float32": "float32"}
# options of our kernel -> fields of a row
OPTIONS = {
    "block_m": "BLOCK_SIZE_M", "block_n": "BLOCK_SIZE_N", "block_k": "BLOCK_SIZE_K", "group": "GROUP_SIZE_M",
    "num_warps": "num_warps", "num_stages": "num_stages",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Export:
    """A tuned file that is to be written, and why each of its rows is as it is."""

    file: TunedFile
    proof: Mapping[int, RowProof]
    source: str
    machine: str = ""
    torch: str = ""


def spec_of(row: Row) -> str:
    """Returns the same tile of our kernel, to be measured: triton_fused(block_k=64,block_m=16,...)."""
    values = {option: getattr(row, field) for option, field in OPTIONS.items()}
    given = ",".join(f"{option}={value}" for option, value in sorted(values.items()) if value is not None)
    return f"{KERNEL}({given})"


def row_of(spec: str) -> Row | None:
    """Returns the tile in a spec; None if it is of another kernel, or says more or less than a row can."""
    name, options = parse_spec(spec)
    if name != KERNEL or set(options) != set(OPTIONS):
        return None
    try:
        return Row.model_validate({OPTIONS[option]: value for option, value in options.items()})
    except ValidationError:
        return None


def export_of_imported(file: TunedFile, source: Path) -> Export:
    return Export(
        file=file, proof={M: RowProof(origin="imported") for M in file.rows}, source=printable(source, 300)
    )


def exports_of_results(folder: Path, project: Project) -> list[Export]:
    """Makes a file for each E, F and dtype of a results folder. ValueError if nothing in it can be a row."""
    run = read_run(folder, LeftOut())
    gpus = {key: machine.get("gpus") for key, _, machine in environments(folder)}
    cells: dict[TunedName, dict[int, tuple[CellRun, dict[str, Record]]]] = {}
    for cell in run.cells:
        tiles = [r for r in cell.records if _is_tile(r)]
        if not tiles:
            continue
        one = tiles[0].experiment
        device = gpus.get(tiles[0].environment)
        if not isinstance(device, list) or not device or not isinstance(device[0], str):
            raise ValueError(f"{tiles[0].record_id} does not say on which GPU it was measured")
        name = TunedName(E=one.E, N=one.F, device="_".join(device[0].split()), dtype=DTYPES[one.dtype])
        name = TunedName.parse(name.written(project)) or name
        default = default_row(one.T, name, project)
        records = {spec_of(row): r for r in tiles if (row := row_of(r.implementation.spec)) is not None}
        if default is None or spec_of(default) not in records:
            continue
        by_T = cells.setdefault(name, {})
        if one.T in by_T:
            raise ValueError(
                f"{folder} has several measurements of T={one.T}: names have neither D nor workload"
            )
        by_T[one.T] = cell, records
    if not cells:
        raise ValueError(
            f"{folder} has no cell with the project's default tile as a {KERNEL}(...) on a GPU; "
            "`mrb tune import` shows how it is spelt"
        )
    return [_export(run, name, project, by_T) for name, by_T in cells.items()]


def _is_tile(record: Record) -> bool:
    one = record.experiment
    return (
        record.correctness.status is Status.PASSED
        and record.implementation.role in ("baseline", "candidate")
        and (one.span, one.direction, one.device) == ("expert_ffn", "forward", "cuda")
        and one.dtype in DTYPES
        and row_of(record.implementation.spec) is not None
    )


def _export(
    run: Run, name: TunedName, project: Project, by_T: Mapping[int, tuple[CellRun, dict[str, Record]]]
) -> Export:
    rows: dict[int, Row] = {}
    proof: dict[int, RowProof] = {}
    fields = [contested(run, *by_T[T]) for T in sorted(by_T)]
    for field, contest in zip(fields, contests(fields), strict=True):
        default = default_row(contest.T, name, project)
        assert default is not None
        rows[contest.T], proof[contest.T] = _decided(default, contest, field.records)
    for M in USUAL_M:
        outside = default_row(M, name, project)
        if not min(by_T) <= M <= max(by_T) and outside is not None:
            rows[M], proof[M] = outside, RowProof(origin="default")
    records = [record for field in fields for record in field.records.values()]
    seen = {(run.environment(r).machine, run.environment(r).torch) for r in records}
    if len(seen) > 1:
        raise ValueError(
            f"{run.folder} mixes machines or versions of torch; keep each in a folder of its own"
        )
    machine, torch = seen.pop()
    in_order = {M: rows[M] for M in sorted(rows)}
    return Export(
        file=TunedFile(project=project, name=name, rows=in_order),
        proof=proof,
        source=printable(run.folder, 300),
        machine=printable(machine, 300),
        torch=printable(torch, 300),
    )


def _decided(default: Row, contest: Contest, records: Mapping[str, Record]) -> tuple[Row, RowProof]:
    usual, best = spec_of(default), contest.winner
    one = records[best].experiment
    experiment = {name: getattr(one, name) for name in ("case", "T", "D", "F", "E", "K", "dtype", "workload")}
    ids = [records[usual].record_id]
    if best == usual:
        return default, RowProof(origin="tie", records=ids, experiment=experiment)
    found = contest.against_winner[usual]
    low, high = found.interval
    faster = found.verdict == "SLOWER"
    row = row_of(best) if faster else default
    assert row is not None
    why = RowProof(
        origin="measured" if faster else "tie", records=[*ids, records[best].record_id], gain=found.ratio,
        low=low, high=high, experiment=experiment,
    )  # fmt: skip
    return row, why


def write_export(export: Export, project: Project, folder: Path, triton_version: str = "") -> Path:
    """Writes the tuned file where the project's loader looks below `folder`, and its proof beside it.
    ValueError if the loader would never read it, or could not run a row."""
    file, name = export.file, export.file.name
    version = triton_version or file.triton_version
    if project == "sglang" and not version:
        raise ValueError("SGLang has a folder for each version of Triton: give it with --triton 3.5.1")
    if project != file.project and (name.dtype == "int4_w4a16" or name.flydsl):
        raise ValueError("the projects count N of int4 weights differently, so such a file is not converted")
    if project == "sglang":
        folder = folder / f"triton_{version.replace('.', '_')}"
    path = folder / name.written(project)
    if (reason := why_never_loaded(path, name, project)) is not None:
        raise ValueError(f"{project} would never load {path.name}: {reason}")
    for M, row in file.rows.items():
        if isinstance(row, Row) and (reason := wrong_option(row, name, project, name.target)):
            raise ValueError(f"{project} could not run the row of M={M}: {reason}")
    content = json.dumps(replace(file, triton_version=version).document(project), indent=4) + "\n"
    proof = Proof.model_validate(
        {
            "schema": PROOF_SCHEMA, "version": 1, "file": path.name,
            "sha256": hashlib.sha256(content.encode()).hexdigest(), "project": project,
            "made_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "source": export.source,
            "measured_with": f"our {KERNEL}, not {project}'s kernel" if export.machine else "",
            "machine": export.machine, "torch": export.torch,
            "rows": {str(M): why for M, why in export.proof.items()},
        }
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    write_whole(
        path.with_suffix(PROOF), proof.model_dump_json(indent=1, by_alias=True, exclude_unset=True) + "\n"
    )
    return path


def write_imported(file: TunedFile, target: Path) -> None:
    write_whole(target, json.dumps(own_document(file), indent=1) + "\n")


def specs(file: TunedFile) -> dict[int, tuple[str, str]]:
    """Returns for each M the tile of our kernel like the row's, and the one like the project's default; "" if
    the name does not say enough for a default."""
    found = {}
    for M, row in file.rows.items():
        if not isinstance(row, FlyRow):
            default = default_row(M, file.name, file.project)
            found[M] = spec_of(row), "" if default is None else spec_of(default)
    return found
