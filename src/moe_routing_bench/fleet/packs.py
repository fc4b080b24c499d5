"""A pack is an object with many parts, so that reading a store takes few requests.

    packs/<sha256 of the header>-<its bytes>     header in JSON, then the parts, byte for byte

The header contains every commit, and a commit contains the sha256 of its part, so the name of a pack is
enough to check it. Equal commits give equal packs: compaction may run twice, be killed, or run at the same
time as writers and other compactions. A commit in two packs is read from the first that is correct.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from moe_routing_bench.fleet.objects import Objects, StoreError
from moe_routing_bench.fleet.parts import COMMIT, Commit, Contents, opened, parse_commit
from moe_routing_bench.results.record import RecordPart

PACK = re.compile(r"packs/([0-9a-f]{64})-([0-9]{1,9})")
PACK_BYTES = 64 << 20  # of parts in a pack; compaction needs twice this much memory
PACK_PARTS = 10_000
REQUESTS = 16


class Member(RecordPart):
    commit: Annotated[str, Field(pattern=f"^{COMMIT.pattern}$")]
    body: Commit


class PackHeader(RecordPart):
    format: Literal["mrb pack"] = "mrb pack"
    version: Literal[1] = 1
    members: Annotated[tuple[Member, ...], Field(max_length=PACK_PARTS)]


def headers(objects: Objects, sentences: list[str]) -> Iterator[tuple[str, PackHeader]]:
    for listed in objects.list("packs/"):
        if not (name := PACK.fullmatch(listed.name)) or int(name[2]) > listed.size:
            continue
        data = objects.get(listed.name, first=int(name[2]))
        if hashlib.sha256(data).hexdigest() != name[1]:
            sentences.append(f"{listed.name} was changed: its header does not have the sha256 in its name")
            continue
        try:
            header = PackHeader.model_validate_json(data)
        except ValidationError as error:
            sentences.append(f"{listed.name} is no pack: {error.errors(include_url=False)[0]['msg']}")
            continue
        if int(name[2]) + sum(member.body.bytes for member in header.members) != listed.size:
            sentences.append(f"{listed.name} has {listed.size:,} bytes, which is not what its header says")
            continue
        yield listed.name, header


def packed(objects: Objects, wanted: set[str], sentences: list[str]) -> Iterator[tuple[str, Contents]]:
    """Yields the wanted commits that are in packs, with one pack in memory at a time."""
    missing = set(wanted)
    for name, header in headers(objects, sentences) if missing else ():
        if missing.isdisjoint(member.commit for member in header.members):
            continue
        data = objects.get(name)
        at = int(name.rpartition("-")[2])
        for member in header.members:
            if member.commit in missing:
                try:
                    contents = opened(data[at : at + member.body.bytes], member.body, member.commit)
                except ValueError as error:
                    sentences.append(f"in {name}: {error}")
                else:
                    missing.discard(member.commit)
                    yield member.commit, contents
            at += member.body.bytes


def fetch_part(objects: Objects, commit: str) -> tuple[Member, bytes, Contents] | str:
    """Returns the checked part of a commit, or a sentence that says what is wrong with it."""
    try:
        body = parse_commit(objects.get(commit), commit)
        data = objects.get(body.part)
        return Member(commit=commit, body=body), data, opened(data, body, commit)
    except FileNotFoundError:
        return f"{commit} names a part that is not there"
    except StoreError:
        raise
    except ValueError as error:
        return str(error)


def compact_store(objects: Objects, *, drop: bool = False) -> tuple[int, int, list[str]]:
    """Returns the number of parts packed, the number of parts deleted, and sentences about what was skipped.

    drop: also delete the parts that an earlier call packed. Readers find them in the packs.
    """
    sentences: list[str] = []
    before = {
        member.commit: member.body for _, header in headers(objects, sentences) for member in header.members
    }
    listed = [commit.name for commit in objects.list("commits/") if COMMIT.fullmatch(commit.name)]
    todo = sorted(name for name in listed if name not in before)

    count, size = 0, 0
    held: list[tuple[Member, bytes]] = []
    with ThreadPoolExecutor(REQUESTS) as pool:
        for start in range(0, len(todo), 4 * REQUESTS):
            for part in pool.map(partial(fetch_part, objects), todo[start : start + 4 * REQUESTS]):
                if isinstance(part, str):
                    sentences.append(f"left as it is: {part}")
                    continue
                member, data, _ = part
                held.append((member, data))
                size += len(data)
                if size >= PACK_BYTES or len(held) >= PACK_PARTS:
                    count += _put_pack(objects, held)
                    held, size = [], 0
    if len(held) > 1:
        count += _put_pack(objects, held)
    dropped = 0
    if drop:
        there = {part.name for part in objects.list("parts/")}
        twice = {name for name, body in before.items() if body.part in there}
        # only parts that can be read from a pack, byte for byte
        safe = [name for name, _ in packed(objects, twice, sentences)]
        objects.delete(before[name].part for name in safe)
        dropped = len(safe)
    return count, dropped, sentences


def _put_pack(objects: Objects, held: list[tuple[Member, bytes]]) -> int:
    header = PackHeader(members=tuple(member for member, _ in held)).model_dump_json().encode()
    name = f"packs/{hashlib.sha256(header).hexdigest()}-{len(header)}"
    objects.put_new(name, header + b"".join(data for _, data in held))
    return len(held)
