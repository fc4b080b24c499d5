"""SQL over a results folder: the columns, the copies behind them, and what a query may not do."""

from __future__ import annotations

import csv
import json
import multiprocessing.connection
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from moe_routing_bench.results import parquet as flat
from moe_routing_bench.results import query
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.parquet import COLUMNS, compact, quoted
from moe_routing_bench.results.query import connect, export_csv, export_parquet, run_query
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import content_hash
from repository import ROOT
from sample_records import SESSION, document, failed, line
from timing import in_time

pytestmark = pytest.mark.slow

OTHER = "20261116T000000000-00000000"


def write(folder: Path, lines: list[bytes], session: str = SESSION) -> Path:
    path = folder / f"session={session}" / "records.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(lines))
    return path


def numbered(number: int, session: str = SESSION, **changes: Any) -> dict[str, Any]:
    samples = f"session={session}/samples.f64"
    name = f"{session}-{number:06d}"
    return document(session=session, record_id=name, timing__samples__file=samples, **changes)


def one(folder: Path, sql: str) -> Any:
    return run_query(folder, sql)[1][0][0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    fast = numbered(1, implementation__label="fast", timing__samples__count=7)
    write(root, [line(fast), line(failed("TIMEOUT", record_id=f"{SESSION}-000002"))])
    return root


@pytest.mark.parametrize("compacted", [False, True])
def test_a_row_says_what_the_record_says(folder: Path, compacted: bool) -> None:
    environment = {"machine": {"name": "xeon-2-cores"}, "source": {"commit": "a1" * 20, "dirty": True}}
    name = content_hash(environment)
    (folder / "environments").mkdir()
    (folder / "environments" / f"{name}.json").write_text(
        json.dumps(environment, sort_keys=True, separators=(",", ":"))
    )
    write(folder, [line(numbered(3, environment=name))])
    if compacted:
        heard: list[tuple[int, int]] = []
        assert compact(folder, lambda done, total: heard.append((done, total))) == 1 and compact(folder) == 0
        size = (folder / f"session={SESSION}" / "records.jsonl").stat().st_size
        assert heard == [(size, size)]
    columns, rows = run_query(folder, "SELECT * FROM records ORDER BY record_id")
    assert columns == [*(column.name for column in COLUMNS), "machine", "source_commit", "source_dirty"]
    first, second, third = (dict(zip(columns, row, strict=True)) for row in rows)
    given = document()
    assert (first["impl"], first["span"], first["case"]) == (
        "fast",
        "expert_ffn",
        given["experiment"]["case"],
    )
    assert [first[name] for name in "TDFEKW"] == [32, 1792, 64, 64, 8, 1]
    assert first["median_ms"] == pytest.approx(11.5) and first["p95_ms"] == pytest.approx(12.8)
    assert first["workload"] == "zipf(1.2)" and first["ratio_low"] == 0.88 and first["verdict"] == "FASTER"
    assert first["stage_seconds"] == {"route": 0.001, "grouped_gemm": 0.01} and first["samples"] == 7
    assert first["created_at"].isoformat() == "2026-11-15T02:47:34.123456"
    assert first["included"] == given["included"] and first["bias"] is False
    assert first["machine"] is None and third["machine"] == "xeon-2-cores"
    assert first["source_commit"] is first["source_dirty"] is None
    assert (third["source_commit"], third["source_dirty"]) == ("a1" * 20, True)
    assert first["tokens_per_second"] == 2782.6 and first["router"] == first["layer"] == ""
    assert second["status"] == "TIMEOUT" and second["reason"] == "why"
    assert second["median_ms"] is second["ratio"] is second["samples"] is None
    assert second["useful_flops"] == 10**9 and second["threads"] == 1
    # every column of a whole record has a value, so every path is right. Records written before have no
    # error, and tests/bench/test_stored_runs.py asks for that of a new one
    unknown = {"more_rounds", "throttled", "machine", "source_commit", "source_dirty", "error", "launch_ms"}
    assert {name for name, value in first.items() if value is None} == unknown


def test_types_do_not_depend_on_the_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "failed", [line(failed("OOM", routing=None, work=None))])
    described = [
        run_query(tmp_path / name, "SELECT column_name, column_type FROM (DESCRIBE records)")[1]
        for name in ("empty", "failed")
    ]
    assert described[0] == described[1]
    assert ("median_ms", "DOUBLE") in described[0] and ("T", "BIGINT") in described[0]


def test_latest_is_the_newest_of_each_cell_and_implementation(folder: Path) -> None:
    for second, label, median in ((50, "fast", 0.0116), (40, "fast", 0.0117), (35, "slow", 0.0118)):
        at = f"2026-11-15T02:47:{second}Z"
        changes = {"created_at": at, "implementation__label": label, "timing__median": median}
        write(folder, [line(numbered(second, OTHER, **changes))], OTHER)
    rows = run_query(folder, "SELECT impl, round(median_ms, 1) FROM latest ORDER BY impl")[1]
    assert rows == [("fast", 11.6), ("slow", 11.8), ("staged", None)]
    for number, change in enumerate(
        ({"implementation__router": "switch"}, {"implementation__layer": "chain(iterations=2)"})
    ):
        newer = {"created_at": "2026-11-15T02:48:00Z", "implementation__label": "fast", **change}
        write(folder, [line(numbered(60 + number, OTHER, **newer))], OTHER)
    assert one(folder, "SELECT count(*) FROM latest WHERE impl = 'fast'") == 3


def test_lines_newer_than_the_copy_are_seen(folder: Path) -> None:
    compact(folder)
    parquet = folder / f"session={SESSION}" / "records.parquet"
    before = parquet.stat().st_mtime_ns
    write(folder, [line(numbered(3)), b"bad\n"])
    left_out = LeftOut()
    assert run_query(folder, "SELECT count(*) FROM records", left_out)[1] == [(3,)]
    assert left_out.count == 1 and parquet.stat().st_mtime_ns == before
    assert compact(folder) == 1 and one(folder, "SELECT count(*) FROM records") == 3
    write(folder, [line(numbered(4))])
    os.utime(folder / f"session={SESSION}" / "records.jsonl", (0, time.time() - 3600))
    assert one(folder, "SELECT count(*) FROM records") == 4
    assert compact(folder) == 0, "a file nobody writes to any more is compacted by the query"
    assert one(folder, "SELECT lines FROM left_out") == 1


def test_a_long_tail_is_added_to_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "SMALL_TAIL", 1_000)
    assert one(folder, "SELECT count(*) FROM records") == 2
    assert compact(folder) == 0


@pytest.mark.parametrize("change", ["edited", "shorter", "rewritten"])
def test_a_copy_of_other_lines_is_made_anew(folder: Path, change: str) -> None:
    compact(folder)
    path = folder / f"session={SESSION}" / "records.jsonl"
    whole = path.read_bytes()
    changed = {
        "edited": whole.replace(b'"fast"', b'"slow"'),
        "shorter": whole.splitlines(keepends=True)[0].replace(b'"fast"', b'"slow"'),
        "rewritten": whole.replace(b'"fast"', b'"slow"') + line(numbered(3)),
    }[change]
    time.sleep(0.02)
    path.write_bytes(changed)
    assert one(folder, "SELECT count(*) FROM records WHERE impl = 'fast'") == 0
    assert one(folder, "SELECT count(*) FROM records") == changed.count(b"\n")


def test_a_copy_with_other_columns_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compact(folder)
    monkeypatch.setattr(flat, "COLUMNS_HASH", "of a later version")
    assert compact(folder) == 1


def test_lines_that_were_only_touched_need_no_new_copy(folder: Path) -> None:
    compact(folder)
    os.utime(folder / f"session={SESSION}" / "records.jsonl")
    assert compact(folder) == 0


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "other columns", "lying", "folder"])
def test_a_damaged_copy_is_made_anew_or_told(folder: Path, damage: str) -> None:
    write(folder, [line(numbered(1, OTHER))], OTHER)
    compact(folder)
    parquet = folder / f"session={SESSION}" / "records.parquet"
    whole = parquet.read_bytes()
    parquet.unlink()
    if damage == "folder":
        parquet.mkdir()
    elif damage == "other columns":
        duckdb.sql(f"COPY (SELECT 1 AS a) TO '{parquet}' (FORMAT parquet)")
    elif damage == "lying":
        for value in ("{}", "[", '{"covered": "x"}', "[" * 5000, '{"sentences": 3}'):
            metadata = f"KV_METADATA {{moe_routing_bench: '{value}'}}"
            duckdb.sql(f"COPY (SELECT 1 AS a) TO '{parquet}' (FORMAT parquet, {metadata})")
            assert one(folder, "SELECT count(*) FROM records") == 3
    else:
        parquet.write_bytes({"cut": whole[:-20], "garbage": b"x" * 999, "empty": b""}[damage])
    assert one(folder, "SELECT count(*) FROM records") == 3


def test_a_torn_tail_is_told_and_stays_out(folder: Path) -> None:
    path = write(folder, [line(numbered(3))[:-20]])
    for _ in range(2):
        left_out = LeftOut()
        assert run_query(folder, "SELECT count(*) FROM records", left_out)[1] == [(2,)]
        assert left_out.count == 1 and "cut off" in left_out.first[0]
        compact(folder)
        assert compact(folder) == 0
    # the line is finished after all
    with path.open("ab") as file:
        file.write(line(numbered(3))[-20:])
    left_out = LeftOut()
    assert run_query(folder, "SELECT count(*) FROM records", left_out)[1] == [(3,)]
    assert left_out.count == 0


def test_a_session_that_closes_leaves_a_copy(tmp_path: Path) -> None:
    with Session.start(tmp_path) as session:
        session.append([])
    assert compact(tmp_path) == 0 and one(tmp_path, "SELECT count(*) FROM records") == 0


def test_a_read_only_folder_can_be_queried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(query, "fold", refuse)
    monkeypatch.setattr(query, "SMALL_TAIL", 0)
    assert one(folder, "SELECT count(*) FROM records") == 2


@pytest.mark.parametrize("name", ["a 'quoted' name", "star*[1]?", "ümlaut; DROP", "a{b,c}"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    write(root, [line(numbered(1))])
    # these would be read too if the name were a pattern
    for other in ("starry1x", "ab", "ac"):
        write(tmp_path / other, [line(numbered(1))] * 10)
        compact(tmp_path / other)
    compact(root)
    assert compact(root) == 0
    assert one(root, "SELECT count(*) FROM records") == 1
    write(root, [line(numbered(2))])
    assert compact(root) == 1 and one(root, "SELECT count(*) FROM records") == 2


READS = (
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT * FROM read_json('{secret}')",
    "SELECT * FROM read_text('{inside}/../../secret.csv')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_parquet('https://example.com/a.parquet')",
    "SELECT * FROM glob('{outside}/*')",
    "SELECT * FROM query('COPY (SELECT 1) TO ''{target}''')",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT * FROM smuggled",
)
OTHERS = (
    "COPY (SELECT 1) TO '{target}'",
    "COPY records TO '{target}' (FORMAT parquet)",
    "EXPORT DATABASE '{target}'",
    "ATTACH '{target}'",
    "SET enable_external_access = true",
    "SET threads = 1",
    "RESET lock_configuration",
    "PRAGMA enable_profiling",
    "INSTALL httpfs",
    "LOAD httpfs",
    "CREATE TABLE t AS SELECT 1",
    "DROP VIEW records",
    "INSERT INTO fresh SELECT * FROM fresh",
    "DELETE FROM left_out",
    "CALL pragma_version()",
    "EXPLAIN ANALYZE SELECT 1",
    "SELECT 1; SELECT 2",
    "WITH x AS (COPY (SELECT 1) TO '{target}') SELECT * FROM x",
    "WITH x AS (COPY (SELECT * REPLACE (0.001 AS median_ms) FROM records) TO '{parquet}') SELECT 1",
    "SELECT (WITH x AS (COPY records TO '{parquet}' (FORMAT parquet)) SELECT count(*) FROM x)",
    "WITH x AS (INSERT INTO fresh SELECT * FROM fresh RETURNING 1) SELECT * FROM x",
    "WITH x AS (DELETE FROM left_out RETURNING 1) SELECT * FROM x",
    "SELECT 1; COPY (SELECT 1) TO '{target}'",
    "",
    ";",
    "-- nothing",
)


@pytest.mark.parametrize("sql", [*READS, *OTHERS])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_query_reads_records_and_nothing_else(folder: Path, sql: str, compacted: bool) -> None:
    smuggled = {"a": [1]}  # DuckDB would find Python variables by name
    assert smuggled
    if compacted:
        compact(folder)
    secret, target = folder.parent / "secret.csv", folder.parent / "target"
    secret.write_text("password\nhunter2\n")
    parquet = folder / f"session={SESSION}" / "records.parquet"
    before = parquet.read_bytes() if compacted else b""
    places = {"secret": secret, "target": target, "parquet": parquet}
    filled = sql.format(**places, inside=folder / "x", outside=folder.parent)
    with pytest.raises(ValueError) as caught:
        run_query(folder, filled)
    assert not compacted or parquet.read_bytes() == before
    sentence = str(caught.value)
    assert "hunter2" not in sentence and "\n" not in sentence and len(sentence) < 600
    assert not target.exists()
    if sql in OTHERS and sql not in ("RESET lock_configuration",):
        assert "one statement" in sentence


@pytest.mark.parametrize("sql", [*READS, *OTHERS[:10]])
def test_the_connection_itself_is_locked(folder: Path, sql: str) -> None:
    compact(folder)
    secret, target = folder.parent / "secret.csv", folder.parent / "target"
    secret.write_text("password\nhunter2\n")
    filled = sql.format(secret=secret, target=target, inside=folder / "x", outside=folder.parent)
    with connect(folder) as connection, pytest.raises(duckdb.Error):
        connection.execute(filled)
    assert not target.exists()


FORGED = "COPY (SELECT * REPLACE (0.001 AS median_ms) FROM records) TO ''{parquet}'' (FORMAT parquet)"


def test_no_way_to_write_reaches_the_copies(folder: Path) -> None:
    """Text that becomes SQL later is not seen by the parser, so a query only has copies of its own."""
    compact(folder)
    parquet = folder / f"session={SESSION}" / "records.parquet"
    before = parquet.read_bytes()
    hidden = f"SELECT * FROM query('WITH x AS ({FORGED.format(parquet=parquet)}) SELECT 1')"
    with pytest.raises(ValueError, match="COPY"):
        run_query(folder, hidden)
    with connect(folder) as connection:
        with pytest.raises(duckdb.PermissionException):
            connection.execute(FORGED.format(parquet=parquet).replace("''", "'"))
        (seen,) = connection.execute(
            "SELECT value FROM duckdb_settings() WHERE name = 'allowed_paths'"
        ).fetchall()
        assert str(folder) not in str(seen)
    assert parquet.read_bytes() == before


def test_the_caller_of_a_query_over_large_results_may_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit that keeps a query from writing is one of a whole process, a notebook's too."""
    write(folder, [b"bad\n"])
    compact(folder)
    small, small_left_out, large_left_out, limits = "SELECT * FROM records", LeftOut(), LeftOut(), []
    expected = run_query(folder, small, small_left_out)
    monkeypatch.setattr(query, "MAX_COPIED_BYTES", 0)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(what))
    assert run_query(folder, small, large_left_out) == expected
    with pytest.raises(ValueError, match="recrods"):
        run_query(folder, "SELECT * FROM recrods")
    assert large_left_out == small_left_out and large_left_out.count == 1
    assert resource.RLIMIT_FSIZE not in limits


TYPES = """1::HUGEINT << 100, 0.5, NULL, true, 'a', '\\x00\\xff'::BLOB, 1.25::DECIMAL(9, 2),
DATE '2026-11-18', TIME '21:50:00.5', TIMESTAMP '2026-11-18 21:50:00.25', INTERVAL 90 MINUTE, [1, NULL],
'6f9619ff-8b86-d011-b42d-00c04fc964ff'::UUID, {'list': [1], 'b': {'c': 2.5}}, MAP {1: 'one'}"""


def test_values_of_every_type_come_back_from_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that it sends is unpickled."""
    compact(folder)
    expected = run_query(folder, f"SELECT {TYPES} FROM range(3)")
    monkeypatch.setattr(query, "MAX_COPIED_BYTES", 0)
    monkeypatch.setattr(multiprocessing.connection.Connection, "recv", None)
    columns, rows = run_query(folder, f"SELECT {TYPES} FROM range(3)")
    assert (columns, rows) == expected
    assert [type(cell) for cell in rows[0]] == [type(cell) for cell in expected[1][0]]


def test_a_process_ends_with_its_parent(folder: Path) -> None:
    compact(folder)
    code = (
        "import sys\n"
        "from moe_routing_bench.results import query\n"
        "query.MAX_COPIED_BYTES = 0\n"
        "query.run_query(sys.argv[1], 'SELECT count(*) FROM range(1000000000) a, range(1000000) b "
        "WHERE a.range * b.range % 7 = 3')\n"
    )
    parent = psutil.Popen([sys.executable, "-c", code, str(folder)])
    try:
        children, until = [], time.monotonic() + 120
        while not any(map(maps_duckdb, children)) and time.monotonic() < until:
            time.sleep(0.1)
            children = parent.children(recursive=True)
        assert any(map(maps_duckdb, children))
    finally:
        parent.kill()
        parent.wait()
    assert not psutil.wait_procs(children, timeout=40)[1]


def maps_duckdb(process: psutil.Process) -> bool:
    try:
        return "duckdb" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


def test_a_forged_copy_is_made_anew(folder: Path) -> None:
    """With everything a copy says of itself as it should be: lines, hash and age."""
    compact(folder)
    parquet = folder / f"session={SESSION}" / "records.parquet"
    status, path = parquet.stat(), quoted(parquet)
    (text,) = duckdb.sql(f"SELECT decode(value) FROM parquet_kv_metadata({path})").fetchall()[0]
    duckdb.sql(f"CREATE TABLE rows AS SELECT * REPLACE (0.001 AS median_ms) FROM {path}")
    duckdb.sql(f"COPY rows TO {path} (FORMAT parquet, KV_METADATA {{moe_routing_bench: {quoted(text)}}})")
    os.utime(parquet, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert one(folder, "SELECT min(median_ms) FROM records") == pytest.approx(11.5)
    assert one(folder, "SELECT min(median_ms) FROM records") == pytest.approx(11.5)


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE r AS (SELECT 1 AS a UNION ALL SELECT 1 FROM r) SELECT count(*) FROM r",
        "SELECT count(*) FROM range(1000000000) a, range(1000000000) b WHERE a.range * b.range % 7 = 3",
    ],
)
@pytest.mark.timing
def test_time_is_bounded(folder: Path, sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "MAX_SECONDS", 1.0)
    started = time.perf_counter()
    with pytest.raises(ValueError, match="stopped after 1 s"):
        run_query(folder, sql)
    in_time(time.perf_counter() - started < 60, "a query of 1 s took over 60 s")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT repeat('x', 100000000) || range::VARCHAR FROM range(30)",
        "SELECT list(range) FROM range(1000000000)",
    ],
)
def test_memory_that_duckdb_does_not_count_is_bounded(
    folder: Path, sql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_PROCESS_BYTES", 1 << 29)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ValueError, match="memory"):
        run_query(folder, sql)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits and one(folder, "SELECT 1") == 1


def test_text_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "MAX_ANSWER_LETTERS", 10_000)
    with pytest.raises(ValueError, match="letters"):
        run_query(folder, "SELECT repeat('x', 6000) FROM range(2)")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "  -- a remark\n WITH a AS (SELECT 1) SELECT * FROM a;",
        "FROM records SELECT impl",
        "DESCRIBE records",
        "SUMMARIZE SELECT median_ms FROM records",
        "SELECT impl, \"case\", median(median_ms) FROM latest WHERE status = 'PASSED' GROUP BY ALL",
    ],
)
def test_questions_people_ask(folder: Path, sql: str) -> None:
    columns, rows = run_query(folder, sql)
    assert columns and rows


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT medianms FROM records", "median_ms"),
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM recrods", "recrods"),
        ("SELECT 'a'::INT", "convert"),
        ("SELECT " + "1," * 20_000 + "1", "letters"),
        ("SELECT * FROM range(3000000)", "add a LIMIT"),
        ("SELECT \ud800", ""),
        ("SELECT \x00", ""),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, sql: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        run_query(folder, sql)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "MEMORY_LIMIT", "400MB")
    with pytest.raises(ValueError, match=r"(?i)memory"):
        run_query(folder, "SELECT median(hash(range)) FROM range(100000000)")


def test_export_is_one_file(folder: Path) -> None:
    write(folder, [line(numbered(1, OTHER))], OTHER)
    target = folder.parent / "it's all.parquet"
    assert export_parquet(folder, target) == 3
    rows = duckdb.sql(
        "SELECT count(*), count(median_ms) FROM read_parquet(?)", params=[str(target)]
    ).fetchall()
    assert rows == [(3, 2)] and not list(folder.parent.glob("*.part*"))
    with pytest.raises(ValueError, match="no folder"):
        export_parquet(folder, folder / "no" / "a.parquet")


FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", " =1", "\uff1d1", "'=1", "'quoted'")


def test_csv_has_the_same_columns_and_no_formulas(folder: Path) -> None:
    for number, text in enumerate(FORMULAS, start=3):
        hard = f'{text},"x";\u2028y'
        changes = {"experiment__case": text, "correctness__reason": hard, "repro": hard}
        write(folder, [line(numbered(number, **changes))])
    target = folder.parent / "it's all.csv"
    assert export_csv(folder, target) == 2 + len(FORMULAS) and not list(folder.parent.glob("*.part*"))
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == run_query(folder, "SELECT * FROM records")[0]
    rows.sort(key=lambda row: row["record_id"])
    for row, text in zip(rows[2:], FORMULAS, strict=True):
        assert row["case"] == f"'{text}" and row["reason"] == f"""'{text},"x";\u2028y"""
        assert row["repro"].startswith("mrb bench expert_ffn ") and '"x"' not in row["repro"]
    first, failed_row = rows[:2]
    assert first["impl"] == "fast" and float(first["median_ms"]) == pytest.approx(11.5) and first["T"] == "32"
    assert json.loads(first["included"]) == document()["included"] and first["bias"] == "false"
    assert json.loads(first["stage_seconds"]) == {"route": 0.001, "grouped_gemm": 0.01}
    assert first["created_at"] == "2026-11-15 02:47:34.123456" and first["router"] == ""
    assert failed_row["status"] == "TIMEOUT" and failed_row["median_ms"] == failed_row["stage_seconds"] == ""
    texts = [value for row in rows for value in row.values()]
    assert not [value for value in texts if value.startswith(("=", "+", "-", "@", "\t", "\r", " ", "\uff1d"))]


def test_text_that_only_holds_signs_is_left_alone(folder: Path) -> None:
    write(folder, [line(numbered(3, experiment__case="a=b+c-d@e'", implementation__router="top_p(p=0.5)"))])
    export_csv(folder, folder.parent / "all.csv")
    with (folder.parent / "all.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["record_id"].endswith("3")]
    assert row["case"] == "a=b+c-d@e'" and row["router"] == "top_p(p=0.5)"


def test_a_folder_of_before_is_read_and_exported(tmp_path: Path) -> None:
    old = (ROOT / "tests" / "data" / "old_record.jsonl").read_bytes()
    write(tmp_path / "old", [old], session=json.loads(old)["session"])
    sql = "SELECT direction, router, layer, tokens_per_second, bw_2pass > 0, source_commit FROM records"
    assert run_query(tmp_path / "old", sql)[1] == [("forward", "", "", None, True, None)]
    assert compact(tmp_path / "old") == 1 and run_query(tmp_path / "old", sql)[1][0][3] is None
    assert export_csv(tmp_path / "old", tmp_path / "old.csv") == 1


@pytest.mark.parametrize(
    "source",
    [None, [], {"commit": 7, "dirty": True}, {"commit": "=HYPERLINK()", "dirty": True}, {"commit": "a1" * 20},
     {"commit": "", "dirty": False}, {"commit": "a1" * 20, "dirty": "yes"}],
)  # fmt: skip
def test_a_source_that_is_no_commit_is_unknown(folder: Path, source: Any) -> None:
    environment = {"machine": {"name": "here"}, "source": source}
    with Session.start(folder) as session:
        name = session.put_environment(environment)
    write(folder, [line(numbered(3, environment=name))])
    sql = "SELECT machine, source_commit, source_dirty FROM records WHERE machine IS NOT NULL"
    assert run_query(folder, sql)[1] == [("here", None, None)]


def test_no_folder_is_a_sentence(tmp_path: Path) -> None:
    for call in (compact, lambda path: run_query(path, "SELECT 1")):
        with pytest.raises(ValueError, match="no results"):
            call(tmp_path / "nowhere")


def test_documents_with_a_wrong_name_are_no_environment(folder: Path) -> None:
    path = folder / "environments"
    path.mkdir()
    (path / f"{document()['environment']}.json").write_text('{"name": "forged"}')
    (path / "x.json").write_text("[" * 100_000)
    assert one(folder, "SELECT count(machine) FROM records") == 0


def test_twenty_thousand_records_are_quick(tmp_path: Path) -> None:
    template = line(numbered(1)).decode()
    lines = [template.replace("-000001", f"-{number:06d}").encode() for number in range(20_000)]
    write(tmp_path, lines)
    compact(tmp_path)
    started = time.process_time()
    rows = run_query(tmp_path, "SELECT impl, span, count(*), median(median_ms) FROM records GROUP BY ALL")[1]
    assert time.process_time() - started < 2
    assert rows[0][2] == 20_000
    size = (tmp_path / f"session={SESSION}" / flat.PARQUET).stat().st_size
    assert size < 0.1 * sum(map(len, lines))
