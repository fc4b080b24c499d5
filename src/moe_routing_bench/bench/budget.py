"""Budget: one deadline for everything a cell does, from its first trial to the last judged result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LONGEST_IMPORT = 20.0  # seconds, on a busy machine


class Budget:
    """Budget(60).left is 60 at first and falls; `began` is an earlier reading of time.perf_counter().

    kit_apart: the hard cases of the kit, which code passes once, take none of it.
    """

    def __init__(self, seconds: float, began: float | None = None, *, kit_apart: bool = False):
        self.seconds, self.began = seconds, time.perf_counter() if began is None else began
        self.kit_apart = kit_apart

    @property
    def used(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        return self.seconds - self.used

    def leave(self, seconds: float) -> None:
        """From now on so many seconds are left."""
        self.seconds = self.used + seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside takes none of the time: what is built once is not a measurement."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.began += time.perf_counter() - began


def command_start() -> float:
    """When this command began, by time.perf_counter(): imports are part of a user's minute. In a process that
    has done other things before, such as a notebook, it begins now."""
    age = time.time() - psutil.Process().create_time()
    return time.perf_counter() - (age if age < LONGEST_IMPORT else 0.0)
