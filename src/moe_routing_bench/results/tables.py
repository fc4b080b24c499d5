"""Tables of a store on a URL, as a manifest names them: Parquet that is read by ranges, through obstore.

A command that asks a store first makes a folder <MRB_HOME>/stores/<hashes>-rows: reading.json has the
manifest, and tail.parquet the records that no table holds yet. Only a folder there is believed, because it
names a URL.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import duckdb
from pydantic import Field

from moe_routing_bench.core.paths import home
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.parquet import quoted
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Count, Hash, Name, RecordPart, Sentence

READING, TAIL, ROWS = "reading.json", "tail.parquet", "-rows"
SCHEME = "mrb"


class Table(RecordPart):
    """One table of a store. columns: a hash of them. suites, days: the least and the greatest."""

    name: Name
    bytes: Count
    rows: Count
    columns: Hash
    suites: tuple[Name, Name]
    days: tuple[Name, Name]


class Manifest(RecordPart):
    """The tables of a store at one moment. replaced: object -> the manifest that replaced it."""

    version: Literal[1] = 1
    number: Count = 0
    tables: tuple[Table, ...] = ()
    replaced: dict[Name, Count] = Field(default_factory=dict)
    left_out: Count = 0
    sentences: Annotated[tuple[Sentence, ...], Field(max_length=LeftOut.MAX_SENTENCES)] = ()


class Reading(RecordPart):
    """A manifest and where it was read. Its left_out and sentences are also about the tail."""

    url: str
    manifest: Manifest
    remarks: tuple[str, ...]


def stores() -> Path:
    return home() / "stores"


def reading_of(folder: Path) -> Reading | None:
    if folder.parent != stores().resolve() or not folder.name.endswith(ROWS):
        return None
    return Reading.model_validate_json((folder / READING).read_bytes())


def scan_tables(
    connection: duckdb.DuckDBPyConnection, objects: Objects, tables: Sequence[Table]
) -> tuple[str, list[str]]:
    """Returns SQL that reads the tables, and the names by which it does. The sizes are those of the manifest,
    so a table costs no request but for its bytes."""
    sizes = {f"{SCHEME}://{one.name}": one.bytes for one in tables}
    connection.register_filesystem(_ranges(objects, sizes))
    by_name = "" if len({one.columns for one in tables}) < 2 else ", union_by_name = true"
    return f"read_parquet([{', '.join(map(quoted, sizes))}], hive_partitioning = false{by_name})", list(sizes)


def _ranges(objects: Objects, sizes: dict[str, int]) -> Any:
    """Makes a file system for DuckDB that only reads. Files of obstore.fsspec returned less than DuckDB asked
    for."""
    import fsspec

    class File:
        def __init__(self, path: str):
            self.path = path
            self.here = threading.local()  # threads of DuckDB share a file, and each seeks before it reads

        def seek(self, to: int) -> None:
            self.here.at = to

        def read(self, count: int) -> bytes:
            start = self.here.at
            self.here.at = end = min(sizes[self.path], start + count)
            name = self.path.removeprefix(f"{SCHEME}://")
            return objects.get_range(name, start, end) if end > start else b""

        def close(self) -> None:
            pass

    class Files(fsspec.AbstractFileSystem):
        protocol, cachable = SCHEME, False

        def open(self, path: str, mode: str = "rb", **more: Any) -> File:
            if mode != "rb":
                raise PermissionError(path)
            return File(path)

        def info(self, path: str, **more: Any) -> dict[str, Any]:
            return {"name": path, "size": sizes[path], "type": "file"}

        def glob(self, path: str, **more: Any) -> list[str]:
            return [path] if path in sizes else []

        def modified(self, path: str) -> datetime:
            return datetime(2026, 1, 1, tzinfo=UTC)  # an object never changes

    return Files()
