"""Segments: what writers put into a store on a URL.

    segments/<2 hex>/<cell key>-<attempt>.jsonl.gz     {"line": "<a record>", "samples": [0.0101, ...]}, ...

A segment is only written if it does not exist, so a cell has one result even if many machines measured it. A
fold (folding.py) moves it into a table. Anybody may have written it: `validated` holds each record to its
samples.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field, ValidationError

from moe_routing_bench.core.text import first_problem
from moe_routing_bench.results.objects import Objects, StoreError
from moe_routing_bench.results.read import BATCH_RECORDS, BATCH_SAMPLES
from moe_routing_bench.results.record import MAX_LINE_BYTES, Record, RecordPart, parse_record
from moe_routing_bench.results.verify import contradictions

SEGMENT = re.compile(r"segments/([0-9a-f]{2})/(\1[0-9a-f]{62})-([0-9]{4})\.jsonl\.gz")
MAX_SEGMENT_BYTES = 1 << 30  # unpacked
REQUESTS = 16
Tell: TypeAlias = Callable[[str, str], None]  # gets the name of a segment, and a sentence


class Line(RecordPart):
    line: Annotated[str, Field(max_length=MAX_LINE_BYTES)]
    samples: Annotated[tuple[float, ...], Field(max_length=10_000_000)]


@dataclass(frozen=True)
class Entry:
    """A record as it was written, and its samples as little-endian float64."""

    cell_key: str
    attempt: int
    line: bytes
    samples: bytes

    @property
    def segment(self) -> str:
        return segment_name(self.cell_key, self.attempt)


def segment_name(cell_key: str, attempt: int) -> str:
    return f"segments/{cell_key[:2]}/{cell_key}-{attempt:04d}.jsonl.gz"


def sealed(records: bytes, samples: bytes, samples_at: int) -> bytes:
    """Returns a segment with these lines. samples_at: where the samples begin in the session's samples.f64,
    which the records refer to."""
    lines = []
    for line in records.splitlines():
        try:
            timing = json.loads(line)["timing"]
            at = timing["samples"]["offset"] - samples_at if timing else 0
            own = samples[at : at + 8 * timing["samples"]["count"]] if timing else b""
        except (ValueError, KeyError, TypeError):  # no record: a fold says so
            own = b""
        seconds = np.frombuffer(own[: len(own) // 8 * 8], dtype="<f8").tolist()
        lines.append(json.dumps({"line": line.decode(errors="replace"), "samples": seconds}) + "\n")
    return gzip.compress("".join(lines).encode(), 3, mtime=0)


def opened(name: str, data: bytes) -> list[Entry]:
    """Reads a segment. Raises ValueError if it is none."""
    given = SEGMENT.fullmatch(name)
    assert given is not None
    try:
        with gzip.GzipFile(fileobj=BytesIO(data)) as file:
            unpacked = file.read(MAX_SEGMENT_BYTES + 1)
        if len(unpacked) > MAX_SEGMENT_BYTES:
            raise ValueError(f"{name} unpacks to over {MAX_SEGMENT_BYTES >> 20} MiB")
        lines = [Line.model_validate_json(line) for line in unpacked.splitlines()]
    except (OSError, EOFError, zlib.error):
        raise ValueError(f"{name} was cut off or changed: it cannot be unpacked") from None
    except ValidationError as error:
        raise ValueError(f"{name} is not what this version writes: {first_problem(error)}") from None
    return [
        Entry(given[2], int(given[3]), one.line.encode() + b"\n", np.array(one.samples, "<f8").tobytes())
        for one in lines
    ]


def fetched(objects: Objects, names: Iterable[str], tell: Tell) -> Iterator[Entry]:
    """Yields what the segments hold. tell gets the name of one that cannot be read, and why. Raises
    FileNotFoundError if one is gone: a fold replaced it, over an hour ago."""

    def fetch(name: str) -> list[Entry] | str:
        try:
            return opened(name, objects.get(name))
        except (FileNotFoundError, StoreError):
            raise
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(REQUESTS) as pool:
        rest = iter(names)
        while some := list(islice(rest, 4 * REQUESTS)):
            for name, found in zip(some, pool.map(fetch, some), strict=True):
                if isinstance(found, str):
                    tell(name, found)
                else:
                    yield from found


def validated(entries: Iterable[Entry], tell: Tell) -> Iterator[tuple[Entry, Record]]:
    """Yields the entries that are records and agree with their samples. Those of a cell must be given
    together."""
    batch: list[tuple[Entry, Record]] = []
    size = 0
    for entry in entries:
        full = len(batch) >= BATCH_RECORDS and batch[-1][0].segment != entry.segment
        if full or size > 8 * BATCH_SAMPLES:
            yield from _held(batch, tell)
            batch, size = [], 0
        try:
            record = parse_record(entry.line)
            if record.cell_key != entry.cell_key:
                raise ValueError(f"it is a record of the cell {record.cell_key[:12]}")
        except ValueError as error:
            tell(entry.segment, f"{entry.segment}: {error}")
        else:
            batch.append((entry, record))
            size += len(entry.samples)
    yield from _held(batch, tell)


def _held(batch: list[tuple[Entry, Record]], tell: Tell) -> Iterator[tuple[Entry, Record]]:
    wrong = contradictions([record for _, record in batch], [entry.samples for entry, _ in batch])
    for (entry, record), sentence in zip(batch, wrong, strict=True):
        if sentence is None:
            yield entry, record
        else:
            tell(entry.segment, f"{record.record_id}: {sentence}")
