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
        """Files that are not Python's, the system's, ours, a cache's or the worker's own, by name."""
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        given = {*filter(None, modules), *self._opened, *_mapped()}
        files = {os.path.realpath(name) for name in given}
        return sorted(name for name in files if self._counts(name))[:MAX_FILES]

    def _counts(self, name: str) -> bool:
        if is_under(name, self._known):
            return False
        path = Path(name)
        try:
            return path.is_file() and path.stat().st_mtime < self._began
        except OSError:
            return False


def not_in_the_key(files: Sequence[str], experiment: Experiment, folders: Sequence[Path]) -> list[str]:
    """Those that no part of the cell's key stands for. folders: all of their files are in the key."""
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
    """Where Python, its packages, the system and caches lie."""
    paths = sysconfig.get_paths()
    packages = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages += [*site.getsitepackages(), site.getusersitepackages()]
    packages += [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    user = Path.home()
    caches = [os.environ[name] for name in CACHES if name in os.environ]
    caches += [str(user / name) for name in (".cache", ".triton", ".nv", ".config", ".local")]
    caches += [str(path) for path in Path(tempfile.gettempdir()).glob("torchinductor_*")]
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    all_of_them = (*SYSTEM, str(PACKAGE), str(home()), *python, *packages, *caches)
    return tuple(dict.fromkeys(os.path.realpath(place) for place in all_of_them))


def _mapped() -> set[str]:
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    names = re.findall(r" (/[^\n]+)$", text, re.M)
    return {name for name in names if not name.endswith(" (deleted)")}
