"""Fabric: the network between ranks and the speed of a rank, read from a small TOML file.

The time of an exchange is an alpha-beta model with contention: a constant, a constant for each message of the
rank with most messages, and the bytes of the most loaded resource divided by its rate. Resources are the two
ports of a rank (inside its node and between nodes; in and out are separate), the links that all ranks of a
node share, and the links that all nodes of a switch share. All resources work at the same time and are never
idle. A fair network comes near to this bound; `measurements/parallel` says how near.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_routing_bench.core.names import no_such
from moe_routing_bench.core.text import first_problem

Rows = NDArray[np.integer]
LARGEST_FILE = 64 * 1024
# one line without control characters: it reaches terminals
Sentence = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]


class _Stated(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Link(_Stated):
    """gb_per_second: of one rank in one direction. exchange_us: of any exchange, even a small one.
    message_us: for each rank that a rank sends to."""

    gb_per_second: float = Field(gt=0, le=1e6)
    exchange_us: float = Field(ge=0, le=1e7)
    message_us: float = Field(default=0.0, ge=0, le=1e6)


class SharedLink(_Stated):
    """A link that several ranks or nodes share, in each direction."""

    gb_per_second: float = Field(gt=0, le=1e9)
    nodes: int = Field(default=1, ge=1, le=65_536)


class Device(_Stated):
    """One rank. Rates are those reached in practice, not those of a data sheet. tflops_8bit: None if 8-bit
    arithmetic is not faster."""

    tflops: float = Field(gt=0, le=1e6)
    tflops_8bit: float | None = Field(default=None, gt=0, le=1e6)
    memory_gb_per_second: float = Field(gt=0, le=1e6)
    memory_gb: float = Field(gt=0, le=1e6)
    launch_us: float = Field(ge=0, le=1e6)  # of one kernel or operation
    host_wait_us: float = Field(ge=0, le=1e6)  # until the host has read a number from the device


class Fabric(_Stated):
    """Eight GPUs a node, each with 50 GB/s to other nodes:  read_fabric("h100-400g").between.gb_per_second

    node: the link to other nodes that all ranks of a node share, if it is slower than their links together.
    switch: `nodes` nodes share gb_per_second to all others, if the network above them is slower.
    waits: the part of the smaller direction that waits for the other, 0 if both run at the same time. With
    Gloo over TCP it was measured near 1; the reason is not known.
    hops_overlap: a hierarchical exchange passes rows on while others still arrive, as DeepEP does.
    """

    title: Sentence
    ranks_per_node: int = Field(ge=1, le=65_536)
    inside: Link
    between: Link
    node: SharedLink | None = None
    switch: SharedLink | None = None
    waits: float = Field(default=0.0, ge=0, le=1)
    hops_overlap: bool = False
    device: Device
    sources: list[Sentence] = Field(min_length=1, max_length=20)  # where the numbers come from


@dataclass(frozen=True, kw_only=True)
class Side:
    """What each rank sends (or receives): rows inside its node and to other nodes, and to how many ranks;
    with a switch also the rows that leave each switch. Rows that stay on a rank use no link."""

    near_W: Rows
    far_W: Rows
    near_ranks_W: Rows
    far_ranks_W: Rows
    switch_S: Rows | None


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The sums over a matrix of rows that decide the time of an exchange. turned: the same rows on the way
    back.
    """

    out: Side
    into: Side

    @property
    def turned(self) -> Ports:
        return Ports(out=self.into, into=self.out)

    @property
    def rows(self) -> int:
        """Rows that leave their rank."""
        return self.far_rows + int(self.out.near_W.sum())

    @property
    def far_rows(self) -> int:
        """Rows that leave their node."""
        return int(self.out.far_W.sum())


@dataclass(frozen=True)
class Exchange:
    """How long an exchange takes, and what limits it:  Exchange(0.0021, "between nodes, in")."""

    seconds: float
    limit: str


def shipped() -> list[str]:
    """The fabrics that come with the package."""
    folder = resources.files("moe_routing_bench.planner") / "fabrics"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_fabric(name: str) -> Fabric:
    """Reads a fabric of this package by name, or a file. Raises ValueError for anything else."""
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"there is no file {name}; shipped are {', '.join(shipped())}")
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"{name} has more than {LARGEST_FILE} bytes, too many for a fabric")
        data = path.read_bytes()
    elif name in shipped():
        data = (resources.files("moe_routing_bench.planner") / "fabrics" / f"{name}.toml").read_bytes()
    else:
        raise no_such("fabric", name, [*shipped(), "or a file.toml"])
    try:
        return Fabric.model_validate(tomllib.loads(data.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not TOML: {error}") from None
    except ValidationError as error:
        raise ValueError(f"{name}: {first_problem(error)}") from None


def ports(rows_WW: Rows, fabric: Fabric) -> Ports:
    """The sums for rows from each rank (first index) to each rank. O(W * W)."""
    W, L = len(rows_WW), min(fabric.ranks_per_node, len(rows_WW))
    N = W // L
    node = np.arange(N)
    inside_NLL = rows_WW.reshape(N, L, N, L)[node, :, node, :]
    own_W = np.diagonal(rows_WW)
    used_WW, used_NLL = rows_WW > 0, inside_NLL > 0
    switch_SS = None
    if fabric.switch is not None and fabric.switch.nodes < N:
        first = np.arange(0, W, fabric.switch.nodes * L)
        switch_SS = np.add.reduceat(np.add.reduceat(rows_WW, first, axis=0), first, axis=1)
        np.fill_diagonal(switch_SS, 0)

    def side(axis: int) -> Side:
        near_W, ranks_W = inside_NLL.sum(axis + 1).ravel(), used_NLL.sum(axis + 1).ravel()
        return Side(
            near_W=near_W - own_W, far_W=rows_WW.sum(axis) - near_W,
            near_ranks_W=ranks_W - (own_W > 0), far_ranks_W=used_WW.sum(axis) - ranks_W,
            switch_S=None if switch_SS is None else switch_SS.sum(axis),
        )  # fmt: skip

    return Ports(out=side(1), into=side(0))


def exchange(rows: Ports, row_bytes: float, fabric: Fabric) -> Exchange:
    out, into, waits = rows.out, rows.into, fabric.waits
    limits = [
        _most("inside a node", out.near_W, into.near_W, fabric.inside.gb_per_second, waits),
        _most("between nodes", out.far_W, into.far_W, fabric.between.gb_per_second, waits),
    ]
    if fabric.node is not None:
        per_node = (-1, min(fabric.ranks_per_node, len(out.far_W)))
        out_N, into_N = (side.far_W.reshape(per_node).sum(1) for side in (out, into))
        limits.append(_most("all ranks of a node", out_N, into_N, fabric.node.gb_per_second, waits))
    if fabric.switch is not None and out.switch_S is not None and into.switch_S is not None:
        rate = fabric.switch.gb_per_second
        limits.append(_most("all nodes of a switch", out.switch_S, into.switch_S, rate, waits))
    most, limit = max(limits)
    used = [(fabric.inside, rows.out.near_ranks_W), (fabric.between, rows.out.far_ranks_W)]
    constant = max((link.exchange_us for link, ranks_W in used if ranks_W.any()), default=0.0)
    each = float(np.sum([link.message_us * ranks_W for link, ranks_W in used], axis=0).max())
    calls, moving = 1e-6 * (constant + each), most * row_bytes / 1e9
    return Exchange(calls + moving, limit if moving > calls else "messages")


def _most(name: str, out: Rows, into: Rows, rate: float, waits: float) -> tuple[float, str]:
    """The rows of the busiest resource divided by its rate, and its name."""
    both = np.maximum(out, into) + waits * np.minimum(out, into)
    busiest = int(both.argmax())
    return float(both[busiest]) / rate, f"{name}, {'out' if out[busiest] >= into[busiest] else 'in'}"
