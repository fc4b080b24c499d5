"""The algebra keeps its laws; measurements/gpu/layout_fuzz.py asks CuTe itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_routing_bench.layouts.algebra import (
    coalesce,
    complement,
    composition,
    logical_divide,
    logical_product,
    raked_product,
    right_inverse,
    thread_values,
    zipped_divide,
)
from moe_routing_bench.layouts.layout import Layout, coordinates, join, leaves, row_major

few = settings(deadline=None, max_examples=50)

POWERS = st.sampled_from([1, 2, 4, 8])


def L(written: str) -> Layout:
    return Layout.parse(written)


@st.composite
def layouts(draw: st.DrawFn, most_modes: int = 4) -> Layout:
    """Any strides at all."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=most_modes))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(sizes), max_size=len(sizes)))
    if len(sizes) > 2 and draw(st.booleans()):
        return Layout((sizes[0], tuple(sizes[1:])), (strides[0], tuple(strides[1:])))
    return Layout(tuple(sizes), tuple(strides))


@st.composite
def compact(draw: st.DrawFn, rank: int, sizes: st.SearchStrategy[int] = POWERS) -> Layout:
    """Numbers 0 to size - 1, in some order of the modes."""
    shape = tuple(draw(sizes) for _ in range(rank))
    strides, step = [0] * rank, 1
    for place in draw(st.permutations(range(rank))):
        strides[place] = step
        step *= shape[place]
    return Layout(shape, tuple(strides))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (coalesce(L("(2,(1,6)):(1,(6,2))")), "12:1"),
        (coalesce(L("(4,8):(8,1)")), "(4,8):(8,1)"),
        (coalesce(L("(1,1):(3,5)")), "1:0"),
        (composition(L("(6,2):(8,2)"), L("(4,3):(3,1)")), "((2,2),3):((24,2),8)"),
        (composition(L("(8,6):(6,1)"), [L("2:2"), L("3:1")]), "(2,3):(12,1)"),
        (composition(L("(4,4):(1,9)"), L("4:3")), "(2,2):(3,9)"),
        (composition(L("(2,2):(3,0)"), L("(2,2):(1,1)")), "(2,2):(3,3)"),
        (composition(L("(4,2):(1,4)"), L("16:1")), "16:1"),
        (complement(L("4:2"), 32), "(2,4):(1,8)"),
        (complement(L("2:1"), (35, 2)), "36:2"),
        (complement(L("2:1"), 70), "35:2"),
        (logical_divide(L("32:1"), L("4:2")), "(4,(2,4)):(2,(1,8))"),
        (logical_divide(L("(8,16):(1,8)"), [4, 8]), "((4,2),(8,2)):((1,4),(8,64))"),
        (logical_divide(L("10:1"), 4), "(4,3):(1,4)"),
        (zipped_divide(L("(8,16):(1,8)"), [4, 8]), "((4,8),(2,2)):((1,8),(4,64))"),
        (zipped_divide(L("((4,8),2):((8,40),5)"), [[2, 4], 2]),
            "(((2,4),2),((2,2),1)):(((8,40),5),((16,160),0))"),
        (logical_product(L("(2,2):(1,2)"), L("(3,4):(1,3)")), "((2,2),(3,4)):((1,2),(4,12))"),
        (raked_product(L("2:1"), L("3:1")), "(3,2):(2,1)"),
        (right_inverse(L("(4,8):(8,1)")), "(8,4):(4,1)"),
        (right_inverse(L("(2,(2,4),2):(1,(1,2),24)")), "2:1"),
        (thread_values(L("(4,32):(32,1)"), L("(1,8):(8,1)"))[1], "((32,4),8):((32,1),4)"),
        (thread_values(L("(2,3):(3,1)"), L("(2,2):(2,1)"))[1], "((3,2),(2,2)):((8,2),(4,1))"),
        (row_major(4, 8), "(4,8):(8,1)"),
    ],
)  # fmt: skip
def test_worked_examples_are_what_cute_says(made: Layout, expected: str) -> None:
    assert str(made) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: composition(L("(4,6):(6,1)"), L("3:2")),  # 2 of 3 steps fit the first mode
        lambda: composition(L("(7,6):(2,4)"), L("1:16")),  # 16 is no multiple of 7
        lambda: complement(L("(4,4):(1,2)"), 64),
        lambda: complement(L("(4,4):(1,1)"), 64),
        lambda: logical_divide(L("(8,8):(8,1)"), L("(3,(7,1)):(2,(3,6))")),
        lambda: logical_product(L("(8,16):(4,1)"), L("2:1")),
        lambda: logical_divide(L("(16,2):(8,5)"), [4, 2, 2]),
        lambda: thread_values(L("(4,32):(64,1)"), L("(1,8):(8,1)")),
        lambda: thread_values(L("(4,32):(32,1)"), L("(2,8):(0,1)")),
        lambda: thread_values(L("32:1"), L("(1,8):(8,1)")),
        lambda: Layout((0, 3)),
        lambda: Layout(4, -1),
        lambda: Layout((4, 2), 1),
        lambda: Layout((4, 2.0)),  # type: ignore[arg-type]
        lambda: L("(4,8):(8,1"),
        lambda: L("4 rows"),
        lambda: L("(4,8):(8,1)")((1, 2, 3)),
    ],
)
def test_what_is_undefined_raises(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        call()


def test_a_place_that_comes_twice_is_named() -> None:
    with pytest.raises(ValueError, match="more than once"):
        complement(L("(4,4):(1,2)"), 64)


@few
@given(layouts())
def test_a_coordinate_has_one_place_however_it_is_written(layout: Layout) -> None:
    nested = [layout(one) for one in coordinates(layout.shape)]
    assert layout.places() == nested == [layout(number) for number in range(layout.size)]
    assert max(nested) == layout.cosize - 1
    assert Layout.parse(str(layout)) == layout


@few
@given(layouts())
def test_coalesce_keeps_the_function(layout: Layout) -> None:
    fewer = coalesce(layout)
    assert fewer.places() == layout.places()
    assert len(leaves(fewer.shape)) <= len(leaves(layout.shape))


@few
@given(compact(3), compact(2))
def test_composition_is_one_after_the_other(outer: Layout, inner: Layout) -> None:
    """With powers of two every composition exists. Past the outer layout its last mode goes on."""
    made = composition(outer, inner)
    inside = [number for number, place in enumerate(inner.places()) if place < outer.size]
    assert [made(n) for n in inside] == [outer(inner(n)) for n in inside]


@few
@given(compact(2), st.sampled_from([1, 2, 3]), st.integers(1, 200))
def test_a_layout_and_its_complement_fill_their_places_once(layout: Layout, gap: int, size: int) -> None:
    layout = Layout(layout.shape, tuple(gap * stride for stride in leaves(layout.stride)))
    both = join(layout, complement(layout, size))
    assert sorted(both.places()) == list(range(both.size))
    assert both.size >= size


@few
@given(compact(2), compact(1))
def test_tiles_hold_every_place_once(layout: Layout, tile: Layout) -> None:
    divided = logical_divide(layout, tile)
    assert divided.modes()[0].places() == composition(layout, tile).places()
    if layout.size % tile.size == 0 and tile.size <= layout.size:
        assert sorted(divided.places()) == list(range(layout.size))


@few
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_a_cut_matrix_goes_by_tile_and_place_in_the_tile(R: int, C: int, r: int, c: int) -> None:
    tiles = zipped_divide(row_major(R, C), [r, c])
    assert [mode.size for mode in tiles.modes()] == [r * c, math.ceil(R / r) * math.ceil(C / c)]
    for i, j in coordinates((R, C)):  # type: ignore[misc]
        assert tiles(((i % r, j % c), (i // r, j // c))) == i * C + j


@few
@given(compact(2), compact(2))
def test_a_product_repeats_the_block_without_overlap(block: Layout, tiler: Layout) -> None:
    product = logical_product(block, tiler)
    assert product.modes()[0] == block
    assert sorted(product.places()) == list(range(block.size * tiler.size))


@few
@given(compact(3))
def test_the_right_inverse_leads_back(layout: Layout) -> None:
    inverse = right_inverse(layout)
    assert [layout(place) for place in inverse.places()] == list(range(layout.size))


@few
@given(compact(2), compact(2))
def test_threads_and_values_cover_their_tile_once(threads: Layout, values: Layout) -> None:
    sides, tv = thread_values(threads, values)
    rows, columns = sides
    assert sorted(tv.places()) == list(range(rows * columns))
    for i, j in coordinates(threads.shape):  # type: ignore[misc]
        for a, b in coordinates(values.shape):  # type: ignore[misc]
            tall, wide = (mode.size for mode in values.modes())
            place = (i * tall + a) + rows * (j * wide + b)
            assert tv((threads((i, j)), values((a, b)))) == place
