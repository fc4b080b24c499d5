"""C++ files beside their launchers: compiled on first use for this processor, kept, loaded.

Built with torch's extension loader in a folder of its own and moved into place when whole, so a process that
is killed while it builds leaves nothing that another would wait for. No compiler is a reason, not an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_routing_bench.machine import this_machine

# best first: what the processor must have (words of /proc/cpuinfo), what the compiler is told
LEVELS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (
        frozenset({"amx_bf16", "avx512f", "avx512_bf16"}),
        ("-march=sapphirerapids",),
    ),
    "avx512": (frozenset({"avx512f"}), ("-march=skylake-avx512", "-mprefer-vector-width=512")),
    "avx2": (frozenset({"avx2"}), ("-march=haswell",)),
}
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")


def best_level() -> str | None:
    """The best level this processor has; None: none of them (not x86, or older than AVX2)."""
    has = set(this_machine().instructions)
    return next((name for name, (needs, _) in LEVELS.items() if needs <= has), None)


@cache
def why_not() -> str | None:
    """Why nothing can be compiled and run here, in words; None if it can."""
    if sys.platform != "linux" or best_level() is None:
        return "it is written for x86 processors with AVX2 or better, on Linux"
    if compiler() is None:
        return "it is compiled on first use and no C++ compiler was found; install g++, or name one in CXX"
    if shutil.which("ninja") is None:
        return "it is compiled on first use and ninja was not found; pip install ninja"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def unsupported(source: Path, level: str | None, *tensors: Tensor) -> str | None:
    """Why the file cannot work on these tensors here, in words; None if it can, and then it is loaded."""
    if torch.compiler.is_compiling():
        return "it calls C++ by address, which torch.compile cannot trace"
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"it runs on the CPU, and a tensor is on {tensor.device}"
        # tensors made to be traced have no memory
        if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
            return f"it reads plain tensors with memory of their own, not {type(tensor).__name__}"
    try:
        load(source, level)
    except NotImplementedError as reason:
        return str(reason)
    return None


def load(source: Path, level: str | None = None) -> ctypes.CDLL:
    """The file, compiled for `level`, or for the best this processor has. Raises NotImplementedError with the
    reason if that cannot be."""
    if (reason := why_not()) is not None:
        raise NotImplementedError(reason)
    return _load(source, _granted(level))


@cache  # every call of a kernel asks, and the processor's answer is read from /proc, which takes 0.2 ms
def _granted(level: str | None) -> str:
    level = level or best_level() or ""
    if level not in LEVELS:
        raise ValueError(f"there is no level {level!r}; there are {', '.join(LEVELS)}")
    missing = LEVELS[level][0] - set(this_machine().instructions)
    if missing:
        raise NotImplementedError(
            f"level {level} needs {', '.join(sorted(missing))}, which this processor lacks"
        )
    if level == "amx" and not _tiles_granted():
        raise NotImplementedError("the system does not grant AMX to this process; use level=avx512")
    return level


@cache
def _tiles_granted() -> bool:
    """Linux gives AMX's registers to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


@cache
def _load(source: Path, level: str) -> ctypes.CDLL:
    flags = [*FLAGS, *LEVELS[level][1]]
    texts = [path.read_text() for path in with_includes(source)]
    built_from = (texts, flags, torch.__version__, compiler())
    digits = hashlib.sha256(repr(built_from).encode()).hexdigest()[:16]
    name = f"mrb_{source.parent.name}_{source.stem}_{level}_{digits}"
    folder = _folder()
    library = folder / f"{name}.so"
    if not library.exists():
        _build(name, source, flags, library)
    return ctypes.CDLL(str(library))


def with_includes(source: Path) -> list[Path]:
    """The file and all headers of ours that it includes, themselves or through others."""
    seen: list[Path] = []
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in seen:
            seen.append(path)
            names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
            waiting += [(path.parent / name).resolve() for name in names]
    return [seen[0], *sorted(seen[1:])]


def _folder() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    folder = Path(root) / "moe_routing_bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(name: str, source: Path, flags: list[str], library: Path) -> None:
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as scratch:
        try:
            cpp_extension.load(
                name=name,
                sources=[str(source)],
                extra_cflags=flags,
                extra_ldflags=["-fopenmp"],  # torch has loaded its libgomp already: one pool of threads
                build_directory=scratch,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            last = str(error).strip().splitlines()[-1:]
            raise NotImplementedError(f"it did not compile here: {' '.join(last)}") from error
        # torch names the second build of one name in one process name_v1
        (built,) = Path(scratch).glob("*.so")
        built.replace(library)
