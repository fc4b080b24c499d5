"""The checker of copies: what is good passes, and every planted fault is found."""

from __future__ import annotations

import pytest

from moe_routing_bench.layouts.algebra import thread_values, zipped_divide
from moe_routing_bench.layouts.layout import Layout, row_major
from moe_routing_bench.layouts.swizzle import Swizzle, Swizzled
from moe_routing_bench.layouts.tiles import coordinate_layout, faults, look_at_copy, tile_faults

L = Layout.parse
# dispatch.triton_gather on A100: 4 warps side by side, a thread has 8 numbers in each of 4 rows
SIDES, GATHER = (4, 1024), L("(128,(8,4)):(32,(4,1))")
ROWS = row_major(4, 1024)
# a 64 x 64 tile of bfloat16 in shared memory: 128 threads write 16 bytes each, 4 times; 8 lanes have a row
SHARED_SIDES, BY_ROW = (64, 64), L("((8,16),(8,4)):((512,1),(64,16))")
# the same tile read 8 rows of 16 bytes at a time, as ldmatrix does
BY_COLUMN = L("((8,8,2),(8,4)):((1,8,512),(64,1024))")
TURNED = Swizzled(Swizzle(3, 3, 3), row_major(64, 64))


def test_a_good_copy_has_no_fault() -> None:
    copy = look_at_copy(GATHER, SIDES, ROWS, item_bits=16)
    assert copy.bijective and faults(copy) == []
    assert (copy.width_bits, copy.accesses, copy.sectors, copy.least_sectors) == (128, 4, 16, 16)
    assert str(copy) == "each place once; 4 x 128 bits; 16 sectors (least 16)"
    for tv in (BY_ROW, BY_COLUMN):
        shared = look_at_copy(tv, SHARED_SIDES, TURNED, item_bits=16, space="shared")
        assert shared.bijective and shared.passes == 1 and faults(shared) == []


def test_what_cute_prints_can_be_checked() -> None:
    sides, tv = thread_values(L("(4,32):(32,1)"), L("(1,8):(8,1)"))
    assert faults(look_at_copy(L(str(tv)), sides, row_major(*sides), item_bits=16)) == []


def test_good_tiles_have_no_fault() -> None:
    assert tile_faults(zipped_divide(coordinate_layout(12, 16), [4, 8]), (12, 16), guarded=False) == []
    assert tile_faults(zipped_divide(coordinate_layout(10, 12), [4, 8]), (10, 12)) == []


# ((rows of a tile, columns), (row tiles, column tiles)) of a 10 x 16 matrix; a column is 2^20 further on
FAR = 1 << 20
PLANTED_TILES = {
    "tiles overlap by a row": (f"((4,8),(3,2)):((1,{FAR}),(3,{8 * FAR}))", "in more than one tile"),
    "tiles overlap by a column": (f"((4,8),(3,3)):((1,{FAR}),(4,{7 * FAR}))", "in more than one tile"),
    "the tail of the rows is lost": (f"((4,8),(2,2)):((1,{FAR}),(4,{8 * FAR}))", "32 of 160 places are in"),
    "the tail of the columns is lost": (f"((4,8),(3,1)):((1,{FAR}),(4,0))", "80 of 160 places are in"),
    "a gap between tiles": (f"((4,8),(2,2)):((1,{FAR}),(5,{8 * FAR}))", "in no tile"),
    "all programs do the first tile": (f"((4,8),(3,2)):((1,{FAR}),(0,{8 * FAR}))", "in more than one tile"),
    "rows and columns of tiles exchanged": (f"((4,8),(3,2)):((1,{FAR}),(8,{4 * FAR}))", "in no tile"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED_TILES)
def test_a_fault_planted_in_tiles_is_found(fault: str) -> None:
    written, sentence = PLANTED_TILES[fault]
    assert any(sentence in found for found in tile_faults(L(written), (10, 16)))


def test_a_tail_that_nothing_masks_is_found() -> None:
    tiles = zipped_divide(coordinate_layout(10, 12), [4, 8])
    assert tile_faults(tiles, (10, 12), guarded=False) == [
        "72 places of tiles are outside the edge, and nothing masks them"
    ]


PLANTED_COPIES = {
    "64-bit accesses": (L("(256,(4,4)):(16,(4,1))"), "one access has 64 bits"),
    "threads strided by one number": (L("(128,(8,4)):(4,(512,1))"), "one access has 16 bits"),
    "values down a column": (L("((32,4),(4,8)):((4,1024),(1,128))"), "one access has 16 bits"),
    "two threads on one place": (L("(128,(8,4)):(16,(4,1))"), "touched 2 times"),
    "the last warp does nothing": (L("(96,(8,4)):(32,(4,1))"), "1024 places of the tile are touched by no"),
    "one row too few": (L("(128,(8,3)):(32,(4,1))"), "1024 places of the tile are touched by no thread"),
    "past the end of the tile": (L("(128,(8,4)):(36,(4,1))"), "outside the tile"),
    "all threads copy the same": (L("(128,(8,4)):(0,(4,1))"), "touched 128 times"),
    "each lane a row of its own": (L("((4,32),(8,4)):((1,128),(4,32))"), "touches 32 sectors; 16 would do"),
}


@pytest.mark.parametrize("fault", PLANTED_COPIES)
def test_a_fault_planted_in_a_copy_is_found(fault: str) -> None:
    tv, sentence = PLANTED_COPIES[fault]
    found = faults(look_at_copy(tv, SIDES, ROWS, item_bits=16))
    assert any(sentence in one for one in found), found


def test_rows_that_are_not_aligned_are_found() -> None:
    """A row of 1004 numbers is 2008 bytes: the second begins 8 bytes into a block of 16."""
    copy = look_at_copy(GATHER, SIDES, Layout((4, 1024), (1004, 1)), item_bits=16)
    assert copy.width_bits == 64


def test_rows_that_begin_inside_a_sector_are_found() -> None:
    copy = look_at_copy(GATHER, SIDES, Layout((4, 1024), (1032, 1)), item_bits=16)
    (fault,) = faults(copy)
    assert "17 sectors" in fault


PLANTED_BANKS = {
    "no swizzle, read by columns": (BY_COLUMN, row_major(64, 64), 8),
    "swizzle of 2 bits for 8 rows": (BY_COLUMN, Swizzled(Swizzle(2, 3, 3), row_major(64, 64)), 2),
    "swizzle below 16 bytes": (BY_ROW, Swizzled(Swizzle(3, 2, 4), row_major(64, 64)), 0),
    "swizzle by the wrong row bits": (BY_COLUMN, Swizzled(Swizzle(3, 3, 6), row_major(64, 64)), 8),
    "padded by too little": (BY_COLUMN, Layout((64, 64), (96, 1)), 4),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED_BANKS)
def test_a_bank_conflict_is_found(fault: str) -> None:
    tv, memory, passes = PLANTED_BANKS[fault]
    copy = look_at_copy(tv, SHARED_SIDES, memory, item_bits=16, space="shared")
    if passes:
        assert copy.passes == passes
        assert f"{passes} passes, not 1" in faults(copy)[0]
    else:
        assert "64 bits, not 128" in faults(copy)[0]


def test_the_first_place_past_the_tile_is_outside() -> None:
    copy = look_at_copy(L("(5,1):(1,0)"), (4,), Layout(4), item_bits=32)
    assert copy.outside == 1 and len(faults(copy)) == 1


def test_lanes_that_want_one_word_share_it() -> None:
    same = look_at_copy(L("(32,1):(0,0)"), (32,), Layout(32, 1), item_bits=32, space="shared")
    assert same.passes == 1 and same.holders == (32, 32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: look_at_copy(L("128:1"), SIDES, ROWS, item_bits=16),
        lambda: look_at_copy(GATHER, SIDES, row_major(4, 512), item_bits=16),
        lambda: look_at_copy(GATHER, SIDES, ROWS, item_bits=12),
        lambda: Swizzle(3, 3, 2),
    ],
)
def test_what_makes_no_sense_raises(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        call()
