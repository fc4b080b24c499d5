"""merge: brings the sessions of several results folders into one, as `mrb sweep --shard` on many machines
leaves them. A session appears whole or not at all, so an interrupted merge is repeated and goes on; one that
has grown since the last merge is copied again.

Folders come from anywhere: links are not followed, and only a session whose every record reads well is taken.
Time and disk grow with the bytes copied; memory does not.
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
    LeftOut,
    is_plain_file,
    read_records,
    session_folders,
)
from moe_routing_bench.results.verify import SAMPLES

FILES = (SAMPLES, RECORDS)  # in this order: a record must find its samples
CELLS = """SELECT count(*), count(*) FILTER (sessions > 1) FROM
    (SELECT count(DISTINCT session) AS sessions FROM records GROUP BY cell_key)"""
PARTS = ".merging-"  # a folder of this name is a session half copied; readers do not look into it


@dataclass
class Merged:
    """What happened to each session.

    Merged(copied=["20261116T..."], there=[...], refused=["FOLDER: session ...: why"], cells=60, twice=2)
      two of the 60 cells were measured in more than one session; queries take the latest.
    """

    copied: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cells: int = 0
    twice: int = 0


def merge(sources: Sequence[Path], into: Path) -> Merged:
    """ValueError if a source is no results folder or the target cannot be written to."""
    for source in sources:
        if source.resolve() == into.resolve():
            raise ValueError(f"{into} is the folder to merge into and one of those to merge")
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
    with views(into) as connection:  # which also makes the copies for queries
        row = connection.execute(CELLS).fetchone()
        assert row is not None
        merged.cells, merged.twice = row
    return merged


def _sessions(source: Path) -> dict[str, Path]:
    """Of a session and its copy under another name only one counts."""
    sessions = session_folders(source)
    if not sessions:
        raise ValueError(f"there are no sessions in {source}: is it the --out of a sweep?")
    return sessions


def _take(session: str, folder: Path, into: Path, environments_there: set[str]) -> bool:
    """Copy one session, unless it is there already; whether it was copied. ValueError: why it is refused."""
    there = into / folder.name
    if there.exists():
        if all(_begins_with(there / name, folder / name) for name in FILES):
            return False
        if not all(_begins_with(folder / name, there / name) for name in FILES):
            raise ValueError(f"{into} has another session of this name, with other bytes")
    part = Path(tempfile.mkdtemp(prefix=PARTS, dir=into))
    try:
        for name in reversed(FILES):  # its writer may be at work: samples of every line that is copied
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
    """The machines that a session was measured on, if every record of it is good."""
    left_out = LeftOut()
    needed = {record.environment for record in read_records(records, session, left_out)}
    # a killed writer leaves one line cut off, and its session is as good as before
    if bad := [sentence for sentence in left_out.first if not sentence.endswith(CUT_OFF)]:
        more = f" and {left_out.count - 1:,} more" if left_out.count > 1 else ""
        raise ValueError(f"{bad[0].replace(str(records.parent), str(source))}{more}")
    if absent := sorted(needed - known):
        raise ValueError(f"it was measured on a machine whose description {absent[0][:12]} is not there")
    return needed


def _copy(source: Path, target: Path) -> None:
    """Whole and on disk, or not there."""
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
