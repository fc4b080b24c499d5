"""Assertions about time, the only ones that a starved machine may leave without a verdict.

A test that uses `in_time` is marked `timing`. Its other assertions are about values and fail like any other.
`.ci/timing_verdicts.py` says what becomes of one that was too slow while other guests had the processor.
"""

from __future__ import annotations

from typing import Any


class TooSlowError(AssertionError):
    """Something took longer than the test allows."""


def in_time(condition: object, sentence: str) -> None:
    if not condition:
        raise TooSlowError(sentence)


def had_time(*outcomes: Any) -> None:
    """Every implementation got its turn and ended."""
    for one in outcomes:
        in_time(one.status not in ("NO_TIME", "TIMEOUT"), f"{one.label}: {one.status} {one.reason}")
