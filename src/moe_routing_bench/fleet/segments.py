"""Segments: what writers put into a store on a URL.

    segments/<2 hex>/<cell key>-<attempt>.jsonl.gz     lines of Entry

A segment is only written if it does not exist, so a cell has one result even if many machines measured it. A
fold (folding.py) moves it into a table. Anybody may have written it: `validated` holds each record to its
samples.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from moe_routing_bench.core.text import first_problem, one_line
from moe_routing_bench.results.objects import REQUESTS, Objects, StoreError
from moe_routing_bench.results.read import LeftOut, held
from moe_routing_bench.results.record import MAX_LINE_BYTES, Count, Hash, Record, RecordPart, parse_record

SEGMENT = re.compile(r"segments/([0-9a-f]{2})/(\1[0-9a-f]{62})-([0-9]{4})\.jsonl\.gz")
MAX_SEGMENT_BYTES = 1 << 30  # unpacked


class Entry(RecordPart):
    """A record as it was written, and its samples."""

    cell_key: Hash
    attempt: Count
    line: Annotated[str, Field(max_length=MAX_LINE_BYTES)]
    sample_seconds: Annotated[list[float], Field(max_length=10_000_000)]

    @property
    def segment(self) -> str:
        return segment_name(self.cell_key, self.attempt)

    @property
    def samples(self) -> bytes:
        """As little-endian float64."""
        return np.array(self.sample_seconds, "<f8").tobytes()


@dataclass
class Refused(LeftOut):
    """segments: those with a record that is wrong."""

    segments: set[str] = field(default_factory=set)

    def refuse(self, segment: str, sentence: str) -> None:
        self.add(one_line(sentence, 300))
        self.segments.add(segment)


def segment_name(cell_key: str, attempt: int) -> str:
    return f"segments/{cell_key[:2]}/{cell_key}-{attempt:04d}.jsonl.gz"


def cell_of(segment: str) -> tuple[str, int]:
    """Returns the cell key and the attempt."""
    found = SEGMENT.fullmatch(segment)
    assert found is not None
    return found[2], int(found[3])


def sealed(cell_key: str, attempt: int, records: bytes, samples: bytes, samples_at: int) -> bytes:
    """Returns a segment with these lines. samples_at: where the samples begin in the session's samples.f64,
    which the records refer to."""
    lines = []
    for line in records.splitlines():
        entry = {"cell_key": cell_key, "attempt": attempt, "line": line.decode(errors="replace")}
        try:
            where = json.loads(line)["timing"]["samples"]
            at = where["offset"] - samples_at
            seconds = np.frombuffer(samples[at : at + 8 * where["count"]], "<f8").tolist()
        except (ValueError, KeyError, TypeError):  # it has no times, or is no record: a fold says so
            seconds = []
        lines.append(json.dumps(entry | {"sample_seconds": seconds}) + "\n")
    return gzip.compress("".join(lines).encode(), 3, mtime=0)


def opened(name: str, data: bytes) -> list[Entry]:
    """Reads a segment. Raises ValueError if it is none."""
    gunzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        unpacked = gunzip.decompress(data, MAX_SEGMENT_BYTES)
        if not gunzip.eof:
            raise zlib.error
        entries = [Entry.model_validate_json(line) for line in unpacked.splitlines()]
    except zlib.error:
        raise ValueError(f"{name} was cut off or changed, or unpacks to too much") from None
    except ValidationError as error:
        raise ValueError(f"{name} is not what this version writes: {first_problem(error)}") from None
    if {one.segment for one in entries} != {name}:
        raise ValueError(f"{name} does not hold results of its cell")
    return entries


def fetched(objects: Objects, names: Sequence[str], refused: Refused) -> Iterator[Entry]:
    """Yields what the segments hold. Raises FileNotFoundError if one is gone: a fold replaced it, over an
    hour ago."""

    def fetch(name: str) -> list[Entry] | str:
        try:
            return opened(name, objects.get(name))
        except StoreError:
            raise
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(REQUESTS) as pool:
        for start in range(0, len(names), 4 * REQUESTS):
            some = names[start : start + 4 * REQUESTS]
            for name, found in zip(some, pool.map(fetch, some), strict=True):
                if isinstance(found, str):
                    refused.refuse(name, found)
                else:
                    yield from found


def validated(entries: Iterable[Entry], refused: Refused) -> Iterator[tuple[Entry, Record]]:
    """Yields the entries that are records and agree with their samples. Those of a cell must be given
    together."""
    for entry, record, sentence in held(_parsed(entries, refused), lambda entry, _: entry.samples):
        if sentence is None:
            yield entry, record
        else:
            refused.refuse(entry.segment, f"{record.record_id}: {sentence}")


def _parsed(entries: Iterable[Entry], refused: Refused) -> Iterator[tuple[Entry, Record]]:
    for entry in entries:
        try:
            record = parse_record(entry.line.encode())
            if record.cell_key != entry.cell_key:
                raise ValueError(f"it is a record of the cell {record.cell_key[:12]}")
        except ValueError as error:
            refused.refuse(entry.segment, f"{entry.segment}: {error}")
        else:
            yield entry, record
