"""Tables of a store on a URL, as queries read them: Parquet by ranges, through obstore.

A command that asks a store first makes a folder <MRB_HOME>/stores/<hashes>-rows: reading.json names the
tables of one manifest, and tail.parquet has the records that no table holds yet. Only a folder there is
believed, because it names a URL.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from moe_routing_bench.core.paths import home
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.parquet import quoted
from moe_routing_bench.results.record import RecordPart

READING, TAIL, ROWS = "reading.json", "tail.parquet", "-rows"
SCHEME = "mrb"


class Reading(RecordPart):
    """tables: name -> bytes. alike: all have the columns of this version."""

    url: str
    tables: dict[str, int]
    alike: bool
    left_out: int
    sentences: tuple[str, ...]


def stores() -> Path:
    return home() / "stores"


def reading_of(folder: Path) -> Reading | None:
    if folder.parent != stores().resolve() or not folder.name.endswith(ROWS):
        return None
    return Reading.model_validate_json((folder / READING).read_bytes())


def scan_tables(
    connection: duckdb.DuckDBPyConnection, objects: Objects, sizes: Mapping[str, int], *, alike: bool
) -> tuple[str, list[str]]:
    """Returns SQL that reads the tables, and the names by which it does. The sizes are those of the manifest,
    so a table costs no request but for its bytes."""
    connection.register_filesystem(_ranges(objects, sizes))
    names = [f"{SCHEME}://{name}" for name in sizes]
    listed = ", ".join(map(quoted, names))
    by_name = "" if alike else ", union_by_name = true"
    return f"read_parquet([{listed}], hive_partitioning = false{by_name})", names


def _ranges(objects: Objects, sizes: Mapping[str, int]) -> Any:
    """A file system for DuckDB that only reads. Files of obstore.fsspec returned less than DuckDB asked
    for."""
    import fsspec

    class File:
        def __init__(self, name: str):
            self.name, self.size = name, sizes[name]
            self.here = threading.local()  # threads of DuckDB share a file, and each seeks before it reads

        def seek(self, to: int, whence: int = 0) -> int:
            self.here.at = to + (0, self.tell(), self.size)[whence]
            return self.tell()

        def tell(self) -> int:
            return getattr(self.here, "at", 0)

        def read(self, count: int = -1) -> bytes:
            start = self.tell()
            end = self.size if count < 0 else min(self.size, start + count)
            self.here.at = max(start, end)
            return objects.get_range(self.name, start, end) if end > start else b""

        def close(self) -> None:
            pass

    class Files(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol, cachable = SCHEME, False

        def open(self, path: str, mode: str = "rb", **more: Any) -> File:
            if mode != "rb":
                raise PermissionError(path)
            return File(path.removeprefix(f"{SCHEME}://"))

        def info(self, path: str, **more: Any) -> dict[str, Any]:
            name = path.removeprefix(f"{SCHEME}://")
            return {"name": name, "size": sizes[name], "type": "file"}

        def glob(self, path: str, **more: Any) -> list[str]:
            return [path] if path.removeprefix(f"{SCHEME}://") in sizes else []

        def modified(self, path: str) -> datetime:
            return datetime(2026, 1, 1, tzinfo=UTC)  # an object never changes

    return Files()
