"""Sweeps survive what happens to them: the cell in flight may be lost, nothing is repeated, nothing stale."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import sweep_driver
from moe_routing_bench.bench import identity
from moe_routing_bench.bench.status import Status
from moe_routing_bench.fleet import sweep
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.fleet.sweep import plan_sweep, run_sweep
from moe_routing_bench.results.folder import Session, iterate
from sample_runs import add_cell
from sweep_driver import cells_in, make_cells, workers_of
from timing import in_time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(folder: Path, cells: int, *bad: str) -> subprocess.Popen:
    words = [sys.executable, sweep_driver.__file__, str(folder), str(cells), *bad]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(process: subprocess.Popen, cells: int) -> list[str]:
    """Read until so many cells are done."""
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen += [line.strip()] if line.startswith("done") else []
        if len(seen) >= cells:
            break
    return seen


@pytest.mark.timing
def test_a_killed_parent_costs_the_cell_in_flight_and_leaves_no_process(tmp_path):
    first = start(tmp_path, 5)
    done = wait_for(first, 2)
    for _ in range(200):
        if alive := workers_of(first):
            break
        time.sleep(0.01)
    first.kill()
    first.communicate()
    deadline = time.monotonic() + 60  # they die with their parent
    while (left := [p for p in alive if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    in_time(not left, f"workers are alive 60 s after their parent: {left}")
    committed = cells_in(tmp_path)
    assert len(committed) in (len(done), len(done) + 1)
    second = start(tmp_path, 5)
    out, _ = second.communicate()
    assert second.returncode == 0 and f"todo {5 - len(committed)}" in out
    assert cells_in(tmp_path) == dict.fromkeys(cells_in(tmp_path), 1) and len(cells_in(tmp_path)) == 5


def test_a_killed_worker_costs_one_implementation_of_one_cell(tmp_path):
    process = start(tmp_path, 3)
    for _ in range(3000):  # in the first cell: between two cells a worker waits, and its death costs nothing
        if alive := workers_of(process):
            random.choice(alive).kill()
            break
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == 0
    records = list(iterate(tmp_path))
    assert len(cells_in(tmp_path)) == 3
    broken = [r for r in records if r.correctness.status is not Status.PASSED]
    assert len(broken) == 1 and broken[0].correctness.status is Status.CRASHED
    assert "SIGKILL" in broken[0].correctness.reason
    assert broken[0].timing is None


def test_oom_hang_and_segfault_each_cost_themselves_only(tmp_path):
    bad = ("allocates_until_oom", "loops_forever", "segfaults")
    process = start(tmp_path, 4, *bad)
    process.communicate()
    assert process.returncode == 0
    by_impl = {r.implementation.label: r for r in iterate(tmp_path) if r.implementation.label in bad}
    assert {name: str(r.correctness.status) for name, r in by_impl.items()} == {
        "allocates_until_oom": "OOM",
        "loops_forever": "TIMEOUT",
        "segfaults": "CRASHED",
    }
    honest = [r for r in iterate(tmp_path) if r.implementation.label not in bad]
    assert len(cells_in(tmp_path)) == 4 and all(r.correctness.status is Status.PASSED for r in honest)


def test_resume_repeats_nothing_and_nothing_stale_is_used(tmp_path, monkeypatch):
    cells = make_cells(2, [])
    assert plan_sweep(cells, tmp_path).done == 0
    assert len(list(run_sweep(plan_sweep(cells, tmp_path).todo, tmp_path, LocalExecutor()))) == 2
    again = plan_sweep(cells, tmp_path)
    assert (again.todo, again.done, again.failed) == ((), 2, 0)
    # every field of the key makes a cell new; test_identity.py changes each of them in the cell itself
    for field in (
        "experiment",
        "suite",
        "recorded",
        "contract",
        "implementations",
        "harness",
        "versions",
        "machine",
        "settings",
    ):
        real = identity.key_fields
        with monkeypatch.context() as patched:
            patched.setattr(identity, "key_fields", lambda c, m, f=field, r=real: {**r(c, m), f: "other"})
            assert len(plan_sweep(cells, tmp_path).todo) == 2, field
    assert plan_sweep(cells, tmp_path).done == 2


def test_failed_cells_are_left_or_retried_as_asked(tmp_path, monkeypatch):
    cells = make_cells(2, [])
    list(run_sweep(cells, tmp_path, LocalExecutor()))
    key = identity.cell_key(cells[0], sweep.this_machine())
    real = sweep.latest_states(tmp_path)
    monkeypatch.setattr(sweep, "latest_states", lambda folder: {**real, key: {Status.PASSED, Status.CRASHED}})
    assert plan_sweep(cells, tmp_path).todo == () and plan_sweep(cells, tmp_path).failed == 1
    assert plan_sweep(cells, tmp_path, retry_failed=True).todo == (cells[0],)


def test_what_had_no_time_is_measured_by_a_later_sweep(tmp_path):
    cells = make_cells(2, [])
    keys = [identity.cell_key(cell, sweep.this_machine()) for cell in cells]
    with Session.start(tmp_path) as session:
        add_cell(session, {"staged": 1.0, "native": "NO_TIME"}, cell_key=keys[0])
        add_cell(session, {"staged": 1.0, "native": 2.0}, cell_key=keys[1])
    plan = plan_sweep(cells, tmp_path)
    assert (plan.todo, plan.done, plan.failed) == ((cells[0],), 1, 0)
    with Session.start(tmp_path) as session:
        add_cell(session, {"staged": 1.0, "native": 2.0}, cell_key=keys[0], seed=1)
    assert plan_sweep(cells, tmp_path).todo == ()


def test_what_counts_is_the_latest_state(tmp_path):
    cells = make_cells(1, [])
    for _ in range(2):
        list(run_sweep(cells, tmp_path, LocalExecutor()))
    states = sweep.latest_states(tmp_path)
    assert list(states.values()) == [{Status.PASSED}]
    assert sum(cells_in(tmp_path).values()) == 2


def test_a_plan_estimates_its_time(tmp_path):
    few, many = (plan_sweep(make_cells(n, []), tmp_path).seconds for n in (2, 20))
    assert 0 < few < many == pytest.approx(10 * few, rel=0.1)


def test_ctrl_c_stops_and_what_is_done_stays(tmp_path):
    process = start(tmp_path, 5)
    wait_for(process, 1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert 1 <= len(cells_in(tmp_path)) < 5
