"""Which columns must be equal for two measurements to be of the same case: the compared axes and the
machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment

# columns of `records`; the implementation, its layout, router and layer are not part of the case
SAME_CASE = (
    *(facts.column or one.name for one, facts in axes_of(Experiment) if facts.compare != "free"),
    "machine",
)


def in_sql(columns: Sequence[str] = SAME_CASE) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def told_apart(
    rows: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], Hashable]
) -> list[str]:
    """Returns what to add to the label of each row, such as " bias=True", if another case has the same
    label."""
    alike: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(label(row), []).append(place)
    more = [""] * len(rows)
    for places in alike.values():
        for name in SAME_CASE:
            if len({rows[place][name] for place in places}) > 1:
                for place in places:
                    more[place] += f" {name}={rows[place][name]}"
    return more
