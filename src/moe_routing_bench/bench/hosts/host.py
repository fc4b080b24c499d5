"""Host: what the measuring loop needs of the processes that run implementations.

shared.py     our own code, all of it in one process
ranks.py      the same for a layer on several processes
isolated.py   code from outside and the baseline beside it, a process each, timed by the parent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from moe_routing_bench.bench.series import Series

Clock: TypeAlias = Literal["child", "parent"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One sample: Turn(series=mine, first=100, calls=4, step=1, keep=2) are calls 100 to 103 with the
    routings 1 to 4, and the result of call 102 is judged.

    The number after the last one is that of the untimed call that makes the caches hot.
    """

    series: Series
    first: int = 0
    calls: int = 1
    step: int = 0
    keep: int | None = None
    hot: bool = True
    stages: bool = False  # instead, the parts of call `first`, one by one


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a turn took: seconds of a call by the host's clock, and of all of them by the parent's.

    new_threads: how many more there are after it
    """

    seconds: float
    calls: int = 1
    parent_seconds: float = 0.0
    rss_before: int = 0  # bytes of the process
    rss_after: int = 0
    new_threads: int = 0
    stages: Mapping[str, float] = field(default_factory=dict)


class Host(Protocol):
    """Runs the turns of some series. Every method raises SubjectError if something is wrong.

    clock: "child" if the process that runs the code also times it, "parent" if nothing in it is trusted
    """

    clock: Clock

    def prepare(self, series: Series) -> bool:
        """Start what it needs. Has its code made calls there before?"""
        ...

    def sample(self, turn: Turn) -> Reading: ...

    def judge(self, turn: Turn) -> int:
        """Check what the turn computed: how many of its results were compared with the oracle."""
        ...

    def finish(self, series: Series) -> str:
        """The last checks after its last turn; what a reader must know about its times."""
        ...

    def check_weights(self) -> None:
        """Are the experts' weights as they were? It takes a while, so it is asked once, at the end."""
        ...

    def harm(self) -> str:
        """What somebody did to its processes while it was not their turn; empty if nothing."""
        ...

    def end(self) -> None:
        """End its processes. The next turn starts new ones."""
        ...
