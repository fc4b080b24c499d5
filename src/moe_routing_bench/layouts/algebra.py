"""Makes new layouts from others. A result is defined where CuTe defines it; else ValueError is raised.

measurements/gpu/layout_fuzz.py compares it with CuTe itself (nvidia-cutlass-dsl): the results are equal at
all coordinates, and undefined for the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from moe_routing_bench.layouts.layout import Layout, Nested, join, leaves, text

# divides a layout: one layout or number for all of it, or a sequence with one for each mode
Tiler: TypeAlias = "int | Layout | Sequence[Tiler]"


def coalesce(layout: Layout) -> Layout:
    """The same function with as few modes as possible.

    (2,(1,6)):(1,(6,2)) -> 12:1      12 consecutive places
    (4,8):(8,1)         -> (4,8):(8,1)      the coordinates of a row-major matrix are not consecutive places
    """
    return _layout(_merged(layout.flat()))


def composition(outer: Layout, inner: Tiler) -> Layout:
    """outer after inner: a layout nested like `inner` with result(c) = outer(inner(c)).

    composition((6,2):(8,2), (4,3):(3,1)) -> ((2,2),3):((24,2),8)
    Place 3 of `inner` is coordinate 3 of `outer`, whose first 6 coordinates go in steps of 8.

    A sequence of layouts composes each with one mode of `outer`: composition((8,6):(6,1), [2:2, 3:1]) takes
    rows 0 and 2 and columns 0 to 2, (2,3):(12,1). Modes without a layout are dropped, as in CuTe.

    Raises ValueError where CuTe finds no layout: 3:2 visits coordinates 0, 2 and 4 of (4,6):(6,1), which are
    at places 0, 12 and 1, and no single step goes from 0 to 12 and from 12 to 1.

    Where CuTe gives a result this gives the same, because kernels use it; but the result is not always right:
      4:3 on (4,4):(1,9)          (2,2):(3,9), but coordinate 6 is at 11: 3 does not divide 4
      (2,2):(1,1) on (2,2):(3,0)  (2,2):(3,3), but coordinate 2 is at 0: each mode is composed separately
    So tiles.py checks the places themselves.
    """
    if isinstance(inner, int):
        inner = Layout(inner, int(inner > 1))
    if not isinstance(inner, Layout):
        return _by_mode(composition, outer, inner, rest=False)
    modes = outer.flat() or [(1, 0)]
    # the last mode continues after its size, so it is kept even if it has one place
    modes[-1] = (max(modes[-1][0], 2), modes[-1][1])
    return _compose(_merged(modes), inner, outer)


def complement(layout: Layout, target: Nested) -> Layout:
    """The starts of copies of a layout that together fill `target` places.

    complement(4:2, 32) -> (2,4):(1,8)     4:2 has 0, 2, 4, 6; moved by 0 or 1 and by 0, 8, 16, 24 it fills 32
    A target that is a shape is rounded up mode by mode: complement(2:1, (35,2)) -> 36:2, not 35:2.

    Raises ValueError for a layout that has a place twice.
    """
    if any(size < 1 for size in leaves(target)):
        raise ValueError(f"a complement fills at least one place, not {text(target)}")
    missing, filled = [], 1
    for stride, size in sorted((stride, size) for size, stride in layout.flat() if size > 1 and stride > 0):
        if stride < filled:
            raise ValueError(f"{layout} has a place more than once, so it has no complement")
        missing.append((stride // filled, filled))
        filled = stride * size
    copies, left = 1, filled
    for size in leaves(target):
        copies *= -(-size // left)
        left = -(-left // size)
    return _layout(_merged([*missing, (copies, filled)]))


def logical_divide(layout: Layout, tiler: Tiler) -> Layout:
    """(tile, rest): the layout divided into tiles; the first mode goes over a tile, the second over the
    tiles.

    logical_divide(32:1, 4:2) -> (4,(2,4)):(2,(1,8))     a tile is every second of 8 places
    A sequence divides mode by mode: logical_divide((8,16):(1,8), [4, 8]) -> ((4,2),(8,2)):((1,4),(8,64)).
    The last tile is always whole: 10:1 by 4 is (4,3):(1,4), and 10 and 11 are places after the end.
    """
    if isinstance(tiler, int):
        tiler = Layout(tiler, int(tiler > 1))
    if not isinstance(tiler, Layout):
        return _by_mode(logical_divide, layout, tiler)
    return composition(layout, join(tiler, complement(tiler, coalesce(layout).shape)))


def zipped_divide(layout: Layout, tiler: Tiler) -> Layout:
    """logical_divide with all modes inside a tile first, then all modes over the tiles.

    zipped_divide((8,16):(1,8), [4, 8]) -> ((4,8),(2,2)):((1,8),(4,64))
    """
    tile, rest = _zipped(logical_divide(layout, tiler), tiler)
    return join(tile, rest)


def logical_product(block: Layout, tiler: Tiler) -> Layout:
    """(block, copies): the block repeated by `tiler`, each copy in places that the others do not use.

    logical_product((2,2):(1,2), (3,4):(1,3)) -> ((2,2),(3,4)):((1,2),(4,12))
    """
    if isinstance(tiler, int):
        tiler = Layout(tiler, int(tiler > 1))
    if not isinstance(tiler, Layout):
        return _by_mode(logical_product, block, tiler)
    return join(block, composition(complement(block, block.size * tiler.cosize), tiler))


def right_inverse(layout: Layout) -> Layout:
    """The longest layout with layout(result(i)) = i: (4,8):(8,1) -> (8,4):(4,1).

    8 consecutive places are 4 coordinates apart. This gives how many numbers one access can take.
    """
    modes, start = [], 1
    for size, stride in _merged(layout.flat()):
        modes.append((stride, size, start))
        start *= size
    inverse: list[tuple[int, int]] = []
    reached = 1
    for stride, size, start in sorted(modes, key=lambda mode: mode[0]):
        if stride == reached and size > 1:
            inverse.append((size, start))
            reached *= size
    return _layout(_merged(inverse))


def thread_values(threads: Layout, values: Layout) -> tuple[tuple[int, ...], Layout]:
    """The tile's sides, and (thread, value) -> place in the tile, first side fastest.

    `threads` gives every place of a small tile a thread, `values` every place of a thread's own tile a value.
    thread_values((4,32):(32,1), (1,8):(8,1)) -> (4, 256), ((32,4),8):((32,1),4)
    4 rows of 256 numbers; thread 1 begins at place 32, column 8 of row 0; its next number is in the next
    column.

    Raises ValueError unless both number their places from 0 without gaps (CuTe needs this but does not check
    it).
    """
    for name, layout in (("threads", threads), ("values", values)):
        if sorted(layout.places()) != list(range(layout.size)):
            raise ValueError(f"{name} {layout} must have the numbers 0 to {layout.size - 1} once each")
    product = raked_product(threads, values)
    sides = tuple(mode.size for mode in product.modes())
    return sides, composition(right_inverse(product), Layout((threads.size, values.size)))


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """logical_product with each side of the result as (tiler, block): copies of the block are interleaved.

    raked_product(2:1, 3:1) -> (3,2):(2,1)     its numbers are 0 2 4 1 3 5
    """
    if block.rank != tiler.rank:
        raise ValueError(f"{block} and {tiler} must have the same number of modes")
    each_block, each_tiler = (mode.modes() for mode in logical_product(block, tiler).modes())
    sides = [join(t, b) for b, t in zip(each_block, each_tiler, strict=True)]
    return join(*sides) if isinstance(block.shape, tuple) else sides[0]


def _by_mode(function: Any, layout: Layout, tilers: Sequence[Tiler], rest: bool = True) -> Layout:
    modes = layout.modes()
    if len(tilers) > len(modes):
        raise ValueError(f"{len(tilers)} tilers for {layout}, which has {len(modes)} modes")
    done = [function(mode, tiler) for mode, tiler in zip(modes, tilers, strict=False)]
    return join(*done, *(modes[len(tilers) :] if rest else ()))


def _merged(modes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Removes modes of one place and joins neighbouring modes that continue each other."""
    merged: list[tuple[int, int]] = []
    for size, stride in modes:
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def _layout(modes: list[tuple[int, int]]) -> Layout:
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(n for n, _ in modes), tuple(d for _, d in modes)) if modes else Layout(1, 0)


def _zipped(divided: Layout, tiler: Tiler) -> tuple[Layout, Layout]:
    if isinstance(tiler, int | Layout):
        tile, rest = divided.modes()
        return tile, rest
    modes = divided.modes()
    pairs = [_zipped(mode, part) for mode, part in zip(modes, tiler, strict=False)]
    over = [rest for _, rest in pairs] + modes[len(tiler) :]
    return join(*(tile for tile, _ in pairs)), join(*over)


def _compose(modes: list[tuple[int, int]], inner: Layout, outer: Layout) -> Layout:
    if isinstance(inner.shape, tuple):
        return join(*(_compose(modes, mode, outer) for mode in inner.modes()))
    assert isinstance(inner.stride, int)
    left, step = inner.shape, inner.stride
    if step == 0:
        return inner
    composed: list[tuple[int, int]] = []
    for size, stride in modes[:-1]:
        if step >= size and step % size:
            raise ValueError(
                f"no layout is {outer} after {inner}: steps of {step} do not fit its mode of {size}"
            )
        fit = -(-size // step)
        if fit > 1 and left > 1:
            taken = min(fit, left)
            if left % taken:
                raise ValueError(
                    f"no layout is {outer} after {inner}: {left} steps, {fit} fit its mode of {size}"
                )
            composed.append((taken, step * stride))
            left //= taken
        step = -(-step // size)
    if left > 1 or not composed:
        composed.append((left, step * modes[-1][1]))
    return _layout(_merged(composed) if len(composed) > 1 else composed)
