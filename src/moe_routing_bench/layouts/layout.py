"""A layout: a function from coordinates to places in memory, written shape:stride as in CuTe.

This is not plan.Layout, the rule that assigns rows to experts; rows.py expresses that rule with these
layouts. It is pure Python. Sizes and strides are known numbers; sizes are at least 1 and strides are not
negative.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Nested: TypeAlias = int | tuple["Nested", ...]


@dataclass(frozen=True)
class Layout:
    """A function from coordinates to places.

    Layout((4, 8), (8, 1)) is a row-major matrix of 4 rows and 8 columns; its (2, 3) is at 2 * 8 + 3 = 19.
    Without strides the first mode is the fastest: Layout((4, 8)) is (4,8):(1,4).
    A mode may consist of modes: ((2,2),8):((8,16),1) is the same matrix with its rows in pairs, and takes the
    coordinates ((0, 1), 3), (2, 3) and 14. A number for several modes counts the first mode fastest: 14 = 2 +
    4 * 3 is row 2 of column 3. After its size the last mode simply continues, as in CuTe.
    """

    shape: Nested
    stride: Nested = None  # type: ignore[assignment]  # always set: the first mode fastest if it is not given

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _nested(self.shape))
        if any(size < 1 for size in leaves(self.shape)):
            raise ValueError(f"the shape {text(self.shape)} has a size below 1")
        if self.stride is None:
            object.__setattr__(self, "stride", column_major(self.shape))
        object.__setattr__(self, "stride", _nested(self.stride))
        if not congruent(self.shape, self.stride):
            raise ValueError(
                f"the strides {text(self.stride)} are not nested like the shape {text(self.shape)}"
            )
        if any(stride < 0 for stride in leaves(self.stride)):
            raise ValueError(f"negative strides are not supported: {text(self.stride)}")

    @staticmethod
    def parse(written: str) -> Layout:
        """Reads what str(layout) writes: `(4,8):(8,1)`, `((2,2),8):((8,16),1)`, `8:1`, or only a shape."""
        if not re.fullmatch(r"[\d,() ]+(:[\d,() ]+)?", written):
            raise ValueError(f"{written!r} is not a layout; write (4,8):(8,1)")
        shape, _, stride = written.partition(":")
        return Layout(_read(shape), _read(stride) if stride else None)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{text(self.shape)}:{text(self.stride)}"

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(leaves(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest place."""
        return 1 + sum((size - 1) * stride for size, stride in self.flat())

    @property
    def rank(self) -> int:
        return len(self.shape) if isinstance(self.shape, tuple) else 1

    def flat(self) -> list[tuple[int, int]]:
        """All modes as (size, stride), in order, without nesting."""
        return list(zip(leaves(self.shape), leaves(self.stride), strict=True))

    def modes(self) -> list[Layout]:
        """The outermost modes; a layout with a single number is its own only mode."""
        if isinstance(self.shape, int):
            return [self]
        assert isinstance(self.stride, tuple)
        return [Layout(shape, stride) for shape, stride in zip(self.shape, self.stride, strict=True)]

    def __call__(self, coordinate: Any) -> int:
        """The place of a coordinate: a number, or numbers nested like the shape."""
        return _place(coordinate, self.shape, self.stride)

    def places(self) -> list[int]:
        """The place of every coordinate, counted by number: Layout((2, 3), (3, 1)) -> [0, 3, 1, 4, 2, 5]."""
        places = [0]
        for size, stride in self.flat():
            places = [place + i * stride for i in range(size) for place in places]
        return places


def join(*layouts: Layout) -> Layout:
    """Makes layouts the modes of one layout: 4:1 and 8:4 make (4,8):(1,4)."""
    return Layout(tuple(mode.shape for mode in layouts), tuple(mode.stride for mode in layouts))


def column_major(shape: Nested, first: int = 1) -> Nested:
    """Strides of a compact layout, first mode fastest: (4, (2, 3)) -> (1, (4, 8))."""
    if isinstance(shape, int):
        return first
    strides = []
    for part in shape:
        strides.append(column_major(part, first))
        first *= math.prod(leaves(part))
    return tuple(strides)


def row_major(*sizes: int) -> Layout:
    """The layout of a contiguous tensor of torch: row_major(4, 8) is (4,8):(8,1)."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return Layout(tuple(sizes), tuple(strides))


def leaves(nested: Nested) -> list[int]:
    return [nested] if isinstance(nested, int) else [leaf for part in nested for leaf in leaves(part)]


def congruent(left: Nested, right: Nested) -> bool:
    """True if both have the same nesting."""
    if isinstance(left, int) or isinstance(right, int):
        return isinstance(left, int) and isinstance(right, int)
    return len(left) == len(right) and all(map(congruent, left, right))


def text(nested: Nested) -> str:
    return str(nested) if isinstance(nested, int) else f"({','.join(map(text, nested))})"


def coordinates(shape: Nested) -> Iterator[Nested]:
    """Every coordinate, first mode fastest: (2, 2) -> (0, 0), (1, 0), (0, 1), (1, 1)."""
    if isinstance(shape, int):
        yield from range(shape)
        return
    if not shape:
        yield ()
        return
    for last in coordinates(shape[-1]):
        for before in coordinates(shape[:-1]):
            assert isinstance(before, tuple)
            yield (*before, last)


def _place(coordinate: Any, shape: Nested, stride: Nested) -> int:
    if isinstance(coordinate, tuple):
        if not isinstance(shape, tuple) or len(coordinate) != len(shape):
            raise ValueError(f"the coordinate {coordinate} does not fit the shape {text(shape)}")
        assert isinstance(stride, tuple)
        return sum(map(_place, coordinate, shape, stride))
    place, rest = 0, int(coordinate)
    modes = list(zip(leaves(shape), leaves(stride), strict=True))
    for size, step in modes[:-1]:
        place += rest % size * step
        rest //= size
    return place + rest * modes[-1][1] if modes else place


def _nested(given: Any) -> Nested:
    if isinstance(given, tuple | list):
        return tuple(_nested(part) for part in given)
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise ValueError(f"a shape or stride is made of whole numbers and tuples of them, not {given!r}")


def _read(written: str) -> Nested:
    """Reads numbers in brackets, where (8) and ((4,2)) are tuples of one element, as CuTe prints them."""
    try:
        # a comma before each closing bracket makes Python read tuples
        return _nested(ast.literal_eval(re.sub(r"(?<=[\d)])\s*\)", ",)", re.sub(r"\s", "", written))))
    except (SyntaxError, ValueError):
        raise ValueError(f"cannot read {written!r}; write 8, (4,8) or ((2,2),8)") from None
