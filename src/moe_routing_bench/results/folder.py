"""The results folder: written by one Session at a time into a folder of its own, read by anybody.

    DIR/environments/<sha256>.json           what the machine and its software were, once for each content
    DIR/session=<id>/records.jsonl           one Record a line, appended and synced cell by cell; the truth
    DIR/session=<id>/samples.f64             raw samples, little-endian float64; records say where theirs are
    DIR/session=<id>/records.parquet         a flat copy for queries, see parquet.py

A killed writer leaves at most one line cut off, in its own file, which readers leave out. The code being
measured runs as the same user and may try to write a better time into the file, so a session keeps a nameless
copy of what it wrote; a file that differs from it is put aside and written again.

A results folder as runs of cells: which records were timed together, and on what machine.

Which cases have a committed record: those in measurements/records/ of a checkout of this project.
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
from moe_routing_bench.results.read import RECORDS, LeftOut, is_plain_file, read_records, session_folders
from moe_routing_bench.results.record import Record, Samples, canonical_json, content_hash
from moe_routing_bench.results.verify import SAMPLES

ENVIRONMENTS = "environments"
MAX_ENVIRONMENT_BYTES = 1 << 20
PIECE_BYTES = 1 << 20


class OwnFile:
    """A file that only this process should write to, appended to piece by piece.

    A second copy without a name, which nobody else can open by path, holds the same bytes: what others
    change is noticed and undone. The copy is deleted when the session ends.
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
        """In one write: a reader, or a crash, sees all lines, or the last one cut off."""
        try:
            if self._copy.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._write(data)
        except OSError:  # as if nothing had been written: the next cell may fit
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
            self._stamp = None  # somebody wrote in between: look at every byte next time

    def since(self, start: int) -> bytes:
        """What was appended from byte `start` on, from the copy that nobody else can open."""
        return os.pread(self._copy.fileno(), self.size - start, start)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        self._copy.close()

    def changed(self, *, thorough: bool = False) -> str | None:
        """What somebody else did to it, in a sentence. Unless thorough, bytes are read only if the system's
        stamps moved; ctime is one of them, which a program cannot set back."""
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
        self._stamp = self._look()  # touched, but its bytes are ours
        return None

    def restore(self) -> None:
        """Put what is there aside as <name>.tampered-N and write what was ours again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(self._fd)
        number = 1
        while True:
            try:
                self._fd = self._create()
                break
            except FileExistsError:  # the changed file, or what a tamperer still running puts there
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

    `repairs` holds a sentence for each time somebody else's changes were undone.
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
        """A new session: its id is the UTC time to the millisecond and eight random digits, so ids sort."""
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
        """Store the document if it is new; its hash, for `Record.environment`. Queries take the machine's
        name from document["machine"]["name"] or document["name"]."""
        name = content_hash(document)
        path = self.root / ENVIRONMENTS / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, canonical_json(document))
        return name

    def put_samples(self, samples: ArrayLike) -> Samples:
        """Append raw samples; where they are, for `Timing.of`. On disk once the cell's records are."""
        values = np.ascontiguousarray(samples, dtype="<f8").ravel()
        if not values.size:
            raise ValueError("there are no samples to store")
        self._undo_tampering()
        data = values.tobytes()
        offset = self._samples.size
        self._samples.append(data)
        self._unsynced_samples = True
        return Samples(
            file=f"{self.folder.name}/{SAMPLES}",
            offset=offset,
            count=values.size,
            sha256=hashlib.sha256(data).hexdigest(),
        )

    def append(self, records: Sequence[Record]) -> None:
        """All records of one cell, in one write, on disk when this returns."""
        foreign = [record.record_id for record in records if record.session != self.id]
        assert not foreign, f"records of another session: {foreign}"
        if not records:
            return
        lines = [record.line() for record in records]
        self._undo_tampering()
        self._records.append(b"".join(lines))
        # side by side both syncs share one commit of the file system's journal
        with ThreadPoolExecutor(1) as pool:
            samples = pool.submit(self._samples.sync) if self._unsynced_samples else None
            self._records.sync()
            if samples:
                samples.result()
        self._unsynced_samples = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of records and of samples so far."""
        return self._records.size, self._samples.size

    def since(self, sizes: tuple[int, int]) -> tuple[bytes, bytes]:
        """The records and samples that were added since there were so many bytes."""
        return self._records.since(sizes[0]), self._samples.since(sizes[1])

    def tampered(self, *, thorough: bool = False) -> str | None:
        """What somebody else did to this session's files, in a sentence. thorough reads every byte."""
        sentences = [file.changed(thorough=thorough) for file in (self._records, self._samples)]
        return "; ".join(sentence for sentence in sentences if sentence) or None

    def repair(self) -> None:
        """Put changed files aside as *.tampered-N and write again what this session wrote."""
        for file in (self._records, self._samples):
            if changed := file.changed(thorough=True):
                file.restore()
                self.repairs.append(f"{changed}; it was restored")

    def close(self) -> None:
        """Look at every byte once more, repair what is not ours, and make the copy for queries."""
        if self._closed:
            return
        self._closed = True
        try:
            self.repair()
            self._samples.sync()
        except OSError as error:
            self.repairs.append(f"the files could not be looked at once more: {error.strerror or error}")
        for file in (self._records, self._samples):
            file.close()
        with duckdb.connect() as connection, suppress(OSError, duckdb.Error):  # a query makes it if need be
            for source in sources(connection, self.root):
                if source.session == self.id and not source.is_current:
                    fold(connection, source)

    def _undo_tampering(self) -> None:
        if self.tampered():
            self.repair()


def iterate(folder: Path | str, left_out: LeftOut | None = None) -> Iterator[Record]:
    """Every record, streamed, oldest session first. Lines that are no records are added to left_out."""
    left_out = LeftOut() if left_out is None else left_out
    for session, path in session_folders(Path(folder), left_out).items():
        yield from read_records(path / RECORDS, session, left_out)


def samples_of(folder: Path | str, record: Record) -> NDArray[np.float64]:
    """The raw samples behind a record, in seconds per call; ValueError if they are not what was written."""
    if record.timing is None:
        raise ValueError(f"{record.record_id} has status {record.correctness.status} and so no samples")
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
        raise ValueError(f"the samples of {record.record_id} in {path} are not those that were written")
    return np.frombuffer(data, dtype="<f8").astype(np.float64)


def environments(folder: Path | str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(hash, document, its part about the machine) of every document that names a machine and whose content
    has the hash in its name."""
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
    settings="OMP_NUM_THREADS=1"); known is False if the folder lacks the document; the fields then say so."""

    machine: str
    torch: str
    python: str
    settings: str
    known: bool = True


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """The records of one cell in the last session that measured it: their samples are paired by round."""

    key: str
    session: str
    records: tuple[Record, ...]

    @cached_property
    def workload(self) -> tuple[str, int] | None:
        """Spec and seed; None if every worker died before they were known."""
        asked = (record.experiment for record in self.records)
        known = [(one.workload, one.seed) for one in asked if one.workload is not None]
        return known[0] if known else None

    @cached_property
    def aa_floor(self) -> float:
        """How far the baseline was from its own twin; 0 if no record says."""
        return max((r.comparison.aa_floor for r in self.records if r.comparison is not None), default=0.0)

    def baseline_of(self, record: Record) -> Record | None:
        """The record of the baseline it was compared with; None for the baseline, or if it is not here."""
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
    """The newest run of every cell. Those records are held in memory; older ones are dropped. ValueError if
    all lines were left out."""
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


# a package installed by pip has no such folder above it
COMMITTED = Path(__file__).parents[3] / "measurements" / "records"


def measured_cases(folder: Path = COMMITTED) -> set[str] | None:
    """The names of cases with a time, full sizes alone; None if there are no committed records here."""
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
    """Write the selected records into the empty folder `target`, with their samples and environments."""
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
    """A folder that is gone when the stack is closed."""
    folder = Path(tempfile.mkdtemp(prefix="mrb-results-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
