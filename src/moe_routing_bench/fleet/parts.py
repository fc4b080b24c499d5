"""Parts and commits: the two main kinds of object in a store on a URL.

    parts/<session>-<number>-<random>     records and samples of one cell; never changed, and only read
                                          if a commit names it
    commits/<cell key>-<attempt>.json     one for each measured cell: the part, its size and its sha256

A commit is only written if it does not exist, so a cell has one result even if many machines measured it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from moe_routing_bench.core.text import first_problem
from moe_routing_bench.results.record import Hash, RecordPart, SessionId

MAX_PART_BYTES = 1 << 30
MAX_HEADER_BYTES = 10_000
COMMIT = re.compile(r"commits/([0-9a-f]{64})-([0-9]{4})\.json")
T = TypeVar("T", bound=RecordPart)
Bytes = Annotated[int, Field(ge=0, le=MAX_PART_BYTES)]


class Header(RecordPart):
    """The first line of a part. `records` bytes of lines follow it, then `samples` bytes of samples.

    samples_at: their position in the session's samples.f64, which the records refer to.
    """

    format: Literal["mrb part"] = "mrb part"
    version: Literal[1] = 1
    cell_key: Hash
    session: SessionId
    number: Annotated[int, Field(ge=1, le=10**6)]  # of the part in its session
    environment: Hash
    records: Bytes
    samples: Bytes
    samples_at: Annotated[int, Field(ge=0, le=2**40, multiple_of=8)]


class Commit(RecordPart):
    version: Literal[1] = 1
    part: Annotated[str, Field(pattern=r"^parts/[0-9A-Za-z_-]{1,100}$")]
    bytes: Bytes
    sha256: Hash
    failed: bool  # something in the cell did not pass: --retry-failed measures it again


@dataclass(frozen=True)
class Contents:
    """A part, read and checked."""

    header: Header
    records: bytes
    samples: bytes


def commit_name(cell_key: str, attempt: int) -> str:
    return f"commits/{cell_key}-{attempt:04d}.json"


def sealed(header: Header, records: bytes, samples: bytes) -> bytes:
    return header.model_dump_json().encode() + b"\n" + records + samples


def parse_commit(data: bytes, name: str) -> Commit:
    return _parsed(Commit, data, name)


def opened(data: bytes, commit: Commit, name: str) -> Contents:
    """Reads a part. Raises ValueError if these are not the bytes that were committed."""
    if len(data) != commit.bytes:
        how = "was cut off or written over" if len(data) < commit.bytes else "was written over"
        raise ValueError(f"{commit.part} has {len(data):,} bytes of {commit.bytes:,}: it {how}")
    if hashlib.sha256(data).hexdigest() != commit.sha256:
        raise ValueError(f"{commit.part} was changed after it was committed: its sha256 is another")
    line, newline, rest = data.partition(b"\n")
    header = _parsed(Header, line[:MAX_HEADER_BYTES], commit.part)
    if not newline or header.records + header.samples != len(rest):
        raise ValueError(f"{commit.part} does not hold what its first line says")
    if (given := COMMIT.fullmatch(name)) is None or given[1] != header.cell_key:
        raise ValueError(f"{name} names the part of another cell")
    return Contents(header, rest[: header.records], rest[header.records :])


def _parsed(kind: type[T], data: bytes, name: str) -> T:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{name} is not what this version writes: {first_problem(error)}") from None
