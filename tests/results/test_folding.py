"""Folds of a store: each record once and the same, whatever writers and folds are killed or meet."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import numpy as np
import pytest

from command_line import mrb, mrb_json
from made_sweeps import MadeUp, key_of, made_cells
from moe_routing_bench.fleet import folding
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.folding import check_tables, compact_store, fold, newest
from moe_routing_bench.fleet.old_layout import convert
from moe_routing_bench.fleet.segments import sealed, segment_name
from moe_routing_bench.fleet.store import RemoteStore, mirror
from moe_routing_bench.results import query
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.tables import _ranges
from moe_routing_bench.workloads.experiment import Experiment

pytest.importorskip("obstore")
ALL = "SELECT * FROM records ORDER BY record_id"
COMMANDS = "SELECT repro FROM records ORDER BY record_id"
COUNTS = "SELECT count(*), count(DISTINCT record_id) FROM records"


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))


@pytest.fixture
def url(tmp_path) -> str:
    """A store of 5 cells with two records each."""
    url = f"file://{tmp_path}/store"
    swept(url, 5)
    return url


def swept(url: str, cells: int, start: int = 0, **more) -> int:
    store, engine = RemoteStore(url, make=True), MadeUp(**more)
    plan = plan_fleet(made_cells(cells)[start:], store, engine, retry_failed=False, resume=True)
    return len(list(run_fleet(plan, store, engine)))


def asked(url: str, sql: str = ALL, left_out: LeftOut | None = None) -> list[tuple]:
    return run_query(mirror(url, rows=True).folder, sql, left_out)[1]


def paths(url: str, prefix: str) -> list[Path]:
    return sorted(path for path in Path(url.removeprefix("file://"), prefix).rglob("*") if path.is_file())


def test_rows_are_the_same_before_and_after_a_fold_and_in_the_whole_copy(url):
    before, whole = asked(url), {one.line() for one in iterate(mirror(url).folder)}
    assert len(before) == 10 and len(whole) == 10
    assert compact_store(Objects(url)) == (5, []) and compact_store(Objects(url)) == (0, [])
    assert asked(url) == before and {one.line() for one in iterate(mirror(url).folder)} == whole
    assert swept(url, 8) == 3 and asked(url, COUNTS) == [(16, 16)]
    compact_store(Objects(url))
    assert asked(url, COUNTS) == [(16, 16)] and swept(url, 8) == 0
    left_out = LeftOut()
    assert len(list(iterate(mirror(url).folder, left_out))) == 16 and not left_out.count
    (table,) = newest(Objects(url))[0].tables
    assert table.rows == 16 and table.days[0] <= table.days[1] and table.suites == ("", "")


def test_what_a_fold_replaced_is_deleted_when_it_is_old(url, monkeypatch):
    objects = Objects(url)
    objects.put_new(f"tables/all/{'0' * 64}.parquet", b"of a fold that was killed")
    compact_store(objects)
    monkeypatch.setattr(folding, "KEPT_SECONDS", 0)
    monkeypatch.setattr(folding, "LEASE_SECONDS", 0)
    objects.put_new(f"leases/{'a' * 64}-0001/000001.json", b"{}")
    time.sleep(0.02)
    for cells in (6, 7, 8):
        swept(url, cells)
        compact_store(objects)
    assert not paths(url, "leases") and len(paths(url, "segments")) == 3
    assert len(paths(url, "tables")) == 4 and f"{'0' * 64}.parquet" not in {
        p.name for p in paths(url, "tables")
    }
    assert len(paths(url, "manifests")) == 2 and len(newest(objects)[0].replaced) == 6
    assert asked(url, COUNTS) == [(16, 16)] and swept(url, 8) == 0


@pytest.mark.parametrize("folded_again", [False, True])
def test_a_segment_put_again_after_it_was_folded_is_not_seen_twice(url, monkeypatch, folded_again):
    before = {path: path.read_bytes() for path in paths(url, "segments")}
    compact_store(Objects(url))
    monkeypatch.setattr(folding, "KEPT_SECONDS", 0)
    for cells in (6, 7, 8):
        swept(url, cells)
        compact_store(Objects(url))
    assert not any(path.exists() for path in before)
    for path, data in before.items():
        path.write_bytes(data)
    if folded_again:
        assert compact_store(Objects(url)) == (5, [])
    assert asked(url, COUNTS) == [(16, 16)] and len(list(iterate(mirror(url).folder))) == 16
    for cells in (9, 10, 11):  # what is replaced is deleted, and no more
        swept(url, cells)
        compact_store(Objects(url))
    assert asked(url, COUNTS) == [(22, 22)]


def test_a_fold_whose_segments_are_all_refused_keeps_the_tables(url, monkeypatch):
    monkeypatch.setattr(folding, "KEPT_SECONDS", 0)
    compact_store(Objects(url))
    for cells in range(6, 14):
        swept(url, cells, cells - 1)
        new = next(path for path in paths(url, "segments") if segment_of(path) not in replaced(url))
        new.write_bytes(b"no gzip")
        assert len(compact_store(Objects(url))[1]) == 1
    assert asked(url, COUNTS) == [(10, 10)]


def test_two_folds_at_once_and_one_of_another_prefix(url, monkeypatch):
    objects, put, others = Objects(url), Objects.put_new, [("", 0)]

    def meanwhile(self, name, data):
        if name.startswith("manifests/") and others:
            prefix, _ = others.pop()
            fold(Objects(url), prefix)
        return put(self, name, data)

    monkeypatch.setattr(Objects, "put_new", meanwhile)
    assert fold(objects) == (0, []) and len(newest(objects)[0].tables) == 1
    assert newest(objects)[0].number == 1 and asked(url, COUNTS) == [(10, 10)]
    swept(url, 7)
    one, other = (
        path.parent.name for path in paths(url, "segments") if segment_of(path) not in replaced(url)
    )
    others.append((one, 0))
    assert fold(objects, other) == (1, []) and newest(objects)[0].number == 3
    assert asked(url, COUNTS) == [(14, 14)] and len(newest(objects)[0].tables) == 3


def test_no_fold_puts_a_manifest_while_another_deletes(url, monkeypatch):
    """Between reading the newest manifest and putting the next one there is no slow request: else folds of
    other prefixes, which run beside it, would always be first."""
    compact_store(Objects(url))
    monkeypatch.setattr(folding, "KEPT_SECONDS", 0)
    for cells in (6, 7):
        swept(url, cells)
        compact_store(Objects(url))
    swept(url, 9)
    new = [path.parent.name for path in paths(url, "segments") if segment_of(path) not in replaced(url)]
    one, other = sorted(new)
    delete, put, lost, others = Objects.delete, Objects.put_new, [], [other]

    def slow(self, names):
        if names := list(names):
            delete(self, names)
            if others:
                fold(Objects(url), others.pop())

    def counted(self, name, data):
        if not (made := put(self, name, data)):
            lost.append(name)
        return made

    monkeypatch.setattr(Objects, "delete", slow)
    monkeypatch.setattr(Objects, "put_new", counted)
    assert fold(Objects(url), one) == (1, []) and not others and not lost
    assert asked(url, COUNTS) == [(18, 18)] and swept(url, 9) == 0


def segment_of(path: Path) -> str:
    return f"segments/{path.parent.name}/{path.name}"


def replaced(url: str) -> set[str]:
    return set(newest(Objects(url))[0].replaced)


def test_a_record_that_contradicts_its_samples_is_left_out_once_for_all_and_kept_aside(url):
    path = paths(url, "segments")[0]
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines[1]["sample_seconds"][0] *= 0.9
    forged = gzip.compress("".join(json.dumps(one) + "\n" for one in lines).encode())
    path.write_bytes(forged)
    paths(url, "segments")[1].write_bytes(b"no gzip")
    for folded in (False, True):
        if folded:
            count, sentences = compact_store(Objects(url))
            assert count == 5 and len(sentences) == 3 and compact_store(Objects(url)) == (0, [])
        left_out = LeftOut()
        assert asked(url, COUNTS, left_out) == [(6, 6)] and left_out.count == 3
        assert len(list(iterate(mirror(url).folder))) == 6 and len(mirror(url).sentences) == 3
        assert all(one.isprintable() and len(one) < 400 for one in mirror(url).sentences)
    assert forged in [one.read_bytes() for one in paths(url, "refused")] and len(paths(url, "refused")) == 2


def test_the_command_of_a_record_is_built_from_its_experiment_before_and_after_a_fold(url):
    path = paths(url, "segments")[0]
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    for one in lines:
        one["line"] = json.dumps(json.loads(one["line"]) | {"repro": "rm -rf ~"})
    path.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in lines).encode()))
    before = asked(url, COMMANDS)
    compact_store(Objects(url))
    assert asked(url, COMMANDS) == before and len(before) == 10 and ("rm -rf ~",) not in before


def test_a_segment_that_unpacks_to_too_much_or_is_of_another_cell_is_refused(url, monkeypatch):
    one, other = paths(url, "segments")[:2]
    one.write_bytes(other.read_bytes())
    assert asked(url, COUNTS) == [(8, 8)]
    monkeypatch.setattr("moe_routing_bench.fleet.segments.MAX_SEGMENT_BYTES", 1_000)
    assert compact_store(Objects(url))[1] and newest(Objects(url))[0].tables == ()


def test_a_check_finds_a_table_that_was_forged(url):
    objects = Objects(url)
    compact_store(objects)
    assert (
        check_tables(objects) == (10, []) and mrb_json("results", "compact", url, "--check")["verified"] == 10
    )
    (path,) = paths(url, "tables")
    before = path.read_bytes()
    for change in (
        "0.9 * median_ms AS median_ms",
        "list_transform(sample_seconds, lambda x: x / 2) AS sample_seconds",
    ):
        path.write_bytes(before)
        forged = path.with_suffix(".forged")
        duckdb.execute(f"COPY (SELECT * REPLACE ({change}) FROM '{path}') TO '{forged}' (FORMAT parquet)")
        data = forged.read_bytes()
        forged.rename(path)
        manifest = paths(url, "manifests")[-1]
        document = json.loads(manifest.read_text())
        document["tables"][0]["bytes"] = len(data)
        manifest.write_text(json.dumps(document))
        count, sentences = check_tables(objects)
        assert count == 10 and "sha256" in sentences[0] and len(sentences) > 10


def test_a_query_of_a_store_reads_its_tables_and_nothing_else(url, tmp_path):
    compact_store(Objects(url))
    (path,) = paths(url, "tables")
    before, folder = path.read_bytes(), mirror(url, rows=True).folder
    name = newest(Objects(url))[0].tables[0].name
    for sql in (
        f"SELECT * FROM read_parquet('{path}')",
        f"SELECT * FROM read_parquet('mrb://tables/all/{'0' * 64}.parquet')",
        f"SELECT * FROM query('WITH x AS (COPY (SELECT 1) TO ''mrb://{name}'') SELECT 1')",
    ):
        with pytest.raises(ValueError):
            run_query(folder, sql)
    with query.connect(folder) as connection, pytest.raises(duckdb.Error):
        connection.execute(f"COPY (SELECT 1 AS a) TO 'mrb://{name}' (FORMAT parquet)")
    assert path.read_bytes() == before
    elsewhere = tmp_path / "x-rows"
    folder.rename(elsewhere)
    assert run_query(elsewhere, COUNTS)[1] == [(0, 0)], "a folder from elsewhere names no URL"


def test_threads_that_share_a_file_read_where_each_has_sought():
    class Far:
        def get_range(self, name: str, start: int, stop: int) -> bytes:
            return b"0123456789"[start:stop]

    file = _ranges(Far(), {"mrb://a": 10}).open("mrb://a")
    file.seek(2)
    with ThreadPoolExecutor(1) as other:
        other.submit(file.seek, 7).result()
        assert file.read(3) == b"234" and other.submit(file.read, 2).result() == b"78"
    assert file.read(9) == b"56789" and file.read(1) == b""


def test_a_table_with_other_columns_is_read_and_made_again(url, monkeypatch):
    rows = asked(url)
    with monkeypatch.context() as older:
        older.setattr(folding, "COLUMNS", tuple(c for c in folding.COLUMNS if c.name != "model"))
        older.setattr(folding, "COLUMNS_HASH", "0" * 64)
        compact_store(Objects(url))
    assert "model" not in duckdb.read_parquet(str(paths(url, "tables")[0])).columns
    assert asked(url, COUNTS) == [(10, 10)] and asked(url, "SELECT count(model) FROM records") == [(0,)]
    swept(url, 6)
    compact_store(Objects(url))
    assert len(newest(Objects(url))[0].tables) == 1
    again = asked(url)
    assert len(again) == 12 and set(map(repr, rows)) <= set(map(repr, again))


def test_a_store_of_the_older_layout_is_converted_once(url, tmp_path):
    """Its parts and packs, as version 0.1 wrote them."""
    rows = asked(url)
    bodies, datas = [], []
    for number, path in enumerate(paths(url, "segments")):
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        key, record = path.name[:64], json.loads(lines[0]["line"])
        records = "".join(one["line"].rstrip("\n") + "\n" for one in lines).encode()
        samples = b"".join(np.array(one["sample_seconds"], "<f8").tobytes() for one in lines)
        header = {
            "format": "mrb part", "version": 1, "cell_key": key, "session": record["session"],
            "environment": record["environment"], "records": len(records), "samples": len(samples),
            "samples_at": record["timing"]["samples"]["offset"], "number": number + 1,
        }  # fmt: skip
        data = json.dumps(header).encode() + b"\n" + records + samples
        name = f"parts/s-{number:06d}"
        body = {
            "version": 1,
            "part": name,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "failed": False,
        }
        commit = f"commits/{key}-0001.json"
        Objects(url).put_new(commit, json.dumps(body).encode())
        if number < 3:
            Objects(url).put_new(name, data)
        if number in (2, 3, 4):
            bodies.append({"commit": commit, "body": body})
            datas.append(data)
        path.unlink()
    head = json.dumps({"format": "mrb pack", "version": 1, "members": bodies}).encode()
    Objects(url).put_new(f"packs/{hashlib.sha256(head).hexdigest()}-{len(head)}", head + b"".join(datas))
    paths(url, "parts")[0].write_bytes(b"changed")
    for _ in range(2):
        with pytest.raises(ValueError, match="compact"):
            mirror(url)
        convert(Objects(url))  # and is killed before the fold
    answer = mrb("results", "compact", url, "--json", code=1)
    assert json.loads(answer.stdout)["folded"] == 4 and "was changed" in json.loads(answer.stdout)["left"][0]
    assert len(asked(url)) == 8 and set(map(repr, asked(url))) <= set(map(repr, rows))
    assert len(paths(url, "commits")) == 1 and len(paths(url, "parts")) == 1


def failed(url: str) -> list[Experiment]:
    return list(plan_fleet(made_cells(7), RemoteStore(url), MadeUp(), retry_failed=True, resume=True).todo)


def test_failed_cells_are_known_before_and_after_a_fold(url):
    swept(url, 7, failing=[105])
    store = RemoteStore(url)
    expected = [made_cells(6)[5]]
    assert failed(url) == expected
    compact_store(store.objects)
    assert failed(url) == expected
    assert store.attempts() == RemoteStore(url).attempts() == {key_of(one): 1 for one in made_cells(7)}


def _writes(url: str, home: str, seed: int) -> None:
    os.environ["MRB_HOME"] = home
    cells, engine = made_cells(80), MadeUp()
    random.Random(seed).shuffle(cells)
    store = RemoteStore(url, make=True)
    for _ in run_fleet(plan_fleet(cells, store, engine, retry_failed=False, resume=True), store, engine):
        pass


def _folds(url: str, home: str, seed: int) -> None:
    folding.KEPT_SECONDS = 0.3  # so that much is deleted while others run
    while True:
        compact_store(Objects(url))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_writers_and_two_folds_with_random_kills_lose_and_double_nothing(tmp_path):
    """All writers measure the same cells in another order, without leases."""
    url, home = f"file://{tmp_path}/store", str(tmp_path / "home")
    RemoteStore(url, make=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_folding"])
    dice, made = random.Random(7), iter(range(1000))

    def start(target):
        process = context.Process(target=target, args=(url, home, next(made)), daemon=True)
        process.start()
        return target, process

    running = [start(_writes) for _ in range(8)] + [start(_folds) for _ in range(2)]
    kills = 0
    while kills < 16:
        time.sleep(dice.uniform(0.05, 0.4))
        place = dice.randrange(10)
        target, process = running[place]
        kills += process.is_alive()
        process.kill()
        process.join()
        running[place] = start(target)
    for target, process in running:
        if target is _folds:
            process.kill()
        process.join()
    assert [process.exitcode for target, process in running if target is _writes] == [0] * 8
    counts = [asked(url, COUNTS)]
    compact_store(Objects(url))
    counts.append(asked(url, COUNTS))
    assert counts == [[(160, 160)]] * 2
    assert set(RemoteStore(url).attempts()) == {key_of(one) for one in made_cells(80)}
    assert check_tables(Objects(url)) == (160, [])


def test_a_cell_is_sealed_with_the_samples_of_its_records():
    assert segment_name("0f" * 32, 1) == f"segments/0f/{'0f' * 32}-0001.jsonl.gz"
    assert sealed("0f" * 32, 1, b"no record\n", b"", 0) == sealed("0f" * 32, 1, b"no record\n", b"", 0)
