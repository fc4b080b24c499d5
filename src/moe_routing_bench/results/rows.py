"""A local copy of a store on a URL that holds only Parquet files: what a query needs, in 1/40 of the bytes.

    DIR/rows-<number>.parquet     rows as in parquet.py, from records that were verified against their samples
    DIR/index.sqlite              the commits of each file, the stamp of each file, and what was left out

A file is never changed. Sixteen files of one level become one file of the next level, so 10^8 records need
about sixty files, and each row is written at most five times. If a file does not match its stamp
(parquet.py), it was not made here. Its records are left out and fetched again at the next update.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import duckdb

from moe_routing_bench.core.whole_files import written_whole
from moe_routing_bench.results.parquet import COLUMNS_HASH, quoted, scan, select_rows, stamp_of, write_rows
from moe_routing_bench.results.read import RECORDS, LeftOut, read_records, session_folders

INDEX = "index.sqlite"
AT_ONCE = 16  # files of one level that become one
MEMORY_LIMIT = "1GB"  # while files are written
TABLES = """
CREATE TABLE IF NOT EXISTS commits (name TEXT PRIMARY KEY, etag TEXT, file INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files
    (file INTEGER PRIMARY KEY, level INTEGER, rows INTEGER, stamp TEXT, columns TEXT);
CREATE TABLE IF NOT EXISTS left_out (file INTEGER, lines INTEGER, sentence TEXT);
"""


def is_rows_copy(folder: Path) -> bool:
    return folder.name.endswith("-rows") and (folder / INDEX).is_file()


def usable(folder: Path, left_out: LeftOut) -> list[Path]:
    """Returns the files to read. left_out gets what is missing in them."""
    with closing(sqlite3.connect(f"file:{folder / INDEX}?mode=ro", uri=True)) as index:
        changed = dict(_changed(folder, index))
        for lines, sentence in index.execute("SELECT lines, sentence FROM left_out ORDER BY rowid"):
            left_out.add(sentence, lines)
        paths = [_path(folder, file) for (file,) in index.execute("SELECT file FROM files ORDER BY file")]
    left_out.remarks += (
        f"{path.name} was changed: its {rows:,} records are left out until the store is read again"
        for path, rows in changed.items()
    )
    return [path for path in paths if path not in changed]


def forget_changed(folder: Path, index: sqlite3.Connection) -> None:
    """Forgets files that do not match their stamp, so that their commits are fetched again. It deletes files
    that the index does not name."""
    with index:
        for path, _ in _changed(folder, index):
            for table in ("commits", "files", "left_out"):
                index.execute(f"DELETE FROM {table} WHERE file = ?", [_number(path)])
    known = {_path(folder, file) for (file,) in index.execute("SELECT file FROM files")}
    for path in folder.glob("rows-*"):
        if path not in known:
            path.unlink()


def add_rows(folder: Path, index: sqlite3.Connection, names: list[tuple[str, str]], lines: Path) -> None:
    """Writes the records of the results folder `lines` into a file for the commits (name, etag)."""
    file = _next(index)
    path, left_out = _path(folder, file), LeftOut()
    written = lines / "rows.jsonl"
    records = (
        record
        for session, place in session_folders(lines).items()
        for record in read_records(place / RECORDS, session, left_out)
    )
    write_rows(written, records)
    rows = _write(select_rows(written), path)
    with index:
        note_file(index, path, level=0, rows=rows)
        index.executemany(
            "INSERT INTO commits VALUES (?, ?, ?)", [(name, etag, file) for name, etag in names]
        )
        first = left_out.first + left_out.remarks
        more = left_out.count - len(left_out.first)
        index.executemany(
            "INSERT INTO left_out VALUES (?, ?, ?)",
            [(file, int(n < len(left_out.first)) + more * (n == 0), one) for n, one in enumerate(first)],
        )
    while _merged(folder, index):
        pass


def note_file(index: sqlite3.Connection, path: Path, *, level: int, rows: int) -> None:
    stamp = str(stamp_of(path))
    index.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?)", [_number(path), level, rows, stamp, COLUMNS_HASH]
    )


def _merged(folder: Path, index: sqlite3.Connection) -> bool:
    """Merges sixteen files of a level into one of the next level, if there are sixteen."""
    levels = "SELECT level FROM files GROUP BY level HAVING count(*) >= ? ORDER BY level LIMIT 1"
    if (row := index.execute(levels, [AT_ONCE]).fetchone()) is None:
        return False
    (level,) = row
    old = [file for (file,) in index.execute("SELECT file FROM files WHERE level = ?", [level])]
    file = _next(index)
    rows = _write(f"SELECT * FROM {scan([_path(folder, one) for one in old])}", _path(folder, file))
    with index:
        note_file(index, _path(folder, file), level=level + 1, rows=rows)
        for one in old:
            for table in ("commits", "left_out"):
                index.execute(f"UPDATE {table} SET file = ? WHERE file = ?", [file, one])
            index.execute("DELETE FROM files WHERE file = ?", [one])
    for one in old:
        _path(folder, one).unlink(missing_ok=True)
    return True


def _write(select: str, path: Path) -> int:
    with (
        written_whole(path) as part,
        duckdb.connect(config={"memory_limit": MEMORY_LIMIT, "temp_directory": ""}) as connection,
    ):
        connection.execute("SET preserve_insertion_order = false; SET enable_progress_bar = false")
        copy = f"COPY ({select}) TO {quoted(part)} (FORMAT parquet, COMPRESSION zstd)"
        row = connection.execute(copy).fetchone()  # how many rows it wrote
    return int(row[0]) if row else 0


def _changed(folder: Path, index: sqlite3.Connection) -> list[tuple[Path, int]]:
    """Returns (file, rows) of files that were changed or lack a current column."""
    listed = index.execute("SELECT file, rows, stamp, columns FROM files").fetchall()
    return [
        (path, rows)
        for file, rows, stamp, columns in listed
        if str(stamp_of(path := _path(folder, file))) != stamp or columns != COLUMNS_HASH
    ]


def _next(index: sqlite3.Connection) -> int:
    (last,) = index.execute("SELECT max(file) FROM files").fetchone()
    return (last or 0) + 1


def _path(folder: Path, file: int) -> Path:
    return folder / f"rows-{file}.parquet"


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("rows-"))
