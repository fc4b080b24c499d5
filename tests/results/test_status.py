"""mrb results status: one line about a folder, a store, and a store whose segments are folded."""

from __future__ import annotations

import pytest

from command_line import mrb, mrb_json, refused
from made_sweeps import MadeUp, made_cells
from moe_routing_bench.bench import estimate
from moe_routing_bench.cli import status
from moe_routing_bench.fleet import sweep
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.folding import compact_store
from moe_routing_bench.fleet.store import RemoteStore
from moe_routing_bench.results.objects import Objects

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sweep, "LocalExecutor", MadeUp)
    monkeypatch.setattr(estimate, "probe", lambda *about: estimate.Speed(flops=1e11, bytes=1e10, jitter=0.05))
    monkeypatch.setattr(status, "sweep_experiments", lambda suite, *options, **more: made_cells(int(suite)))


def test_a_store_in_one_line(tmp_path):
    url, engine = f"file://{tmp_path}/store", MadeUp(failing=[101])
    store = RemoteStore(url, make=True)
    plan = plan_fleet(made_cells(5), store, engine, retry_failed=False, resume=True)
    list(run_fleet(plan, store, engine))
    for _ in range(2):
        assert mrb("results", "status", url).stdout.strip() == f"{url}: 5 done, 1 failed, 1 machine."
        found = mrb_json("results", "status", url, "--suite", 8)
        minutes = found.pop("seconds_left") / 60
        assert found == {"done": 5, "failed": 1, "machines": 1, "to_do": 3} and minutes > 0
        line = mrb("results", "status", url, "--suite", 8).stdout.split()
        assert " ".join(line).endswith(f"3 to do, about {minutes:,.0f} minutes left on one machine.")
        assert mrb("results", "status", url, "--suite", 4).stdout.strip().endswith("1 machine, 0 to do.")
        compact_store(Objects(url))


def test_a_folder_in_one_line(tmp_path):
    list(sweep.run_sweep(made_cells(3), tmp_path / "out", MadeUp()))
    found = mrb_json("results", "status", tmp_path / "out", "--suite", 4)
    assert (found["done"], found["failed"], found["to_do"]) == (3, 0, 1)
    assert "nothing" in refused("results", "status", tmp_path / "nothing")
