"""Reading a folder's records line by line. Anybody may have written them: a bad line becomes a sentence."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_routing_bench.results.record import MOST_LINE_BYTES, SESSION, Record, parse_record

RECORDS = "records.jsonl"


@dataclass
class LeftOut:
    """Lines that are no records: how many, and a sentence about each of the first few."""

    MOST_SENTENCES = 20
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, sentence: str, lines: int = 1) -> None:
        self.count += lines
        if len(self.first) < self.MOST_SENTENCES:
            self.first.append(sentence)


def read_records(
    path: Path, session: str, left_out: LeftOut, *, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """The records of one file, streamed, from byte `start` (the beginning of a line) up to `stop`.

    A last line without a newline was cut off while it was written and is left out, as is every bad line.
    """
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while stop is None or at < stop:
            line = file.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            begin, at = at, at + len(line)
            where = f"{path} at byte {begin:,}"
            if not line.endswith(b"\n"):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(MOST_LINE_BYTES)
                    at += len(rest)
                if not rest:
                    left_out.add(f"{where}: the last line was cut off while it was written")
                    return
                left_out.add(f"{where}: the line has over {MOST_LINE_BYTES:,} bytes, which no record has")
                continue
            try:
                record = parse_record(line)
            except ValueError as error:
                left_out.add(f"{where}: {error}")
                continue
            if record.session != session:
                left_out.add(f"{where}: the record belongs to session {record.session}")
                continue
            yield record


def session_folders(folder: Path) -> dict[str, Path]:
    """Session id -> its folder, oldest first, if it has a records file. Links are not followed."""
    if not folder.is_dir():
        raise ValueError(f"there is no results folder {folder}; mrb bench --out {folder} makes one")
    folders = {}
    for path in sorted(folder.iterdir()):
        name = re.fullmatch(f"session=({SESSION})", path.name)
        if name and stat.S_ISDIR(path.lstat().st_mode) and is_plain_file(path / RECORDS):
            folders[name[1]] = path
    return folders


def is_plain_file(path: Path) -> bool:
    """A file and neither a link, which may lead out of the folder, nor a pipe, which may never end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
