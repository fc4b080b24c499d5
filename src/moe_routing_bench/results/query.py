"""SQL over a results folder: the views `records` and `latest`, the tables `trainings` and `left_out`.

Rows come from the Parquet copies of parquet.py, from lines that are newer than the copies, or from the tables
of a store (tables.py). A query reads copies of local files in a private folder, which is deleted with the
connection. It cannot open another file, use the network for more than those tables or change settings, so a
query that finds a way to write changes nothing. If copying would take long, the query reads the files
themselves in a process that cannot write to any file. Its time, memory, rows and text are limited.

A query reads the columns that it names from all rows, so its time grows linearly:
`measurements/fleet/growth.json` shows it for 10^5 to 10^7 records. A median needs 8 bytes per row. `latest`
needs a few bytes per cell and the records of cells that were measured more than once.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import duckdb

from moe_routing_bench.conformance import outside
from moe_routing_bench.core.names import MistakeError
from moe_routing_bench.core.text import one_line
from moe_routing_bench.core.whole_files import written_whole
from moe_routing_bench.results import trainings
from moe_routing_bench.results.folder import environments
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.parquet import (
    COLUMNS,
    SMALL_TAIL,
    Source,
    fold,
    glob_free,
    quoted,
    scan,
    select_rows,
    sources,
    write_rows,
)
from moe_routing_bench.results.read import TRAININGS, LeftOut, is_plain_file, read_records
from moe_routing_bench.results.tables import TAIL, reading_of, scan_tables

MEMORY_LIMIT = "2GB"  # DuckDB does not count long texts in it
MAX_COPIED_BYTES = 1 << 30  # of Parquet files; copying this many takes about a second
MAX_PROCESS_BYTES = 3 << 30  # a query may add this much to the process, with what DuckDB does not count
MAX_SECONDS = 60.0
MAX_QUERY_LETTERS = 20_000
MAX_ROWS = 1_000_000
MAX_ANSWER_LETTERS = 1 << 28
ROWS_OF_A_PART = 1_000
# the nodes of a query that only reads, as DuckDB's parser names them; COPY in a WITH is COPY_QUERY_NODE
READING_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
ONE_SELECT = (
    "a query is one statement that begins with SELECT, WITH, FROM, DESCRIBE or SUMMARIZE, "
    "for example: SELECT impl, median(median_ms) FROM records GROUP BY impl"
)
# Most cells were measured once. The others are found with a few bytes per cell; two cells with the same hash
# do no harm. Only the records of these cells are compared.
LATEST = """CREATE VIEW latest AS
WITH again(cell) AS MATERIALIZED (
    SELECT hash(cell_key) FROM records GROUP BY hash(cell_key)
    HAVING min(created_at) <> max(created_at) OR min(hash(session)) <> max(hash(session)))
SELECT * FROM records WHERE hash(cell_key) NOT IN (SELECT cell FROM again) OR record_id IN (
    SELECT arg_max(record_id, (created_at, record_id)) FROM records
    WHERE hash(cell_key) IN (SELECT cell FROM again)
    GROUP BY cell_key, impl, layout, router, layer, role)"""
Answer: TypeAlias = tuple[list[str], list[tuple[Any, ...]], list[tuple[Any, ...]]]
# more columns of `records`; they come from the environment of a record
JOINED = (("machine", "VARCHAR"), ("source_commit", "VARCHAR"), ("source_dirty", "BOOLEAN"))
# texts that a spreadsheet may take for a formula, in full width too, and texts that begin with '
FORMULA = r"^(\s*[=+@\x{FF1D}\x{FF0B}\x{FF20}\x{FF0D}-]|[\t\r\n'])"


@contextmanager
def views(folder: Path | str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Opens a locked connection with the views, for our own queries. `SELECT * FROM left_out` shows the lines
    that are no records."""
    with _locked(folder) as (connection, _):
        yield connection


@contextmanager
def connect(folder: Path | str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Opens a connection for a user's queries. If the results are large, this process cannot write to any
    file until the connection is closed, so `run_query` opens it in another process."""
    with _locked(folder) as (connection, copied), nullcontext() if copied else _no_writes():
        yield connection


@contextmanager
def _locked(folder: Path | str) -> Iterator[tuple[duckdb.DuckDBPyConnection, bool]]:
    """Yields a connection and whether it reads only copies."""
    with tempfile.TemporaryDirectory(prefix="mrb-query-") as private:
        connection, parquets, tables = _open(Path(folder).resolve(), Path(private))
        names = [*tables, *(name for path in parquets for name in {str(path), glob_free(path)})]
        allowed = ", ".join(map(quoted, names))
        for setting in (
            f"allowed_paths = [{allowed}]",
            "enable_external_access = false",
            "python_enable_replacements = false",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")
        with connection:
            yield connection, all(path.is_relative_to(private) for path in parquets)


def run_query(
    folder: Path | str, sql: str, left_out: LeftOut | None = None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Returns the column names and rows of one SELECT. A ValueError says in one sentence why it failed."""
    if len(sql) > MAX_QUERY_LETTERS:
        raise ValueError(f"the query has {len(sql):,} letters, over the limit of {MAX_QUERY_LETTERS:,}")
    if re.search("[\ud800-\udfff]", sql):
        raise ValueError("the query holds bytes that are not UTF-8 text")
    with _locked(folder) as (connection, copied):
        answer = _answer(connection, sql) if copied else None
    columns, rows, noted = answer or _answer_of_a_process(folder, sql)
    if left_out is not None:
        _add_left_out(noted, left_out)
    return columns, rows


def _answer(connection: duckdb.DuckDBPyConnection, sql: str) -> Answer:
    """Returns column names, rows, and the content of the table `left_out`."""
    try:
        statement = _one_select(connection, sql)
        with _limited(connection):
            connection.execute(statement)
            columns = [column[0] for column in connection.description or ()]
            rows = _rows(connection)
    except duckdb.InterruptException:
        raise ValueError(f"the query was stopped after {MAX_SECONDS:g} s; ask for less") from None
    except duckdb.OutOfMemoryException as error:
        raise ValueError(f"the query needs too much memory: {sentence_of(error)}") from None
    except MemoryError:
        raise ValueError("the query needs too much memory; ask for less") from None
    except duckdb.Error as error:
        if "bad_alloc" in str(error):  # seen while DuckDB made the message of another error
            raise ValueError("the query needs too much memory; ask for less") from None
        raise ValueError(sentence_of(error)) from None
    return columns, rows, connection.execute("SELECT lines, sentences FROM left_out").fetchall()


class _Part(outside.Answer):
    """A part of an answer that a process sends: its head, or some rows, by _to_json."""

    columns: tuple[str, ...] = ()
    noted: tuple[Any, ...] = ()
    rows: tuple[Any, ...] = ()


def _answer_of_a_process(folder: Path | str, sql: str) -> Answer:
    """Answers in another process, because the limit on writing holds for a whole process."""
    try:
        parts = outside.answers(
            _parts_of_answer, str(Path(folder).resolve()), sql, answer=_Part, seconds=10 * MAX_SECONDS,
            most_bytes=8 * MAX_ANSWER_LETTERS,
        )  # fmt: skip
        head = next(parts)
        rows = [tuple(map(_from_json, row)) for part in parts for row in part.rows]
        return [*head.columns], rows, [tuple(map(_from_json, row)) for row in head.noted]
    except outside.IsolatedError as error:
        raise ValueError(f"the query failed: {error}; ask for less") from None


def _parts_of_answer(folder: str, sql: str) -> Iterator[dict[str, Any]]:
    try:
        with _locked(folder) as (connection, _), _no_writes():
            columns, rows, noted = _answer(connection, sql)
    except ValueError as sentence:
        raise MistakeError(str(sentence)) from None
    yield {"columns": columns, "noted": [[*map(_to_json, row)] for row in noted]}
    for start in range(0, len(rows), ROWS_OF_A_PART):
        yield {"rows": [[*map(_to_json, row)] for row in rows[start : start + ROWS_OF_A_PART]]}


def _to_json(value: Any) -> Any:
    """Returns numbers and texts as they are, else the name of the type with what is in the value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return {kind: [*map(_to_json, value)]}
    if isinstance(value, dict):
        return {kind: [[_to_json(key), _to_json(inner)] for key, inner in value.items()]}
    if isinstance(value, timedelta):
        return {kind: [value.days, value.seconds, value.microseconds]}
    return {kind: value.hex() if isinstance(value, bytes) else str(value)}


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    return FROM_JSON[kind](inside)


# how a value is read again, by the name of its type
FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "list": lambda items: [*map(_from_json, items)],
    "tuple": lambda items: tuple(map(_from_json, items)),
    "dict": lambda pairs: {_from_json(key): _from_json(inner) for key, inner in pairs},
    "bytes": bytes.fromhex,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": clock_time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "Decimal": Decimal,
    "UUID": UUID,
}


def _one_select(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    """Returns the statement if every part of it only reads."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ValueError(ONE_SELECT)
    row = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone()
    parts = [json.loads(row[0])] if row else []
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            kind = part.get("type")
            if part.get("error") or (
                isinstance(kind, str) and kind.endswith("_NODE") and kind not in READING_NODES
            ):
                raise ValueError(ONE_SELECT)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return statements[0]


def _rows(connection: duckdb.DuckDBPyConnection) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    letters = 0
    while some := connection.fetchmany(10_000):
        rows += some
        letters += sum(len(cell) for row in some for cell in row if isinstance(cell, (str, bytes, list)))
        if len(rows) > MAX_ROWS:
            raise ValueError(f"the answer has over {MAX_ROWS:,} rows; add a LIMIT or use mrb results export")
        if letters > MAX_ANSWER_LETTERS:
            raise ValueError(f"the answer has over {MAX_ANSWER_LETTERS:,} letters; ask for less")
    return rows


@contextmanager
def _limited(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Stops a query after MAX_SECONDS, and refuses memory beyond MAX_PROCESS_BYTES."""
    timer = threading.Timer(MAX_SECONDS, connection.interrupt)
    timer.daemon = True
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = now + MAX_PROCESS_BYTES
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    except OSError:  # not on this system
        pass
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _no_writes() -> Iterator[None]:
    """Stops this process from writing to files. Python ignores the signal, so the write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def export_parquet(folder: Path | str, target: Path | str) -> int:
    """Writes all records into one Parquet file with the columns of `records`, and returns their number."""
    return _export(folder, Path(target), "*", "FORMAT parquet, COMPRESSION zstd")


def export_csv(folder: Path | str, target: Path | str) -> int:
    """Writes all records as CSV, with lists and maps as JSON. A ' stands before text that a spreadsheet may
    take for a formula or that begins with a '."""
    columns = []
    for name, sql_type in (*((column.name, column.type) for column in COLUMNS), *JOINED):
        cell = f'"{name}"'
        if "(" in sql_type or "[" in sql_type:
            cell = f"to_json({cell})::VARCHAR"
        elif sql_type == "VARCHAR":
            cell = f"if(regexp_matches({cell}, {quoted(FORMULA)}), chr(39), '') || {cell}"
        columns.append(f'{cell} AS "{name}"')
    return _export(folder, Path(target), ", ".join(columns), "FORMAT csv, HEADER")


def _export(folder: Path | str, target: Path, columns: str, form: str) -> int:
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent} to write {target.name} into")
    connection, *_ = _open(Path(folder).resolve(), None)
    try:
        with written_whole(target) as part:
            connection.execute(f"COPY (SELECT {columns} FROM records) TO {quoted(part)} ({form})")
        row = connection.execute("SELECT count(*) FROM records").fetchone()
    except duckdb.Error as error:
        raise ValueError(sentence_of(error)) from None
    finally:
        connection.close()
    return int(row[0]) if row else 0


def _open(folder: Path, private: Path | None) -> tuple[duckdb.DuckDBPyConnection, list[Path], list[str]]:
    """Opens a connection that is not locked yet, and returns the Parquet files and the tables of a store that
    it reads. If the folder `private` is given and the files are small enough, they are copies in it."""
    connection = duckdb.connect(
        config={
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": "",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
    )
    connection.execute("CREATE TABLE left_out (session VARCHAR, lines BIGINT, sentences VARCHAR[])")
    columns = ", ".join(f'"{column.name}" {column.type}' for column in COLUMNS)
    connection.execute(f"CREATE TABLE fresh ({columns})")
    about = LeftOut()
    tables, far = list[str](), ""
    if (reading := reading_of(folder)) is not None:
        parquets, manifest = [folder / TAIL], reading.manifest
        about = LeftOut(manifest.left_out, list(manifest.sentences), list(reading.remarks))
        if manifest.tables:
            far, tables = scan_tables(connection, Objects(reading.url), manifest.tables)
    else:
        parquets = [
            source.parquet
            for given in sources(connection, folder, about)
            if (source := _load(connection, given)).cover
        ]
    _note_left_out(connection, "", about)
    if private is not None and sum(path.stat().st_size for path in parquets) <= MAX_COPIED_BYTES:
        parquets = [_copied(path, private / f"{n}.parquet") for n, path in enumerate(parquets)]
    joined = ", ".join(f"{name} {sql_type}" for name, sql_type in JOINED)
    connection.execute(f"CREATE TABLE environments (environment VARCHAR, {joined})")
    if known := [(key, *_joined(document, machine)) for key, document, machine in environments(folder)]:
        connection.executemany("INSERT INTO environments VALUES (?, ?, ?, ?)", known)
    names = ", ".join(f'"{column.name}"' for column in COLUMNS)
    rows = f"SELECT {names} FROM fresh"
    if parquets:
        rows += f" UNION ALL SELECT {names} FROM {scan(parquets)}"
    if far:  # a table of another version may lack a column, and anybody may have written one
        typed = ", ".join(f'"{column.name}"::{column.type} AS "{column.name}"' for column in COLUMNS)
        rows = f"SELECT {typed} FROM ({rows} UNION ALL BY NAME SELECT * FROM {far})"
    try:
        connection.execute(
            f"CREATE VIEW records AS SELECT r.*, {', '.join(name for name, _ in JOINED)} FROM ({rows}) r "
            "LEFT JOIN environments e ON r.environment = e.environment"
        )
    except duckdb.Error as error:
        what = "read the store again" if far else "delete the records.parquet files: they are only copies"
        raise ValueError(f"{sentence_of(error)}; {what}") from None
    connection.execute(LATEST)
    _add_trainings(connection, folder)
    return connection, parquets, tables


def _add_trainings(connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Adds the table `trainings` if the folder holds training runs."""
    if not is_plain_file(folder / TRAININGS):
        return
    left_out = LeftOut()
    rows = trainings.rows(folder, left_out)
    columns = ", ".join(f'"{name}" {kind}' for name, kind in trainings.COLUMNS.items())
    connection.execute(f"CREATE TABLE trainings ({columns}, max_violation DOUBLE)")
    if rows:
        places = ", ".join("?" for _ in rows[0])
        connection.executemany(f"INSERT INTO trainings VALUES ({places})", rows)
    if left_out.count:
        connection.execute("INSERT INTO left_out VALUES ('', ?, ?)", [left_out.count, left_out.first])


def _joined(document: dict[str, Any], machine: dict[str, Any]) -> tuple[str, str | None, bool | None]:
    """Returns the values of JOINED. Anybody may have written the document. Older ones do not name a
    commit."""
    source = document.get("source")
    given = source if isinstance(source, dict) else {}
    commit, dirty = given.get("commit"), given.get("dirty")
    known = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40,64}", commit) and isinstance(dirty, bool)
    return one_line(machine["name"], 300), commit if known else None, dirty if known else None


def _load(connection: duckdb.DuckDBPyConnection, source: Source) -> Source:
    """Adds new lines to the Parquet copy if they are many or the file is finished, else to `fresh`."""
    if not source.is_current and (source.size - source.start > SMALL_TAIL or source.settled):
        try:
            source = fold(connection, source)
        except (OSError, duckdb.IOException, duckdb.PermissionException):
            pass  # in a read-only folder the lines are parsed each time
    left_out = source.left_out_before()
    if not source.is_current:
        with tempfile.TemporaryDirectory() as scratch:
            rows = Path(scratch) / "rows.jsonl"
            write_rows(rows, read_records(source.lines, source.session, left_out, start=source.start))
            connection.execute(f"INSERT INTO fresh {select_rows(rows)}")
    _note_left_out(connection, source.session, left_out)
    return source


def _note_left_out(connection: duckdb.DuckDBPyConnection, session: str, left_out: LeftOut) -> None:
    for lines, sentences in ((left_out.count, left_out.first), (0, left_out.remarks)):
        if sentences:
            connection.execute("INSERT INTO left_out VALUES (?, ?, ?)", [session, lines, sentences])


def _copied(path: Path, target: Path) -> Path:
    shutil.copyfile(path, target, follow_symlinks=False)
    return target


def _add_left_out(noted: list[tuple[Any, ...]], left_out: LeftOut) -> None:
    for lines, sentences in noted:
        if not lines:
            left_out.remarks += sentences
            continue
        left_out.add(sentences[0], lines)
        for sentence in sentences[1:]:
            left_out.add(sentence, 0)


def sentence_of(error: Exception) -> str:
    """Returns DuckDB's message without the copy of the query below it."""
    text = re.split(r"\n\s*\n|\nLINE ", str(error))[0]
    if "Traceback (most recent call last)" in text:  # the store did not give a range
        text = text.splitlines()[-1]
    return one_line(text, 500) or "the query failed"
