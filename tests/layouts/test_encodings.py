"""Triton's encodings read as layouts; the numbers to compare with are Triton's own linear layouts."""

from __future__ import annotations

import pytest

from moe_routing_bench.layouts.encodings import matrix_reads, registers, shared
from moe_routing_bench.layouts.tiles import faults, look_at_copy

GATHER = (
    "#ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}>"
)
SWIZZLED = "#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>"
HOPPER = "#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>"


def places(bases: list[list[int]], rows: int) -> list[int]:
    """What a linear layout of Triton says of every number: the bases of its bits, added without carry."""
    said = [0]
    for row, column in bases:
        said += [place ^ (row + rows * column) for place in said]
    return said


def test_a_blocked_layout_is_what_triton_says() -> None:
    tv = registers(GATHER, (4, 1024))
    assert str(tv) == "((32,4),(8,4)):((32,1024),(4,1))"
    lanes = [[0, 8], [0, 16], [0, 32], [0, 64], [0, 128], [0, 256], [0, 512]]
    values = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]]
    assert tv.places() == places(lanes + values, 4)


def test_threads_that_are_left_over_hold_what_others_hold() -> None:
    small = GATHER.replace("[1, 8]", "[1, 1]").replace("[1, 32]", "[4, 8]").replace("[1, 4]", "[4, 1]")
    tv = registers(small, (8, 8))
    assert str(tv) == "((8,4,2,2),(1)):((8,1,4,0),(0))"
    copy = look_at_copy(
        tv, (8, 8), shared(SWIZZLED.replace("maxPhase = 8", "maxPhase = 1"), (8, 8), 32), item_bits=32
    )
    assert copy.holders == (2, 2) and not copy.bijective
    assert any("touched 2 times" in one for one in faults(copy, width_bits=32))
    assert faults(copy, width_bits=32, copies=2) == []


def test_a_side_that_is_full_stays_full() -> None:
    warps = "threadsPerWarp = [4, 8], warpsPerCTA = [4, 1]"
    tv = registers(f"#ttg.blocked<{{sizePerThread = [8, 1], {warps}, order = [0, 1]}}>", (8, 8))
    assert str(tv) == "((4,8,4),(8)):((0,8,0),(1))"
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4], [0, 0], [0, 0]]
    assert tv.places() == places([*lanes, [1, 0], [2, 0], [4, 0]], 8)


def test_a_linear_layout_is_its_bases() -> None:
    written = (
        "#ttg.linear<{register = [[1, 0], [0, 1]], lane = [[0, 2], [2, 0]], warp = [[4, 0]], block = []}>"
    )
    assert str(registers(written, (8, 4))) == "((2,2,2),(2,2)):((16,2,4),(1,8))"


def test_shared_memory_is_what_triton_says() -> None:
    memory = shared(SWIZZLED, (64, 64), 16)
    assert str(memory) == "S<3,3,3> o 0 o (64,64):(64,1)"
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]]
    rows = [[1, 8], [2, 16], [4, 32], [8, 0], [16, 0], [32, 0]]
    place_of = memory.places()
    assert [place_of[at] for at in places(columns + rows, 64)] == list(range(64 * 64))


@pytest.mark.parametrize(
    ("encoding", "shape", "bases"),
    [
        (
            SWIZZLED.replace("perPhase = 1, maxPhase = 8", "perPhase = 2, maxPhase = 4"),
            (32, 32),
            [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 8], [4, 16], [8, 0], [16, 0]],
        ),
        (
            SWIZZLED.replace("[1, 0]", "[0, 1]"),  # a row of 32 has room for 4 phases of 8 numbers, not for 8
            (32, 32),
            [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [8, 1], [16, 2], [0, 4], [0, 8], [0, 16]],
        ),
        (
            HOPPER,
            (64, 128),
            [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32], [8, 0], [16, 0],
             [32, 0], [0, 64]],
        ),
        (
            HOPPER.replace("= false", "= true"),
            (128, 64),
            [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [8, 1], [16, 2], [32, 4], [0, 8], [0, 16],
             [0, 32], [64, 0]],
        ),
        (
            HOPPER.replace("128", "64"),
            (64, 128),
            [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0],
             [0, 32], [0, 64]],
        ),
    ],
)  # fmt: skip
def test_other_shared_memory_is_what_triton_says(
    encoding: str, shape: tuple[int, int], bases: list[list[int]]
) -> None:
    place_of = shared(encoding, shape, 16).places()
    assert [place_of[at] for at in places(bases, shape[0])] == list(range(shape[0] * shape[1]))


def test_a_tile_is_read_by_matrices_without_bank_conflicts_because_it_is_swizzled() -> None:
    tv = matrix_reads((64, 64), 1)
    plain = SWIZZLED.replace("maxPhase = 8", "maxPhase = 1")
    passes = [
        look_at_copy(tv, (64, 64), shared(one, (64, 64), 16), item_bits=16, space="shared").passes
        for one in (SWIZZLED, HOPPER, plain)
    ]
    assert passes == [1, 1, 8]


@pytest.mark.parametrize(
    "call",
    [
        lambda: registers("#ttg.amd_mfma<{version = 3}>", (16, 16)),
        lambda: registers("no encoding", (16, 16)),
        lambda: shared("#ttg.amd_rotating_shared<{vec = 4}>", (16, 16), 16),
        lambda: shared(SWIZZLED, (16,), 16),
        lambda: shared(HOPPER, (16, 48), 16),
        lambda: matrix_reads((4, 64), 1),
    ],
)
def test_what_is_not_read_says_so(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NotImplementedError):
        call()
