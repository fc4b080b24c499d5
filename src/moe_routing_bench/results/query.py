"""SQL over a results folder: the views `records` and `latest`, the table `left_out`.

Rows come from the Parquet copies that flat.py keeps and, for lines newer than those, from the lines. A query
may read these files and nothing else: no other file, no network, no writing, no settings.

Cost: a query reads the columns it names of all rows, so time grows linearly: 10^8 records take about a
hundred times what `measurements/bench/results_scale.json` shows for 10^6; a median holds 8 bytes a row.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import duckdb

from moe_routing_bench.bench.status import Status
from moe_routing_bench.results.flat import (
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
from moe_routing_bench.results.lines import LeftOut, read_records
from moe_routing_bench.results.record import one_line
from moe_routing_bench.results.store import environments

MEMORY_LIMIT = "2GB"
MOST_QUERY_LETTERS = 20_000
MOST_ROWS = 1_000_000
# columns of `records` beside COLUMNS, from the environment of a record
JOINED = (("machine", "VARCHAR"), ("source_commit", "VARCHAR"), ("source_dirty", "BOOLEAN"))
# what a spreadsheet may take for a formula, in full width too; and ' itself, so that it can be undone
FORMULA = r"^(\s*[=+@\x{FF1D}\x{FF0B}\x{FF20}\x{FF0D}-]|[\t\r\n'])"


def connect(folder: Path | str) -> duckdb.DuckDBPyConnection:
    """A locked connection with the views. `SELECT * FROM left_out` shows which lines are no records."""
    connection, parquets = _open(Path(folder).resolve())
    allowed = ", ".join(quoted(name) for path in parquets for name in {str(path), glob_free(path)})
    for setting in (
        f"allowed_paths = [{allowed}]",
        "enable_external_access = false",
        "python_enable_replacements = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")
    return connection


def run_query(
    folder: Path | str, sql: str, left_out: LeftOut | None = None
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The column names and rows of one SELECT; ValueError with one sentence if it cannot be answered."""
    if len(sql) > MOST_QUERY_LETTERS:
        raise ValueError(f"the query has {len(sql):,} letters, over the limit of {MOST_QUERY_LETTERS:,}")
    if re.search("[\ud800-\udfff]", sql):
        raise ValueError("the query holds bytes that are not UTF-8 text")
    with connect(folder) as connection:
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise ValueError(
                    "a query is one statement that begins with SELECT, WITH, FROM, DESCRIBE or SUMMARIZE, "
                    "for example: SELECT impl, median(median_ms) FROM records GROUP BY impl"
                )
            connection.execute(statements[0])
            columns = [column[0] for column in connection.description or ()]
            rows = connection.fetchmany(MOST_ROWS + 1)
        except duckdb.Error as error:
            raise ValueError(_sentence(error)) from None
        if len(rows) > MOST_ROWS:
            raise ValueError(f"the answer has over {MOST_ROWS:,} rows; add a LIMIT or use mrb export")
        if left_out is not None:
            _add_left_out(connection, left_out)
    return columns, rows


def keys(folder: Path | str) -> dict[str, set[Status]]:
    """cell_key -> the states it has ended in, over all sessions: what a resumed sweep need not repeat."""
    states: dict[str, set[Status]] = {}
    known = {str(status): status for status in Status}
    with connect(folder) as connection:
        answer = connection.execute("SELECT DISTINCT cell_key, status FROM records")
        while rows := answer.fetchmany(100_000):
            for key, status in rows:
                states.setdefault(key, set()).add(known[status])
    return states


def export_parquet(folder: Path | str, target: Path | str) -> int:
    """Write all records as one Parquet file with the columns of `records`; how many."""
    return _export(folder, Path(target), "*", "FORMAT parquet, COMPRESSION zstd")


def export_csv(folder: Path | str, target: Path | str) -> int:
    """The same as CSV: lists and maps as JSON, and a ' before text that a spreadsheet may take for a formula,
    or that begins with one."""
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
    connection, _ = _open(Path(folder).resolve())
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        connection.execute(f"COPY (SELECT {columns} FROM records) TO {quoted(part)} ({form})")
        part.replace(target)
        row = connection.execute("SELECT count(*) FROM records").fetchone()
    except duckdb.Error as error:
        raise ValueError(_sentence(error)) from None
    finally:
        part.unlink(missing_ok=True)
        connection.close()
    return int(row[0]) if row else 0


def _open(folder: Path) -> tuple[duckdb.DuckDBPyConnection, list[Path]]:
    """The views, not locked yet, and the Parquet files they read."""
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
    parquets = [
        source.parquet for given in sources(connection, folder) if (source := _load(connection, given)).cover
    ]
    joined = ", ".join(f"{name} {sql_type}" for name, sql_type in JOINED)
    connection.execute(f"CREATE TABLE environments (environment VARCHAR, {joined})")
    if known := [(key, *_joined(document, machine)) for key, document, machine in environments(folder)]:
        connection.executemany("INSERT INTO environments VALUES (?, ?, ?, ?)", known)
    names = ", ".join(f'"{column.name}"' for column in COLUMNS)
    rows = f"SELECT {names} FROM fresh"
    if parquets:
        rows += f" UNION ALL SELECT {names} FROM {scan(parquets)}"
    try:
        connection.execute(
            f"CREATE VIEW records AS SELECT r.*, {', '.join(name for name, _ in JOINED)} FROM ({rows}) r "
            "LEFT JOIN environments e ON r.environment = e.environment"
        )
    except duckdb.Error as error:
        raise ValueError(
            f"{_sentence(error)}; delete the records.parquet files, they are only copies"
        ) from None
    connection.execute(
        "CREATE VIEW latest AS SELECT * FROM records WHERE record_id IN (SELECT "
        "arg_max(record_id, (created_at, record_id)) FROM records "
        "GROUP BY cell_key, impl, layout, router, layer, role)"
    )
    return connection, parquets


def _joined(document: dict[str, Any], machine: dict[str, Any]) -> tuple[str, str | None, bool | None]:
    """The values of JOINED. Anybody may have written the document; older ones do not name their source."""
    source = document.get("source")
    given = source if isinstance(source, dict) else {}
    commit, dirty = given.get("commit"), given.get("dirty")
    known = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40,64}", commit) and isinstance(dirty, bool)
    return one_line(machine["name"], 300), commit if known else None, dirty if known else None


def _load(connection: duckdb.DuckDBPyConnection, source: Source) -> Source:
    """Add what the Parquet copy lacks: to the copy if it is much or settled, else to `fresh`."""
    if not source.is_current and (source.size - source.start > SMALL_TAIL or source.settled):
        try:
            source = fold(connection, source)
        except (OSError, duckdb.IOException, duckdb.PermissionException):
            pass  # a folder that may only be read: its lines are parsed each time
    left_out = source.left_out_before()
    if not source.is_current:
        with tempfile.TemporaryDirectory() as scratch:
            rows = Path(scratch) / "rows.jsonl"
            write_rows(rows, read_records(source.lines, source.session, left_out, start=source.start))
            connection.execute(f"INSERT INTO fresh {select_rows(rows)}")
    if left_out.count:
        row = [source.session, left_out.count, left_out.first]
        connection.execute("INSERT INTO left_out VALUES (?, ?, ?)", row)
    return source


def _add_left_out(connection: duckdb.DuckDBPyConnection, left_out: LeftOut) -> None:
    for lines, sentences in connection.execute("SELECT lines, sentences FROM left_out").fetchall():
        left_out.add(sentences[0], lines)
        for sentence in sentences[1:]:
            left_out.add(sentence, 0)


def _sentence(error: duckdb.Error) -> str:
    """DuckDB's message without the picture of the query below it."""
    text = re.split(r"\n\s*\n|\nLINE ", str(error))[0]
    return one_line(text, 500) or "the query failed"
