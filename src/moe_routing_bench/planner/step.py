"""StepTime: how long one MoE layer takes on many ranks, part by part.

A part ends when its last rank ends, and then the next part begins: nothing overlaps. The time of a rank's own
work is the larger of operations over the device's rate and bytes over its memory's rate, plus a launch per
operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.core.experts import GATED
from moe_routing_bench.core.published import PublishedModel
from moe_routing_bench.parallel.faults import ROWS_SHOWN
from moe_routing_bench.planner.fabric import Device, Exchange, Fabric, Ports, Rows, exchange, ports
from moe_routing_bench.planner.flow import Flow

NUMBER_BYTES, FACTS = 8, 5  # traffic.settle sends each rank P + min(W, ROWS_SHOWN) + 5 numbers, int64
PARTS = ("route", "plan", "send", "compute", "return")


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """The sizes of a layer and the bytes of its numbers. DeepSeek-V3 with 8-bit weights and rows sent in 8
    bits: LayerSize(D=7168, F=2048, E=256, K=8, shared_F=2048, gated=True, weight_bytes=1, send_bytes=1).

    math_bits: of the arithmetic of experts. groups, keep_groups: a token chooses experts of `keep_groups` of
    `groups` equal groups, which are placed on nodes (DeepSeek).
    """

    D: int
    F: int
    E: int
    K: int
    shared_F: int = 0
    gated: bool = True
    weight_bytes: float = 2.0
    send_bytes: float = 2.0
    return_bytes: float = 2.0
    math_bits: int = 16
    groups: int = 0
    keep_groups: int = 0

    @property
    def expert_numbers(self) -> int:
        return self.D * self.F * (3 if self.gated else 2)

    @property
    def shared_numbers(self) -> int:
        return self.D * self.shared_F * (3 if self.gated else 2)

    @property
    def expert_bytes(self) -> float:
        return self.expert_numbers * self.weight_bytes


def layer_size(
    model: PublishedModel, *, weight_bits: float = 16, send_bits: float = 16, return_bits: float = 16,
    columns: int = 1,
) -> LayerSize:  # fmt: skip
    """The MoE layer of a published model. Weights of 8 bits also mean arithmetic in 8 bits; for fewer bits it
    stays at 16. columns: ranks that share each expert."""
    for what, bits in (("weight", weight_bits), ("send", send_bits), ("return", return_bits)):
        if not 1 <= bits <= 64:
            raise ValueError(f"--{what}-bits is {bits:g}; it must be from 1 to 64")
    limits = model.routing.options
    return LayerSize(
        D=model.D, F=-(-model.F // columns), E=model.E, K=model.K, shared_F=-(-model.shared_F // columns),
        gated=model.activation in GATED, weight_bytes=weight_bits / 8, send_bytes=send_bits / 8,
        return_bytes=return_bits / 8, math_bits=8 if 8 <= weight_bits < 9 else 16,
        groups=limits.get("groups", 0), keep_groups=limits.get("keep_groups", 0),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of each part. sent, returned: bytes of all ranks that leave their rank. between: the part
    of them that also leaves its node. buffers: bytes of rows on the rank with most."""

    seconds: dict[str, float]
    limits: dict[str, str]  # what limits send and return
    sent: float
    returned: float
    between: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def step_time(
    flow: Flow, size: LayerSize, fabric: Fabric, *, transport: str = "all_to_all", capacity: int | None = None
) -> StepTime:
    """Predicts a step. capacity: rows of each slot from each rank (padded); None: exactly the pairs
    (compact)."""
    device, W = fabric.device, flow.placement.num_ranks
    phases = flow.phases(transport, capacity)
    ways = [ports(rows_WW, fabric) for rows_WW in phases]
    there = [exchange(way, size.D * size.send_bytes, fabric) for way in ways]
    back = [exchange(way.turned, size.D * size.return_bytes, fabric) for way in reversed(ways)]
    T_W = flow.tokens_W
    kept_WS = flow.pairs_WS if capacity is None else np.minimum(flow.pairs_WS, capacity)
    slot_rows = kept_WS.sum(0).reshape(W, -1)  # by rank and place
    arrive_W = np.maximum(phases[-1], flow.rows_WW).sum(0)  # at the end there is a row for each pair
    leave_W = phases[0].sum(1)

    route = _work(device, flops_W=2 * size.D * size.E * T_W, bytes_W=T_W * size.D * 2, launches=2)
    plan = device.launch_us * 2e-6
    if W > 1:
        numbers = flow.placement.places + min(W, ROWS_SHOWN) + FACTS
        numbers_WW = np.broadcast_to(np.int64(numbers), (W, W))
        plan += exchange(ports(numbers_WW, fabric), NUMBER_BYTES, fabric).seconds
        plan += 0.0 if capacity is not None else device.host_wait_us * 1e-6
    pack = _work(device, bytes_W=(T_W + leave_W) * size.D * size.send_bytes, launches=1)
    unpack = _work(device, bytes_W=(T_W + leave_W) * size.D * size.return_bytes, launches=1)
    compute = float(expert_seconds(size, device, slot_rows.sum(1), (slot_rows > 0).sum(1), T_W).max())
    send = pack + _hops(there, fabric) + _beside(transport, ways, size, fabric)
    parts = (route, plan, send, compute, unpack + _hops(back, fabric))
    seconds = dict(zip(PARTS, parts, strict=True))
    rows, far = sum(way.rows for way in ways), sum(way.far_rows for way in ways)
    hidden = size.F * (2 if size.gated else 1)
    buffers = (leave_W + arrive_W) * size.D * (size.send_bytes + size.return_bytes) + arrive_W * hidden * 2
    return StepTime(
        seconds=seconds,
        limits={"send": _limit(there), "return": _limit(back)},
        sent=rows * size.D * size.send_bytes,
        returned=rows * size.D * size.return_bytes,
        between=far * size.D * (size.send_bytes + size.return_bytes),
        buffers=float(buffers.max()),
    )


def expert_seconds(
    size: LayerSize, device: Device, rows_W: Rows, experts_W: Rows | int, tokens_W: Rows | int = 0
) -> NDArray[np.floating]:
    """The time of each rank's experts: rows_W pairs on experts_W of them, and tokens of the shared expert."""
    return seconds_W(
        device,
        flops_W=2 * (size.expert_numbers * rows_W + size.shared_numbers * tokens_W),
        bytes_W=size.weight_bytes * (size.expert_numbers * experts_W + size.shared_numbers)
        + 4 * size.D * rows_W,
        launches=3,
        math_bits=size.math_bits,
    )


def _work(device: Device, *, flops_W: Rows | int = 0, bytes_W: Rows | float = 0, launches: int) -> float:
    """The slowest rank's time."""
    return float(seconds_W(device, flops_W=flops_W, bytes_W=bytes_W, launches=launches).max())


def seconds_W(
    device: Device,
    *,
    flops_W: Rows | float,
    bytes_W: Rows | NDArray[np.floating] | float,
    launches: int,
    math_bits: int = 16,
) -> NDArray[np.floating]:
    """Each rank's time for this arithmetic and this traffic with its memory, which run at the same time."""
    tflops = device.tflops_8bit if math_bits <= 8 and device.tflops_8bit is not None else device.tflops
    by_rank: NDArray[np.floating] = np.maximum(
        np.asarray(flops_W) / (tflops * 1e12),
        np.asarray(bytes_W) / (device.memory_gb_per_second * 1e9),
    )
    return by_rank + launches * device.launch_us * 1e-6


def _beside(transport: str, ways: list[Ports], size: LayerSize, fabric: Fabric) -> float:
    """The time for what a transport sends besides rows: K int32 per row and, for each hop, the numbers of
    rows.
    """
    if transport == "all_to_all":
        return 0.0
    seconds = sum(exchange(way, 4 * size.K, fabric).seconds for way in ways)
    if transport == "hierarchical":
        seconds += sum(exchange(way, 0, fabric).seconds + fabric.device.host_wait_us * 1e-6 for way in ways)
    return seconds


def _hops(exchanges: list[Exchange], fabric: Fabric) -> float:
    seconds = [hop.seconds for hop in exchanges]
    return max(seconds) if fabric.hops_overlap else sum(seconds)


def _limit(exchanges: list[Exchange]) -> str:
    return max(exchanges, key=lambda hop: hop.seconds).limit
