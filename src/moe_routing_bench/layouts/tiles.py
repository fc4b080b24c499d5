"""Checks the copy of a tile by looking at every number: is it copied once, how wide, which sectors and banks?

    sides, tv = thread_values(Layout((4, 32), (32, 1)), Layout((1, 8), (8, 1)))   # 128 threads, 4 x 256
    copied = look_at_copy(tv, sides, row_major(4, 256), item_bits=16)
    copied.width_bits, copied.sectors, faults(copied)       ->  128, 16, []

A thread-value layout gives (thread, value) -> place in the tile, first side fastest, as in CuTe's
make_layout_tv; `Layout.parse(str(tv))` reads that one. `memory` gives the places of the tile's numbers: a
Layout, or a Swizzled layout in shared memory; place 0 is aligned to 16 bytes. The hardware is NVIDIA's: 32
lanes, sectors of 32 bytes, 32 banks of 4 bytes. A phase is the lanes that are served together: 8 of 128 bits,
16 of 64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_routing_bench.layouts.layout import Layout
from moe_routing_bench.layouts.swizzle import Swizzled

WIDEST, SECTOR, BANKS, BANK = 128, 256, 32, 32  # bits, but for the number of banks
FAR = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One tile moved by all threads of a program.

    Copy(threads=128, values=8, missing=0, outside=0, holders=(1, 1), width_bits=128, accesses=1, sectors=16,
      least_sectors=16, passes=1, space="global")
    """

    threads: int
    values: int  # of each thread
    missing: int  # places of the tile that no thread has
    outside: int  # values that are outside the tile
    holders: tuple[int, int]  # the fewest and the most values at a place that has any
    width_bits: int  # of the widest access that all threads can make; 0 if some are outside
    accesses: int  # of each thread
    sectors: int  # of the access of a warp with the most unneeded sectors (global memory)
    least_sectors: int  # how many sectors that access needs for its bytes
    passes: int  # the most passes that a phase needs; 1 means no bank conflicts (shared memory)
    space: Literal["global", "shared"]

    @property
    def bijective(self) -> bool:
        """Every place of the tile has exactly one (thread, value)."""
        return not self.missing and not self.outside and self.holders == (1, 1)

    def __str__(self) -> str:
        low, high = self.holders
        held = "once" if self.bijective else f"{low} to {high} times, {self.missing} never"
        traffic = (
            f"{self.sectors} sectors (least {self.least_sectors})"
            if self.space == "global"
            else f"{self.passes} passes a phase"
        )
        return f"each place {held}; {self.accesses} x {self.width_bits} bits; {traffic}"


def look_at_copy(
    tv: Layout,
    sides: Sequence[int],
    memory: Layout | Swizzled,
    *,
    item_bits: int,
    space: Literal["global", "shared"] = "global",
    lanes: int = 32,
) -> Copy:
    """All facts about the copy of one tile. `tv` has two modes, threads and values."""
    size = math.prod(sides)
    if tv.rank != 2:
        raise ValueError(f"a thread-value layout has two modes, threads and values, not {tv}")
    if memory.size != size:
        raise ValueError(f"memory {memory} has {memory.size} numbers, but the tile {tuple(sides)} has {size}")
    if item_bits not in (8, 16, 32, 64):
        raise ValueError(f"a number has 8, 16, 32 or 64 bits, not {item_bits}")
    threads, values = (mode.size for mode in tv.modes())
    places = tv.places()  # of thread t and value v: places[t + threads * v]
    held = Counter(places)
    outside = sum(count for place, count in held.items() if place >= size)
    inside = [count for place, count in held.items() if place < size]
    width = sectors = least = passes = 0
    if not outside:
        bits = [place * item_bits for place in memory.places()]
        address = [[bits[place] for place in places[t::threads]] for t in range(threads)]
        width = _width(address, item_bits)
        for starts in _warp_accesses(address, width // item_bits, lanes):
            touched = {start // SECTOR for start in starts}
            needed = -(-len(set(starts)) * width // SECTOR)
            if (len(touched) - needed, needed) > (sectors - least, least):
                sectors, least = len(touched), needed
            passes = max(passes, _passes(starts, width))
    return Copy(
        threads=threads, values=values, missing=size - len(inside), outside=outside,
        holders=(min(inside, default=0), max(inside, default=0)), width_bits=width,
        accesses=values * item_bits // width if width else 0, sectors=sectors, least_sectors=least,
        passes=passes, space=space,
    )  # fmt: skip


def faults(copy: Copy, *, width_bits: int = WIDEST, copies: int = 1) -> list[str]:
    """Says what is wrong with a copy; empty if it could not be better.

    `copies`: how many threads should hold each place. With extra threads, Triton lets several hold the same
    place and stores from one of them.
    """
    wrong = []
    if copy.missing:
        wrong.append(f"{copy.missing} places of the tile are touched by no thread")
    if copy.outside:
        wrong.append(f"{copy.outside} values lie outside the tile")
    if copy.holders[1] > copies:
        wrong.append(f"a place is touched {copy.holders[1]} times, not {copies}")
    if not copy.outside and copy.width_bits < width_bits:
        wrong.append(f"one access has {copy.width_bits} bits, not {width_bits}")
    if copy.space == "global" and copy.sectors > copy.least_sectors:
        wrong.append(f"an access of a warp touches {copy.sectors} sectors; {copy.least_sectors} would do")
    if copy.space == "shared" and copy.passes > 1:
        wrong.append(f"lanes of one phase use the same bank: {copy.passes} passes, not 1")
    return wrong


def coordinate_layout(*sizes: int) -> Layout:
    """A tensor whose places encode the coordinates: (4, 8) is (4,8):(1,2^20), and 3 + 2 * 2^20 is (3, 2).

    Divide it into tiles to see the coordinates of a tile, also coordinates outside the edge.
    """
    return Layout(tuple(sizes), tuple(FAR**i for i in range(len(sizes))))


def tile_faults(tiles: Layout, sizes: Sequence[int], *, guarded: bool = True) -> list[str]:
    """Says what is wrong with a division of coordinate_layout(*sizes) into (place in a tile, tile).

    tile_faults(zipped_divide(coordinate_layout(10, 8), [4, 8]), (10, 8)) -> []
    `guarded`: the kernel masks coordinates outside the edge; else they are a fault.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    beyond = 0
    for place in tiles.places():
        coordinate = tuple(place // FAR**i % FAR for i in range(len(sizes)))
        if all(at < size for at, size in zip(coordinate, sizes, strict=True)):
            seen[coordinate] += 1
        else:
            beyond += 1
    wrong = []
    if lost := math.prod(sizes) - len(seen):
        wrong.append(f"{lost} of {math.prod(sizes)} places are in no tile")
    if twice := sum(count > 1 for count in seen.values()):
        wrong.append(f"{twice} places are in more than one tile")
    if beyond and not guarded:
        wrong.append(f"{beyond} places of tiles are outside the edge, and nothing masks them")
    return wrong


def _width(address: list[list[int]], item_bits: int) -> int:
    """The widest access that every thread can make for all its values, in order."""
    values = len(address[0])
    width = WIDEST
    while width > item_bits:
        n = width // item_bits
        if values % n == 0 and all(
            mine[v] % width == 0 and all(mine[v + i] == mine[v] + i * item_bits for i in range(n))
            for mine in address
            for v in range(0, values, n)
        ):
            return width
        width //= 2
    return item_bits


def _warp_accesses(address: list[list[int]], step: int, lanes: int) -> Iterator[list[int]]:
    for first in range(0, len(address), lanes):
        for value in range(0, len(address[0]), step):
            yield [mine[value] for mine in address[first : first + lanes]]


def _passes(starts: list[int], width: int) -> int:
    """The most passes of one phase: distinct words of one bank. Lanes that need the same word share it.

    Accesses are aligned to their width, so two of them share all of their banks or none.
    """
    unit = max(width, BANK)
    phase = BANKS * BANK // unit
    most = 1
    for first in range(0, len(starts), phase):
        wanted = {start // unit for start in starts[first : first + phase]}
        most = max(most, *Counter(word % phase for word in wanted).values())
    return most
