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

import duckdb
from pydantic import ValidationError

from moe_routing_bench.core.text import first_problem
from moe_routing_bench.fleet.segments import SEGMENT, Entry, Refused, cell_of, fetched, validated
from moe_routing_bench.results.objects import Listed, Objects
from moe_routing_bench.results.parquet import COLUMNS, COLUMNS_HASH, Column, quoted, row_line, select_rows
from moe_routing_bench.results.query import MEMORY_LIMIT, sentence_of
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.tables import Manifest, Table, scan_tables

FOLD_BYTES = 64 << 20  # of segments, as they lie there, in one fold
SMALL_BYTES, TABLE_BYTES = 1 << 20, 1 << 28  # smaller tables are merged; none grows beyond the second
KEPT_SECONDS, LEASE_SECONDS = 3600, 86_400
ROW_GROUP = 40_960  # rows; a row with its line and samples has about 4 KB
MANIFEST = re.compile(r"manifests/([0-9]{12})\.json")
# `cell` is the beginning of the cell key as a number: what tables hold is found by 8 bytes a record
OWN = {"cell": "BIGINT", "attempt": "BIGINT", "line": "VARCHAR", "sample_seconds": "DOUBLE[]"}


def newest(objects: Objects) -> tuple[Manifest, dict[int, Listed]]:
    """Returns the newest manifest, and all that there are by number."""
    found = ((MANIFEST.fullmatch(one.name), one) for one in objects.list("manifests/"))
    listed = {int(name[1]): one for name, one in found if name}
    if not listed:
        return Manifest(), listed
    name = listed[max(listed)].name
    try:
        return Manifest.model_validate_json(objects.get(name)), listed
    except ValidationError as error:
        raise ValueError(f"{name} is no manifest: {first_problem(error)}") from None


def state_of(objects: Objects, prefix: str = "") -> tuple[list[Listed], Manifest]:
    """Returns the segments, and the newest manifest. What is folded between these requests is then in
    `replaced`."""
    segments = [one for one in objects.list(f"segments/{prefix}") if SEGMENT.fullmatch(one.name)]
    return segments, newest(objects)[0]


@contextmanager
def scanning(
    objects: Objects, tables: Sequence[Table] = ()
) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """Yields a connection, and SQL that reads the tables if there are any."""
    with duckdb.connect(config={"memory_limit": MEMORY_LIMIT, "temp_directory": ""}) as connection:
        connection.execute("SET enable_progress_bar = false")
        try:
            yield connection, scan_tables(connection, objects, tables)[0] if tables else ""
        except (duckdb.Error, ValidationError) as error:
            raise ValueError(f"a table of {objects.url} cannot be read: {sentence_of(error)}") from None


def without_held(objects: Objects, tables: Sequence[Table], names: list[str]) -> list[str]:
    """Returns the segments that no table holds. A slow writer may put a segment again after it was folded."""
    if not names or not tables:
        return names
    keys = [(int(cell_key[:15], 16), attempt) for cell_key, attempt in map(cell_of, names)]
    with scanning(objects, tables) as (connection, scan):
        asked = "CREATE TABLE asked AS SELECT unnest(?::BIGINT[]) AS cell, unnest(?::BIGINT[]) AS attempt"
        connection.execute(asked, [list(one) for one in zip(*keys, strict=True)])
        held = connection.execute(f"SELECT * FROM asked SEMI JOIN {scan} USING (cell, attempt)").fetchall()
    over = set(held)
    return [name for name, key in zip(names, keys, strict=True) if key not in over]


def entries_of(objects: Objects, tables: Sequence[Table]) -> Iterator[Entry]:
    """Yields what was folded into the tables, in the order in which it was folded."""
    for table in tables:
        with scanning(objects, [table]) as (connection, scan):
            connection.execute(f"SELECT {', '.join(Entry.model_fields)} FROM {scan}")
            while rows := connection.fetchmany(1_000):
                for row in rows:
                    yield Entry(**dict(zip(Entry.model_fields, row, strict=True)))


def write_table(
    connection: duckdb.DuckDBPyConnection, found: Iterable[tuple[Entry, Record]], out: Path, scan: str = ""
) -> None:
    """Writes records with their lines and samples, and the rows that `scan` reads."""
    with (lines := out.with_suffix(".jsonl")).open("wb") as file:
        for entry, record in found:
            own = entry.model_dump(exclude={"cell_key"}) | {"cell": int(entry.cell_key[:15], 16)}
            file.write(row_line(record)[:-2] + b"," + json.dumps(own).encode()[1:] + b"\n")
    columns = (*COLUMNS, *(Column(name, kind, name) for name, kind in OWN.items()))
    select = select_rows(lines, columns) + (f" UNION ALL BY NAME SELECT * FROM {scan}" if scan else "")
    # with a random word no table has the name of an older one, which may be about to be deleted
    form = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP}"
    unique = f"KV_METADATA {{fold: {quoted(secrets.token_hex(16))}}}"
    connection.execute(f"COPY ({select}) TO {quoted(out)} ({form}, {unique})")
    lines.unlink()


def compact_store(objects: Objects, prefix: str = "") -> tuple[int, list[str]]:
    """Folds until no segment of the prefix is left, then sweeps. Returns the number of folded segments, and
    sentences about what was left out."""
    count, sentences = 0, list[str]()
    with suppress(FileNotFoundError):  # another fold was first, so long ago that what it replaced is deleted
        while (folded := fold(objects, prefix))[0]:
            count += folded[0]
            sentences += folded[1]
    sweep(objects)
    return count, sentences


def fold(objects: Objects, prefix: str = "") -> tuple[int, list[str]]:
    """Folds up to FOLD_BYTES. Returns the number of segments, which is 0 if there are none or another fold
    was first, and sentences about what was left out."""
    segments, before = state_of(objects, prefix)
    began, size, names = before.number, 0, list[str]()
    for segment in segments:
        if segment.name not in before.replaced and size <= FOLD_BYTES:
            size += segment.size
            names.append(segment.name)
    if not names:
        return 0, []
    mine, absorbed, refused, table = f"tables/{prefix or 'all'}/", list[Table](), Refused(), None
    about = [one for one in before.tables if not prefix or one.name.startswith((mine, "tables/all/"))]
    if new := without_held(objects, about, names):
        for one in sorted(about, key=lambda one: one.bytes):
            # it takes in tables that are not much larger: they stay few, and rows are seldom written again
            small = one.bytes <= 2 * max(size, SMALL_BYTES) and size + one.bytes <= TABLE_BYTES
            if one.name.startswith(mine) and small:
                absorbed.append(one)
                size += one.bytes
        table = _table(objects, mine, new, absorbed, refused)
    over_now, deleted = {*names, *(one.name for one in absorbed)}, set[tuple[str, int]]()
    while True:
        before, listed = newest(objects)
        unknown = any(n not in listed for n in range(began + 1, before.number))
        if unknown or not over_now.isdisjoint(before.replaced):
            return 0, []  # another fold of this prefix was first, or may have been
        if table is not None and not objects.exists(table.name):
            return 0, []  # this fold was stopped for so long that its table was swept
        # they are deleted before they leave the manifest, else a segment would be tail again. That may take
        # long, and other prefixes are folded meanwhile, so the newest manifest is read once more
        if old := {one for one in before.replaced.items() if one[1] not in listed} - deleted:
            objects.delete(name for name, _ in old)
            deleted |= old
            continue
        number = before.number + 1
        kept = (one for one in before.tables if one not in absorbed)
        after = Manifest(
            number=number,
            tables=(*kept, table) if table else tuple(kept),
            replaced={name: n for name, n in before.replaced.items() if (name, n) not in deleted}
            | dict.fromkeys(sorted(over_now), number),
            left_out=before.left_out + refused.count,
            sentences=(*before.sentences, *refused.first)[: LeftOut.MAX_SENTENCES],
        )
        if objects.put_new(f"manifests/{number:012d}.json", after.model_dump_json().encode()):
            return len(names), refused.first


def _table(
    objects: Objects, mine: str, names: list[str], absorbed: list[Table], refused: Refused
) -> Table | None:
    """Validates segments, and puts a table with them and the absorbed tables."""
    old = [one for one in absorbed if one.columns != COLUMNS_HASH]  # their rows are made again
    current = [one for one in absorbed if one not in old]
    entries = chain(fetched(objects, names, refused), entries_of(objects, old))
    with (
        tempfile.TemporaryDirectory(prefix="mrb-fold-") as scratch,
        scanning(objects, current) as (connection, scan),
    ):
        write_table(connection, validated(entries, refused), out := Path(scratch, "out.parquet"), scan)
        about = "SELECT count(*), {0}(suite), {1}(suite), {0}(created_at)::DATE, {1}(created_at)::DATE FROM"
        found = connection.execute(f"{about.format('min', 'max')} read_parquet({quoted(out)})").fetchone()
        data = out.read_bytes()
    assert found is not None
    for name in refused.segments & set(names):
        objects.put_new(f"refused/{name}", objects.get(name))
    if not found[0]:
        return None
    name = f"{mine}{hashlib.sha256(data).hexdigest()}.parquet"
    objects.put_new(name, data)
    return Table(
        name=name, bytes=len(data), rows=found[0], columns=COLUMNS_HASH, suites=found[1:3],
        days=(str(found[3]), str(found[4])),
    )  # fmt: skip


def sweep(objects: Objects) -> None:
    """Deletes old manifests, tables that no manifest ever named, and old leases."""
    manifest, listed = newest(objects)
    if not listed:
        return
    now = listed[max(listed)].modified
    late = now - timedelta(seconds=KEPT_SECONDS)
    # a manifest is old if the next one is: until then readers took it
    old = [listed[n].name for n, after in pairwise(sorted(listed)) if listed[after].modified < late]
    known = {one.name for one in manifest.tables} | manifest.replaced.keys()
    litter = [one.name for one in objects.list("tables/") if one.name not in known and one.modified < late]
    left = now - timedelta(seconds=LEASE_SECONDS)
    objects.delete([*old, *litter, *(one.name for one in objects.list("leases/") if one.modified < left)])


def check_tables(objects: Objects, prefix: str = "") -> tuple[int, list[str]]:
    """Holds each record of the tables to its samples again, and each row to its record. Returns the number of
    records, and sentences about those that are wrong."""
    tables = [one for one in newest(objects)[0].tables if one.name.startswith(f"tables/{prefix}")]
    refused = Refused()
    for table in tables:
        if hashlib.sha256(objects.get(table.name)).hexdigest() not in table.name:
            refused.add(f"{table.name} was changed: its sha256 is another")
        with (
            tempfile.TemporaryDirectory(prefix="mrb-check-") as scratch,
            scanning(objects, [table]) as (connection, scan),
        ):
            found = validated(entries_of(objects, [table]), refused)
            write_table(connection, found, out := Path(scratch, "out.parquet"))
            if table.columns == COLUMNS_HASH:
                row = "SELECT record_id, sha256(whole::VARCHAR) FROM"  # rows may not fit in memory
                made = f"read_parquet({quoted(out)})"
                other = connection.execute(f"{row} {scan} whole EXCEPT ALL {row} {made} whole").fetchall()
                for one, _ in other:
                    refused.add(f"{table.name}: the row of {one} is not that of its record")
    return sum(table.rows for table in tables), refused.first
