"""What the C++ files are compiled with, and what the libraries are called.

It imports the standard library alone, because hatch_build.py reads it where there is no torch.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# The code for AMX with each tile instruction computed in plain C++ (ops/pretended_tiles.h). It is for tests
# on processors without AMX and very slow, and used only if it is named.
PRETENDED = "amx_pretended"
# best first: the flags of /proc/cpuinfo that the processor must have, the options for the compiler
LEVELS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (
        frozenset({"amx_bf16", "amx_int8", "avx512f", "avx512_bf16"}),
        ("-march=sapphirerapids",),
    ),
    "vnni": (
        frozenset({"avx512f", "avx512_vnni"}),
        ("-march=cascadelake", "-mprefer-vector-width=512"),
    ),
    "avx512": (frozenset({"avx512f"}), ("-march=skylake-avx512", "-mprefer-vector-width=512")),
    "avx2": (frozenset({"avx2"}), ("-march=haswell",)),
    "neon": (frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
    PRETENDED: (
        frozenset({"avx512f", "avx512_vnni"}),
        ("-march=cascadelake", "-mprefer-vector-width=512", "-DMRB_PRETENDED_TILES"),
    ),
}
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")


def with_includes(source: Path) -> list[Path]:
    """The file and all our headers that it includes, directly or indirectly."""
    seen: list[Path] = []
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in seen:
            seen.append(path)
            names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
            waiting += [(path.parent / name).resolve() for name in names]
    return [seen[0], *sorted(seen[1:])]


def options(level: str) -> list[str]:
    return [*FLAGS, *LEVELS[level][1]]


def library_name(source: Path, level: str, *more: str | None) -> str:
    """It changes with every text and option that the library is built from, and with `more`."""
    texts = [path.read_text() for path in with_includes(source)]
    digits = hashlib.sha256(repr((texts, options(level), *more)).encode()).hexdigest()[:16]
    return f"mrb_{source.parent.name}_{source.stem}_{level}_{digits}.so"
