"""Records of cases with stored weights: read beside older ones, and never taken for the same question."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_routing_bench.report.finding import results_folders
from moe_routing_bench.report.reading import read
from moe_routing_bench.results.compare import compare_runs
from moe_routing_bench.results.decisions import decide
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.history import WHERE
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.read import measurable
from sample_records import a_record
from sample_runs import add_cell

TIMES = {"native": 1.0, "native(store=int8)": 0.6}


def folder_with(path: Path, *stores: str) -> Path:
    with Session.start(path) as session:
        for number, store in enumerate(stores):
            add_cell(session, TIMES, experiment__store=store, correctness__error=0.001, seed=number)
    return path


def test_the_format_and_the_error_are_in_a_record() -> None:
    new = a_record(experiment__store="int8", correctness__error=0.0017)
    assert b'"store":"int8"' in new.line() and b'"error":0.0017' in new.line()
    case = measurable(a_record(experiment__store="int8", experiment__view="host_wall").experiment)
    assert (case.store, case.case) == ("int8", "seed-fused/32x7168~scaled")


def test_another_format_is_another_question(tmp_path: Path) -> None:
    plain, int8 = folder_with(tmp_path / "plain", ""), folder_with(tmp_path / "int8", "int8")
    with pytest.raises(ValueError, match="b is int8; add --allow"):
        compare_runs(plain, int8)
    assert compare_runs(int8, folder_with(tmp_path / "again", "int8"))
    assert "store" in WHERE  # a series of mrb results history has one format


def test_formats_are_groups_of_their_own_and_decide_nothing(tmp_path: Path) -> None:
    both = folder_with(tmp_path / "both", "", "int8")
    with results_folders([both]) as sources:
        (chapter,) = read(sources).chapters
        assert {group.title for group in chapter.groups} == {
            "expert_ffn, float32", "expert_ffn, float32, int8"
        }  # fmt: skip
    decided = decide(both)
    assert [len(answer.contests) for answer in decided.answers] == [1]
    assert any("stored as int8" in note for note in decided.notes)
    rows = run_query(both, "SELECT store, min(error) FROM records GROUP BY 1 ORDER BY 1")[1]
    assert rows == [("", 0.001), ("int8", 0.001)]
