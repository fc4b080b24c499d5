"""Budget: the one deadline of a cell, from its first trial to the last judged result."""

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
        self.is_paused = False

    @property
    def used(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        return self.seconds - self.used

    def leave(self, seconds: float) -> None:
        """Sets the seconds that are left from now on."""
        self.seconds = self.used + seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside this block does not count. It is for what is built once, which is not a
        measurement."""
        began, before = time.perf_counter(), self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before
            self.began += 0.0 if before else time.perf_counter() - began


def command_start() -> float:
    """When this command began, by time.perf_counter(). Imports are part of a user's minute, so they count. In
    a process that did other things before, such as a notebook, the command begins now."""
    age = time.time() - psutil.Process().create_time()
    return time.perf_counter() - (age if age < LONGEST_IMPORT else 0.0)
