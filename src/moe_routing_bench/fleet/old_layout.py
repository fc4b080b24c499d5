"""Converts a store of an older version into segments.

    commits/<cell key>-<attempt>.json     the part of the cell, its size and its sha256
    parts/<name>                          a header in one line, then records, then samples
    packs/<sha256>-<bytes>                a header with commits, then their parts

Each commit becomes a segment, and is deleted after that. A killed conversion goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from moe_routing_bench.fleet.segments import sealed, segment_name
from moe_routing_bench.results.objects import Objects, StoreError

COMMIT = re.compile(r"commits/([0-9a-f]{64})-([0-9]{4})\.json")
PART = re.compile(r"parts/[0-9A-Za-z_-]{1,100}")
PACK = re.compile(r"packs/[0-9a-f]{64}-([0-9]{1,9})")


def refuse_old(objects: Objects) -> None:
    if objects.list("commits/"):
        raise ValueError(
            f"{objects.url} was written by an older version; mrb results compact {objects.url} converts it"
        )


def convert(objects: Objects) -> list[str]:
    """Returns sentences about commits that stay as they are."""
    left = {one.name: name for one in objects.list("commits/") if (name := COMMIT.fullmatch(one.name))}
    if not left:
        return []
    why: dict[str, str] = {}
    for commit, body, part in _parts(objects, set(left)):
        if commit in left:
            try:
                data = _segment(left[commit][1], body, part)
            except (ValueError, KeyError, TypeError) as error:
                why[commit] = str(error)
                continue
            objects.put_new(segment_name(left[commit][1], int(left[commit][2])), data)
            objects.delete([body["part"], commit])
            del left[commit]
    if not left:
        objects.delete([one.name for one in objects.list("packs/")])
    return [f"{commit} stays as it is: {why.get(commit, 'its part is not there')}" for commit in left]


def _parts(objects: Objects, commits: set[str]) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """Yields commits with their bodies and parts, from packs and then one by one."""
    for listed in objects.list("packs/"):
        if name := PACK.fullmatch(listed.name):
            data, at = objects.get(listed.name), int(name[1])
            try:
                members = json.loads(data[:at])["members"]
                for member in members:
                    yield member["commit"], member["body"], data[at : at + member["body"]["bytes"]]
                    at += member["body"]["bytes"]
            except (ValueError, KeyError, TypeError):
                continue  # its commits are looked for among the parts
    for commit in sorted(commits):
        try:
            body = json.loads(objects.get(commit))
            yield commit, body, objects.get(str(body["part"]))
        except (FileNotFoundError, KeyError, TypeError):
            continue
        except StoreError:
            raise
        except ValueError:
            continue


def _segment(cell_key: str, body: dict[str, Any], part: bytes) -> bytes:
    """Raises ValueError if these are not the bytes that were committed."""
    if not PART.fullmatch(body["part"]) or hashlib.sha256(part).hexdigest() != body["sha256"]:
        raise ValueError("its part was changed after it was committed")
    line, _, rest = part.partition(b"\n")
    header = json.loads(line)
    if header["cell_key"] != cell_key or header["records"] + header["samples"] != len(rest):
        raise ValueError("its part does not hold what its first line says")
    return sealed(rest[: header["records"]], rest[header["records"] :], header["samples_at"])
