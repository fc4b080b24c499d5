"""Knobs: options of an implementation that change its time and not what it computes.

A file declares them once, as a dataclass called `Knobs`, and `run` gets one as its argument `knobs`:

    @dataclass(frozen=True, kw_only=True)
    class Knobs(KnobSet):
        strip: int | None = knob(1, 2, 4, 8, stage="first product", help="Panels of a task.")

        def pointless(self, x_TD, gate_TK, plan, weights) -> str | None: ...

`native(strip=8)` then sets it like any option. None is the kernel's own rule. Knobs of one stage are tried
together by a tuner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, TypeAlias

Setting: TypeAlias = tuple[tuple[str, int], ...]  # knobs that are set, by name; (): all by the kernel's rule


def knob(*values: int, stage: str, help: str) -> Any:
    """A field of a KnobSet: the values that it may have besides None."""
    return field(default=None, metadata={"values": values, "stage": stage, "help": help})


@dataclass(frozen=True, kw_only=True)
class KnobSet:
    """Knobs(strip=8): one choice of values. ValueError for a value that was not declared."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value, values = getattr(self, one.name), one.metadata["values"]
            if value is not None and (type(value) is not int or value not in values):
                known = ", ".join(map(str, values))
                raise ValueError(f"the knob {one.name} is {value!r}, and it may be {known}")

    def pointless(self, *args: Any) -> str | None:
        """Why a call with these arguments would be the same as with fewer knobs, or cannot gain; None if it
        may gain. It reads shapes, dtypes and layouts, never values."""
        return None

    def numbers(self) -> list[int]:
        """The values in order, 0 for None, as C++ takes them."""
        return [getattr(self, one.name) or 0 for one in fields(self)]


def stages(knobs: type[KnobSet]) -> dict[str, list[str]]:
    """The names of the knobs by stage, in the order of their declaration."""
    found: dict[str, list[str]] = {}
    for one in fields(knobs):
        found.setdefault(one.metadata["stage"], []).append(one.name)
    return found


def settings(
    knobs: type[KnobSet], args: tuple[Any, ...], names: Sequence[str], given: Setting = ()
) -> Iterator[Setting]:
    """Every choice of values of the knobs `names`, the others as in `given`, without those that are pointless
    for these arguments. Nothing is compiled."""
    others = {name: value for name, value in given if name not in names}
    values = {one.name: (None, *one.metadata["values"]) for one in fields(knobs)}
    for chosen in product(*(values[name] for name in names)):
        wanted: Mapping[str, int | None] = {**others, **dict(zip(names, chosen, strict=True))}
        own = {name: value for name, value in wanted.items() if value is not None}
        if not own or knobs(**own).pointless(*args) is None:
            yield tuple(sorted(own.items()))
