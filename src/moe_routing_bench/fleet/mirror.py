"""Keeps a local copy of a store on a URL, so that all code that reads a results folder can read a store.

    <MRB_HOME>/stores/<hash of the URL>/         a results folder, and index.sqlite with its commits
    <MRB_HOME>/stores/<hash of the URL>-rows/    its rows alone, for queries (rows.py)

Only commits that are not in the copy yet are fetched. Each part must have the size and sha256 of its commit,
and each record must agree with its samples, as in any folder. What does not is left out, and a sentence says
why. A copy may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from moe_routing_bench.core.paths import home
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.fleet.objects import Objects
from moe_routing_bench.fleet.packs import fetch_part, packed
from moe_routing_bench.fleet.parts import COMMIT, Contents
from moe_routing_bench.results.folder import ENVIRONMENTS, MAX_ENVIRONMENT_BYTES
from moe_routing_bench.results.read import RECORDS
from moe_routing_bench.results.rows import INDEX, add_rows, forget_changed
from moe_routing_bench.results.rows import TABLES as ROWS_TABLES
from moe_routing_bench.results.verify import SAMPLES

AT_ONCE = 256  # commits fetched, then written and noted together
REQUESTS = 16
TABLES = """
CREATE TABLE IF NOT EXISTS commits (name TEXT PRIMARY KEY, etag TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (session TEXT PRIMARY KEY, records INTEGER) WITHOUT ROWID;
"""


@dataclass
class Mirror:
    """The folder to read, and sentences about what was left out or looks wrong."""

    folder: Path
    fetched: int = 0
    sentences: list[str] = field(default_factory=list)


Watch = Callable[[int, int], None]
Fetched = list[tuple[str, str, Contents]]  # name of the commit, its etag, what it holds


def mirror(place: Path | str, on_progress: Watch = lambda done, of: None) -> Mirror:
    """Copies all of the store. Raises ValueError if it does not exist or is empty, StoreError if it cannot be
    read."""
    return _copied(place, "", TABLES, _add, lambda folder, index: None, on_progress)


def mirror_rows(place: Path | str, on_progress: Watch = lambda done, of: None) -> Mirror:
    """Copies what queries need: the rows. If there is a whole copy already, that is brought up to date."""
    if (_place(Objects(place), "") / INDEX).is_file():
        return mirror(place, on_progress)
    return _copied(place, "-rows", ROWS_TABLES, _add_rows, forget_changed, on_progress)


def _place(objects: Objects, kind: str) -> Path:
    return home() / "stores" / (hashlib.sha256(objects.url.encode()).hexdigest()[:16] + kind)


def _copied(
    place: Path | str,
    kind: str,
    tables: str,
    add: Callable[[Path, sqlite3.Connection, Fetched], None],
    mend: Callable[[Path, sqlite3.Connection], None],
    on_progress: Watch,
) -> Mirror:
    """Brings one kind of copy up to date."""
    objects = Objects(place)
    here = Mirror(_place(objects, kind))
    here.folder.mkdir(parents=True, exist_ok=True)
    with _alone(here.folder), closing(sqlite3.connect(here.folder / INDEX)) as index:
        index.executescript(tables)
        mend(here.folder, index)
        listed = {
            commit.name: commit.etag for commit in objects.list("commits/") if COMMIT.fullmatch(commit.name)
        }
        known = dict(index.execute("SELECT name, etag FROM commits"))
        if not listed and not known:
            raise ValueError(f"there are no results in {objects.url}; mrb sweep --out {objects.url}")
        for name in sorted(known):
            if name not in listed:
                here.sentences.append(f"{name} was committed and is gone; the copy here keeps its results")
            elif listed[name] != known[name]:
                here.sentences.append(f"{name} was changed after it was committed; its first content counts")
        _fetch_environments(objects, here)
        new = sorted(listed.keys() - known.keys())
        contents = _all_contents(objects, new, here.sentences)
        done = 0
        while some := list(islice(contents, AT_ONCE)):
            add(here.folder, index, [(name, listed[name], fetched) for name, fetched in some])
            done += len(some)
            on_progress(done, len(new))
        here.fetched = done
    return here


def _all_contents(objects: Objects, new: list[str], sentences: list[str]) -> Iterator[tuple[str, Contents]]:
    """Reads packs first, then the remaining parts one by one."""
    missing = set(new)
    for name, contents in packed(objects, missing, sentences):
        missing.discard(name)
        yield name, contents

    gone: dict[str, str] = {}
    with ThreadPoolExecutor(REQUESTS) as pool:
        rest = iter(sorted(missing))
        while some := list(islice(rest, AT_ONCE)):
            for name, part in zip(some, pool.map(partial(fetch_part, objects), some), strict=True):
                if isinstance(part, str):
                    gone[name] = part
                else:
                    yield name, part[2]
    # a compaction may have moved it into a pack meanwhile
    for name, contents in packed(objects, set(gone), sentences) if gone else ():
        del gone[name]
        yield name, contents
    sentences += (f"left out: {sentence}" for sentence in gone.values())


def _add(folder: Path, index: sqlite3.Connection, some: Fetched) -> None:
    """Appends lines after those that the index knows. So what a killed reader left half written is
    overwritten."""
    sizes = dict(index.execute("SELECT session, records FROM sessions"))
    _write(folder, sizes, some)
    with index:
        index.executemany("INSERT INTO commits VALUES (?, ?)", [(name, etag) for name, etag, _ in some])
        index.executemany("INSERT OR REPLACE INTO sessions VALUES (?, ?)", sizes.items())


def _add_rows(folder: Path, index: sqlite3.Connection, some: Fetched) -> None:
    with tempfile.TemporaryDirectory(prefix="mrb-rows-") as scratch:
        _write(Path(scratch), {}, some)
        add_rows(folder, index, [(name, etag) for name, etag, _ in some], Path(scratch))


def _write(folder: Path, sizes: dict[str, int], some: Fetched) -> None:
    """Writes samples where the records say, and lines after the first `sizes[session]` bytes; updates
    `sizes`."""
    for _, _, contents in sorted(some, key=lambda part: (part[2].header.session, part[2].header.number)):
        session = contents.header.session
        place = folder / f"session={session}"
        place.mkdir(exist_ok=True)
        for name, at, data in (
            (SAMPLES, contents.header.samples_at, contents.samples),
            (RECORDS, sizes.get(session, 0), contents.records),
        ):
            fd = os.open(place / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(fd, "r+b") as file:
                if name == RECORDS:
                    file.truncate(at)
                file.seek(at)
                file.write(data)
        sizes[session] = sizes.get(session, 0) + len(contents.records)


def _fetch_environments(objects: Objects, here: Mirror) -> None:
    (here.folder / ENVIRONMENTS).mkdir(exist_ok=True)
    for listed in objects.list(f"{ENVIRONMENTS}/"):
        target = here.folder / listed.name
        if not re.fullmatch(rf"{ENVIRONMENTS}/[0-9a-f]{{64}}\.json", listed.name) or target.exists():
            continue
        data = objects.get(listed.name) if listed.size <= MAX_ENVIRONMENT_BYTES else b""
        if hashlib.sha256(data).hexdigest() != target.stem:
            here.sentences.append(f"{listed.name} was changed: its sha256 is another")
            continue
        write_whole(target, data)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time bring the copy up to date."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
