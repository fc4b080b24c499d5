"""The machine's name and weather, its roofs, and `mrb doctor`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_routing_bench.bench import roofs as roofs_module
from moe_routing_bench.bench.machine import Weather, this_machine, weather
from moe_routing_bench.bench.roofs import Roofs, measure_roofs, roofs_path, store_roofs, stored_roofs
from moe_routing_bench.cli import app
from moe_routing_bench.cost import Cost

ROOFS = Roofs(
    machine="toy-1",
    read_bytes={1: 1e10},
    copy_bytes={1: 8e9},
    gemm_flops={"float32": {1: 1e11}},
    seconds=1.0,
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    return tmp_path


def test_the_name_stays_and_changes_when_it_should() -> None:
    machine = this_machine()
    assert machine.name == this_machine().name
    assert machine.cores >= 1 and machine.memory_gib >= 1
    assert replace(machine, cores=machine.cores + 1).name != machine.name
    # software is recorded beside the name, not in it
    assert replace(machine, torch="9.9").name == machine.name
    assert set(machine.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_bad_weather_is_told() -> None:
    assert weather().available_gib > 0
    storm = Weather(load_1min=3.0, steal_percent=7.0, available_gib=1.0, throttled=True)
    assert len(storm.complaints(cores=2)) == 3
    assert Weather(load_1min=0.1, steal_percent=0, available_gib=8, throttled=None).complaints(2) == []


def test_roofs_are_measured_and_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs_module, "MEMORY_BYTES", 2**24)
    monkeypatch.setattr(roofs_module, "GEMM_SIZES", (128,))
    told: list[str] = []
    roofs = measure_roofs("here", (1,), told.append)
    assert 1e8 < roofs.read_bytes[1] < 1e13 and 1e8 < roofs.copy_bytes[1] < 1e13
    assert all(1e8 < rates[1] < 1e15 for rates in roofs.gemm_flops.values())
    assert told[0] == "memory, 1 threads"


def test_the_floor_and_the_share_of_the_roof() -> None:
    cost = Cost(useful_flops=10**9, executed_flops=10**9, weight_bytes=10**9)
    assert ROOFS.floor_seconds(cost, "float32", 1) == 0.1  # memory: 1 GB at 10 GB/s
    assert ROOFS.share(cost, 0.2, "float32", 1) == pytest.approx(0.5)
    assert ROOFS.share(cost, 0.098, "float32", 1) == 1.0
    with pytest.raises(ValueError, match="200 % of a measured roof: the cost model or the timer is wrong"):
        ROOFS.share(cost, 0.05, "float32", 1)


def test_roofs_are_kept_and_read_back() -> None:
    assert stored_roofs("toy-1") is None
    path = store_roofs(ROOFS)
    assert path == roofs_path("toy-1") and stored_roofs("toy-1") == ROOFS
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"machine": "toy-1"}', '{"machine": "toy-1", "evil": 1}', "\x00\xff", "x" * 2**21],
    ids=["empty", "half", "list", "missing", "extra", "bytes", "huge"],
)
def test_a_spoilt_file_is_refused_in_words(text: str) -> None:
    path = roofs_path("toy-1")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match="delete it"):
        stored_roofs("toy-1")


def test_doctor_measures_once_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def fake(machine: str, threads: tuple[int, ...], tell: object) -> Roofs:
        measured.append(machine)
        names = ("float32", "bfloat16", "float16")
        rates = {n: 1e10 for n in threads}
        return Roofs(
            machine=machine,
            read_bytes=rates,
            copy_bytes=rates,
            gemm_flops={name: rates for name in names},
            seconds=1,
        )

    monkeypatch.setattr("moe_routing_bench.cli.doctoring.measure_roofs", fake)
    for words in (["doctor"], ["doctor", "--json"]):
        ran = CliRunner().invoke(app, words)
        assert ran.exit_code == 0, ran.output
        assert len(measured) == 1
    document = json.loads(ran.stdout)
    assert document["machine"]["name"] == this_machine().name and "read_bytes" in document["roofs"]
    assert CliRunner().invoke(app, ["doctor", "--again"]).exit_code == 0
    assert len(measured) == 2
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "GB/s" in text and "GFLOP/s" in text and this_machine().name in text
