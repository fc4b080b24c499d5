"""Roofs: the highest rates measured on this machine, with which other rates are compared.

A roof is the best of several tries, never a datasheet's number. A rate above its roof is an error in the cost
model or the timer, not a fast kernel, and is reported as an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_routing_bench.cost import Cost

TRIES = 5
MEMORY_BYTES = 2**28  # per array; several times the caches of a server core
GEMM_SIZES = (512, 1024, 2048)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# a rate above its roof by more than this factor is an error; less may be noise, since roofs are measured too
TOLERANCE = 1.05

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

    def share(self, cost: Cost, seconds: float, dtype: str, threads: int) -> float:
        """The floor divided by the time: 0.8 is four fifths of what the machine can do. Above 1 raises."""
        share = self.floor_seconds(cost, dtype, threads) / seconds
        if share > TOLERANCE:
            raise ValueError(
                f"{100 * share:.0f} % of a measured roof: the cost model or the timer is wrong, "
                "or the roofs are; measure them again with `mrb doctor --again`"
            )
        return min(share, 1.0)


def measure_roofs(
    machine: str, threads: tuple[int, ...], on_step: Callable[[str], None] = lambda what: None
) -> Roofs:
    """Takes about ten seconds. `on_step` is called with what is being measured."""
    started = time.perf_counter()
    read: dict[int, float] = {}
    copy: dict[int, float] = {}
    gemm: dict[str, dict[int, float]] = {name: {} for name in DTYPES}
    for n in threads:
        with _threads(n):
            on_step(f"memory, {n} threads")
            source, target = torch.ones(2, MEMORY_BYTES // 4)
            read[n] = MEMORY_BYTES / _best(source.sum)
            copy[n] = 2 * MEMORY_BYTES / _best(partial(target.copy_, source))
            for name, dtype in DTYPES.items():
                on_step(f"{name} matmul, {n} threads")
                gemm[name][n] = max(_gemm_rate(size, dtype) for size in GEMM_SIZES)
    return Roofs(
        machine=machine,
        read_bytes=read,
        copy_bytes=copy,
        gemm_flops=gemm,
        seconds=time.perf_counter() - started,
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
    home = os.environ.get("MRB_HOME")
    base = Path(home) if home else Path.home() / ".cache" / "moe-routing-bench"
    return base / "roofs" / f"{machine}.json"


def _short(text: str) -> str:
    """Text from the file, made printable and short enough for a sentence."""
    printable = "".join(c if c.isprintable() else "?" for c in text[:1000])
    return printable if len(printable) <= 120 else f"{printable[:120]}..."


def _gemm_rate(size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / _best(partial(torch.mm, a, b))


def _best(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
