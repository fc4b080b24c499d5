"""A bundle is a results folder in one zip file. Others can check it without trusting its author.

    manifest.json                             format, version, size and sha256 of each file, a summary
    session=<id>/records.jsonl, samples.f64   as in a results folder; every time must have its samples
    environments/<sha256>.json                descriptions of the machines
    power.json                                optional: `mrb doctor --power` on that machine

The summary (machines, A/A comparisons, sources) is computed again from the records by whoever opens the
bundle, so it cannot say more than they do; and so is all in the records that follows from their samples
(results/recompute.py, which also names what does not). Other writers follow `Manifest` below.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from moe_routing_bench.core.text import first_problem, one_line
from moe_routing_bench.core.whole_files import written_whole
from moe_routing_bench.results.folder import ENVIRONMENTS, environments, iterate
from moe_routing_bench.results.parquet import end_of_last_line
from moe_routing_bench.results.read import RECORDS, SAMPLES, LeftOut, is_plain_file, session_folders
from moe_routing_bench.results.recompute import check_cells
from moe_routing_bench.results.record import SESSION, Amount, Count, Hash, Name, RecordPart

MANIFEST, POWER = "manifest.json", "power.json"
SUFFIX = ".zip"
TIMED = rf"session={SESSION}/({re.escape(RECORDS)}|{re.escape(SAMPLES)})|{ENVIRONMENTS}/[0-9a-f]{{64}}\.json"
KEPT = re.compile(rf"{TIMED}|{re.escape(POWER)}")
MAX_FILES = 20_000
MAX_MANIFEST_BYTES = 8 << 20
MAX_BYTES = 4 << 30  # unpacked, all files together
MAX_RATIO = 100  # unpacked to packed; records compress about tenfold
PIECE = 1 << 20
BEGINNING = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip file: equal results give equal bytes


class File(RecordPart):
    bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)]
    sha256: Hash


class OneMachine(RecordPart):
    """How reliable the comparisons of a machine are. aa: the baseline against a copy of itself.

    OneMachine(name="xeon-...", records=120, cells=40, aa_cells=40, aa_called_different=1, aa_median=0.002,
               aa_worst=0.013, seen=0.011): half of all comparisons can detect a difference of 1.1 %.
    """

    name: Name
    records: Count
    cells: Count
    aa_cells: Count
    aa_called_different: Count
    aa_median: Amount | None  # distance of the ratio from 1
    aa_worst: Amount | None
    seen: Amount | None  # median of half the widths of the intervals


class Manifest(RecordPart):
    format: Literal["mrb bundle"] = "mrb bundle"
    version: Literal[1] = 1
    made_by: Name
    files: Annotated[dict[Name, File], Field(max_length=MAX_FILES)]
    machines: Annotated[dict[Hash, OneMachine], Field(max_length=1000)]  # by environment
    sources: Annotated[dict[Hash, Name], Field(max_length=100_000)]  # hash of the code -> implementation
    harnesses: Annotated[tuple[Hash, ...], Field(max_length=1000)]


def make_bundle(folder: Path, target: Path, *, made_by: str, power: bytes | None = None) -> Manifest:
    """Writes a bundle. Raises ValueError if `opened_bundle` would refuse a record of the folder."""
    names = {ENVIRONMENTS + f"/{name}.json" for name, _, _ in environments(folder)}
    for place in session_folders(folder).values():
        names |= {f"{place.name}/{name}" for name in (RECORDS, SAMPLES) if is_plain_file(place / name)}
    with written_whole(target) as part, tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)  # a sweep may be writing to the folder
        for name in sorted(names, key=lambda name: (name.endswith(SAMPLES), name)):
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, copy / name, follow_symlinks=False)
            if name.endswith(RECORDS):  # leaves out a last line that is not complete
                os.truncate(copy / name, end_of_last_line(copy / name, (copy / name).stat().st_size))
        if power is not None:
            (copy / POWER).write_bytes(power)
            names.add(POWER)
        files = {name: _file(copy / name) for name in sorted(names)}
        manifest = Manifest(made_by=made_by, files=files, **_summary(copy))  # type: ignore[arg-type]
        check_cells(copy)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo(MANIFEST, BEGINNING), manifest.model_dump_json(indent=1))
            for name in files:
                entry = zipfile.ZipInfo(name, BEGINNING)
                entry.compress_type, entry.file_size = zipfile.ZIP_DEFLATED, files[name].bytes
                with (
                    (copy / name).open("rb") as reading,
                    archive.open(entry, "w") as to,
                ):
                    shutil.copyfileobj(reading, to, PIECE)
    return manifest


@contextmanager
def opened_bundle(path: Path) -> Iterator[tuple[Path, Manifest]]:
    """Unpacks a bundle into a temporary results folder. Raises ValueError unless every byte, every record and
    the summary are correct."""
    with tempfile.TemporaryDirectory(prefix="mrb-bundle-") as scratch:
        folder = Path(scratch)
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = _unpack(archive, folder)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{path} is not a whole zip file: {one_line(str(error), 200)}") from None
        except (OSError, OverflowError, UnicodeError) as error:
            raise ValueError(f"{path} cannot be read: {one_line(str(error), 200)}") from None
        summary = _summary(folder)
        for name, computed in summary.items():
            if getattr(manifest, name) != computed:
                raise ValueError(f"the manifest's {name} are not what the records say")
        check_cells(folder)
        yield folder, manifest


def _unpack(archive: zipfile.ZipFile, folder: Path) -> Manifest:
    """Unpacks only files with names of a results folder, and never more bytes than the manifest states."""
    entries = archive.infolist()
    if len(entries) > MAX_FILES + 1:
        raise ValueError(f"the bundle has {len(entries):,} files, over the limit of {MAX_FILES:,}")
    by_name = {entry.filename: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError("the bundle has two files of the same name")
    for entry in entries:
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.filename != MANIFEST and not KEPT.fullmatch(entry.filename):
            raise ValueError(
                f"the bundle has a file {one_line(repr(entry.filename), 100)}, which no bundle has"
            )
        if kind not in (0, stat.S_IFREG) or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename} is not a plain file: a link, a folder or encrypted")
        if entry.file_size > PIECE and entry.file_size > MAX_RATIO * entry.compress_size:
            raise ValueError(f"{entry.filename} unpacks to over {MAX_RATIO} times its size: a bomb")
    if MANIFEST not in by_name:
        raise ValueError(f"the bundle has no {MANIFEST}")
    if by_name[MANIFEST].file_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} has over {MAX_MANIFEST_BYTES:,} bytes")
    with archive.open(MANIFEST) as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    try:
        manifest = Manifest.model_validate_json(text[:MAX_MANIFEST_BYTES])
    except ValidationError as error:
        raise ValueError(f"{MANIFEST} is wrong: {first_problem(error)}") from None
    if odd := sorted(manifest.files.keys() ^ (by_name.keys() - {MANIFEST})):
        raise ValueError(f"{one_line(odd[0], 100)} is in the bundle or in its manifest, and not in both")
    if sum(file.bytes for file in manifest.files.values()) > MAX_BYTES:
        raise ValueError(f"the bundle unpacks to over {MAX_BYTES >> 30} GiB")
    for name, stated in manifest.files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with archive.open(name) as reading, target.open("xb") as writing:
            while piece := reading.read(PIECE):
                size += len(piece)
                if size > stated.bytes:
                    break
                digest.update(piece)
                writing.write(piece)
        if size != stated.bytes or digest.hexdigest() != stated.sha256:
            raise ValueError(f"{name} is not what the manifest says: its size or its sha256 is another")
    return manifest


def _summary(folder: Path) -> dict[str, object]:
    """Returns machines, sources and harnesses. Raises ValueError if a record is not valid."""
    left_out = LeftOut()
    machines: dict[str, list[tuple[str, str, float | None, float | None, bool]]] = defaultdict(list)
    sources: dict[str, str] = {}
    harnesses: set[str] = set()
    for record in iterate(folder, left_out):
        compared, role = record.comparison, record.implementation.role
        off = width = None
        if compared is not None:
            off = abs(compared.ratio - 1) if role == "twin" else None
            width = (compared.high - compared.low) / 2 if role == "candidate" else None
        different = role == "twin" and compared is not None and compared.verdict in ("FASTER", "SLOWER")
        machines[record.environment].append((record.cell_key, role, off, width, different))
        sources.setdefault(record.implementation.source_hash, record.implementation.label)
        harnesses.add(record.harness_hash)
    if left_out.first or left_out.remarks:
        sentence = (left_out.first or left_out.remarks)[0]
        raise ValueError(one_line(sentence.replace(f"{folder}/", ""), 400))
    if not machines:
        raise ValueError("there are no records")
    names = {key: one_line(machine["name"], 300) for key, _, machine in environments(folder)}
    if absent := sorted(machines.keys() - names.keys()):
        raise ValueError(
            f"records were measured on a machine whose description {absent[0][:12]} is not there"
        )
    described = {}
    for key, rows in machines.items():
        aa = [off for _, _, off, _, _ in rows if off is not None]
        widths = [width for _, _, _, width, _ in rows if width is not None]
        described[key] = OneMachine(
            name=names[key],
            records=len(rows),
            cells=len({experiment for experiment, *_ in rows}),
            aa_cells=len(aa),
            aa_called_different=sum(different for *_, different in rows),
            aa_median=median(aa) if aa else None,
            aa_worst=max(aa) if aa else None,
            seen=median(widths) if widths else None,
        )
    return {"machines": described, "sources": sources, "harnesses": tuple(sorted(harnesses))}


def _file(path: Path) -> File:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return File(bytes=path.stat().st_size, sha256=digest.hexdigest())
