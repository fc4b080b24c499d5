"""Records as flat rows in Parquet. Queries read them instead of parsing JSON each time.

`session=<id>/records.parquet` holds one row for each valid line of records.jsonl in the same folder. It is
only a copy: a Parquet file that does not match the lines is made again. So is a file that was not made on
this machine. The file records.stamp holds the inode, size and times of both files, and no program can set the
time of the last change. So a file that was edited, replaced or copied does not match its stamp. Making the
copy validates each line once, which takes two or three minutes for 10^6 records
(`measurements/bench/results_scale.json`). Later lines are added.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import duckdb
from pydantic import AwareDatetime, BaseModel

from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.whole_files import write_whole, written_whole
from moe_routing_bench.results.read import (
    RECORDS,
    LeftOut,
    command_of,
    is_plain_file,
    read_records,
    session_folders,
)
from moe_routing_bench.results.record import Record
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment

PARQUET = "records.parquet"
STAMP = "records.stamp"
ENTRY = "moe_routing_bench"
# each query parses up to this many new bytes, which takes about 0.1 s; more are added to the Parquet file
SMALL_TAIL = 2 << 20
SETTLED_SECONDS = 600  # after this time without a write a file is finished, or its writer is dead


@dataclass(frozen=True)
class Column:
    """A column: its name in SQL, its type, its place in a record and a factor:
    Column("median_ms", "DOUBLE", "timing.median", 1e3)."""

    name: str
    type: str
    path: str
    scale: float = 1.0


SQL_TYPES: dict[Any, str] = {
    str: "VARCHAR", Status: "VARCHAR", bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", tuple: "VARCHAR[]",
    dict: "MAP(VARCHAR, DOUBLE)", AwareDatetime: "TIMESTAMP",  # UTC
}  # fmt: skip
# columns whose name is not the last part of their path; seconds of a kernel become columns in ms
NAMED = {
    **{f"experiment.{one.name}": facts.column for one, facts in axes_of(Experiment) if facts.column},
    "experiment.threads": "rank_threads",
    "protocol.all_threads": "threads",
    "routing.checksum": "routing_checksum",
    "implementation.label": "impl",
    "implementation.spec": "impl_spec",
    "timing.stages": "stage_seconds",
    "timing.samples.count": "samples",
    "comparison.low": "ratio_low",
    "comparison.high": "ratio_high",
    "comparison.reason": "verdict_reason",
    "work.floor_seconds": "floor_ms",
    "work.roof_seconds": "roof_ms",
}
WITHOUT_COLUMN = (
    "schema_version", "log_tail", "timing.samples.file", "timing.samples.offset", "timing.samples.sha256",
    "experiment.implementations", "experiment.include", "profile",
)  # fmt: skip
# columns of version 2, and the columns that replace them
COPIES = {"protocol_seed": "routing_seed", "routing_suite_version": "suite_version"}


def columns_of(part: type[BaseModel], path: str = "") -> Iterator[Column]:
    """Yields a column for every field of a record, in the order of its parts."""
    for name, field in part.model_fields.items():
        where, kind = path + name, _kind(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from columns_of(kind, f"{where}.")
        elif where not in WITHOUT_COLUMN:
            timed = path == "timing." and kind is float
            called = NAMED.get(where, f"{name}_ms" if timed else name)
            yield Column(called, SQL_TYPES[kind], where, 1e3 if called.endswith("_ms") else 1.0)


def _kind(hint: Any) -> Any:
    """Returns the plain type of a field: float for Annotated[float, ...] | None."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(inside[0])
    if origin in (Union, UnionType):
        return _kind(next(one for one in inside if one is not type(None)))
    return type(inside[0]) if origin is Literal else origin or hint


_BY_NAME = {column.name: column for column in columns_of(Record)}
COLUMNS = (*_BY_NAME.values(), *(replace(_BY_NAME[same], name=name) for name, same in COPIES.items()))
COLUMNS_HASH = hashlib.sha256(repr(COLUMNS).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Cover:
    """The lines that a Parquet file holds: the first `covered` bytes of a records file that had `seen` bytes.
    An incomplete line is seen but not covered. sha256 is the hash of the covered bytes."""

    columns: str = COLUMNS_HASH
    covered: int
    seen: int
    sha256: str
    left_out: int
    sentences: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The places of a session's rows: the Parquet file if it is valid, and the lines from byte `start` on."""

    session: str
    folder: Path
    cover: Cover | None  # None: the Parquet file is missing, damaged or made from other lines
    size: int

    @property
    def lines(self) -> Path:
        return self.folder / RECORDS

    @property
    def parquet(self) -> Path:
        return self.folder / PARQUET

    @property
    def start(self) -> int:
        return self.cover.covered if self.cover else 0

    @property
    def is_current(self) -> bool:
        return self.cover is not None and self.size == self.cover.seen

    @property
    def settled(self) -> bool:
        return time.time() - self.lines.stat().st_mtime > SETTLED_SECONDS

    def left_out_before(self) -> LeftOut:
        """Returns what was left out before byte `start`, or in the whole file if the copy is current."""
        if self.cover is None:
            return LeftOut()
        # a line that was incomplete when the copy was made is read again
        again = not self.is_current and self.cover.seen > self.cover.covered
        lines = self.cover.left_out - again
        return LeftOut(lines, list(self.cover.sentences[:lines]), list(self.cover.remarks))


def compact(folder: Path | str, on_progress: Callable[[int, int], None] | None = None) -> int:
    """Updates the Parquet file of every session and returns how many were out of date. on_progress gets
    (bytes done, total bytes) after each."""
    with duckdb.connect() as connection:
        behind = [source for source in sources(connection, Path(folder)) if not source.is_current]
        total, done = sum(source.size - source.start for source in behind), 0
        for source in behind:
            fold(connection, source)
            done += source.size - source.start
            if on_progress is not None:
                on_progress(done, total)
    return len(behind)


def sources(
    connection: duckdb.DuckDBPyConnection, folder: Path, left_out: LeftOut | None = None
) -> list[Source]:
    """Returns every session. left_out gets a remark for each session that is only a copy of another."""
    sessions = session_folders(folder, left_out)
    covers = _read_covers(connection, [path / PARQUET for path in sessions.values()])
    return [_source(session, path, covers.get(path / PARQUET)) for session, path in sessions.items()]


def _source(session: str, folder: Path, cover: Cover | None) -> Source:
    size = (folder / RECORDS).stat().st_size
    stamp = _stamp(folder)
    noted = _noted(folder)
    if cover is not None and noted != stamp:
        if noted[:1] != stamp[:1]:  # not the Parquet file that was made here
            cover = None
        elif size < cover.seen or _sha256(folder / RECORDS, cover.covered) != cover.sha256:
            cover = None
        elif size == cover.seen:
            with suppress(OSError):  # a read-only folder is hashed each time
                _note(folder, stamp[-1])
    return Source(session=session, folder=folder, cover=cover, size=size)


def _stamp(folder: Path) -> list[list[int]]:
    """Returns the stamps of the Parquet file and of the lines, if they exist."""
    return [stamp for name in (PARQUET, RECORDS) if (stamp := stamp_of(folder / name))]


def stamp_of(path: Path) -> list[int]:
    """Returns [inode, size, modified, changed], or an empty list if there is no such file."""
    try:
        status = path.lstat()
    except OSError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _note(folder: Path, lines: list[int]) -> None:
    write_whole(folder / STAMP, json.dumps([_stamp(folder)[0], lines]))


def _noted(folder: Path) -> list[Any]:
    if not is_plain_file(folder / STAMP):
        return []
    try:
        with (folder / STAMP).open("rb") as file:
            noted = json.loads(file.read(1_000))
    except (OSError, ValueError, RecursionError):
        return []
    return noted if isinstance(noted, list) else []


def fold(connection: duckdb.DuckDBPyConnection, source: Source) -> Source:
    """Writes the session's Parquet file with its old rows and the new lines, and renames it when complete."""
    before, lines_before = source.lines.stat(), _stamp(source.folder)[-1]
    end = end_of_last_line(source.lines, before.st_size)
    left_out = source.left_out_before()
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        records = read_records(source.lines, source.session, left_out, start=source.start, stop=end)
        write_rows(rows, records)
        if end < before.st_size:
            left_out.add(f"{source.lines} at byte {end:,}: the last line was cut off while it was written")
        cover = Cover(
            covered=end,
            seen=before.st_size,
            sha256=_sha256(source.lines, end),
            left_out=left_out.count,
            sentences=tuple(left_out.first),
            remarks=tuple(left_out.remarks),
        )
        select = select_rows(rows)
        if source.cover:
            select = f"SELECT * FROM {scan([source.parquet])} UNION ALL {select}"
        with written_whole(source.folder / PARQUET) as part:
            connection.execute(
                f"COPY ({select}) TO {quoted(part)} (FORMAT parquet, COMPRESSION zstd, "
                f"KV_METADATA {{{ENTRY}: {quoted(json.dumps(asdict(cover)))}}})"
            )
    _note(source.folder, lines_before)  # a later edit of the lines does not match this stamp
    return Source(session=source.session, folder=source.folder, cover=cover, size=before.st_size)


def write_rows(path: Path, records: Iterable[Record]) -> None:
    """Writes records for `select_rows`, so that SQL reads only what the schema has checked."""
    with path.open("wb") as file:
        file.writelines(map(row_line, records))


def row_line(record: Record) -> bytes:
    return record.model_copy(update={"repro": command_of(record)}).line()


def select_rows(rows: Path, wanted: Sequence[Column] = COLUMNS) -> str:
    nested: dict[str, Any] = {}
    for column in wanted:
        *parents, last = column.path.split(".")
        part = nested
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = column.type
    types = ", ".join(f"{quoted(name)}: {quoted(_sql_type(inner))}" for name, inner in nested.items())
    columns = ", ".join(f'{_sql_path(column)} AS "{column.name}"' for column in wanted)
    options = f"format = 'newline_delimited', columns = {{{types}}}"
    return f"SELECT {columns} FROM read_json({quoted(rows)}, {options})"


def _sql_type(sql_type: str | dict[str, Any]) -> str:
    if isinstance(sql_type, str):
        return sql_type
    fields = ", ".join(f'"{name}" {_sql_type(inner)}' for name, inner in sql_type.items())
    return f"STRUCT({fields})"


def _sql_path(column: Column) -> str:
    path = ".".join(f'"{step}"' for step in column.path.split("."))
    return path if column.scale == 1.0 else f"{path} * {column.scale!r}"


def scan(parquets: list[Path]) -> str:
    listed = ", ".join(quoted(glob_free(path)) for path in parquets)
    return f"read_parquet([{listed}], hive_partitioning = false)"


def quoted(text: object) -> str:
    return "'" + str(text).replace("'", "''") + "'"


def glob_free(path: Path) -> str:
    """Returns the path with *, ? and [ escaped."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def _read_covers(connection: duckdb.DuckDBPyConnection, parquets: list[Path]) -> dict[Path, Cover]:
    present = [path for path in parquets if is_plain_file(path)]
    if not present:
        return {}
    names = {glob_free(path): path for path in present}
    query = "SELECT file_name, decode(value) FROM parquet_kv_metadata({}) WHERE decode(key) = ?"
    try:
        listed = ", ".join(quoted(name) for name in names)
        rows = connection.execute(query.format(f"[{listed}]"), [ENTRY]).fetchall()
    except duckdb.Error:  # one of them is damaged: read each alone
        if len(present) == 1:
            return {}
        covers: dict[Path, Cover] = {}
        for path in present:
            covers |= _read_covers(connection, [path])
        return covers
    return {Path(name): cover for name, text in rows if (cover := _parse_cover(text)) is not None}


def _parse_cover(text: str) -> Cover | None:
    try:
        given = json.loads(text)
        texts = {name: tuple(str(text) for text in given[name]) for name in ("sentences", "remarks")}
        cover = Cover(**{**given, **texts})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = (cover.covered, cover.seen, cover.left_out)
    if cover.columns != COLUMNS_HASH or not all(type(n) is int and n >= 0 for n in numbers):
        return None
    return cover


def _sha256(path: Path, stop: int) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path, stop):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while stop > 0 and (chunk := file.read(min(stop, 1 << 20))):
            stop -= len(chunk)
            yield chunk


def end_of_last_line(path: Path, size: int) -> int:
    """Returns the position after the last newline within the first `size` bytes."""
    with path.open("rb") as file:
        while size > 0:
            begin = max(0, size - (1 << 16))
            file.seek(begin)
            if (newline := file.read(size - begin).rfind(b"\n")) >= 0:
                return begin + newline + 1
            size = begin
    return 0
