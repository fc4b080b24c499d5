"""What a worker really loaded from outside: modules, mapped libraries, and files that Python opened.

The resume key has the files of the include folders and the versions of installed packages. A file that is
loaded from anywhere else would change a result without changing the key, so what loads one gets no time.
Python's and the system's own files do not count, nor caches of compiled code, which are made from the source;
nor what was written after the worker began.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from moe_routing_bench.bench.sources import PACKAGE, PYTHONS_OWN, files_in
from moe_routing_bench.core.paths import home
from moe_routing_bench.workloads.experiment import Experiment
from moe_routing_bench.workloads.workload import file_of

MAX_FILES = 1_000  # that are reported
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/nix", "/proc", "/sys", "/dev", "/run")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")


class LoadedFiles:
    """In a worker, before anything from outside is loaded: LoadedFiles(scratch); later .found()."""

    def __init__(self, scratch: Path):
        self._began, self._opened = time.time(), set[str]()
        self._known = (*_places(), str(scratch.resolve()))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and (args[1] is None or "r" in str(args[1])):
            self._opened.add(args[0])

    def found(self) -> list[str]:
        """Returns the names of files that do not belong to Python, the system, this package, a cache or the
        worker itself."""
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        given = {*filter(None, modules), *self._opened, *_mapped("self")}
        files = {os.path.realpath(name) for name in given}
        return sorted(name for name in files if _counts(name, self._known, self._began))[:MAX_FILES]


def mapped_by(pid: int, scratch: Path, began: float) -> list[str]:
    """The same of a worker's libraries as the system tells them, whatever it says itself."""
    known = (*_places(), str(scratch.resolve()))
    return sorted(name for name in _mapped(str(pid)) if _counts(name, known, began))


def _counts(name: str, known: Sequence[str], began: float) -> bool:
    if is_under(name, known):
        return False
    path = Path(name)
    try:
        return path.is_file() and path.stat().st_mtime < began
    except OSError:
        return False


def not_in_the_key(files: Sequence[str], experiment: Experiment, folders: Sequence[Path]) -> list[str]:
    """Returns the files that no part of the cell's key covers. All files in `folders` are in the key."""
    hashed = {os.path.realpath(file) for folder in folders for file in files_in(folder)}
    trace = file_of(experiment.workload) if experiment.workload else None
    known = [str(trace.resolve())] if trace is not None else []
    known += [str(Path(experiment.checkpoint).resolve())] if experiment.checkpoint else []
    return [
        name
        for name in files
        if name not in hashed and not is_under(name, known) and PYTHONS_OWN not in Path(name).parts
    ]


def is_under(name: str, folders: Sequence[str]) -> bool:
    return any(name == folder or name.startswith(folder.rstrip("/") + "/") for folder in folders)


def _places() -> tuple[str, ...]:
    """Returns where Python, its packages, the system and caches lie."""
    paths = sysconfig.get_paths()
    packages = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages += [*site.getsitepackages(), site.getusersitepackages()]
    packages += [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    user = Path.home()
    caches = [os.environ[name] for name in CACHES if name in os.environ]
    caches += [str(user / name) for name in (".cache", ".triton", ".nv", ".config/matplotlib")]
    caches += [str(path) for path in Path(tempfile.gettempdir()).glob("torchinductor_*")]
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    all_of_them = (*SYSTEM, str(PACKAGE), str(home()), *python, *packages, *caches)
    return tuple(dict.fromkeys(os.path.realpath(place) for place in all_of_them))


def _mapped(pid: str) -> set[str]:
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    names = re.findall(r" (/[^\n]+)$", text, re.M)
    return {name for name in names if not name.endswith(" (deleted)")}
