"""The rows of a store as Parquet alone: the same rows as in the whole copy, each once, whatever happens."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from command_line import mrb, mrb_json
from made_sweeps import MadeUp, made_cells
from moe_routing_bench.core.paths import home
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.mirror import mirror, mirror_rows
from moe_routing_bench.fleet.store import RemoteStore
from moe_routing_bench.results import query
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.read import LeftOut

pytest.importorskip("obstore")
ALL = "SELECT * FROM records ORDER BY record_id"


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))


@pytest.fixture
def url(tmp_path) -> str:
    """A store of 20 cells with two records each."""
    url = f"file://{tmp_path}/store"
    swept(url, 20)
    return url


def swept(url: str, cells: int) -> None:
    store, engine = RemoteStore(url, make=True), MadeUp()
    plan = plan_fleet(made_cells(cells), store, engine, retry_failed=False, resume=True)
    assert list(run_fleet(plan, store, engine))


def many_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_routing_bench.fleet.mirror.AT_ONCE", 1)
    monkeypatch.setattr("moe_routing_bench.results.rows.AT_ONCE", 3)


def test_rows_are_those_of_the_whole_copy_and_only_new_ones_are_fetched(url):
    rows = mirror_rows(url)
    assert rows.fetched == 20 and rows.folder.name.endswith("-rows")
    assert not list(rows.folder.glob("session=*"))
    swept(url, 23)
    assert mirror_rows(url).fetched == 3 and mirror_rows(url).fetched == 0
    found = run_query(rows.folder, ALL)
    assert len(found[1]) == 46 and found == run_query(mirror(url).folder, ALL)


def test_small_files_become_larger_ones(url, monkeypatch):
    many_small_files(monkeypatch)
    folder = mirror_rows(url).folder
    files = list(folder.glob("rows-*"))
    assert len(files) == 4  # 20 in threes: two of nine, none of three, two of one
    assert run_query(folder, "SELECT count(*), count(DISTINCT record_id) FROM records")[1] == [(40, 40)]


@pytest.mark.parametrize("after", range(0, 20, 3))
def test_a_reader_killed_half_way_doubles_and_loses_nothing(url, monkeypatch, after):
    many_small_files(monkeypatch)

    def dies(done: int, of: int) -> None:
        if done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mirror_rows(url, dies)
    folder = mirror_rows(url).folder
    (folder / "rows-9999.parquet").write_bytes(b"of one that was killed before it noted the file")
    mirror_rows(url)
    assert run_query(folder, "SELECT count(*), count(DISTINCT record_id) FROM records")[1] == [(40, 40)]


def test_a_changed_file_is_left_out_and_made_again(url, monkeypatch):
    many_small_files(monkeypatch)
    folder = mirror_rows(url).folder
    changed = sorted(folder.glob("rows-*"))[0]
    rows = run_query(folder, ALL)
    data = changed.read_bytes()
    changed.write_bytes(data)  # the same bytes by somebody else's hand: its rows cannot be held to samples
    left_out = LeftOut()
    (count,) = run_query(folder, "SELECT count(*) FROM records", left_out)[1][0]
    assert count < 40 and "was changed" in left_out.remarks[0]
    again = mirror_rows(url)
    assert 0 < again.fetched < 20
    assert run_query(folder, ALL) == rows


def test_a_time_without_its_samples_is_no_row(url, monkeypatch):
    from moe_routing_bench.results import rows

    folder = mirror_rows(url).folder
    real = rows.read_records

    def forged(path: Path, *more):
        text = path.read_text()
        path.write_text(text.replace('"median":', '"median":1', 1))
        return real(path, *more)

    monkeypatch.setattr(rows, "read_records", forged)
    swept(url, 21)
    mirror_rows(url)
    left_out = LeftOut()
    assert run_query(folder, "SELECT count(*) FROM records", left_out)[1] == [(41,)]
    assert left_out.count == 1


def test_a_large_copy_is_read_in_place_and_no_query_writes_to_it(url, tmp_path, monkeypatch):
    folder = mirror_rows(url).folder
    monkeypatch.setattr(query, "MAX_COPIED_BYTES", 0)
    rows = run_query(folder, ALL)
    (parquet,) = folder.glob("rows-*")
    before = parquet.read_bytes()
    forged = f"COPY (SELECT * REPLACE (0.001 AS median_ms) FROM records) TO ''{parquet}'' (FORMAT parquet)"
    with pytest.raises(ValueError):
        run_query(folder, f"SELECT * FROM query('WITH x AS ({forged}) SELECT 1')")
    with query.connect(folder) as connection, pytest.raises(duckdb.Error):
        connection.execute(forged.replace("''", "'"))
    (tmp_path / "later").write_text("files can be written again")
    if parquet.read_bytes() != before:
        mirror_rows(url)
    assert run_query(folder, ALL) == rows


def test_commands_that_ask_for_rows_keep_rows_and_the_others_keep_all(url, tmp_path):
    assert mrb_json("results", "query", "SELECT count(*) FROM records", "--folder", url)["rows"] == [[40]]
    mrb("results", "export", url, "--csv", str(tmp_path / "all.csv"))
    (only,) = (home() / "stores").iterdir()
    assert only.name.endswith("-rows")
    mrb("results", "merge", url, "--out", str(tmp_path / "merged"))
    assert len(list((home() / "stores").iterdir())) == 2
    assert mirror_rows(url).folder == mirror(url).folder
