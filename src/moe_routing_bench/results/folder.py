"""The results folder. Each Session writes into a folder of its own; anybody may read all of them.

    DIR/environments/<sha256>.json           the machine and its software, one file for each content
    DIR/session=<id>/records.jsonl           one Record per line, written to disk after each cell; the
    original DIR/session=<id>/samples.f64             raw samples, little-endian float64; records hold their
    offsets DIR/session=<id>/records.parquet         a flat copy for queries, see parquet.py

If a writer is killed, at most the last line of its file is incomplete, and readers skip it. The measured code
runs as the same user and could write a better time into the file. So a session keeps a second copy without a
name. If the file differs from the copy, the session renames the file and writes it again.

`Run` and `CellRun` say which records were timed together and on what machine. `measured_cases` lists the
cases that have a committed record in measurements/records/.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_routing_bench.core.text import one_line
from moe_routing_bench.core.whole_files import sync_folder, write_whole
from moe_routing_bench.results.parquet import fold, sources
from moe_routing_bench.results.read import (
    RECORDS,
    SAMPLES,
    LeftOut,
    is_plain_file,
    read_records,
    session_folders,
)
from moe_routing_bench.results.record import Record, SamplesFile, canonical_json, content_hash

ENVIRONMENTS = "environments"
MAX_ENVIRONMENT_BYTES = 1 << 20
PIECE_BYTES = 1 << 20


class OwnFile:
    """A file that only this process should append to.

    A second copy has no name, so no other process can open it by path. It holds the same bytes, so this class
    notices changes by others and undoes them. The copy is deleted when the session ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._fd = self._create()
        self._copy = tempfile.TemporaryFile(dir=path.parent, buffering=0)
        self._stamp = self._look()

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self.path, flags, 0o644)

    def append(self, data: bytes) -> None:
        """Appends in one write, so that after a crash at most the last line is incomplete."""
        try:
            if self._copy.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._write(data)
        except OSError:  # undo the partial write: the next cell may fit
            self._copy.truncate(self.size)
            self._copy.seek(self.size)
            raise
        self.size += len(data)

    def _write(self, data: bytes) -> None:
        before = os.fstat(self._fd).st_size
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._stamp = self._look()
        if os.fstat(self._fd).st_size != before + len(data) or before != self.size:
            self._stamp = None  # another process wrote meanwhile: read every byte next time

    def since(self, start: int) -> bytes:
        """Returns the bytes from `start` on, read from the copy that no other process can open."""
        return os.pread(self._copy.fileno(), self.size - start, start)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        self._copy.close()

    def changed(self, *, thorough: bool = False) -> str | None:
        """Returns a sentence that says how another process changed the file, or None. Unless thorough, it
        reads the bytes only if the file's inode, size or times changed; a program cannot set back ctime."""
        if not thorough and self._stamp is not None and self._look() == self._stamp:
            return None
        try:
            there, mine = self.path.lstat(), os.fstat(self._fd)
        except OSError:
            return f"{self.path.name} was removed"
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            return f"{self.path.name} was replaced by another file"
        if mine.st_size < self.size:
            return f"{self.path.name} was cut from {self.size:,} to {mine.st_size:,} bytes"
        if any(os.pread(self._fd, len(piece), at) != piece for at, piece in self._pieces()):
            return f"{self.path.name} was edited"
        if mine.st_size > self.size:
            return f"{mine.st_size - self.size:,} bytes were added to {self.path.name}"
        self._stamp = self._look()  # its times changed but not its bytes
        return None

    def restore(self) -> None:
        """Renames the changed file to <name>.tampered-N and writes our bytes again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(self._fd)
        number = 1
        while True:
            try:
                self._fd = self._create()
                break
            except FileExistsError:  # the changed file, or one that a running tamperer made again
                while (aside := self.path.with_name(f"{self.path.name}.tampered-{number}")).exists():
                    number += 1
                self.path.rename(aside)
        size, self.size = self.size, 0
        for _, piece in self._pieces(size):
            self._write(piece)
            self.size += len(piece)
        self.sync()

    def _pieces(self, size: int | None = None) -> Iterator[tuple[int, bytes]]:
        size = self.size if size is None else size
        for at in range(0, size, PIECE_BYTES):
            yield at, os.pread(self._copy.fileno(), min(PIECE_BYTES, size - at), at)

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = self.path.lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Session:
    """Writes the records of one run.

    with Session.start("results") as session:
        environment = session.put_environment(this_machine().to_dict())
        samples = session.put_samples([0.0101, 0.0099])
        session.append([Record(record_id=session.new_record_id(), session=session.id, ...)])

    `repairs` holds a sentence for each change by another process that was undone.
    """

    def __init__(self, folder: Path, session: str) -> None:
        self.root = folder
        self.id = session
        self.folder = folder / f"session={session}"
        self.folder.mkdir(parents=True)
        self.repairs: list[str] = []
        self._records = OwnFile(self.folder / RECORDS)
        self._samples = OwnFile(self.folder / SAMPLES)
        self._numbers = 0
        self._unsynced_samples = False
        self._closed = False
        for path in (self.folder, folder):
            sync_folder(path)

    @classmethod
    def start(cls, folder: Path | str) -> Session:
        """Starts a session. Its id is the UTC time in milliseconds and eight random digits, so ids sort."""
        now = datetime.now(UTC)
        stamp = f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}"
        return cls(Path(folder), f"{stamp}-{secrets.token_hex(4)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def new_record_id(self) -> str:
        self._numbers += 1
        return f"{self.id}-{self._numbers:06d}"

    def put_environment(self, document: Mapping[str, object]) -> str:
        """Stores the document if it is new and returns its hash for `Record.environment`. Queries take the
        name of the machine from document["machine"]["name"] or document["name"]."""
        name = content_hash(document)
        path = self.root / ENVIRONMENTS / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, canonical_json(document))
        return name

    def put_samples(self, samples: ArrayLike) -> SamplesFile:
        """Appends raw samples and returns their place for `Timing.of`. They are on disk when `append`
        returns."""
        values = np.ascontiguousarray(samples, dtype="<f8").ravel()
        if not values.size:
            raise ValueError("there are no samples to store")
        self._undo_tampering()
        data = values.tobytes()
        offset = self._samples.size
        self._samples.append(data)
        self._unsynced_samples = True
        return SamplesFile(
            file=f"{self.folder.name}/{SAMPLES}",
            offset=offset,
            count=values.size,
            sha256=hashlib.sha256(data).hexdigest(),
        )

    def append(self, records: Sequence[Record]) -> None:
        """Writes all records of one cell in one write. They are on disk when it returns."""
        foreign = [record.record_id for record in records if record.session != self.id]
        assert not foreign, f"records of another session: {foreign}"
        if not records:
            return
        lines = [record.line() for record in records]
        self._undo_tampering()
        self._records.append(b"".join(lines))
        # if both syncs run at the same time, they share one commit of the file system's journal
        with ThreadPoolExecutor(1) as pool:
            samples = pool.submit(self._samples.sync) if self._unsynced_samples else None
            self._records.sync()
            if samples:
                samples.result()
        self._unsynced_samples = False

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the records file and the samples file in bytes."""
        return self._records.size, self._samples.size

    def since(self, sizes: tuple[int, int]) -> tuple[bytes, bytes]:
        """Returns the bytes of records and samples that were added after the files had these sizes."""
        return self._records.since(sizes[0]), self._samples.since(sizes[1])

    def tampered(self, *, thorough: bool = False) -> str | None:
        """Returns a sentence that says how another process changed this session's files, or None. `thorough`
        reads every byte."""
        sentences = [file.changed(thorough=thorough) for file in (self._records, self._samples)]
        return "; ".join(sentence for sentence in sentences if sentence) or None

    def repair(self) -> None:
        """Renames changed files to *.tampered-N and writes the session's bytes again."""
        for file in (self._records, self._samples):
            if changed := file.changed(thorough=True):
                file.restore()
                self.repairs.append(f"{changed}; it was restored")

    def close(self) -> None:
        """Checks every byte, repairs changed files, and makes the copy for queries."""
        if self._closed:
            return
        self._closed = True
        try:
            self.repair()
            self._samples.sync()
        except OSError as error:
            self.repairs.append(f"the files could not be checked at the end: {error.strerror or error}")
        for file in (self._records, self._samples):
            file.close()
        with duckdb.connect() as connection, suppress(OSError, duckdb.Error):  # else a query makes it
            for source in sources(connection, self.root):
                if source.session == self.id and not source.is_current:
                    fold(connection, source)

    def _undo_tampering(self) -> None:
        if self.tampered():
            self.repair()


def iterate(folder: Path | str, left_out: LeftOut | None = None) -> Iterator[Record]:
    """Yields every record, the oldest session first. Invalid lines are added to left_out."""
    left_out = LeftOut() if left_out is None else left_out
    for session, path in session_folders(Path(folder), left_out).items():
        yield from read_records(path / RECORDS, session, left_out)


def samples_of(folder: Path | str, record: Record) -> NDArray[np.float64]:
    """Returns the raw samples of a record in seconds per call. It raises a ValueError if they were
    changed."""
    if record.timing is None:
        raise ValueError(f"{record.record_id} has status {record.correctness.status}, so it has no samples")
    wanted = record.timing.samples
    path = Path(folder) / wanted.file
    if path.parent.is_symlink() or not is_plain_file(path):
        raise ValueError(f"there is no samples file {path}")
    length = 8 * wanted.count
    if wanted.offset + length > path.stat().st_size:
        raise ValueError(f"{path} ends before the samples of {record.record_id}: it was cut off or replaced")
    with path.open("rb") as file:
        file.seek(wanted.offset)
        data = file.read(length)
    if hashlib.sha256(data).hexdigest() != wanted.sha256:
        raise ValueError(f"the samples of {record.record_id} in {path} were changed after they were written")
    return np.frombuffer(data, dtype="<f8").astype(np.float64)


def environments(folder: Path | str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields (hash, document, its part about the machine) of every document that names a machine and whose
    content has the hash in its file name."""
    home = Path(folder) / ENVIRONMENTS
    for path in sorted(home.glob("*.json")) if home.is_dir() else ():
        if not is_plain_file(path) or path.stat().st_size > MAX_ENVIRONMENT_BYTES:
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.stem:
            continue
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            continue
        machine = document.get("machine", document) if isinstance(document, dict) else None
        if isinstance(machine, dict) and isinstance(machine.get("name"), str):
            yield path.stem, document, machine


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment(machine="xeon-2-cores-24-gib-1f3a9c02", torch="2.13.0+cpu", python="3.12.3",
    settings="OMP_NUM_THREADS=1"). If the folder lacks the document, known is False and the fields say so."""

    machine: str
    torch: str
    python: str
    settings: str
    known: bool = True


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """The records of one cell in the last session that measured it. Their samples are paired by round."""

    key: str
    session: str
    records: tuple[Record, ...]

    @cached_property
    def workload(self) -> tuple[str, int] | None:
        """The spec and seed. None if every worker died before it reported them."""
        asked = (record.experiment for record in self.records)
        known = [(one.workload, one.seed) for one in asked if one.workload is not None]
        return known[0] if known else None

    @cached_property
    def aa_floor(self) -> float:
        """The noise floor: by how much two copies of the baseline differed. 0 if no record says so."""
        return max((r.comparison.aa_floor for r in self.records if r.comparison is not None), default=0.0)

    def baseline_of(self, record: Record) -> Record | None:
        """Returns the record of its baseline. None for the baseline itself, or if the record is missing."""
        if record.comparison is None:
            return None
        baselines = [r for r in self.records if r.implementation.role == "baseline" and r.timing is not None]
        named = [r for r in baselines if r.implementation.label == record.comparison.baseline]
        return named[0] if len(named) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    cells: tuple[CellRun, ...]
    environments: dict[str, Environment] = field(repr=False)

    def environment(self, record: Record) -> Environment:
        unknown = f"not known (environment {record.environment[:12]} is not in the folder)"
        nothing = Environment(machine=unknown, torch=unknown, python=unknown, settings=unknown, known=False)
        return self.environments.get(record.environment, nothing)


def read_run(folder: Path | str, left_out: LeftOut) -> Run:
    """Reads the newest run of every cell into memory and drops older runs. It raises a ValueError if no line
    is valid."""
    newest: dict[str, str] = {}
    by_cell: dict[str, dict[object, Record]] = {}
    for record in iterate(folder, left_out):  # oldest session first
        one, key = record.implementation, record.cell_key
        if newest.get(key) != record.session:
            newest[key], by_cell[key] = record.session, {}
        if one.role != "beside":
            by_cell[key][one.label, one.spec, one.role, record.implementation.setting] = record
    if not by_cell and left_out.first:
        raise ValueError(f"no line of {folder} is a valid record. {left_out.first[0]}")
    cells = [
        CellRun(key=key, session=newest[key], records=tuple(records.values()))
        for key, records in by_cell.items()
    ]
    return Run(folder=Path(folder), cells=tuple(cells), environments=_environments(Path(folder)))


def _environments(folder: Path) -> dict[str, Environment]:
    known = {}
    for key, document, machine in environments(folder):
        settings = document.get("settings")
        given = settings if isinstance(settings, dict) else {}
        texts = {k: v for k, v in given.items() if isinstance(v, str)}
        known[key] = Environment(
            machine=_text(machine, "name"),
            torch=_text(machine, "torch"),
            python=_text(machine, "python"),
            settings=one_line(" ".join(f"{k}={v}" for k, v in sorted(texts.items()))) or "none",
        )
    return known


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    return one_line(value, 300) if isinstance(value, str) else "not known"


# this folder exists in a checkout, not in an installed package
COMMITTED = Path(__file__).parents[3] / "measurements" / "records"


def measured_cases(folder: Path = COMMITTED) -> set[str] | None:
    """Returns the names of cases in full size that have a time. None if there are no committed records."""
    if not folder.is_dir():
        return None
    measured = set()
    for packed in sorted(folder.glob("*.tar.xz")):
        with tarfile.open(packed) as tar:
            for member in tar:
                if not member.name.endswith("records.jsonl") or (file := tar.extractfile(member)) is None:
                    continue
                for record in map(json.loads, file):
                    case = record.get("experiment") or record["workload"]  # from version 3 on, and before
                    if record["timing"] is not None and not case["scaled_from"]:
                        measured.add(case["case"])
    return measured


Selection = Mapping[str, Collection[str] | None]  # session -> the ids of its records; None: all of them


def copy_selected(folder: Path, target: Path, selection: Selection) -> None:
    """Copies the selected records with their samples and environments into the empty folder `target`."""
    if (folder / ENVIRONMENTS).is_dir():
        shutil.copytree(folder / ENVIRONMENTS, target / ENVIRONMENTS, symlinks=True)
    for session, source in session_folders(folder).items():
        if session not in selection:
            continue
        wanted = selection[session]
        records = read_records(source / RECORDS, session, LeftOut())
        lines = [one.line() for one in records if wanted is None or one.record_id in wanted]
        home = target / source.name
        home.mkdir()
        (home / RECORDS).write_bytes(b"".join(lines))
        if is_plain_file(source / SAMPLES):
            shutil.copyfile(source / SAMPLES, home / SAMPLES)


def temporary_folder(stack: ExitStack) -> Path:
    """Makes a folder that is deleted when the stack is closed."""
    folder = Path(tempfile.mkdtemp(prefix="mrb-results-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
