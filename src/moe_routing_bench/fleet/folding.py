"""Tables and manifests: segments of a store, validated once and folded into Parquet.

    tables/<2 hex, or all>/<sha256>.parquet     rows as in parquet.py, and each record's line and samples
    manifests/<n>.json                          every table, and objects that the tables have replaced
    refused/<name of a segment>                 a segment with a record that is wrong

Nothing is changed. A fold puts a table named by its content, then the next manifest if it is absent: of two
folds, the second tries again or gives up, and what it put is litter. A killed fold leaves only litter too. A
replaced object is deleted KEPT_SECONDS after it was replaced, by the clock of the server, so readers of an
older manifest and folds that overlap still find it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Literal

import duckdb
import numpy as np
from pydantic import Field, ValidationError

from moe_routing_bench.core.text import first_problem, one_line
from moe_routing_bench.fleet.segments import SEGMENT, Entry, fetched, validated
from moe_routing_bench.results.objects import Listed, Objects
from moe_routing_bench.results.parquet import COLUMNS, COLUMNS_HASH, Column, quoted, select_rows
from moe_routing_bench.results.query import sentence_of
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Count, Hash, Name, Record, RecordPart, Sentence
from moe_routing_bench.results.tables import scan_tables

FOLD_BYTES = 64 << 20  # of segments, as they lie there, in one fold
SMALL_BYTES, TABLE_BYTES = 1 << 20, 1 << 28  # smaller tables are merged; none grows beyond the second
KEPT_SECONDS = 3600
LEASE_SECONDS = 86_400
MEMORY_LIMIT = "2GB"
ROW_GROUP = 40_960  # rows; a row with its line and samples has about 4 KB
MANIFEST = re.compile(r"manifests/([0-9]{12})\.json")
# `cell` is the beginning of the cell key as a number: what tables hold is found by 8 bytes a record
OWN = (
    Column("cell", "BIGINT", "cell"),
    Column("attempt", "BIGINT", "attempt"),
    Column("line", "VARCHAR", "line"),
    Column("sample_seconds", "DOUBLE[]", "sample_seconds"),
)


Replaced = Annotated[str, Field(pattern=r"^(segments|tables)/[0-9a-z]{2,3}/[0-9a-f]{64}[0-9a-z.-]{8,14}$")]


class Table(RecordPart):
    """suites, days: the least and the greatest."""

    name: Annotated[str, Field(pattern=r"^tables/([0-9a-f]{2}|all)/[0-9a-f]{64}\.parquet$")]
    prefix: Annotated[str, Field(pattern=r"^([0-9a-f]{2})?$")]
    bytes: Count
    rows: Count
    columns: Hash
    suites: tuple[Name, Name]
    days: tuple[Name, Name]


class Manifest(RecordPart):
    """replaced: object -> the manifest that replaced it."""

    version: Literal[1] = 1
    number: Count = 0
    tables: tuple[Table, ...] = ()
    replaced: Annotated[dict[Replaced, Count], Field(default_factory=dict)]
    left_out: Count = 0
    sentences: Annotated[tuple[Sentence, ...], Field(max_length=LeftOut.MAX_SENTENCES)] = ()


def manifests(objects: Objects) -> dict[int, Listed]:
    listed = ((MANIFEST.fullmatch(one.name), one) for one in objects.list("manifests/"))
    return {int(name[1]): one for name, one in listed if name}


def newest(objects: Objects, listed: dict[int, Listed] | None = None) -> Manifest:
    listed = manifests(objects) if listed is None else listed
    if not listed:
        return Manifest()
    try:
        return Manifest.model_validate_json(objects.get(listed[max(listed)].name))
    except ValidationError as error:
        raise ValueError(f"{listed[max(listed)].name} is no manifest: {first_problem(error)}") from None


def tail_of(objects: Objects, prefix: str = "") -> list[Listed]:
    """Returns the segments. A reader takes the manifest after this: what was folded in between is then in
    `replaced`."""
    listed = objects.list(f"segments/{prefix}/" if prefix else "segments/")
    return [one for one in listed if SEGMENT.fullmatch(one.name)]


@contextmanager
def scanning(objects: Objects, tables: Sequence[Table]) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """Yields a connection, and SQL that reads the tables if there are any."""
    config = {"memory_limit": MEMORY_LIMIT, "temp_directory": ""}
    with duckdb.connect(config=config) as connection:
        connection.execute("SET enable_progress_bar = false")
        sizes, alike = {one.name: one.bytes for one in tables}, len({one.columns for one in tables}) < 2
        try:
            yield connection, scan_tables(connection, objects, sizes, alike=alike)[0] if tables else ""
        except duckdb.Error as error:
            raise ValueError(f"a table of {objects.url} cannot be read: {sentence_of(error)}") from None


def without_held(objects: Objects, tables: Sequence[Table], names: list[str]) -> list[str]:
    """Returns the segments that no table holds. A slow writer may put a segment again after it was folded."""
    if not names or not tables:
        return names
    keys = {(int(one[2][:15], 16), int(one[3])): one[0] for one in map(SEGMENT.fullmatch, names) if one}
    with scanning(objects, tables) as (connection, scan):
        connection.execute("CREATE TABLE asked (cell BIGINT, attempt BIGINT)")
        connection.execute(
            "INSERT INTO asked SELECT unnest(?::BIGINT[]), unnest(?::BIGINT[])",
            [[cell for cell, _ in keys], [attempt for _, attempt in keys]],
        )
        held = connection.execute(f"SELECT * FROM asked SEMI JOIN {scan} USING (cell, attempt)").fetchall()
    over = {keys[key] for key in held}
    return [name for name in names if name not in over]


def entries_of(objects: Objects, tables: Sequence[Table]) -> Iterator[Entry]:
    """Yields what was folded into the tables, in the order in which it was folded."""
    for table in tables:
        with scanning(objects, [table]) as (connection, scan):
            columns = {"cell_key": "''", "attempt": "0", "line": "''", "sample_seconds": "[]"}
            found = ", ".join(f"coalesce({name}, {nothing})" for name, nothing in columns.items())
            connection.execute(f"SELECT {found} FROM {scan}")
            while rows := connection.fetchmany(1_000):
                for key, attempt, line, seconds in rows:
                    yield Entry(key, attempt, line.encode(), np.array(seconds, "<f8").tobytes())


def compact_store(objects: Objects, prefix: str = "") -> tuple[int, list[str]]:
    """Folds until no segment of the prefix is left, then sweeps. Returns the number of folded segments, and
    sentences about what was left out."""
    left_out, count = LeftOut(), 0
    with suppress(FileNotFoundError):  # another fold was first, so long ago that what it replaced is deleted
        while folded := fold(objects, prefix, left_out):
            count += folded
    sweep(objects)
    return count, left_out.first


def fold(objects: Objects, prefix: str, left_out: LeftOut) -> int:
    """Folds up to FOLD_BYTES. Returns the number of segments, 0 if there are none or another fold was
    first."""
    segments = tail_of(objects, prefix)
    before = newest(objects)
    began, size, names = before.number, 0, []
    for segment in segments:
        if segment.name not in before.replaced and size <= FOLD_BYTES:
            size += segment.size
            names.append(segment.name)
    if not names:
        return 0
    absorbed: list[Table] = []
    for one in sorted(before.tables, key=lambda one: one.bytes):
        # a table takes in those that are not much larger: they stay few, and a row is seldom written again
        small = one.bytes <= 2 * max(size, SMALL_BYTES) and size + one.bytes <= TABLE_BYTES
        if one.prefix == prefix and small:
            absorbed.append(one)
            size += one.bytes
    about = [one for one in before.tables if not prefix or one.prefix in ("", prefix)]
    new, wrong = without_held(objects, about, names), LeftOut()
    table = None
    if not new:
        absorbed = []
    else:
        with tempfile.TemporaryDirectory(prefix="mrb-fold-") as scratch:
            table = _table(objects, prefix, new, absorbed, Path(scratch), wrong)
    for_good = {*names, *(one.name for one in absorbed)}
    while True:
        listed = manifests(objects)
        if max(listed, default=0) != before.number:
            before = newest(objects, listed)
            unknown = any(n not in listed for n in range(began + 1, before.number + 1))
            if unknown or not for_good.isdisjoint(before.replaced):
                return 0  # another fold of this prefix was first, or may have been
        if table is not None and not objects.exists(table.name):
            return 0  # this fold was stopped for so long that its table was swept
        over = {name: n for name, n in before.replaced.items() if n not in listed}
        # before they leave the manifest, else a segment would be tail again
        objects.delete(over)
        number = before.number + 1
        kept = tuple(one for one in before.tables if one not in absorbed)
        after = Manifest(
            number=number,
            tables=(*kept, table) if table else kept,
            replaced={name: n for name, n in before.replaced.items() if name not in over}
            | dict.fromkeys(sorted(for_good), number),
            left_out=before.left_out + wrong.count,
            sentences=(*before.sentences, *wrong.first)[: LeftOut.MAX_SENTENCES],
        )
        name = f"manifests/{number:012d}.json"
        data = after.model_dump_json().encode()
        if objects.put_new(name, data) or objects.get(name) == data:
            break
    for sentence in wrong.first:
        left_out.add(sentence)
    return len(names)


def _table(
    objects: Objects, prefix: str, names: list[str], absorbed: list[Table], scratch: Path, wrong: LeftOut
) -> Table | None:
    """Validates segments, and writes and puts a table with them and the absorbed tables."""
    old = [one for one in absorbed if one.columns != COLUMNS_HASH]  # their rows are made again
    refused: set[str] = set()

    def tell(segment: str, sentence: str) -> None:
        wrong.add(one_line(sentence, 300))  # a manifest takes no other
        refused.add(segment)

    entries = chain(fetched(objects, names, tell), entries_of(objects, old))
    rows, out = _rows(validated(entries, tell), scratch), scratch / "out.parquet"
    for name in refused & set(names):
        objects.put_new(f"refused/{name}", objects.get(name))
    current = [one for one in absorbed if one not in old]
    with scanning(objects, current) as (connection, scan):
        select = select_rows(rows, (*COLUMNS, *OWN)) + (
            f" UNION ALL BY NAME SELECT * FROM {scan}" if scan else ""
        )
        # with a random word no table has the name of an older one, which may be about to be deleted
        form = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP}"
        unique = f"KV_METADATA {{fold: {quoted(secrets.token_hex(16))}}}"
        connection.execute(f"COPY ({select}) TO {quoted(out)} ({form}, {unique})")
        about = (
            "count(*), min(suite), max(suite), min(created_at)::DATE::VARCHAR, max(created_at)::DATE::VARCHAR"
        )
        found = connection.execute(f"SELECT {about} FROM read_parquet({quoted(out)})").fetchone()
    assert found is not None
    count, *ends = found
    if not count:
        return None
    data = out.read_bytes()
    name = f"tables/{prefix or 'all'}/{hashlib.sha256(data).hexdigest()}.parquet"
    objects.put_new(name, data)
    return Table(
        name=name, prefix=prefix, bytes=len(data), rows=count, columns=COLUMNS_HASH,
        suites=(ends[0], ends[1]), days=(ends[2], ends[3]),
    )  # fmt: skip


def _rows(found: Iterable[tuple[Entry, Record]], scratch: Path) -> Path:
    """Writes JSON lines for `select_rows` with the columns of OWN."""
    with (path := scratch / "rows.jsonl").open("wb") as file:
        for entry, record in found:
            own = {
                "cell": int(entry.cell_key[:15], 16),
                "attempt": entry.attempt,
                "line": entry.line.decode(),
                "sample_seconds": np.frombuffer(entry.samples, "<f8").tolist(),
            }
            file.write(record.line()[:-2] + b"," + json.dumps(own).encode()[1:] + b"\n")
    return path


def sweep(objects: Objects) -> None:
    """Deletes old manifests, tables that no manifest ever named, and old leases."""
    listed = manifests(objects)
    if not listed:
        return
    manifest = newest(objects, listed)
    now = listed[max(listed)].modified
    late = now - timedelta(seconds=KEPT_SECONDS)
    # a manifest is old if the next one is: until then readers took it
    old = [listed[n].name for n, after in pairwise(sorted(listed)) if listed[after].modified < late]
    known = {one.name for one in manifest.tables} | manifest.replaced.keys()
    litter = [one.name for one in objects.list("tables/") if one.name not in known and one.modified < late]
    left = now - timedelta(seconds=LEASE_SECONDS)
    leases = [one.name for one in objects.list("leases/") if one.modified < left]
    objects.delete([*old, *litter, *leases])


def check_tables(objects: Objects, prefix: str = "") -> tuple[int, list[str]]:
    """Holds each record of the tables to its samples again, and each row to its record. Returns the number of
    records, and sentences about those that are wrong."""
    tables = [one for one in newest(objects).tables if prefix in ("", one.prefix)]
    sentences: list[str] = []

    def tell(segment: str, sentence: str) -> None:
        sentences.append(sentence)

    for table in tables:
        if hashlib.sha256(objects.get(table.name)).hexdigest() not in table.name:
            sentences.append(f"{table.name} was changed: its sha256 is another")
        with tempfile.TemporaryDirectory(prefix="mrb-check-") as scratch:
            rows = _rows(validated(entries_of(objects, [table]), tell), Path(scratch))
            if table.columns == COLUMNS_HASH:
                with scanning(objects, [table]) as (connection, scan):
                    made = f"({select_rows(rows, (*COLUMNS, *OWN))})"
                    row = "SELECT record_id, sha256(whole::VARCHAR) FROM"  # rows may not fit in memory
                    other = connection.execute(f"{row} {scan} whole EXCEPT ALL {row} {made} whole").fetchall()
                sentences += (f"{table.name}: the row of {one} is not that of its record" for one, _ in other)
    return sum(table.rows for table in tables), sentences
