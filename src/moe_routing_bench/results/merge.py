"""Copies the sessions of several results folders into one, for example after `mrb sweep --shard` on many
machines.

A session appears completely or not at all, so an interrupted merge can be run again. A session that has grown
since the last merge is copied again. The folders are not trusted: links are not followed, and a session is
copied only if every record of it is valid. Time and disk space grow with the bytes copied; memory does not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_routing_bench.core.whole_files import sync_folder, written_whole
from moe_routing_bench.results.folder import ENVIRONMENTS, PIECE_BYTES, environments
from moe_routing_bench.results.query import views
from moe_routing_bench.results.read import (
    CUT_OFF,
    RECORDS,
    SAMPLES,
    LeftOut,
    is_plain_file,
    read_records,
    session_folders,
)

FILES = (SAMPLES, RECORDS)  # in this order: a record must find its samples
CELLS = """SELECT count(*), count(*) FILTER (sessions > 1) FROM
    (SELECT count(DISTINCT session) AS sessions FROM records GROUP BY cell_key)"""
PARTS = ".merging-"  # a folder with this prefix holds an incomplete session; readers ignore it


@dataclass
class Merged:
    """What happened to each session.

    Merged(copied=["20261116T..."], there=[...], refused=["FOLDER: session ...: why"], cells=60, twice=2)
      Two of the 60 cells were measured in more than one session; queries take the latest.
    """

    copied: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cells: int = 0
    twice: int = 0


def merge(sources: Sequence[Path], into: Path) -> Merged:
    """Merges. It raises a ValueError if a source is no results folder or the target cannot be written."""
    for source in sources:
        if source.resolve() == into.resolve():
            raise ValueError(f"{into} is both a source and the target; name another target")
    given = [(source, _sessions(source)) for source in sources]  # before anything is written
    merged = Merged()
    try:
        into.mkdir(parents=True, exist_ok=True)
        (into / ENVIRONMENTS).mkdir(exist_ok=True)
        for source, sessions in given:
            known = {name for name, _, _ in environments(source)}
            for session, folder in sessions.items():
                try:
                    is_new = _take(session, folder, into, known)
                except ValueError as error:
                    merged.refused.append(f"{source}: session {session}: {error}")
                    continue
                (merged.copied if is_new else merged.there).append(session)
    except OSError as error:
        raise ValueError(f"cannot write into {into}: {error.strerror or error}") from None
    with views(into) as connection:  # this also makes the copies for queries
        row = connection.execute(CELLS).fetchone()
        assert row is not None
        merged.cells, merged.twice = row
    return merged


def _sessions(source: Path) -> dict[str, Path]:
    """Returns the sessions of a folder. If a session has a copy under another name, only one counts."""
    sessions = session_folders(source)
    if not sessions:
        raise ValueError(f"there are no sessions in {source}: is it the --out of a sweep?")
    return sessions


def _take(session: str, folder: Path, into: Path, environments_there: set[str]) -> bool:
    """Copies one session unless it exists, and returns whether it was copied. A ValueError says why a session
    is refused."""
    there = into / folder.name
    if there.exists():
        if all(_begins_with(there / name, folder / name) for name in FILES):
            return False
        if not all(_begins_with(folder / name, there / name) for name in FILES):
            raise ValueError(f"{into} has a different session of the same name")
    part = Path(tempfile.mkdtemp(prefix=PARTS, dir=into))
    try:
        for name in reversed(FILES):  # a running writer has samples of every copied line
            if is_plain_file(folder / name):
                _copy(folder / name, part / name)
        for name in _environments_of(part / RECORDS, session, folder, environments_there):
            if not (into / ENVIRONMENTS / f"{name}.json").exists():
                _copy(folder.parent / ENVIRONMENTS / f"{name}.json", into / ENVIRONMENTS / f"{name}.json")
        part.chmod(0o755)
        sync_folder(part)
        if there.exists():
            for name in FILES:
                if (part / name).exists():
                    (part / name).replace(there / name)
        else:
            part.rename(there)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync_folder(into)
    return True


def _environments_of(records: Path, session: str, source: Path, known: set[str]) -> set[str]:
    """Returns the environments of a session, if every record of it is valid."""
    left_out = LeftOut()
    needed = {record.environment for record in read_records(records, session, left_out)}
    # a killed writer leaves one incomplete line; the other lines are valid
    if bad := [sentence for sentence in left_out.first if not sentence.endswith(CUT_OFF)]:
        more = f" and {left_out.count - 1:,} more" if left_out.count > 1 else ""
        raise ValueError(f"{bad[0].replace(str(records.parent), str(source))}{more}")
    if absent := sorted(needed - known):
        raise ValueError(f"it was measured on a machine whose description {absent[0][:12]} is not there")
    return needed


def _copy(source: Path, target: Path) -> None:
    """Copies the whole file to disk, or nothing."""
    with (
        written_whole(target, sync=True) as part,
        source.open("rb") as reading,
        part.open("wb") as writing,
    ):
        shutil.copyfileobj(reading, writing, PIECE_BYTES)


def _begins_with(long: Path, short: Path) -> bool:
    if not is_plain_file(short):
        return not short.exists()
    if not is_plain_file(long) or long.stat().st_size < short.stat().st_size:
        return False
    with long.open("rb") as one, short.open("rb") as other:
        while piece := other.read(PIECE_BYTES):
            if one.read(len(piece)) != piece:
                return False
    return True
