"""A pytest plugin for machines whose processor goes to other guests, for minutes or hours at a time.

CI has 90 minutes there and must end with an answer. Two things are said openly in place of a failure that
nobody can use: a test that was not begun because its step's time was over; and a test marked slow (it starts
processes, holds a clock), or one that ran out of time, which failed while other guests took much of the
processor. Both are counted as skipped, each with its reason, and .ci/run ends with how many there were. Where
the processor is ours neither happens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

UNTIL = float(os.environ.get("CI_STEP_UNTIL", "inf"))  # seconds since 1970
BEFORE = pytest.StashKey[tuple[int, int]]()
MOST_TAKEN = 0.3  # of the time that the processor was busy, with us or with others


def _busy_and_taken() -> tuple[int, int]:
    """Steps of the clock since the start: of anyone's work on our processors, and of other guests' alone."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return user + nice + system + irq + softirq + steal, steal


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        pytest.skip("NOT RUN: the time of this step of CI was over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEFORE] = _busy_and_taken()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and (item.get_closest_marker("slow") or "Timeout" in report.longreprtext):
        busy, taken = (now - then for now, then in zip(_busy_and_taken(), item.stash[BEFORE], strict=True))
        if taken > MOST_TAKEN * busy:
            said = report.longreprtext.strip().splitlines()[-1][:200]
            why = f"NO VERDICT: failed while other guests took {100 * taken / busy:.0f} % of the processor"
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"{why}: {item.nodeid}: {said}")
    return report
