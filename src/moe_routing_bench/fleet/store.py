"""A results store on a URL that many machines can write at the same time, without a server of this project.

    environments/<sha256>.json            description of a machine
    parts/..., commits/...                see parts.py
    packs/<sha256>-<bytes>                many parts in one object, made by compaction
    leases/<cell key>-<attempt>/<n>.json  see leases.py

Objects are never changed. A writer puts a part under a unique name, then a commit that names it. If it dies
in between, the part is never read. mirror.py reads stores.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from moe_routing_bench.fleet.objects import Objects
from moe_routing_bench.fleet.parts import COMMIT, Commit, Header, commit_name, parse_commit, sealed
from moe_routing_bench.results.folder import ENVIRONMENTS
from moe_routing_bench.results.record import canonical_json, content_hash


class RemoteStore:
    """store = RemoteStore("s3://bucket/runs")
    store.attempts() -> {"0f3a...": 2, ...}     cells with results, and how often they were measured
    """

    def __init__(self, place: Path | str, *, make: bool = False):
        self.objects = Objects(place, make=make)
        self._environments: set[str] = set()

    def attempts(self) -> dict[str, int]:
        """Returns how often each cell was measured, from names only: one request for a thousand cells."""
        known: dict[str, int] = {}
        for listed in self.objects.list("commits/"):
            if name := COMMIT.fullmatch(listed.name):
                known[name[1]] = max(known.get(name[1], 0), int(name[2]))
        return known

    def commit_of(self, cell_key: str, attempt: int) -> Commit | None:
        name = commit_name(cell_key, attempt)
        try:
            return parse_commit(self.objects.get(name), name)
        except FileNotFoundError:
            return None

    def put_environment(self, document: Mapping[str, object]) -> str:
        name = content_hash(document)
        if name not in self._environments:
            self.objects.put_new(f"{ENVIRONMENTS}/{name}.json", canonical_json(document).encode())
            self._environments.add(name)
        return name

    def publish(self, header: Header, records: bytes, samples: bytes, *, attempt: int, failed: bool) -> bool:
        """Publishes the results of a cell. Returns False, and changes nothing, if another machine was first.

        A request may have succeeded although its answer was lost. Only this call knows the name of the part,
        so a commit with that name is its own.
        """
        data = sealed(header, records, samples)
        part = f"parts/{header.session}-{header.number:06d}-{secrets.token_hex(4)}"
        digest = hashlib.sha256(data).hexdigest()
        commit = Commit(part=part, bytes=len(data), sha256=digest, failed=failed)
        self.objects.put_new(part, data)
        name = commit_name(header.cell_key, attempt)
        if self.objects.put_new(name, commit.model_dump_json().encode()):
            return True
        first = self.commit_of(header.cell_key, attempt)
        if first is not None and first.part == part:
            return True
        self.objects.delete([part])
        return False
