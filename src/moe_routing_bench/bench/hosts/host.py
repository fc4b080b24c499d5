"""Host: what trials and the measuring loop need of the processes that run implementations.

shared.py     our own code, all of it in one process
ranks.py      the same for a layer on several processes
isolated.py   code from outside and the baseline beside it, a process each, timed by the parent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from moe_routing_bench.bench.series import Series
from moe_routing_bench.core.accuracy import Verdict

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
    poison: bool = False  # new memory holds nonsense
    name: str = ""  # a kept result with a name is read again after the next kept one: it must be the same


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a turn took: seconds of a call by the host's clock, and of all of them by the parent's.

    new_threads: how many more there are after it
    used, launch_seconds: what timed it on a device, and how long the host took to launch one call
    held: what keeps its process still between turns, "ptrace + seccomp + landlock"; "" if nothing does
    """

    seconds: float
    calls: int = 1
    parent_seconds: float = 0.0
    rss_before: int = 0  # bytes of the process
    rss_after: int = 0
    new_threads: int = 0
    used: str = ""
    launch_seconds: float = 0.0
    held: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What judging found out about a turn whose results are all right.

    results: how many were compared with the oracle
    runs:    what really ran, in words
    file:    holds the kept result
    """

    results: int = 0
    verdict: Verdict | None = None
    runs: str = ""
    file: Path = Path()


class Host(Protocol):
    """Runs the turns of some series. Every method raises ImplementationError if something is wrong.

    clock: "child" if the process that runs the code also times it, "parent" if nothing in it is trusted
    """

    clock: Clock

    def prepare(self, series: Series) -> bool:
        """Starts the processes it needs. Returns True if its code has made calls there before."""
        ...

    def sample(self, turn: Turn) -> Reading: ...

    def judge(self, turn: Turn) -> Judged:
        """Checks the results of the turn."""
        ...

    def finish(self, series: Series) -> str:
        """Does the last checks after its last turn. Returns what a reader must know about its times."""
        ...

    def check_weights(self) -> None:
        """Checks that the experts' weights are unchanged. It takes a while, so it is called once, at the
        end."""
        ...

    def harm(self) -> str:
        """Says what was done to its processes while it was not their turn; empty if nothing."""
        ...

    def end(self) -> None:
        """Ends its processes. The next turn starts new ones."""
        ...
