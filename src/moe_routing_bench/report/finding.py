"""Finds the results folders in a path: a folder itself, folders inside it, archives, and bundles.

An archive is unpacked into a temporary folder: only the lines, samples and environments of a results folder
and the files of a study. Links and everything else in an archive are ignored.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_routing_bench.core.text import printable
from moe_routing_bench.fleet.bundle import SUFFIX as BUNDLE
from moe_routing_bench.fleet.bundle import TIMED, opened_bundle
from moe_routing_bench.report.console import say
from moe_routing_bench.results.objects import url_of
from moe_routing_bench.results.read import TRAININGS, is_plain_file, session_folders
from moe_routing_bench.train.study import STUDY, TIMES, USED

MAX_SENTENCES = 20  # about unreadable objects of a store
DEPTH = 3  # levels of folders below a path that are searched
MAX_UNPACKED_BYTES = 8 << 30
PACKED = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", BUNDLE)
KEPT = re.compile(rf"(\./)?({TIMED}|{'|'.join(map(re.escape, (TRAININGS, STUDY, TIMES, USED)))})")


@dataclass(frozen=True, kw_only=True)
class ResultsFolder:
    """ResultsFolder(name="measurements/records/grid.tar.xz", folder=Path("/tmp/mrb-report-x1/0"), timed=True,
    trained=False)"""

    name: str  # as the user would write it
    folder: Path
    timed: bool
    trained: bool


@contextmanager
def results_folders(paths: Sequence[Path]) -> Iterator[list[ResultsFolder]]:
    """Yields every results folder in these paths, in order. It raises a ValueError if a path holds none."""
    with ExitStack() as stack:
        folders = []
        for path in paths:
            here = [one for place in _places(path, DEPTH) for one in _opened(place, stack)]
            if not here:
                raise ValueError(
                    f"{path} holds no results: no session=... folders, no {TRAININGS} and no packed results "
                    f"({', '.join(PACKED)}); mrb bench layer --out {path} makes some"
                )
            folders += here
        yield folders


def _places(path: Path, depth: int) -> Iterator[Path]:
    if not path.exists():
        raise ValueError(f"there is no {path}")
    if path.is_file() or _kinds(path) != (False, False):
        yield path
    elif depth:
        for inner in sorted(path.iterdir()):
            packed = inner.name.endswith(PACKED) and is_plain_file(inner)
            if packed or (inner.is_dir() and not inner.is_symlink()):
                yield from _places(inner, depth - 1)


def _kinds(folder: Path) -> tuple[bool, bool]:
    """Returns whether a folder has timing records, and whether it has training records or a study."""
    return bool(session_folders(folder)), is_plain_file(folder / TRAININGS) or is_plain_file(folder / STUDY)


def _opened(path: Path, stack: ExitStack) -> Iterator[ResultsFolder]:
    folder = path
    if path.is_file():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrb-report-")))
        if path.suffix == BUNDLE:
            folder, _ = stack.enter_context(opened_bundle(path))
        else:
            _unpack(path, folder)
    timed, trained = _kinds(folder)
    if timed or trained:
        yield ResultsFolder(name=str(path), folder=folder, timed=timed, trained=trained)


def _unpack(archive: Path, folder: Path) -> None:
    size = 0
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:
                if not entry.isfile() or not KEPT.fullmatch(entry.name):
                    continue
                size += entry.size
                if size > MAX_UNPACKED_BYTES:
                    raise ValueError(f"{archive} unpacks to more than {MAX_UNPACKED_BYTES >> 30} GiB")
                target, source = folder / entry.name, tar.extractfile(entry)
                target.parent.mkdir(parents=True, exist_ok=True)
                assert source is not None  # it is a file
                with target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from None


def at_hand(folder: Path, *, rows: bool = False) -> Path:
    """Returns the folder, or an updated local copy of a store on a URL. rows: copy only what a query
    needs."""
    if url_of(folder) is None:
        return folder
    from moe_routing_bench.fleet.store import mirror  # most commands read a folder

    copied = mirror(folder, rows=rows)
    if rows:
        return copied.folder  # the query says what was left out
    for sentence in copied.sentences[:MAX_SENTENCES]:
        say(printable(f"{url_of(folder)}: {sentence}"))
    if len(copied.sentences) > MAX_SENTENCES:
        say(f"and {len(copied.sentences) - MAX_SENTENCES:,} more")
    return copied.folder
