"""Parcels: known by their content, put right where they were changed, never outside of their place."""

from __future__ import annotations

import pytest

from moe_routing_bench.bench.identity import key_fields
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet import shipping
from moe_routing_bench.fleet.shipping import Parcel, moved, named_by
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.trace import write_trace
from moe_routing_bench.workloads.workload import make_workload


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine" / "combine" / "__pycache__").mkdir(parents=True)
    (tmp_path / "mine" / ".git").mkdir()
    left_behind = ("combine/__pycache__/a.pyc", ".git/config", "combine/.a.py.swp")
    for name in ("combine/a.py", "combine/a.cpp", *left_behind):
        (tmp_path / "mine" / name).write_text(name)
    return tmp_path / "mine"


def test_a_folder_arrives_as_it_was(folder):
    parcel = Parcel.of(folder)
    assert [name for name, _ in parcel.files] == ["combine/a.cpp", "combine/a.py"]
    place = parcel.unpacked()
    assert place.name == "mine" and parcel.sha256 in place.parts
    assert Parcel.of(place) == parcel and parcel.unpacked() == place
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("wrong", ["changed", "added", "removed"])
def test_what_was_changed_there_is_put_right(folder, wrong):
    parcel = Parcel.of(folder)
    place = parcel.unpacked()
    if wrong == "removed":
        (place / "combine/a.py").unlink()
    else:
        (place / "combine" / {"changed": "a.py", "added": "b.py"}[wrong]).write_text("evil")
    assert Parcel.of(parcel.unpacked()) == parcel


def test_any_change_is_another_parcel(folder):
    before = Parcel.of(folder).sha256
    (folder / "combine/a.py").write_text("new")
    changed = Parcel.of(folder).sha256
    (folder / "combine/a.py").rename(folder / "combine/b.py")
    assert len({before, changed, Parcel.of(folder).sha256}) == 3


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py", "combine/../../evil.py"])
def test_no_file_outside_of_its_place(name, tmp_path):
    with pytest.raises(ValueError, match="outside"):
        Parcel("mine", ((name, b"x"),)).unpacked()


def test_what_is_too_large_is_refused(folder, monkeypatch):
    monkeypatch.setattr(shipping, "MAX_FILES", 1)
    with pytest.raises(ValueError, match="too much"):
        Parcel.of(folder)


def test_a_moved_cell_has_the_same_key(folder, tmp_path):
    trace = tmp_path / "routing.safetensors"
    write_trace(trace, make_workload("zipf(1.2)", T=32, E=4, K=2).routing, source="test")
    experiment = Experiment(
        case="own/x",
        span="combine",
        T=16,
        D=32,
        F=32,
        E=4,
        K=2,
        workload=f"trace({trace})",
        implementations=(ImplementationRef(name="gather_sum"),),
        include=(str(folder),),
    )
    places = {text: Parcel.of(path).unpacked() for text, path in named_by(experiment).items()}
    there = moved(experiment, places)
    assert there.include == (str(places[str(folder)]),) and str(trace) not in there.workload
    assert key_fields(there, this_machine()) == key_fields(experiment, this_machine())
    other = tmp_path / "other" / "routing.safetensors"
    other.parent.mkdir()
    write_trace(other, make_workload("zipf(1.3)", T=32, E=4, K=2).routing, source="test")
    elsewhere = moved(experiment, {**places, str(trace): other})
    assert key_fields(elsewhere, this_machine()) != key_fields(experiment, this_machine())
