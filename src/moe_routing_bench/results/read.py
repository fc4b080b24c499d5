"""Reads the records of a folder line by line. Anybody may have written them: a bad line becomes a sentence.

`RecordCount` counts records in the same way for every command.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from moe_routing_bench.results.record import (
    MAX_LINE_BYTES,
    SESSION,
    Record,
    content_hash,
    parse_record,
)
from moe_routing_bench.results.verify import SAMPLES, whats_wrong

RECORDS = "records.jsonl"
TRAININGS = "trainings.jsonl"  # see training.py
CUT_OFF = "the last line was cut off while it was written"
BATCH_RECORDS = 256  # verified against their samples at once
BATCH_SAMPLES = 1 << 22
Place = TypeVar("Place")  # where a record stands


@dataclass
class LeftOut:
    """Lines that are no records: their number, and a sentence about each of the first few. remarks: what else
    a reader must know about the remaining records."""

    MAX_SENTENCES = 20
    count: int = 0
    first: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, sentence: str, lines: int = 1) -> None:
        self.count += lines
        if len(self.first) < self.MAX_SENTENCES:
            self.first.append(sentence)


def read_records(
    path: Path, session: str, left_out: LeftOut, *, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yields the records of one file from byte `start` (the beginning of a line) up to `stop`.

    It leaves out bad lines, records that contradict their samples, and a last line without a newline, which
    was cut off while it was written.
    """
    samples = path.with_name(SAMPLES)
    if not is_plain_file(samples):
        timed = 0
        for _, record in _parsed(path, session, left_out, start, stop):
            timed += record.timing is not None
            yield record
        if timed:
            left_out.remarks.append(f"session {session} has no {SAMPLES}: {timed:,} times are not checked")
        return
    with samples.open("rb") as file:
        parsed = _parsed(path, session, left_out, start, stop)
        for where, record, sentence in held(parsed, lambda _, record: _samples(file.fileno(), record)):
            if sentence is None:
                yield record
            else:
                left_out.add(f"{where}: {record.record_id}: {sentence}")


def held(
    parsed: Iterator[tuple[Place, Record]], samples: Callable[[Place, Record], bytes]
) -> Iterator[tuple[Place, Record, str | None]]:
    """Yields each record with None, or with a sentence that says how it contradicts its samples."""
    for batch in _batches(parsed):
        found = whats_wrong([record for _, record in batch], [samples(*one) for one in batch])
        for (where, record), sentence in zip(batch, found, strict=True):
            yield where, record, sentence


def _samples(fd: int, record: Record) -> bytes:
    if record.timing is None:
        return b""
    return os.pread(fd, 8 * record.timing.samples.count, record.timing.samples.offset)


def _batches(parsed: Iterator[tuple[Place, Record]]) -> Iterator[list[tuple[Place, Record]]]:
    """Groups records into batches and keeps the records of a cell together."""
    batch: list[tuple[Place, Record]] = []
    samples = 0
    for where, record in parsed:
        full = len(batch) >= BATCH_RECORDS and batch[-1][1].cell_key != record.cell_key
        if full or samples > BATCH_SAMPLES:
            yield batch
            batch, samples = [], 0
        batch.append((where, record))
        samples += record.timing.samples.count if record.timing else 0
    if batch:
        yield batch


def _parsed(
    path: Path, session: str, left_out: LeftOut, start: int, stop: int | None
) -> Iterator[tuple[str, Record]]:
    """Yields (place, record) for each valid line."""
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while stop is None or at < stop:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            begin, at = at, at + len(line)
            where = f"{path} at byte {begin:,}"
            if not line.endswith(b"\n"):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_LINE_BYTES)
                    at += len(rest)
                if not rest:
                    left_out.add(f"{where}: {CUT_OFF}")
                    return
                left_out.add(f"{where}: the line has over {MAX_LINE_BYTES:,} bytes, which no record has")
                continue
            try:
                record = parse_record(line)
            except ValueError as error:
                left_out.add(f"{where}: {error}")
                continue
            if record.session != session:
                left_out.add(f"{where}: the record belongs to session {record.session}")
                continue
            yield where, record


def session_folders(folder: Path, left_out: LeftOut | None = None) -> dict[str, Path]:
    """Returns {session id: folder} for each folder with a records file, oldest first. Links are not followed.
    If a session has copies, only the longest counts, and left_out gets a remark for each of the others."""
    if not folder.is_dir():
        raise ValueError(f"there is no results folder {folder}; mrb bench layer --out {folder} makes one")
    folders: dict[str, Path] = {}
    known: dict[str, tuple[bool, int, str]] = {}  # by content: does its name match, its size, its id
    for path in sorted(folder.iterdir()):
        name = re.fullmatch(f"session=({SESSION})", path.name)
        if not (name and stat.S_ISDIR(path.lstat().st_mode) and is_plain_file(path / RECORDS)):
            continue
        folders[name[1]] = path
        content, session = _beginning(path / RECORDS)
        if not content:
            continue
        mine = (session == name[1], (path / RECORDS).stat().st_size, name[1])
        other = known.setdefault(content, mine)
        if other is not mine:
            copy, kept = (other, mine) if mine[:2] > other[:2] else (mine, other)
            known[content] = kept
            del folders[copy[2]]
            if left_out is not None:
                sentence = f"session {copy[2]} is a copy of session {kept[2]} and is not counted again"
                left_out.remarks.append(sentence)
    return folders


def _beginning(path: Path) -> tuple[str, str]:
    """Returns a hash of the first record without the session's name, and that name. A copy of a session has
    the same hash. Both are empty if the first line is no record."""
    with path.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    try:
        record = json.loads(line)
        names = [record.pop("session"), record.pop("record_id")]
        if record["timing"] is not None:
            record["timing"]["samples"].pop("file")
        return content_hash(record), str(names[0])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", ""


def is_plain_file(path: Path) -> bool:
    """Returns whether it is a file, and not a link (it may lead out of the folder) or a pipe (it may never
    end)."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


OWN_ROLES = ("baseline", "candidate")


@dataclass(frozen=True, kw_only=True)
class RecordCount:
    """The number of records, each a line of a results folder: RecordCount(implementations=12, again=6) is 18.

    again: records of a baseline that was timed a second time for noise, or next to code from outside.
    """

    implementations: int
    again: int

    @staticmethod
    def of(roles: Mapping[str, int]) -> RecordCount:
        implementations = sum(rows for role, rows in roles.items() if role in OWN_ROLES)
        return RecordCount(implementations=implementations, again=sum(roles.values()) - implementations)

    @property
    def records(self) -> int:
        return self.implementations + self.again

    def __add__(self, other: RecordCount) -> RecordCount:
        return RecordCount(
            implementations=self.implementations + other.implementations, again=self.again + other.again
        )

    def __str__(self) -> str:
        word = "record" if self.records == 1 else "records"
        if not self.again:
            return f"{self.records:,} {word}"
        return f"{self.records:,} {word}, {self.again:,} of them of baselines timed again to show the noise"

    def to_dict(self) -> dict[str, int]:
        return {
            "records": self.records,
            "implementations": self.implementations,
            "baselines_again": self.again,
        }
