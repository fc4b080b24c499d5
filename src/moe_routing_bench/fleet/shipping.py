"""Sends files that a cell refers to by path to other machines: folders of code and recorded traces.

A parcel is identified by its content. The machine that receives it keeps it in
<MRB_HOME>/shipped/<sha256>/<name>, checks every byte again before each use, and measures a copy of the cell
with the new path. Keys contain hashes of contents and no paths, so they are equal on all machines.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from moe_routing_bench.bench.sources import files_in
from moe_routing_bench.core.paths import home
from moe_routing_bench.workloads.experiment import Experiment
from moe_routing_bench.workloads.workload import file_of, with_file

MAX_BYTES, MAX_FILES = 256 << 20, 2_000


@dataclass(frozen=True)
class Parcel:
    """Parcel("kernels", (("combine/mine.py", b"..."), ("combine/mine.cpp", b"..."))): a folder, or a single
    file if its only name is that of the parcel."""

    name: str
    files: tuple[tuple[str, bytes], ...]

    @staticmethod
    def of(path: Path) -> Parcel:
        """Reads a file or a folder. Raises ValueError if it is too large to be sent."""
        files: list[tuple[str, bytes]] = []
        size = 0
        for file in [path] if path.is_file() else files_in(path):
            size += file.stat().st_size
            if size > MAX_BYTES or len(files) == MAX_FILES:
                raise ValueError(
                    f"{path} has over {MAX_BYTES >> 20} MiB or {MAX_FILES:,} files, too much to send to "
                    "other machines"
                )
            name = file.name if file == path else file.relative_to(path).as_posix()
            files.append((name, file.read_bytes()))
        return Parcel(path.name, tuple(files))

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.name.encode() + b"\0")
        for name, content in self.files:
            digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        return digest.hexdigest()

    def unpacked(self) -> Path:
        """Returns its path on this machine, and writes it there if needed. Existing files are checked: if
        some were added, changed or removed, a new copy replaces them."""
        shelf = home() / "shipped" / self.sha256
        if (place := shelf / self.name).exists() and Parcel.of(place) == self:
            return place
        shelf.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shelf) as scratch:
            fresh = Path(scratch) / self.name
            for name, content in self.files:
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise ValueError(
                        f"the parcel {self.name} has a file {name!r}, which would be outside of it"
                    )
                file = fresh if len(self.files) == 1 and name == self.name else fresh / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            try:
                if place.exists():
                    place.rename(Path(scratch) / "wrong")
                fresh.rename(place)
            except OSError:
                if not (place.exists() and Parcel.of(place) == self):  # else another process was quicker
                    raise
        return place


def named_by(experiment: Experiment) -> dict[str, Path]:
    """By the text in the cell, the path that another machine may lack."""
    trace = file_of(experiment.workload) if experiment.workload else None
    return {text: Path(text).resolve() for text in (*experiment.include, *([str(trace)] if trace else []))}


def moved(experiment: Experiment, places: Mapping[str, Path]) -> Experiment:
    """The cell with other paths."""
    trace = file_of(experiment.workload) if experiment.workload else None
    workload = with_file(experiment.workload, places[str(trace)]) if trace else experiment.workload
    return replace(
        experiment, workload=workload, include=tuple(str(places[text]) for text in experiment.include)
    )
