"""Loads the C++ files: from the wheel, or compiled for this processor at their first use and stored.

A wheel for Linux has a library for each file and level (hatch_build.py). What it does not have, such as a
changed file, is compiled into <MRB_HOME>/compiled, or TORCH_EXTENSIONS_DIR. You can delete those at any time.

torch's extension loader builds each file in its own folder, and the finished library is then moved. So a
process that is killed while it builds leaves nothing that another process waits for. Without a compiler these
implementations are unsupported, which is not an error. Compiling takes seconds, so a line on stderr says so.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, is_autocast_enabled
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from moe_routing_bench.core.levels import LEVELS, PRETENDED, library_name, options
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.paths import home

P = ParamSpec("P")
R = TypeVar("R")
PLAIN_TYPES = (Tensor, Parameter)
PREBUILT = Path(__file__).parents[1] / "prebuilt"  # only in a wheel that hatch_build.py filled


@cache  # reading /proc takes 0.2 ms
def best_level() -> str | None:
    """The best level of this processor and system; None without Linux and AVX2 or NEON dot products."""
    has = set(this_machine().instructions) if sys.platform == "linux" else set()
    fits = [name for name, (needs, _) in LEVELS.items() if needs <= has and name != PRETENDED]
    return next((name for name in fits if name != "amx" or _tiles_granted()), None)


@cache
def missing_tool() -> str | None:
    """Which tool for compiling is not installed, and how to get it; None if all are."""
    if compiler() is None:
        return "no C++ compiler was found; install g++ (apt install g++), or name one in CXX"
    return "ninja was not found; pip install ninja" if shutil.which("ninja") is None else None


def other_dtypes(x: torch.dtype, weights: torch.dtype) -> str:
    """Why kernels that multiply do not take these dtypes.

    On a core with AMX and AVX512-FP16 torch's matmul reaches 160 GFLOP/s in float16, 160 in float32 and 1,190
    in bfloat16 (`mrb doctor`). AVX512-FP16 would also sum in float16, which is not allowed here.
    """
    if x == weights == torch.float16:
        return (
            "it computes bfloat16 or float32; nearly all x86 processors multiply float16 no faster than "
            "float32, so convert the model with .bfloat16()"
        )
    return f"it computes bfloat16 or float32 throughout, not {x} with {weights}"


def why_not() -> str | None:
    """Why our C++ cannot run here; None if it can, because the wheel has it or it can be compiled."""
    if best_level() is None:
        return "it is written for x86 processors with AVX2 or better and ARM with asimddp, on Linux"
    return None if _in_wheel() else why_not_compiled()


def why_not_compiled() -> str | None:
    return None if missing_tool() is None else f"it is compiled on first use and {missing_tool()}"


@cache
def _in_wheel() -> bool:
    return any(PREBUILT.glob(f"*_{best_level()}_*.so"))


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def unsupported(source: Path, level: str | None, *tensors: Tensor) -> str | None:
    """Why the file cannot work on these tensors here; None if it can, and then it has been loaded."""
    return why_not_plain(*tensors) or _why_not_loaded(source, level)


def why_not_plain(*tensors: Tensor) -> str | None:
    """Why C++ cannot read these tensors; None if it can."""
    if is_dynamo_compiling():  # other tracers give tensors of another type
        return "it calls C++ by address, which torch.compile cannot trace"
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "it calls C++ by address, which torch.func and forward-mode derivatives cannot transform"
    for tensor in tensors:
        if not tensor.is_cpu:  # device.type takes seven times as long
            return f"it runs on the CPU, and a tensor is on {tensor.device}"
        # tensors made to be traced have no memory
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            return f"it reads plain tensors with memory of their own, not {type(tensor).__name__}"
    return None


def differentiable_once(backward: Callable[P, R]) -> Callable[P, R]:
    """Makes the backward of a torch.autograd.Function raise if second derivatives are asked for.

    torch's once_differentiable raises only if its own node is reached. torch.autograd.grad bypasses it, and
    then second derivatives are wrong without an error.
    """

    @wraps(backward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError(
                'kernels in C++ have no second derivatives (create_graph=True); use impl="staged"'
            )
        return backward(*args, **kwargs)

    return checked


def why_not_cast(dtype: torch.dtype) -> str | None:
    """Why torch.autocast forbids a matrix product in this dtype; None if it does not."""
    if is_autocast_enabled("cpu") and (wanted := torch.get_autocast_dtype("cpu")) != dtype:
        return f"torch.autocast asks for {wanted}, but it computes in the dtype of its tensors, {dtype}"
    return None


@cache  # every call of a kernel comes here
def _why_not_loaded(source: Path, level: str | None) -> str | None:
    try:
        load(source, level)
    except NotImplementedError as reason:
        return str(reason)
    return None


def load(source: Path, level: str | None = None) -> ctypes.CDLL:
    """Loads the library for `level`, by default the best of this processor. Raises NotImplementedError with
    the reason if that is impossible."""
    if (reason := why_not()) is not None:
        raise NotImplementedError(reason)
    library = _load(source, _granted(level))
    if isinstance(library, str):
        raise NotImplementedError(library)
    return library


class Function:
    """A function of a C++ file that takes one pointer to a struct of addresses and int64 numbers.

    Function(source, "mrb_topk", fields=9)(level, *values) compiles at the first call and passes the nine
    values. Packing them takes 0.6 us; ctypes would need 2 us to convert eleven arguments.
    """

    def __init__(self, source: Path, name: str, fields: int):
        self.source, self.name, self.pack = source, name, struct.Struct(f"{fields}q").pack
        self.by_level: dict[str, Callable[[bytes], int]] = {}

    def __call__(self, level: str, *values: int) -> int:
        if (call := self.by_level.get(level)) is None:
            call = load(self.source, level)[self.name]
            call.argtypes, call.restype = [ctypes.c_char_p], ctypes.c_int
            self.by_level[level] = call
        return call(self.pack(*values))


def compiled(source: Path, level: str | None = None) -> bool:
    """True if there is nothing to compile, also if it cannot be compiled here; `load` says why."""
    try:
        return why_not() is not None or _library(source, _granted(level)).exists()
    except NotImplementedError:
        return True


@cache
def _granted(level: str | None) -> str:
    level = level or best_level() or ""
    if level not in LEVELS:
        real = ", ".join(name for name in LEVELS if name != PRETENDED)
        raise ValueError(
            f"there is no level {level!r}; there are {real}, and for tests {PRETENDED}: AMX's code with "
            "tiles in plain C++, very slow"
        )
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
    """On Linux a process must request AMX's registers: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


@cache  # failures are cached too, because a build takes seconds
def _load(source: Path, level: str) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    library = _library(source, level)
    if not library.exists():
        if (reason := why_not_compiled()) is not None:
            return reason
        what = f"moe_routing_bench: compiling {source.parent.name}/{source.name} for {level}, once"
        what += " (AMX's tiles in plain C++, for tests, very slow): " if level == PRETENDED else ": "
        print(what, end="", file=sys.stderr, flush=True)
        began = time.monotonic()
        failed = _build(library.stem, source, options(level), library)
        print(f"{time.monotonic() - began:.0f} s{failed and ', failed'}", file=sys.stderr, flush=True)
        if failed:
            return f"it did not compile here: {failed}"
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a library of the wheel that needs a newer system
        return f"its library cannot be loaded here: {error}"


def _library(source: Path, level: str) -> Path:
    """The path of the compiled file. Its name changes with everything it is built from."""
    if (prebuilt := PREBUILT / library_name(source, level)).exists():
        return prebuilt
    return _folder() / library_name(source, level, torch.__version__, compiler())


def _folder() -> Path:
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or home() / "compiled") / "moe_routing_bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(name: str, source: Path, flags: list[str], library: Path) -> str:
    """Builds the library; returns what went wrong, "" if nothing did."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as scratch:
        try:
            cpp_extension.load(
                name=name,
                sources=[str(source)],
                extra_cflags=flags,
                extra_ldflags=["-fopenmp"],  # finds the libgomp that torch has loaded: one pool of threads
                build_directory=scratch,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            return " ".join(str(error).strip().splitlines()[-1:]) or type(error).__name__
        # torch calls a second build of the same name in one process name_v1
        (built,) = Path(scratch).glob("*.so")
        built.replace(library)
    return ""
