"""A pytest plugin: what CI makes of a test that was too slow while other guests had the processor.

Only `timing.in_time`, in a test marked `timing`, can end so; any other failure is a failure. The test is put
off to the last step of CI, which runs it again alone. If other guests take the processor then too, it has no
verdict: .ci/run says so in its last line, and fails if more than 2 % of the timing tests had none.

A timing test that a step had no time to begin has no verdict either. If any other test was not begun, the
run fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

STAT = Path(os.environ.get("CI_PROC_STAT", "/proc/stat"))  # a test of this file gives its own
UNTIL = float(os.environ.get("CI_STEP_UNTIL", "inf"))  # seconds since 1970
LEDGER = os.environ.get("CI_LEDGER")  # a file of JSON lines, see _note
LAST = os.environ.get("CI_STEP") == "again"  # what is too slow now is not tried another time
WHAT = ("ran", "timing", "put off", "not begun", "no verdict")
MAX_STOLEN = 0.3  # of the time that the processor was busy, with us or with others
MAX_LEFT_OUT = 0.02
BEFORE = pytest.StashKey[tuple[int, int]]()


def _busy_and_stolen() -> tuple[int, int]:
    """Ticks since the start: of anyone's work on our processors, and of other guests' alone."""
    first = STAT.read_text().splitlines()[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return user + nice + system + irq + softirq + steal, steal


def _note(item: pytest.Item, what: str, why: str = "") -> None:
    assert what in WHAT
    if LEDGER:
        with open(LEDGER, "a") as file:  # noqa: PTH123
            file.write(json.dumps({"test": item.nodeid, "what": what, "why": why}) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        _note(item, "not begun")
        pytest.skip("NOT BEGUN: the time of this step of CI was over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEFORE] = _busy_and_stolen()
    _note(item, "timing" if item.get_closest_marker("timing") else "ran")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and call.excinfo is not None and call.excinfo.typename == "TooSlowError":
        assert item.get_closest_marker("timing"), f"{item.nodeid} calls in_time and is not marked timing"
        busy, stolen = (now - then for now, then in zip(_busy_and_stolen(), item.stash[BEFORE], strict=True))
        if stolen > MAX_STOLEN * busy:
            why = f"other guests took {100 * stolen / busy:.0f} % of the processor: {call.excinfo.value}"
            what = "no verdict" if LAST else "put off"
            _note(item, what, why)
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"{what.upper()}: {why}")
    return report


def put_off(ledger: Path) -> list[str]:
    """The tests to run again, alone."""
    return sorted({row["test"] for row in _rows(ledger) if row["what"] == "put off"})


def summary(ledger: Path) -> tuple[list[str], bool]:
    """What the run ends with, line by line, and whether it may pass."""
    rows = _rows(ledger)
    those = {what: {row["test"] for row in rows if row["what"] == what} for what in WHAT}
    timing, late = those["timing"], sorted(those["not begun"])
    without, values = those["no verdict"] | timing & those["not begun"], those["not begun"] - timing
    lines = [f"NO VERDICT: {row['test']}: {row['why']}" for row in rows if row["what"] == "no verdict"]
    lines += [f"NOT BEGUN: {test}" for test in late]
    if values:
        lines.append(f"FAILED: this run was so slow that it did not begin {len(values)} tests of values.")
    lines.append(
        f"{len(those['ran'] | timing)} tests, {len(late)} of them not begun for want of time; "
        f"{len(timing)} timing tests, {len(without)} of them without a verdict"
    )
    return lines, not values and len(without) <= MAX_LEFT_OUT * len(timing)


def _rows(ledger: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


if __name__ == "__main__":
    if sys.argv[1] == "put-off":
        print(*put_off(Path(sys.argv[2])), sep="\n")
    else:
        lines, passes = summary(Path(sys.argv[2]))
        print(*lines, sep="\n")
        sys.exit(not passes)
