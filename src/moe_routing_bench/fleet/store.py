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

from moe_routing_bench.bench.status import Status
from moe_routing_bench.fleet.folding import newest, scanning, tail_of
from moe_routing_bench.fleet.old_layout import refuse_old
from moe_routing_bench.fleet.segments import SEGMENT, fetched, sealed, segment_name, validated
from moe_routing_bench.results.folder import ENVIRONMENTS
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.parquet import quoted
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
        tail = tail_of(self.objects)
        manifest = newest(self.objects)
        if not tail and not manifest.number:
            refuse_old(self.objects)
        if new := [one for one in manifest.tables if one.name not in self._read]:
            with scanning(self.objects, new) as (connection, scan):
                rows = connection.execute(
                    f"SELECT cell_key, max(attempt) FROM {scan} GROUP BY ALL"
                ).fetchall()
            _raise(self._folded, rows)
            self._read |= {one.name for one in new}
        known = dict(self._folded)
        _raise(known, [(name[2], int(name[3])) for one in tail if (name := SEGMENT.fullmatch(one.name))])
        return known

    def failed(self, fine: frozenset[Status]) -> set[tuple[str, int]]:
        """Returns (cell, attempt) of results with another status than these, or that are not valid."""
        tail = tail_of(self.objects)
        manifest, found = newest(self.objects), set[tuple[str, int]]()
        if manifest.tables:
            with scanning(self.objects, manifest.tables) as (connection, scan):
                statuses = ", ".join(quoted(one) for one in fine)
                select = f"SELECT DISTINCT cell_key, attempt FROM {scan} WHERE status NOT IN ({statuses})"
                found |= set(connection.execute(select).fetchall())
        names = [one.name for one in tail if one.name not in manifest.replaced]

        def tell(segment: str, sentence: str) -> None:
            name = SEGMENT.fullmatch(segment)
            assert name is not None
            found.add((name[2], int(name[3])))

        for entry, record in validated(fetched(self.objects, names, tell), tell):
            if record.correctness.status not in fine:
                found.add((entry.cell_key, entry.attempt))
        return found

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
        """Publishes the results of a cell. Returns False, and changes nothing, if another machine was first.
        A request may have succeeded although its answer was lost: our own bytes are ours."""
        data, name = sealed(records, samples, samples_at), segment_name(cell_key, attempt)
        if self.objects.put_new(name, data):
            return True
        try:
            return self.objects.get(name) == data
        except FileNotFoundError:  # it was folded meanwhile
            return False


def _raise(known: dict[str, int], pairs: list[tuple[str, int]]) -> None:
    for key, attempt in pairs:
        known[key] = max(known.get(key, 0), attempt)
