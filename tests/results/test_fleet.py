"""A store on a URL: many machines write it, each cell counts once, and damage is said in a sentence."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from made_sweeps import MadeUp, key_of, made_cells
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.folding import compact_store
from moe_routing_bench.fleet.leases import Leases, lease_seconds
from moe_routing_bench.fleet.store import RemoteStore, mirror
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.objects import Objects, url_of

obstore = pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/store"


def swept(url: str, cells, engine: MadeUp | None = None, **more) -> list[str]:
    store, engine = RemoteStore(url, make=True), engine or MadeUp()
    plan = plan_fleet(cells, store, engine, retry_failed=more.pop("retry_failed", False), resume=True)
    return [outcome.experiment.title for outcome in run_fleet(plan, store, engine, **more)]


def cells_of(folder: Path) -> Counter[str]:
    """How often each cell is there: it has one baseline."""
    return Counter(r.cell_key for r in iterate(folder) if r.implementation.role == "baseline")


def contents(folder: Path) -> set[tuple]:
    return {(r.cell_key, r.implementation.title, r.timing and r.timing.median) for r in iterate(folder)}


def objects_in(url: str, prefix: str) -> list[Path]:
    return sorted(p for p in (Path(url.removeprefix("file://")) / prefix).rglob("*") if p.is_file())


def test_urls_survive_being_paths():
    assert url_of(Path("s3://bucket/runs/")) == "s3://bucket/runs"
    assert url_of(Path("file:///tmp/x")) == url_of("file:///tmp/x") == "file:///tmp/x"
    assert url_of("results") is None and url_of("/s3:/x") is None


def test_a_store_reads_as_a_folder_with_the_same_records_and_is_not_measured_again(url, tmp_path):
    cells = made_cells(5)
    assert len(swept(url, cells[:3])) == 3 and len(swept(url, cells)) == 2
    list(run_sweep(cells, tmp_path / "local", MadeUp()))
    first = mirror(url)
    assert not first.sentences
    assert len(contents(first.folder)) == 10 and contents(first.folder) == contents(tmp_path / "local")
    assert mirror(url) == first and swept(url, cells) == []
    assert not list((tmp_path / "home" / "unsent").iterdir())


def test_cells_that_failed_are_repeated_when_asked_and_the_later_result_counts(url):
    cells = made_cells(2)
    swept(url, cells, MadeUp(failing=[101]))
    assert swept(url, cells) == []
    assert swept(url, cells, retry_failed=True) == [cells[1].title]
    assert swept(url, cells, retry_failed=True) == []
    assert cells_of(mirror(url).folder)[key_of(cells[1])] == 2
    rows = mrb_json("results", "query", "SELECT status FROM latest", "--folder", url)["rows"]
    assert rows == [["PASSED"]] * 4


def test_four_workers_claim_every_cell_once(url):
    cells, engines = made_cells(12), [MadeUp() for _ in range(4)]
    RemoteStore(url, make=True)
    threads = [
        threading.Thread(
            target=swept, args=(url, cells, engine), kwargs={"claim": True, "sleep": lambda s: None}
        )
        for engine in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(len(engine.measured) for engine in engines) == 12
    assert len(objects_in(url, "segments")) == 12
    assert cells_of(mirror(url).folder) == Counter(map(key_of, cells)) == dict.fromkeys(map(key_of, cells), 1)


def test_a_dead_worker_s_cell_is_taken_when_its_lease_is_over_by_the_waiter_s_own_clock(url):
    (experiment,), store = made_cells(1), RemoteStore(url, make=True)
    key, seconds = key_of(experiment), lease_seconds(experiment)
    far_ahead = [1e12]
    assert Leases(store.objects, "dead", clock=lambda: far_ahead[0]).take(key, 1, seconds)
    now = [5.0]
    waiter = Leases(store.objects, "waiter", clock=lambda: now[0])
    slept = []

    def sleep(pause: float) -> None:
        slept.append(pause)
        now[0] += pause

    assert swept(url, [experiment], claim=True, leases=waiter, sleep=sleep) == [experiment.title]
    assert seconds <= sum(slept) <= seconds + 60
    (left,) = objects_in(url, "leases")
    assert left.name == "000001.json", "of the dead; its own is removed when the results are there"


def test_a_lease_nobody_can_read_is_respected_and_one_given_back_is_free(url):
    store = RemoteStore(url, make=True)
    now = [0.0]
    one, other = (Leases(store.objects, name, clock=lambda: now[0]) for name in ("one", "other"))
    assert one.take("a" * 64, 1, 10.0) and not other.take("a" * 64, 1, 10.0)
    one.give_back("a" * 64, 1)
    assert other.take("a" * 64, 1, 10.0)
    store.objects.put_new(f"leases/{'b' * 64}-0001/000001.json", b"\xff not JSON")
    for now[0] in (0.0, 100.0):
        assert not other.take("b" * 64, 1, 10.0)
    now[0] = 4000.0
    assert other.take("b" * 64, 1, 10.0)


def test_a_slow_writer_whose_lease_expired_changes_nothing(url):
    (experiment,), store = made_cells(1), RemoteStore(url, make=True)
    slow = MadeUp()
    plan = plan_fleet([experiment], store, slow, retry_failed=False, resume=True)

    class Slow(MadeUp):
        def run(self, cells, **more):
            for outcome in super().run(cells, **more):
                swept(url, [experiment])  # another machine is done in the meantime
                yield outcome

    assert list(run_fleet(plan, store, Slow())) == []
    assert len(objects_in(url, "segments")) == 1
    assert cells_of(mirror(url).folder) == {key_of(experiment): 1}


def test_a_segment_whose_answer_was_lost_is_known_as_our_own(url, monkeypatch):
    put = obstore.put

    def answer_lost(*args, **more):
        put(*args, **more)
        raise obstore.exceptions.AlreadyExistsError("the second request finds what the first has written")

    monkeypatch.setattr(obstore, "put", answer_lost)
    assert len(swept(url, made_cells(2))) == 2
    assert len(swept(url, made_cells(3), claim=True)) == 1
    monkeypatch.undo()
    os.environ["MRB_HOME"] = str(objects_in(url, ".")[0].parent / "home2")
    assert len(cells_of(mirror(url).folder)) == 3


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("prefix", "damage", "sentence"),
    [
        ("segments", _cut, "cut off"),
        ("segments", _one_byte, "cut off|not what|samples"),
        ("manifests", _cut, "no manifest"),
        ("tables", Path.unlink, "tables/all/"),
        ("environments", _one_byte, "sha256"),
    ],
)
def test_damage_is_said_in_a_sentence_and_the_rest_is_read(url, prefix, damage, sentence):
    swept(url, made_cells(3))
    if prefix in ("manifests", "tables"):
        compact_store(Objects(url))
        damage(objects_in(url, prefix)[0])
        assert re.search(sentence, refused("results", "--folder", url))
        return
    damage(objects_in(url, prefix)[0])
    found = mirror(url)
    assert any(re.search(sentence, one) for one in found.sentences), found.sentences
    assert all(one.isprintable() and len(one) < 400 for one in found.sentences)
    assert len(cells_of(found.folder)) == (3 if prefix == "environments" else 2)


def test_the_commands_read_urls(url, tmp_path, monkeypatch):
    swept(url, made_cells(3))
    swept(url.replace("store", "other"), made_cells(3))
    monkeypatch.chdir(tmp_path)
    assert mrb_json("results", "query", "SELECT count(*) FROM records", "--folder", url)["rows"] == [[6]]
    assert len(mrb_json("results", "compare", url, url.replace("store", "other"))["changes"]) > 0
    mrb("tune", "decide", url)
    assert (tmp_path / "decisions.json").exists()
    assert "native" in mrb("results", "report", url, "--markdown").stdout
    assert (
        mrb_json("results", "merge", url, url.replace("store", "other"), "--out", tmp_path / "merged")[
            "cells"
        ]
        == 3
    )
    mrb("results", "export", url, "--csv", tmp_path / "a.csv")


def test_mistakes_with_urls_get_a_sentence(url, tmp_path, monkeypatch):
    assert "no store" in refused("results", "--folder", url)
    claim = ("sweep", "seed-fused~scaled", "--claim", "--out")
    assert "--claim" in refused(*claim, tmp_path)
    assert "work alone" in refused(*claim, url, "--engine", "ray")
    Path(url.removeprefix("file://")).mkdir()
    assert "no results" in refused("results", "--folder", url)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("moe_routing_bench.results.objects.RETRY_SECONDS", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    assert "AWS_ALLOW_HTTP=true" in refused("results", "--folder", "s3://bucket/x")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert "s3://bucket/x" in refused("results", "--folder", "s3://bucket/x")
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "moe-routing-bench[store]" in refused("results", "--folder", url)


def test_what_cannot_be_sent_stays_here(url, tmp_path, monkeypatch):
    store, engine = RemoteStore(url, make=True), MadeUp()
    plan = plan_fleet(made_cells(1), store, engine, retry_failed=False, resume=True)
    monkeypatch.setattr(
        RemoteStore, "publish", lambda *a, **k: (_ for _ in ()).throw(OSError("no route to host"))
    )
    with pytest.raises(ValueError, match=r"no route to host.*unsent"):
        list(run_fleet(plan, store, engine))
    (kept,) = (tmp_path / "home" / "unsent").iterdir()
    assert len(list(iterate(kept))) == 2
