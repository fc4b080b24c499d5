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
from moe_routing_bench.core.paths import home
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.leases import Leases, lease_seconds
from moe_routing_bench.fleet.mirror import mirror
from moe_routing_bench.fleet.objects import Objects, url_of
from moe_routing_bench.fleet.packs import compact_store
from moe_routing_bench.fleet.store import RemoteStore
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.read import LeftOut

pytest.importorskip("obstore")


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
    return sorted((Path(url.removeprefix("file://")) / prefix).rglob("*"))


def test_urls_survive_being_paths():
    assert url_of(Path("s3://bucket/runs/")) == "s3://bucket/runs"
    assert url_of(Path("file:///tmp/x")) == url_of("file:///tmp/x") == "file:///tmp/x"
    assert url_of("results") is None and url_of("/s3:/x") is None


def test_a_store_reads_as_a_folder_with_the_same_records_and_is_not_measured_again(url, tmp_path):
    cells = made_cells(5)
    assert len(swept(url, cells[:3])) == 3 and len(swept(url, cells)) == 2
    list(run_sweep(cells, tmp_path / "local", MadeUp()))
    first = mirror(url)
    assert first.fetched == 5 and not first.sentences
    assert len(contents(first.folder)) == 10 and contents(first.folder) == contents(tmp_path / "local")
    assert mirror(url).fetched == 0 and swept(url, cells) == []
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
    assert len(objects_in(url, "parts")) == 12
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
    assert not waiter.take(key, 1, seconds), "its own lease holds"


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
    assert len(objects_in(url, "parts")) == len(objects_in(url, "commits")) == 1
    assert cells_of(mirror(url).folder) == {key_of(experiment): 1}


def test_a_commit_whose_answer_was_lost_is_known_as_our_own(url, monkeypatch):
    put = Objects.put_new

    def answer_lost(self, name, data):
        put(self, name, data)
        return False

    monkeypatch.setattr(Objects, "put_new", answer_lost)
    assert len(swept(url, made_cells(2))) == 2
    assert len(swept(url, made_cells(3), claim=True)) == 1
    monkeypatch.undo()
    os.environ["MRB_HOME"] = str(objects_in(url, ".")[0].parent / "home2")
    assert len(cells_of(mirror(url).folder)) == 3


def test_a_part_that_no_commit_names_is_never_read(url):
    swept(url, made_cells(1))
    RemoteStore(url).objects.put_new("parts/torn-000001-aaaa", b"half an upload")
    found = mirror(url)
    assert found.fetched == 1 and not found.sentences


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("prefix", "damage", "sentence"),
    [
        ("parts", _cut, "cut off"),
        ("parts", _one_byte, "was changed"),
        ("parts", Path.unlink, "not there"),
        ("commits", _cut, "this version"),
        ("environments", _one_byte, "sha256"),
        ("packs", _one_byte, "changed|no pack"),
        ("packs", _cut, "header"),
    ],
)
def test_damage_is_said_in_a_sentence_and_the_rest_is_read(url, prefix, damage, sentence):
    swept(url, made_cells(3))
    if prefix == "packs":
        compact_store(Objects(url))
        compact_store(Objects(url), drop=True)
    damage(objects_in(url, prefix)[0])
    found = mirror(url)
    assert any(re.search(sentence, one) for one in found.sentences), found.sentences
    assert all(one.isprintable() and len(one) < 400 for one in found.sentences)
    whole = {"environments": 3, "packs": 2 if damage is _one_byte else 0}.get(prefix, 2)
    assert found.fetched in (whole, 0 if prefix == "packs" else whole)


def test_what_was_read_before_it_was_damaged_stays_and_the_change_is_noticed(url):
    swept(url, made_cells(2))
    mirror(url)
    one, other = objects_in(url, "commits")
    _one_byte(one)
    other.unlink()
    found = mirror(url)
    assert "was changed" in found.sentences[0] and "is gone" in found.sentences[1]
    assert len(cells_of(found.folder)) == 2


def test_a_reader_killed_half_way_doubles_nothing(url, monkeypatch):
    swept(url, made_cells(2))
    with monkeypatch.context() as patched:
        patched.setattr("moe_routing_bench.fleet.mirror.AT_ONCE", 1)

        def dies(done: int, of: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            mirror(url, dies)
    (records,) = home().glob("stores/*/session=*/records.jsonl")
    with records.open("ab") as file:  # what a reader wrote and had not noted when it died
        file.write(records.read_bytes()[:1000])
    left_out, folder = LeftOut(), mirror(url).folder
    assert cells_of(folder) == dict.fromkeys(map(key_of, made_cells(2)), 1)
    assert len(list(iterate(folder, left_out))) == 4 and not left_out.count


def test_compaction_twice_beside_writers_and_with_parts_deleted_loses_nothing(url, tmp_path, monkeypatch):
    cells = made_cells(6)
    swept(url, cells[:4])
    assert compact_store(Objects(url)) == (4, 0, []) and compact_store(Objects(url)) == (0, 0, [])
    swept(url, cells)
    assert compact_store(Objects(url), drop=True) == (2, 4, [])
    assert len(objects_in(url, "parts")) == 2 and len(objects_in(url, "packs")) == 2
    before = contents(mirror(url).folder)
    assert len(before) == 12
    assert "2 parts deleted" in mrb("results", "compact", url, "--drop").stdout
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "another"))
    again = mirror(url)
    assert contents(again.folder) == before and not again.sentences
    assert swept(url, cells) == []


def test_two_compactions_that_overlap_are_read_once(url):
    swept(url, made_cells(3))
    compact_store(Objects(url))
    (pack,) = objects_in(url, "packs")
    aside = pack.read_bytes()
    pack.unlink()
    swept(url, made_cells(4))
    compact_store(Objects(url))  # did not see the first one
    pack.write_bytes(aside)
    compact_store(Objects(url), drop=True)
    found = mirror(url)
    assert not objects_in(url, "parts") and not found.sentences
    assert cells_of(found.folder) == dict.fromkeys(map(key_of, made_cells(4)), 1)


def test_a_damaged_pack_keeps_its_parts(url):
    swept(url, made_cells(2))
    compact_store(Objects(url))
    (pack,) = objects_in(url, "packs")
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(bytes(data))
    _, dropped, sentences = compact_store(Objects(url), drop=True)
    assert dropped == 1 and "was changed" in sentences[0]
    assert len(cells_of(mirror(url).folder)) == 2


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
    monkeypatch.setattr("moe_routing_bench.fleet.objects.RETRY_SECONDS", 0)
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
