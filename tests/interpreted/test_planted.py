"""Faults planted in small kernels: each must be caught, and the kernels without them must pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from moe_routing_bench.conformance.instrumented import (
    KernelMemoryError,
    Order,
    OrderError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
    instrumented,
)

ORDERS: tuple[Order, ...] = ("forward", "reversed", "random")


@triton.jit
def gather(x, index, out, N, stride, H: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, H)
    live = row < N
    if FAULT == "load without mask":
        source = tl.load(index + row)
    else:
        source = tl.load(index + row, mask=live, other=0)
    if FAULT == "off by one":
        source += 1
    value = tl.load(x + source[:, None] * stride + column[None, :], mask=live[:, None], other=0.0)
    target = row
    if FAULT == "overlapping blocks":
        target = row - tl.program_id(0)
    if FAULT == "two lanes, one place":
        target = row - row % 2
    place = out + target[:, None] * H + column[None, :]
    if FAULT == "store without mask":
        tl.store(place, value)
    else:
        tl.store(place, value, mask=live[:, None])
    if FAULT == "written twice":
        tl.store(place, value, mask=live[:, None])
    if FAULT == "read back":
        tl.store(place + H * N, tl.load(place, mask=live[:, None]), mask=live[:, None])


@triton.jit
def running_sum(x, out, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """All programs add into one number, or the right way: each into its own."""
    value = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    if HOW == "own place":
        tl.store(out + tl.program_id(0), value)
    elif HOW == "read, add, write":
        tl.store(out, tl.load(out) + value)
    elif HOW == "atomic floats":
        tl.atomic_add(out, value)
    elif HOW == "after its neighbour":
        before = 0.0
        if tl.program_id(0) > 0:
            before = tl.load(out + tl.program_id(0) - 1)
        tl.store(out + tl.program_id(0), before + value)


@triton.jit
def count(x, out, BLOCK: tl.constexpr, PEEK: tl.constexpr):
    value = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(out + value, 1)
    if PEEK:
        tl.store(out + 8 + tl.program_id(0), tl.load(out))


def run_gather(fault: str, *, rows: int = 20, H: int = 8, step: int = 1, out: torch.Tensor | None = None):
    x = torch.randn(16, H * step).bfloat16()[:, :H]
    index = torch.arange(rows) % 16
    room = 2 * rows if fault == "read back" else rows
    result = torch.zeros(room, H).bfloat16() if out is None else out
    gather[(triton.cdiv(rows, 16),)](x, index, result, rows, x.stride(0), H, 16, fault)
    return x, index, result


@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_without_faults_passes(order: Order) -> None:
    with instrumented(order=order) as seen:
        x, index, out = run_gather("", out=torch.empty(20, 8, dtype=torch.bfloat16))
    assert torch.equal(out, x[index])
    assert (seen.launches, seen.programs) == (1, 2) and seen.lanes == 20 + 2 * 20 * 8


@pytest.mark.parametrize(
    "fault,kind",
    [
        ("load without mask", OutOfBoundsError),
        ("store without mask", OutOfBoundsError),
        ("off by one", OutOfBoundsError),
        ("overlapping blocks", RaceError),
        ("two lanes, one place", RaceError),
        ("written twice", RaceError),
        ("read back", RaceError),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_planted_fault_is_caught(fault: str, kind: type[KernelMemoryError], order: Order) -> None:
    with instrumented(order=order), pytest.raises(kind):
        run_gather(fault)


def test_the_gaps_of_a_view_are_out_of_bounds() -> None:
    with instrumented():
        run_gather("", step=2)
    x = torch.randn(16, 16)[:, :8]
    out = torch.zeros(16, 16)
    with instrumented(), pytest.raises(OutOfBoundsError, match="gaps"):
        gather[(1,)](x, torch.arange(15), out, 15, x.stride(0), 16, 16, "")


@pytest.mark.parametrize("how", ["read, add, write", "after its neighbour"])
@pytest.mark.parametrize("order", ORDERS)
def test_programs_in_each_others_way_are_caught(how: str, order: Order) -> None:
    with instrumented(order=order), pytest.raises(RaceError):
        running_sum[(4,)](torch.randn(64), torch.zeros(4), 16, how)


def test_sums_that_depend_on_the_order_are_caught() -> None:
    with instrumented(), pytest.raises(OrderError):
        running_sum[(4,)](torch.randn(64), torch.zeros(4), 16, "atomic floats")


def test_memory_that_nobody_wrote_is_caught_when_read() -> None:
    with instrumented(), pytest.raises(UninitialisedError):
        running_sum[(4,)](torch.empty(64), torch.zeros(4), 16, "own place")
    with instrumented():
        partial = torch.empty(4)
        running_sum[(4,)](torch.randn(64), partial, 16, "own place")
        running_sum[(1,)](partial, torch.empty(1), 4, "own place")  # what one launch wrote another may read
    with instrumented():
        running_sum[(4,)](torch.empty(64).normal_(), torch.zeros(4), 16, "own place")


def test_atomic_counts_are_fine_and_peeking_at_them_is_not() -> None:
    x = torch.randint(8, (64,))
    with instrumented():
        out = torch.zeros(16, dtype=torch.int64)
        count[(4,)](x, out, 16, False)
    assert torch.equal(out[:8], torch.bincount(x, minlength=8))
    with instrumented(), pytest.raises(RaceError):
        count[(4,)](x, torch.zeros(16, dtype=torch.int64), 16, True)


def outcome(act: Callable[[], object]) -> type[Exception] | None:
    try:
        act()
    except KernelMemoryError as fault:
        return type(fault)
    return None


def test_without_the_watch_all_of_it_passes_unnoticed() -> None:
    # why the watch exists; the faults that would write past their memory are left out
    assert outcome(lambda: run_gather("overlapping blocks")) is None
    assert outcome(lambda: run_gather("written twice")) is None
    assert outcome(lambda: running_sum[(4,)](torch.randn(64), torch.zeros(4), 16, "read, add, write")) is None
