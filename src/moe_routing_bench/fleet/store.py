"""A results store on a URL that many machines can write at the same time, without a server of this project.

    environments/<sha256>.json            description of a machine
    segments/...                          results of a cell, see segments.py
    tables/..., manifests/..., refused/   folded results, see folding.py
    leases/<cell key>-<attempt>/<n>.json  see leases.py

Objects are never changed. A writer puts one segment for each cell and nothing else, so writers do not wait
for one another. mirror.py reads stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_routing_bench.fleet.folding import scanning, state_of
from moe_routing_bench.fleet.segments import cell_of, sealed, segment_name
from moe_routing_bench.results.folder import ENVIRONMENTS
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.record import canonical_json, content_hash


class RemoteStore:
    """store = RemoteStore("s3://bucket/runs")
    store.attempts() -> {"0f3a...": 2, ...}     cells with results, and how often they were measured
    """

    def __init__(self, place: Path | str, *, make: bool = False):
        self.objects = Objects(place, make=make)
        self._environments: set[str] = set()
        self._read: set[str] = set()  # tables whose cells are in _folded
        self._folded: dict[str, int] = {}

    def attempts(self) -> dict[str, int]:
        """Returns how often each cell was measured: from names of segments, and one column of tables that
        this object has not read yet."""
        segments, manifest = state_of(self.objects)
        if new := [one for one in manifest.tables if one.name not in self._read]:
            with scanning(self.objects, new) as (connection, scan):
                select = f"SELECT cell_key, max(attempt) FROM {scan} GROUP BY ALL"
                for key, attempt in connection.execute(select).fetchall():
                    self._folded[key] = max(self._folded.get(key, 0), attempt)
            self._read |= {one.name for one in new}
        known = dict(self._folded)
        for key, attempt in (cell_of(one.name) for one in segments):
            known[key] = max(known.get(key, 0), attempt)
        return known

    def has(self, cell_key: str, attempt: int) -> bool:
        """Returns whether there is a segment. It stays for an hour after it was folded."""
        return self.objects.exists(segment_name(cell_key, attempt))

    def put_environment(self, document: Mapping[str, object]) -> str:
        name = content_hash(document)
        if name not in self._environments:
            self.objects.put_new(f"{ENVIRONMENTS}/{name}.json", canonical_json(document).encode())
            self._environments.add(name)
        return name

    def publish(
        self, cell_key: str, attempt: int, records: bytes, samples: bytes, samples_at: int = 0
    ) -> bool:
        """Publishes the results of a cell. Returns False, and changes nothing, if another machine was
        first."""
        data = sealed(cell_key, attempt, records, samples, samples_at)
        return self.objects.put_new(segment_name(cell_key, attempt), data)
