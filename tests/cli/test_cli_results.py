"""mrb results, export, compare, gate and decide: what they print, what they return, and hostile records."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench.verdict import Comparison, Verdict, compare
from moe_routing_bench.ops.decisions import read_decisions
from sample_runs import OTHER_MACHINE, make_run

pytestmark = pytest.mark.slow

HOSTILE = "[red]case[/red] \x9b31m \u202egnp.exe :smile: [link=file:///etc/passwd]x[/link]"
TWO = {"eager_loop": 1.0, "staged": 0.8}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_run(tmp_path / "a", TWO)


def other(tmp_path: Path, implementations: dict[str, Any] = TWO, **options: Any) -> Path:
    return make_run(tmp_path / "b", implementations, **{"seed": 1, **options})


def tear(folder: Path) -> None:
    (path,) = folder.glob("session=*/records.jsonl")
    path.write_bytes(path.read_bytes()[:-300])
    for copy in folder.glob("session=*/records.parquet"):
        copy.unlink()


@pytest.mark.parametrize("said", ["FASTER", "UNDECIDED", "SAME"])
@pytest.mark.parametrize("best", [0.5, 0.97])
def test_results_and_decide_say_the_same_of_one_folder(
    tmp_path: Path, best: float, said: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if samples alone would say something else: the cell knew more when it was measured."""

    def judged(*samples: Any, **more: Any) -> Comparison:
        found = compare(*samples, **more)
        return replace(found, verdict=said) if found.ratio < 0.99 else found

    monkeypatch.setattr("sample_runs.compare", judged)
    folder = make_run(tmp_path / "r", {"eager_loop": 1.0, "staged": best, "dense_all_experts": 1.7})
    (row,) = mrb_json("results", "--folder", folder)["best"]
    assert (row["best"], row["verdict"]) == ("staged", said)
    (contest,) = mrb_json("tune", "decide", folder)["contests"]
    assert contest["winner"] == row["best"]
    assert contest["ratios"]["staged"] == pytest.approx(row["ratio"])
    assert contest["ties"] == ([] if said == "FASTER" else ["eager_loop"])


def test_compare_shows_a_table_and_a_summary(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = other(tmp_path, {"eager_loop": 1.0, "staged": 0.88}, sources={"staged": "new"}, drift=1.0)
    monkeypatch.setenv("COLUMNS", "200")
    text = mrb("results", "compare", a, b).stdout
    rows = [line.split() for line in text.splitlines() if "| compact" in line]
    assert [row[4] for row in rows] == ["eager_loop", "staged"]  # least ratio first
    assert "SLOWER" in rows[1] and "1 SLOWER" in text and "of 2 ratios 1.0" in text
    assert "not interleaved" in text and "by times alone: 1" in text
    document = mrb_json("results", "compare", a, b)
    assert document["counts"]["SLOWER"] == 1 and document["compared"] == 2
    assert document["changes"][1]["method"] == "ratio to baseline"


def test_compare_names_what_differs(a: Path, tmp_path: Path) -> None:
    b = other(tmp_path, environment=OTHER_MACHINE)
    error = refused("results", "compare", a, b)
    assert all(word in error for word in ("xeon-2-cores", "laptop", "--allow machine"))
    assert "machines differ" in mrb("results", "compare", a, b, "--allow", "machine").stdout
    assert "'machine'" in refused("results", "compare", a, b, "--allow", "machina")


def test_the_gate_stays_open_for_the_same_code(a: Path, tmp_path: Path) -> None:
    text = mrb("results", "gate", "--baseline", a, other(tmp_path)).stdout
    assert text.rstrip().endswith("gate: passed") and "UNDECIDED" in text


def test_the_gate_closes_on_a_confirmed_regression(a: Path, tmp_path: Path) -> None:
    b = other(tmp_path, {"eager_loop": 1.0, "staged": 0.84})
    text = mrb("results", "gate", "--baseline", a, b, "--max-regression", "3%", code=1).stdout
    assert "3 %" in text and "mrb bench expert_ffn" in text and "--impl 'staged @ compact'" in text
    assert "gate: failed: 1 slower, 0 broken" in text
    mrb("results", "gate", "--baseline", a, b, "--max-regression", "10%")
    document = mrb_json("results", "gate", "--baseline", a, b, code=1)
    assert document["passed"] is False and document["max_regression"] == 0.03


def test_the_gate_closes_on_what_broke(a: Path, tmp_path: Path) -> None:
    b = other(tmp_path, {"eager_loop": 1.0, "staged": "WRONG_VALUE"})
    text = mrb("results", "gate", "--baseline", a, b, code=1).stdout
    assert "WRONG_VALUE" in text and "--impl 'staged @ compact'" in text and "1 broken" in text
    everything = make_run(tmp_path / "c", dict.fromkeys(TWO, "CRASHED"), twin=False)
    assert "2 broken" in mrb("results", "gate", "--baseline", a, everything, code=1).stdout


def test_missing_cells_are_said_and_fail_only_on_request(a: Path, tmp_path: Path) -> None:
    b = other(tmp_path, {"eager_loop": 1.0})
    text = mrb("results", "gate", "--baseline", a, b).stdout
    assert "Only in A" in text and "staged" in text and "gate: passed" in text
    assert "1 missing" in mrb("results", "gate", "--baseline", a, b, "--require-all", code=1).stdout


@pytest.mark.parametrize("limit", ["3", "0.03", "0%", "-3%", "nan%", "1e3%", "", "3%%", "9999999%", "\x1b%"])
def test_a_limit_that_is_no_percentage_is_a_mistake(a: Path, tmp_path: Path, limit: str) -> None:
    error = mrb(
        "results", "gate", "--baseline", a, other(tmp_path), f"--max-regression={limit}", code=2
    ).stderr
    assert "percentage" in error and "\x1b" not in error


def test_mistakes_get_a_sentence(a: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (("results", "compare", a, empty), ("results", "gate", "--baseline", a, empty)):
        assert str(empty) in refused(*words)
    assert "PASSED" in refused("tune", "decide", empty)
    absent = tmp_path / "absent"
    assert str(absent) in refused("tune", "decide", absent)
    assert str(absent) in refused("results", "--folder", absent)
    assert str(empty) in refused("results", "export", a, "--parquet", empty)
    assert str(absent) in refused("results", "export", a, "--parquet", absent / "x.parquet")


def test_decide_writes_a_file_and_says_how_to_use_it(a: Path, tmp_path: Path) -> None:
    text = mrb("tune", "decide", a).stdout
    path = a / "decisions.json"
    assert f"MRB_DECISIONS={path} or use_decisions('{path}')" in text
    assert re.search(r"eager_loop .*25\..*seed-fused/32x7168~scaled T=32", text)
    assert read_decisions(path).entries[0].overall == "staged"
    chosen = tmp_path / "chosen.json"
    document = mrb_json("tune", "decide", a, "-o", chosen)
    assert document["decisions"] == json.loads(chosen.read_text())
    assert document["contests"][0]["winner"] == "staged"
    assert [row["implementation"] for row in document["regret"]["expert_ffn"]] == ["staged", "eager_loop"]


def test_decide_json_holds_no_infinity(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", {"eager_loop": 1.0, "staged": 0.5}, experiment__T=4)
    make_run(folder, {"eager_loop": 1.0}, experiment__T=8)
    text = mrb("tune", "decide", folder, "--json").stdout
    assert "Infinity" not in text and json.loads(text)["regret"]["expert_ffn"][1]["worst_loss"] is None
    assert "staged everywhere is impossible" in mrb("tune", "decide", folder).stdout


def test_results_answers_sql(a: Path) -> None:
    ask = "SELECT impl, count(*) AS n FROM records GROUP BY impl ORDER BY impl"
    text = mrb("results", "query", ask, "--folder", a).stdout
    assert [line.split() for line in text.splitlines()] == [
        ["impl", "n"],
        ["eager_loop", "2"],
        ["staged", "1"],
    ]
    document = mrb_json("results", "query", ask, "-f", a)
    assert document["columns"] == ["impl", "n"] and document["rows"] == [["eager_loop", 2], ["staged", 1]]
    assert mrb("results", "query", "SELECT 1 WHERE false", "-f", a).stdout == "no rows\n"
    assert "statement" in refused("results", "query", "DROP VIEW records", "-f", a)
    odd = mrb_json(
        "results", "query", "SELECT 'nan'::DOUBLE, created_at, [1.5], {'a': 2} FROM records LIMIT 1", "-f", a
    )
    assert odd["rows"][0][0] is None and odd["rows"][0][2:] == [[1.5], {"a": 2}]


def test_many_rows_are_cut_with_a_word(a: Path) -> None:
    text = mrb("results", "query", "SELECT * FROM range(1500)", "-f", a).stdout
    assert (
        "500 more" in text and len(mrb_json("results", "query", "FROM range(1500)", "-f", a)["rows"]) == 1500
    )


def test_results_alone_is_an_overview_of_the_default_folder(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    refused("results")  # nothing is saved yet
    make_run(tmp_path / "results", {**TWO, "dense_all_experts": "OOM"})
    make_run(tmp_path / "results", {"eager_loop": 1.0, "staged": 1.5}, experiment__T=64)
    text = mrb("results").stdout
    assert "OOM" in text and "mrb results query --columns" in text
    document = mrb_json("results")
    counts = {row["status"]: row["records"] for row in document["counts"]}
    assert counts == {"PASSED": 4, "OOM": 1}  # twins are no implementations
    assert [(row["best"], row["implementations"]) for row in document["best"]] == [
        ("staged", 2),  # T = 16 before T = 64
        ("eager_loop", 2),
    ]


def test_the_answer_comes_first(tmp_path: Path) -> None:
    """The winner, its lead over the next with an interval, and whether that is certain."""
    folder = tmp_path / "a"
    make_run(folder, {"eager_loop": 1.0, "staged": 0.5, "native": 0.25})
    make_run(folder, {"eager_loop": 1.0, "staged": 1.0}, experiment__T=64)
    make_run(folder, {"eager_loop": 1.0}, experiment__T=256)
    first, second, alone = mrb_json("results", "-f", folder)["best"]
    assert (first["best"], first["next"], first["certain"]) == ("native", "staged", "yes")
    assert first["lead_low"] < 2 < first["lead_high"] and first["lead"] == pytest.approx(2, rel=0.02)
    assert second["certain"].startswith("no") and alone["next"] is None and alone["certain"] == ""
    lines = mrb("results", "-f", folder).stdout.splitlines()
    assert lines[0].startswith("native") and "1 of 2" in lines[0]


def test_what_drops_pairs_wins_nothing_where_another_drops_none(tmp_path: Path) -> None:
    each = {"staged": {"routing__dropped_pairs": 5}}
    make_run(tmp_path / "a", {"eager_loop": 1.0, "native": 0.9, "staged": 0.5}, each=each)
    (row,) = mrb_json("results", "-f", tmp_path / "a")["best"]
    assert (row["best"], row["next"], row["implementations"]) == ("native", "eager_loop", 2)


def test_the_overview_takes_the_newest_run(tmp_path: Path) -> None:
    make_run(tmp_path / "a", TWO)
    make_run(tmp_path / "a", {"eager_loop": 1.0, "staged": 1.5}, sources={"staged": "new"},
             created_at="2026-11-16T00:00:00Z")  # fmt: skip
    assert [row["best"] for row in mrb_json("results", "-f", tmp_path / "a")["best"]] == ["eager_loop"]


def test_folders_without_times_have_an_overview(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no records" in mrb("results", "-f", tmp_path / "empty").stdout
    failures = make_run(tmp_path / "failed", {"staged": "OOM"}, twin=False)
    assert "Nothing passed" in mrb("results", "-f", failures).stdout


def test_columns_can_be_asked_for() -> None:
    text = mrb("results", "query", "--columns").stdout
    assert "median_ms" in text and '"case"' in text
    assert {"name": "T", "type": "BIGINT"} in mrb_json("results", "query", "--columns")


def test_export_is_a_file_others_can_read(a: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    assert "3 records" in mrb("results", "export", a, "--parquet", target).stdout
    assert duckdb.sql(f"SELECT count(*) FROM '{target}'").fetchall() == [(3,)]
    assert mrb_json("results", "export", a, "--parquet", target)["records"] == 3


def test_export_as_csv(a: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    assert "3 records" in mrb("results", "export", a, "--csv", str(target)).stdout
    assert duckdb.sql(f"SELECT count(*), count(median_ms) FROM '{target}'").fetchall() == [(3, 3)]
    counted = {"records": 3, "implementations": 2, "baselines_again": 1}
    left_out = {"lines": 0, "first": [], "remarks": []}
    document = mrb_json("results", "export", a, "--csv", str(target))
    assert document == {"file": str(target), **counted, "left_out": left_out}
    assert "results.csv" in mrb("results", "export", a, "--csv", str(tmp_path), code=2).stderr
    for words in ((), ("--csv", str(target), "--parquet", str(target))):
        assert "one file" in mrb("results", "export", a, *words, code=2).stderr


def test_the_overview_keeps_routers_layers_and_directions_apart(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    make_run(folder, TWO)
    make_run(folder, {"eager_loop": 1.0, "staged": 1.5}, implementation__router="top_p(p=0.5)")
    make_run(
        folder,
        {"eager_loop": 1.0, "staged": 2.0},
        implementation__router="switch",
        experiment__direction="train",
    )
    make_run(folder, {"eager_loop": 1.0, "staged": 3.0}, implementation__layer="chain(iterations=2)")
    text = mrb("results", "-f", str(folder)).stdout
    for name in ("eager_loop | compact | top_p(p=0.5)", "eager_loop | compact | chain(iterations=2)"):
        assert name in text
    assert "expert_ffn train seed-fused/" in text

    def best(*words: str) -> list[tuple[str, str, str, str]]:
        overview = mrb_json("results", "-f", str(folder), *words)
        assert sum(row["records"] for row in overview["counts"]) == 2 * len(overview["best"])
        return [(row["best"], row["router"], row["layer"], row["direction"]) for row in overview["best"]]

    top_p = ("eager_loop", "top_p(p=0.5)", "", "forward")
    chain = ("eager_loop", "", "chain(iterations=2)", "forward")
    assert len(best()) == 4
    assert best("--router", "top_p") == best("--router", "top_p(p=0.5)") == [top_p]
    assert best("--layer", "chain") == [chain]
    assert best("--layer", "moe", "--direction", "forward", "--router", "top_p") == [top_p]
    assert best("--direction", "train") == [("eager_loop", "switch", "", "train")]
    assert len(best("--layer", "moe")) == 3


def test_a_filter_for_what_is_not_there_is_a_mistake(a: Path) -> None:
    for words, named in (
        (("--direction", "forwards"), "'forward'"),
        (("--router", "switch"), "router 'switch'"),
        (("--router", "x' OR true --"), "router"),
        (("--layer", "chain"), "layer 'chain'"),
    ):
        assert named in mrb("results", "-f", a, *words, code=2).stderr


def test_lines_that_were_left_out_are_said(a: Path, tmp_path: Path) -> None:
    b = other(tmp_path)
    tear(a)
    target = tmp_path / "out.parquet"
    for command in (
        ("results", "-f", a),
        ("results", "query", "SELECT 1", "-f", a),
        ("results", "export", a, "--parquet", target),
        ("results", "compare", a, b),
        ("results", "gate", "--baseline", a, b),
        ("tune", "decide", a),
    ):
        assert "1 line" in mrb(*command).stderr, command
        assert mrb_json(*command)["left_out"]["lines"] == 1


def test_hostile_words_reach_no_terminal(tmp_path: Path) -> None:
    options = {"experiment__case": HOSTILE, "repro": HOSTILE, "implementation__spec": "staged"}
    a = make_run(tmp_path / "a", {"staged": 1.0}, **options)
    b = other(tmp_path, {"staged": 2.0}, sources={"staged": "new"}, **options)
    broken = make_run(
        tmp_path / "c", {"staged": "CRASHED"}, twin=False, correctness__reason=HOSTILE, **options
    )
    unlike = make_run(tmp_path / "d", {"staged": 1.0}, **options, experiment__view=HOSTILE)
    for words, code in (
        (("results", "compare", a, b), 0),
        (("results", "compare", a, unlike), 2),
        (("results", "gate", "--baseline", a, b), 1),
        (("results", "gate", "--baseline", a, broken), 1),
        (("tune", "decide", a), 0),
        (("results", "-f", a), 0),
        (("results", "query", 'SELECT "case", repro FROM records', "-f", a), 0),
        (("results", "query", "SELECT chr(27) || '[2J' AS \"x\x9b\"", "-f", a), 0),
        (("results", "query", "SELECT nothing\x9b", "-f", a), 2),
    ):
        ran = mrb(*words, code=code)
        shown = ran.stdout + ran.stderr
        assert all(letter.isprintable() or letter == "\n" for letter in shown), (words, shown)
        if not any(part in str(words) for part in ("chr(27)", "nothing")):
            assert "[red]case[/red] ?31m ?gnp.exe :smile: [link=file:///etc/passwd]x[/link]" in shown, words


def test_a_long_text_is_cut_in_a_table(a: Path) -> None:
    text = mrb("results", "query", "SELECT repeat('x', 100000) AS long", "--folder", a).stdout
    assert len(text) < 500 and "99,700" in text
