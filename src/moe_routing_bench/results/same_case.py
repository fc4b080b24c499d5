"""What makes two measurements measurements of one case: the axes that are compared, and the machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment

# columns of `records`; the implementation, its layout, router and layer are what is compared
SAME_CASE = (
    *(facts.column or one.name for one, facts in axes_of(Experiment) if facts.compare != "free"),
    "machine",
)


def in_sql(columns: Sequence[str] = SAME_CASE) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def told_apart(
    rows: Sequence[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], Hashable]
) -> list[str]:
    """For each row what its label lacks: " bias=True" where rows of another case have the same label."""
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
