"""Roofs: the highest rates ever seen on this machine, with which other rates are compared.

A roof is the best of several tries, never a datasheet's number: bytes read a second for each size of working
set (the ladder), operations a second for each unit. roofs.cpp measures them; without a compiler torch does,
memory and products alone, and `how` says so. Roofs bound from above, so the best of all sessions is kept.
What was measured while others used the machine bounds nothing: such roofs are marked, used with that mark
alone, and measured again in the next quiet moment. What they mean for a call is said in floor.py.
"""

from __future__ import annotations

import ctypes
import math
import time
from bisect import bisect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_routing_bench.bench.noise import Neighbours
from moe_routing_bench.core import cpp
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.machine import Machine, this_machine, torch_threads
from moe_routing_bench.core.paths import home
from moe_routing_bench.core.text import first_problem, short
from moe_routing_bench.core.whole_files import write_whole

TRIES, LIBRARY_TRIES = 5, 3
MEMORY_BYTES = 2**28  # per array; several times the caches of a server core
GEMM_SIZES = (512, 1024, 2048)
# a processor without float16 takes 50 s for the largest product, and ten minutes for all of them
MAX_SECONDS = 0.5
# no machine comes near 1e30; such a rate in a file would make every floor zero
Rate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=2**20)]
ByThreads = Annotated[dict[Threads, Rate], Field(max_length=64)]
Words = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]  # they reach terminals
Ladder = Annotated[dict[Annotated[int, Field(ge=1, le=2**50)], Rate], Field(min_length=1, max_length=64)]

SOURCE = Path(__file__).with_suffix(".cpp")
MIN_RUNG, MAX_RUNG = 2**14, 2**30  # bytes: the least for each thread, the most for all
TRY_BYTES = 2**27  # a working set is read again until one try has moved so much
TRY_STEPS = 2_000_000  # 5 ms of FMA, 80 ms of AMX
READ, READ_STREAMS, COPY = range(3)  # as in roofs.cpp
MIN_SECONDS = 40.0  # who gives a command less time does not wait for roofs
QUIET_SECONDS = 0.3  # a look of this length says whether others use the machine


class Unit(NamedTuple):
    """Its number in roofs.cpp, the flag of a processor that has it, and the dtype it multiplies."""

    number: int
    flag: str
    dtype: str


UNITS = {
    "fma": Unit(0, "", "float32"),
    "vnni": Unit(1, "avx512_vnni", "int8"),
    "sdot": Unit(1, "asimddp", "int8"),
    "avx512_bf16": Unit(2, "avx512_bf16", "bfloat16"),
    "amx_bf16": Unit(3, "amx_bf16", "bfloat16"),
    "amx_int8": Unit(4, "amx_int8", "int8"),
}


class Roofs(BaseModel):
    """Best rates seen on one machine, by thread count: bytes per second and operations per second.

    read_bytes[1] = 1.2e10: 12 GB/s from memory for one thread; ladder[1][2**20] = 5e10: 50 GB/s if 1 MiB is
    read again and again; units["vnni"][1] = 6e11. gemm_flops["bfloat16"][2] = 3e11: 0.3 TFLOP/s for two
    threads, by the best unit that multiplies that dtype; "int8" is known if a unit has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    machine: str
    read_bytes: ByThreads
    copy_bytes: ByThreads
    gemm_flops: dict[Words, ByThreads] = Field(max_length=16)
    ladder: dict[Threads, Ladder] = Field(default={}, max_length=64)
    units: dict[Words, ByThreads] = Field(default={}, max_length=16)
    seconds: float = Field(ge=0, allow_inf_nan=False)  # that measuring took
    how: Words = ""  # "C++", or torch and why; "": before there were ladders
    busy: Words = ""  # who else used the machine meanwhile; "": nobody

    @model_validator(mode="before")
    @classmethod
    def _without_quiet(cls, given: Any) -> Any:
        """Files from before there were ladders said only whether it was quiet."""
        if isinstance(given, dict) and isinstance(given.get("quiet"), bool):
            rest = {name: value for name, value in given.items() if name != "quiet"}
            return rest if given["quiet"] else {"busy": "others used the machine", **rest}
        return given

    @model_validator(mode="after")
    def _same_threads(self) -> Self:
        rates = (self.copy_bytes, *self.gemm_flops.values(), *self.units.values())
        if any(one.keys() != self.read_bytes.keys() for one in (*rates, self.ladder or self.read_bytes)):
            raise ValueError("the rates must be for the same numbers of threads")
        return self

    @property
    def stale(self) -> bool:
        """Should they be measured again in the next quiet moment?"""
        return bool(self.busy) or not self.how

    def memory(self, threads: int) -> float:
        """Bytes per second of data that no cache holds."""
        return max(self.read_bytes[threads], self.copy_bytes[threads])

    def bandwidth(self, working_set: float, threads: int) -> float:
        """Bytes per second if so many bytes are read again and again. Between two rungs of the ladder it
        follows a straight line over logarithms; beyond the ends it stays the same."""
        rungs = sorted(self.ladder[threads].items())
        place = bisect(rungs, (working_set, math.inf))
        if place in (0, len(rungs)):
            return rungs[min(place, len(rungs) - 1)][1]
        (small, fast), (large, slow) = rungs[place - 1 : place + 1]
        share = math.log(working_set / small) / math.log(large / small)
        return math.exp(math.log(fast) * (1 - share) + math.log(slow) * share)

    def best_of_both(self, other: Self | None) -> Self:
        """Keeps the higher rate of each kind, because other work can only lower a rate. If one of them was
        measured on a quiet machine, a rate that only a busy machine gave is left out. A rate measured in
        another way is replaced."""
        if other is None or other.how != self.how:
            return self
        if self.busy and not other.busy:
            return other.best_of_both(self)
        alone = bool(other.busy) and not self.busy
        update: dict[str, Any] = {
            name: _higher(getattr(self, name), getattr(other, name), alone)
            for name in ("read_bytes", "copy_bytes", "gemm_flops", "units", "ladder")
        }
        return self.model_copy(update=update)


def measure_roofs(
    machine: str, threads: tuple[int, ...], on_step: Callable[[str], None] = lambda what: None
) -> Roofs:
    """Takes about ten seconds. `on_step` is called with what is being measured."""
    try:
        library, how = cpp.load(SOURCE), "C++"  # before the neighbours are looked at: a compiler is one
    except NotImplementedError as reason:
        library, how = None, f"torch, because of roofs.cpp: {' '.join(str(reason).split())[:500]}"
    started, neighbours = time.perf_counter(), Neighbours()
    if library is None:
        rates = _by_torch(threads, on_step)
    else:  # twice, some seconds apart: what other guests of the host do to memory lasts longer than a try
        rates = _by_library(library, threads, on_step)
        rates = _higher(rates, _by_library(library, threads, on_step))
    seconds = time.perf_counter() - started
    return Roofs(machine=machine, **rates, seconds=seconds, how=how, busy=neighbours.complaint() or "")


def _by_library(
    library: ctypes.CDLL, threads: tuple[int, ...], on_step: Callable[[str], None]
) -> dict[str, Any]:
    library.mrb_memory.restype = ctypes.c_void_p
    for function in (library.mrb_move, library.mrb_work, library.mrb_compute):
        function.restype = ctypes.c_double
    most = min(MAX_RUNG, 2 ** int(math.log2(psutil.virtual_memory().available / 4)))
    memory = ctypes.c_void_p(library.mrb_memory(ctypes.c_size_t(most)))
    if not memory.value:
        raise ValueError(f"there is no room for {most / 2**20:,.0f} MiB, which measuring the roofs takes")

    def moved(pattern: int, size: int, n: int) -> float:
        counted, passes = size // n // 1024 * 1024 * n, max(1, TRY_BYTES // size)
        run = partial(library.mrb_move, pattern, memory, ctypes.c_size_t(size), n, passes)
        return counted * passes / min(run() for _ in range(LIBRARY_TRIES))

    ladder: dict[int, dict[int, float]] = {}
    copy: dict[int, float] = {}
    units: dict[str, dict[int, float]] = {}
    half: dict[int, float] = {}
    try:
        for n in threads:
            on_step(f"memory, {n} threads")
            ladder[n], best, size = {}, 0.0, most
            while size >= MIN_RUNG * n:  # a smaller set is not slower, whatever the noise says
                best = max(best, moved(READ, size, n), moved(READ_STREAMS, size, n))
                ladder[n] = {size: best, **ladder[n]}
                size //= 2
            copy[n] = moved(COPY, most, n)
            for name, unit in UNITS.items():
                if not (work := _work(library, unit)):
                    continue
                on_step(f"{name}, {n} threads")
                run = partial(library.mrb_compute, unit.number, n, ctypes.c_long(TRY_STEPS))
                units.setdefault(name, {})[n] = (
                    work * n * TRY_STEPS / min(run() for _ in range(LIBRARY_TRIES))
                )
            on_step(f"float16 matmul, {n} threads")
            with torch_threads(n):
                half[n] = max(_gemm_rate(torch.float16), units["fma"][n])
    finally:
        library.mrb_release(memory, ctypes.c_size_t(most))
    # numbers of 16 bits can be multiplied as float32
    gemm: dict[str, dict[int, float]] = {"float32": units["fma"], "bfloat16": units["fma"], "float16": half}
    for name, unit in UNITS.items():
        if name in units:
            gemm[unit.dtype] = _higher(gemm.get(unit.dtype, {}), units[name])
    read = {n: rungs[most] for n, rungs in ladder.items()}
    return {"read_bytes": read, "copy_bytes": copy, "gemm_flops": gemm, "ladder": ladder, "units": units}


def _work(library: ctypes.CDLL, unit: Unit) -> float:
    """Returns the operations in a step of the unit; 0 if this processor or system has no such unit."""
    if unit.flag and unit.flag not in this_machine().instructions:
        return 0.0
    if unit.flag.startswith("amx") and cpp.best_level() != "amx":
        return 0.0
    return library.mrb_work(unit.number)


def _by_torch(threads: tuple[int, ...], on_step: Callable[[str], None]) -> dict[str, Any]:
    """Measures with torch. Numbers of 16 bits can be multiplied as float32, so their roof is never lower than
    that of float32, even if torch's own product is."""
    read: dict[int, float] = {}
    copy: dict[int, float] = {}
    gemm: dict[str, dict[int, float]] = {name: {} for name in DTYPES}
    for n in threads:
        with torch_threads(n):
            on_step(f"memory, {n} threads")
            source, target = torch.ones(2, MEMORY_BYTES // 4)
            read[n] = MEMORY_BYTES / _best(source.sum)
            copy[n] = 2 * MEMORY_BYTES / _best(partial(target.copy_, source))
            for name, dtype in DTYPES.items():
                on_step(f"{name} matmul, {n} threads")
                gemm[name][n] = max(_gemm_rate(dtype), gemm["float32"].get(n, 0.0))
    return {"read_bytes": read, "copy_bytes": copy, "gemm_flops": gemm}


def take_roofs(
    machine: Machine, stored: Roofs | None, on_step: Callable[[str], None] = lambda what: None
) -> Roofs:
    """Measures the roofs and stores the best of the new and the stored ones."""
    measured = measure_roofs(machine.name, tuple(sorted({1, machine.cores})), on_step)
    roofs = measured.best_of_both(stored)
    store_roofs(roofs)
    return roofs


def roofs_now(machine: Machine, seconds: float, on_retake: Callable[[], None] = lambda: None) -> Roofs | None:
    """Returns the stored roofs. It measures them again if they are stale, the machine is quiet now and the
    user gave enough seconds. None if they were never measured here."""
    stored = stored_roofs(machine.name)
    if stored is None or not stored.stale or seconds < MIN_SECONDS:
        return stored
    neighbours = Neighbours()
    time.sleep(QUIET_SECONDS)
    if neighbours.complaint() is not None:
        return stored
    on_retake()
    try:
        return take_roofs(machine, stored)
    except OSError:  # a home that cannot be written keeps the roofs it has
        return stored


def percent_of_roof(share: float, busy: bool) -> str:
    """73 %, or ~73 % if the roof was measured while others used the machine."""
    return f"{'~' if busy else ''}{100 * share:.0f} %"


def stored_roofs(machine: str) -> Roofs | None:
    """Reads what `mrb doctor` measured here before. ValueError says what is wrong with a bad file."""
    path = roofs_path(machine)
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > 2**20:
        raise ValueError(f"{path} is not a file, or is too large to be a file of roofs; delete it")
    try:
        roofs = Roofs.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is not a file of roofs ({first_problem(error)}); delete it") from None
    if roofs.machine != machine:
        raise ValueError(f"{path} holds the roofs of {short(roofs.machine)}, another machine; delete it")
    return roofs


def store_roofs(roofs: Roofs) -> Path:
    path = roofs_path(roofs.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, roofs.model_dump_json(indent=1) + "\n", sync=True)
    return path


def roofs_path(machine: str) -> Path:
    return home() / "roofs" / f"{machine}.json"


def _higher(one: dict[Any, Any], other: dict[Any, Any], alone: bool = False) -> dict[Any, Any]:
    """Returns the higher rate of each kind, inside nested dicts too. With `alone`, only kinds that the first
    one has count."""
    both = {**({} if alone else other), **one}
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        both[name] = _higher(a, b, alone) if isinstance(a, dict) else max(a, b)
    return dict(sorted(both.items()))


def _gemm_rate(dtype: torch.dtype) -> float:
    """Returns the best rate of all sizes. After a size that takes long, larger ones are left out."""
    best = 0.0
    for size in GEMM_SIZES:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        seconds = _best(partial(torch.mm, a, b))
        best = max(best, 2 * size**3 / seconds)
        if seconds > MAX_SECONDS / 8:  # the next one has eight times the work
            break
    return best


def _best(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of TRIES calls after the first. If the first call is long, it is not
    repeated."""
    times: list[float] = []
    while len(times) <= TRIES and sum(times) < MAX_SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
