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

from moe_routing_bench.fleet.segments import sealed, segment_name
from moe_routing_bench.results.objects import Objects, StoreError

COMMIT = re.compile(r"commits/([0-9a-f]{64})-([0-9]{4})\.json")


def convert(objects: Objects) -> list[str]:
    """Returns sentences about commits that stay as they are."""
    left, packed = [], _packed(objects)
    for one in objects.list("commits/"):
        if not (name := COMMIT.fullmatch(one.name)):
            continue
        key, attempt = name[1], int(name[2])
        try:
            body = json.loads(objects.get(one.name))
            at = packed.get(body["sha256"])
            part = objects.get_range(*at) if at else objects.get(body["part"])
            if hashlib.sha256(part).hexdigest() != body["sha256"] or not body["part"].startswith("parts/"):
                raise ValueError("its part was changed after it was committed")
            line, _, rest = part.partition(b"\n")
            header = json.loads(line)
            end = header["records"]
            data = sealed(key, attempt, rest[:end], rest[end:], header["samples_at"])
        except StoreError:
            raise
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            left.append(f"{one.name} stays as it is: {error}")
        else:
            objects.put_new(segment_name(key, attempt), data)
            objects.delete([body["part"], one.name])
    if not left:
        objects.delete(one.name for one in objects.list("packs/"))
    return left


def _packed(objects: Objects) -> dict[str, tuple[str, int, int]]:
    """Returns for each part, by its sha256, the pack that holds it and where it begins and ends there."""
    packed: dict[str, tuple[str, int, int]] = {}
    for one in objects.list("packs/"):
        try:
            at = int(one.name.rpartition("-")[2])
            for member in json.loads(objects.get_range(one.name, 0, min(at, one.size)))["members"]:
                end = at + member["body"]["bytes"]
                if at < end <= one.size:
                    packed[member["body"]["sha256"]] = one.name, at, end
                at = end
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError):
            continue  # its parts are looked for one by one
    return packed
