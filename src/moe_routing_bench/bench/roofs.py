"""Roofs: the highest rates ever seen on this machine, with which other rates are compared.

A roof is the best of several tries, never a datasheet's number. It bounds from above, so the best of all
sessions is kept, and what was measured while others used the machine bounds nothing: such roofs are marked
and not used. Who is held to them is said in floor.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_routing_bench.bench.weather import Neighbours
from moe_routing_bench.cost import Cost
from moe_routing_bench.machine import torch_threads
from moe_routing_bench.places import home

TRIES = 5
MEMORY_BYTES = 2**28  # per array; several times the caches of a server core
GEMM_SIZES = (512, 1024, 2048)
# a processor without float16 takes 50 s for the largest product, and ten minutes for all of them
MOST_SECONDS = 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# no machine comes near 1e30; such a rate in a file would make every floor zero
Rate = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
ByThreads = Annotated[dict[Annotated[int, Field(ge=1, le=2**20)], Rate], Field(max_length=64)]


class Roofs(BaseModel):
    """Best rates seen on one machine, by thread count: bytes per second and operations per second.

    read_bytes[1] = 1.2e10: 12 GB/s for one thread; gemm_flops["bfloat16"][2] = 1.6e12: 1.6 TFLOP/s for two.
    The memory roof holds for data that comes from memory: cold, or larger than the caches.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    machine: str
    read_bytes: ByThreads
    copy_bytes: ByThreads
    gemm_flops: dict[str, ByThreads] = Field(max_length=16)
    seconds: float = Field(ge=0, allow_inf_nan=False)  # that measuring took
    quiet: bool = False  # no others used the machine in at least one of the sessions

    @model_validator(mode="after")
    def _same_threads(self) -> Self:
        if any(
            rates.keys() != self.read_bytes.keys() for rates in (self.copy_bytes, *self.gemm_flops.values())
        ):
            raise ValueError("the rates must be for the same numbers of threads")
        return self

    def floor_seconds(self, cost: Cost, dtype: str, threads: int) -> float:
        """The least time of a call: its bytes at the best bandwidth, or its operations at the best rate."""
        memory = max(self.read_bytes[threads], self.copy_bytes[threads])
        return max(cost.bytes / memory, cost.useful_flops / self.gemm_flops[dtype][threads])

    def best_of_both(self, other: Self | None) -> Self:
        """The higher rate of each kind."""
        if other is None:
            return self
        gemm = {
            name: _higher(self.gemm_flops.get(name, {}), other.gemm_flops.get(name, {}))
            for name in {**self.gemm_flops, **other.gemm_flops}
        }
        return self.model_copy(
            update={
                "read_bytes": _higher(self.read_bytes, other.read_bytes),
                "copy_bytes": _higher(self.copy_bytes, other.copy_bytes),
                "gemm_flops": gemm,
                "quiet": self.quiet or other.quiet,
            }
        )


def measure_roofs(
    machine: str, threads: tuple[int, ...], on_step: Callable[[str], None] = lambda what: None
) -> Roofs:
    """Takes about ten seconds. `on_step` is called with what is being measured.

    Numbers of 16 bits can be multiplied as float32, so their roof is not lower, even if torch's product is.
    """
    started, neighbours = time.perf_counter(), Neighbours()
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
    return Roofs(
        machine=machine,
        read_bytes=read,
        copy_bytes=copy,
        gemm_flops=gemm,
        seconds=time.perf_counter() - started,
        quiet=neighbours.complaint() is None,
    )


def stored_roofs(machine: str) -> Roofs | None:
    """What `mrb doctor` measured here before. ValueError says what is wrong with a bad file."""
    path = roofs_path(machine)
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > 2**20:
        raise ValueError(f"{path} is not a file, or is too large to be a file of roofs; delete it")
    try:
        roofs = Roofs.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = _short(".".join(map(str, problem["loc"])) or "the file")
        raise ValueError(
            f"{path} is not a file of roofs ({where}: {_short(problem['msg'])}); delete it"
        ) from None
    if roofs.machine != machine:
        raise ValueError(f"{path} holds the roofs of {_short(roofs.machine)}, another machine; delete it")
    return roofs


def store_roofs(roofs: Roofs) -> Path:
    path = roofs_path(roofs.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(roofs.model_dump_json(indent=1) + "\n")
    temporary.replace(path)
    return path


def roofs_path(machine: str) -> Path:
    return home() / "roofs" / f"{machine}.json"


def _higher(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {n: max(one.get(n, 0.0), other.get(n, 0.0)) for n in sorted({**one, **other})}


def _short(text: str) -> str:
    """Text from the file, made printable and short enough for a sentence."""
    printable = "".join(c if c.isprintable() else "?" for c in text[:1000])
    return printable if len(printable) <= 120 else f"{printable[:120]}..."


def _gemm_rate(dtype: torch.dtype) -> float:
    """The best of all sizes; after one that takes long, larger ones are left out."""
    best = 0.0
    for size in GEMM_SIZES:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        seconds = _best(partial(torch.mm, a, b))
        best = max(best, 2 * size**3 / seconds)
        if seconds > MOST_SECONDS / 8:  # the next one has eight times the work
            break
    return best


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of TRIES calls after the first; a long first call is not repeated."""
    times: list[float] = []
    while len(times) <= TRIES and sum(times) < MOST_SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
