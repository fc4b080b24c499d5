"""Makes a local copy of a store on a URL, so that all code that reads a results folder can read a store.

    <MRB_HOME>/stores/<hash of the URL>-<state>/          a results folder
    <MRB_HOME>/stores/<hash of the URL>-<state>-rows/     for queries: see tables.py

The state is a hash of the newest manifest and of the segments that it does not name, so a store that has not
changed is not read again. A record that contradicts its samples is left out, and a sentence says why. A copy
may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

from moe_routing_bench.fleet.folding import (
    KEPT_SECONDS,
    entries_of,
    scanning,
    state_of,
    without_held,
    write_table,
)
from moe_routing_bench.fleet.segments import Entry, Refused, fetched, validated
from moe_routing_bench.results.folder import ENVIRONMENTS, MAX_ENVIRONMENT_BYTES
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.parquet import COLUMNS_HASH
from moe_routing_bench.results.read import RECORDS
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.tables import READING, ROWS, TAIL, Reading, stores
from moe_routing_bench.results.verify import SAMPLES

MAX_SAMPLES_BYTES = 1 << 40  # of a session; a record that says more has no samples in the copy


@dataclass(frozen=True)
class Mirror:
    """The folder to read, and sentences about what was left out or looks wrong."""

    folder: Path
    sentences: tuple[str, ...]


def mirror(place: Path | str, *, rows: bool = False) -> Mirror:
    """Copies all of the store. rows: only what no table holds; queries read tables in the store itself.
    Raises ValueError if it does not exist or is empty, StoreError if it cannot be read."""
    objects = Objects(place)
    listed, manifest = state_of(objects)
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
            tail = fetched(objects, without_held(objects, manifest.tables, names), refused)
            if rows:
                with scanning(objects) as (connection, _):
                    write_table(connection, validated(tail, refused), made / TAIL)
            else:
                entries = chain(entries_of(objects, manifest.tables), tail)
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
                if other.stat().st_mtime < time.time() - KEPT_SECONDS:
                    shutil.rmtree(other)
    os.utime(folder)  # a copy is deleted an hour after its last use
    reading = Reading.model_validate_json((folder / READING).read_bytes())
    return Mirror(folder, (*reading.manifest.sentences, *reading.remarks))


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
