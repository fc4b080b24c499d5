"""A results store on a URL that many machines can write at the same time, without a server of this project.

    environments/<sha256>.json            description of a machine
    segments/...                          results of a cell, see segments.py
    tables/..., manifests/..., refused/   folded results, see folding.py
    leases/<cell key>-<attempt>/<n>.json  see leases.py

Objects are never changed. A writer puts one segment for each cell and nothing else, so writers do not wait
for one another. All code that reads a results folder can read a local copy, which may be deleted at any time:

    <MRB_HOME>/stores/<hash of the URL>-<state>/          a results folder
    <MRB_HOME>/stores/<hash of the URL>-<state>-rows/     for queries: see tables.py

The state is a hash of the newest manifest and of the segments that it does not name, so a store that has not
changed is not read again. A record that contradicts its samples is left out, and a sentence says why.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

from moe_routing_bench.fleet import folding
from moe_routing_bench.fleet.segments import Entry, Refused, cell_of, fetched, sealed, segment_name, validated
from moe_routing_bench.results.folder import ENVIRONMENTS, MAX_ENVIRONMENT_BYTES
from moe_routing_bench.results.objects import Listed, Objects
from moe_routing_bench.results.parquet import COLUMNS_HASH
from moe_routing_bench.results.read import RECORDS, SAMPLES
from moe_routing_bench.results.record import Record, canonical_json, content_hash
from moe_routing_bench.results.tables import READING, ROWS, TAIL, Manifest, Reading, stores

MAX_SAMPLES_BYTES = 1 << 40  # of a session; a record that says more has no samples in the copy


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
        segments, manifest = _converted(self.objects)
        if new := [one for one in manifest.tables if one.name not in self._read]:
            with folding.scanning(self.objects, new) as (connection, scan):
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


@dataclass(frozen=True)
class Mirror:
    """The folder to read, and sentences about what was left out or looks wrong."""

    folder: Path
    sentences: tuple[str, ...]


def mirror(place: Path | str, *, rows: bool = False) -> Mirror:
    """Copies all of the store. rows: only what no table holds; queries read tables in the store itself.
    Raises ValueError if it does not exist or is empty, StoreError if it cannot be read."""
    objects = Objects(place)
    listed, manifest = _converted(objects)
    if not listed and not manifest.number:
        raise ValueError(f"there are no results in {objects.url}; mrb sweep --out {objects.url}")
    names = [one.name for one in listed if one.name not in manifest.replaced]
    documents = [one.name for one in objects.list(f"{ENVIRONMENTS}/") if one.size <= MAX_ENVIRONMENT_BYTES]
    state = "\n".join([str(manifest.number), COLUMNS_HASH, *names, *documents])
    url, token = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (objects.url, state))
    folder = stores() / f"{url}-{token}{ROWS if rows else ''}"
    if not (folder / READING).is_file():
        stores().mkdir(parents=True, exist_ok=True)
        refused = Refused(manifest.left_out, list(manifest.sentences))
        with tempfile.TemporaryDirectory(dir=stores()) as scratch:
            made = Path(scratch, "made")
            (made / ENVIRONMENTS).mkdir(parents=True)
            for name in documents:
                data = objects.get(name)
                if name == f"{ENVIRONMENTS}/{hashlib.sha256(data).hexdigest()}.json":
                    (made / name).write_bytes(data)
                else:
                    refused.remarks.append(f"{name} was changed: its sha256 is another")
            tail = fetched(objects, folding.without_held(objects, manifest.tables, names), refused)
            if rows:
                with folding.scanning(objects) as (connection, _):
                    folding.write_table(connection, validated(tail, refused), made / TAIL)
            else:
                entries = chain(folding.entries_of(objects, manifest.tables), tail)
                _write_sessions(validated(entries, refused), made)
            told = {"left_out": refused.count, "sentences": tuple(refused.first), "replaced": {}}
            reading = Reading(
                url=objects.url, manifest=manifest.model_copy(update=told), remarks=tuple(refused.remarks)
            )
            (made / READING).write_text(reading.model_dump_json())
            shutil.rmtree(folder, ignore_errors=True)
            try:
                made.rename(folder)
            except OSError:
                if not (folder / READING).is_file():  # else another process was quicker
                    raise
        for other in stores().glob(f"{url}-*"):
            with suppress(OSError):
                if other != folder and other.stat().st_mtime < time.time() - folding.KEPT_SECONDS:
                    shutil.rmtree(other)
    os.utime(folder)  # a copy is deleted an hour after its last use
    reading = Reading.model_validate_json((folder / READING).read_bytes())
    return Mirror(folder, (*reading.manifest.sentences, *reading.remarks))


def _converted(objects: Objects) -> tuple[list[Listed], Manifest]:
    """Returns the segments and the newest manifest. Raises ValueError if old_layout.py has not converted the
    store, or not all of it."""
    segments, manifest = folding.state_of(objects)
    if not manifest.number and objects.list("commits/"):
        raise ValueError(
            f"{objects.url} was written by an older version; mrb results compact {objects.url} converts it"
        )
    return segments, manifest


def _write_sessions(found: Iterable[tuple[Entry, Record]], folder: Path) -> None:
    for session, some in groupby(found, lambda one: one[1].session):
        place = folder / f"session={session}"
        place.mkdir(exist_ok=True)
        (place / SAMPLES).touch()
        with (place / RECORDS).open("ab") as lines, (place / SAMPLES).open("r+b") as samples:
            for entry, record in some:
                lines.write(entry.line.encode() + b"\n")
                if record.timing is not None and record.timing.samples.offset < MAX_SAMPLES_BYTES:
                    samples.seek(record.timing.samples.offset)
                    samples.write(entry.samples)
