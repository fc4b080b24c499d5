"""Decisions from results: winners by tokens, ties, regret, and a file that impl="auto" can follow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_routing_bench as mrb
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.ops import auto
from moe_routing_bench.ops.auto import choose
from moe_routing_bench.ops.decisions import read_decisions
from moe_routing_bench.ops.expert_ffn.op import op
from moe_routing_bench.ops.stand_ins import StandIns
from moe_routing_bench.results.decisions import Decided, decide, write_decisions
from moe_routing_bench.results.folder import Session
from sample_runs import ENVIRONMENT, OTHER_MACHINE, OTHER_TORCH, ROUNDS, add_cell, make_run

pytestmark = pytest.mark.slow

HERE = {"machine": this_machine().to_dict()}


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_state", auto._State())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """staged wins at 4 tokens with dense_all_experts as its tie, eager_loop at 64."""
    with Session.start(tmp_path / "results") as session:
        few = {"eager_loop": 1.0, "staged": 0.8, "dense_all_experts": 0.802}
        many = {"eager_loop": 1.0, "staged": 1.3, "dense_all_experts": 4.0}
        add_cell(session, few, experiment__T=4, environment=HERE)
        add_cell(session, many, experiment__T=64, environment=HERE)
    return tmp_path / "results"


def entry(decided: Decided, target: Path) -> dict[str, Any]:
    (only,) = write_decisions(decided, "results", target)["entries"]
    return only


def test_winners_ties_and_regret(folder: Path, tmp_path: Path) -> None:
    decided = decide(folder)
    (answer,) = decided.answers
    few, many = answer.contests
    assert (few.T, few.winner, few.ties) == (4, "staged", ("dense_all_experts",))
    assert (many.T, many.winner, many.ties) == (64, "eager_loop", ())
    assert few.ratios["staged"] == pytest.approx(0.8, rel=0.01) and many.ratios["eager_loop"] == 1
    # staged loses 0 % and 30 %, eager_loop 25 % and 0 %, dense_all_experts 0 % and 300 %
    worst = {row.implementation: row.worst_loss for row in decided.regrets["expert_ffn"]}
    assert worst == {
        "eager_loop": pytest.approx(0.25, rel=0.05),
        "staged": pytest.approx(0.3, rel=0.05),
        "dense_all_experts": pytest.approx(3, rel=0.05),
    }
    assert "T=4" in decided.regrets["expert_ffn"][0].worst_cell
    written = entry(decided, tmp_path / "decisions.json")
    assert written["overall"] == "eager_loop" and written["regret_worst"] == pytest.approx(0.25, rel=0.05)
    assert written["regret_median"] == pytest.approx(0.125, rel=0.05)
    assert [one["T"] for one in written["by_tokens"]] == [4, 64]


def test_impl_auto_follows_the_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    write_decisions(decide(folder), folder, path)
    assert read_decisions(path).source == str(folder)
    mrb.use_decisions(path)
    weights = mrb.ExpertWeights(w_in_EDG=torch.empty(64, 1792, 128), w_out_EFD=torch.empty(64, 64, 1792))
    for tokens, wanted in ((4, "staged"), (50, "eager_loop")):
        source = StandIns(weights, 8, mrb.Layout.compact(), tokens)
        choice = choose(op, tuple(op.arguments(source).values()))
        assert choice.implementation.name == wanted and choice.warning is None
        assert choice.why.startswith("measured winner")


def test_a_layer_decides_expert_ffn_unless_the_op_itself_was_measured(tmp_path: Path) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5}, experiment__span="layer")
    (answer,) = decide(tmp_path).answers
    assert (answer.question.op, answer.contests[0].winner) == ("expert_ffn", "staged")
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 2.0}, created_at="2026-11-14T00:00:00Z")
    decided = decide(tmp_path)
    (answer,) = decided.answers
    assert answer.contests[0].winner == "eager_loop" and any("closer" in note for note in decided.notes)


def test_layouts_threads_workloads_and_dtypes_are_decided_apart(tmp_path: Path) -> None:
    layouts = {"eager_loop": "compact", "staged": "block(64)", "dense_all_experts": "block(64)"}
    implementations = {"eager_loop": 1.0, "staged": 3.0, "dense_all_experts": 2.0}
    make_run(tmp_path, implementations, layouts=layouts)
    for number, changes in enumerate(
        ({"experiment__threads": 2}, {"experiment__workload": "uniform"}, {"experiment__dtype": "bfloat16"})
    ):
        make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.9 + 0.2 * number}, **changes)
    answers = decide(tmp_path).answers
    won = {(a.question.facts.layout, a.question.threads, a.question.workload): a for a in answers}
    assert len(answers) == 5
    assert won["block(64)", 1, "zipf(1.2)"].contests[0].winner == "dense_all_experts"
    assert won["compact", 2, "zipf(1.2)"].contests[0].winner == "staged"
    assert won["compact", 1, "uniform"].contests[0].winner == "eager_loop"
    write_decisions(decide(tmp_path), tmp_path, tmp_path / "decisions.json")


OTHERS = (
    ({"experiment__direction": "backward"}, "measured backward, not forward"),
    ({"experiment__direction": "train"}, "measured train, not forward"),
    ({"implementation__router": "switch"}, "measured with the router switch"),
    ({"implementation__layer": "chain(iterations=2)"}, "measured in the layer chain(iterations=2)"),
)


@pytest.mark.parametrize(("other", "words"), OTHERS, ids=lambda one: str(one))
def test_only_the_plain_layer_going_forward_decides(
    tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    newer = {"created_at": "2026-11-16T00:00:00Z", "experiment__span": "layer", "experiment__cache": "cold"}
    make_run(tmp_path / "alone", {"eager_loop": 1.0, "staged": 0.5}, **{**newer, **other})
    with pytest.raises(ValueError, match="records not used: " + re.escape(words)):
        decide(tmp_path / "alone")
    make_run(tmp_path / "a", {"eager_loop": 1.0, "staged": 2.0}, experiment__span="layer")
    make_run(tmp_path / "a", {"eager_loop": 1.0, "staged": 0.5}, **{**newer, **other})
    decided = decide(tmp_path / "a")  # its cache policy is of no concern either
    (answer,) = decided.answers
    assert answer.contests[0].winner == "eager_loop" and f"records not used: {words} (2)" in decided.notes


def test_of_a_cell_with_several_routers_the_default_decides(tmp_path: Path) -> None:
    staged = {"implementation__label": "staged", "implementation__spec": "staged"}
    each = {
        "quick": {**staged, "implementation__router": "switch"},
        "slow": {**staged, "implementation__router": "softmax_topk"},
    }
    make_run(tmp_path, {"eager_loop": 1.0, "quick": 0.5, "slow": 2.0}, each=each, experiment__span="layer")
    (contest,) = decide(tmp_path).answers[0].contests
    assert contest.winner == "eager_loop" and contest.ratios["staged"] == pytest.approx(2, rel=0.01)


def test_an_op_is_decided_by_its_own_span_and_a_chain_of_ops_by_none(tmp_path: Path) -> None:
    make_run(tmp_path, {"index_add": 1.0, "gather_sum": 0.7}, experiment__span="combine")
    make_run(tmp_path, {"a+b": 1.0, "c+d": 0.7}, experiment__span="pack")
    decided = decide(tmp_path)
    assert [(a.question.op, a.contests[0].winner) for a in decided.answers] == [("combine", "gather_sum")]
    assert any("span pack" in note for note in decided.notes)


def test_one_that_did_not_pass_everywhere_is_no_choice_for_all(tmp_path: Path) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5}, experiment__T=4)
    make_run(tmp_path, {"eager_loop": 1.0, "staged": "OOM"}, experiment__T=64)
    decided = decide(tmp_path)
    assert decided.answers[0].overall.implementation == "eager_loop"
    assert decided.regrets["expert_ffn"][1].missing
    # nobody passed everywhere: the fewest holes, and no figure for a regret that has none
    make_run(tmp_path, {"eager_loop": "OOM", "staged": 1.0}, experiment__T=128)
    make_run(tmp_path, {"eager_loop": "OOM", "staged": 1.0}, experiment__T=256)
    written = entry(decide(tmp_path), tmp_path / "decisions.json")
    assert written["overall"] == "staged" and written["regret_worst"] is written["regret_median"] is None


def test_the_choice_for_all_is_the_one_with_the_least_worst_loss(tmp_path: Path) -> None:
    for tokens, factor in ((4, 0.9), (8, 0.9), (16, 2.0)):  # staged has the better median
        make_run(tmp_path, {"eager_loop": 1.0, "staged": factor}, experiment__T=tokens)
    assert decide(tmp_path).answers[0].overall.implementation == "eager_loop"


def test_exactly_equal_times_are_a_tie(tmp_path: Path) -> None:
    samples = [0.01 + 0.0001 * n for n in range(20)]
    make_run(tmp_path, {"staged": samples, "eager_loop": samples})
    contest = decide(tmp_path).answers[0].contests[0]
    assert (contest.winner, contest.ties) == ("eager_loop", ("staged",))


def test_the_newest_measurement_of_a_size_counts(tmp_path: Path) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5}, experiment__seed=0)
    make_run(
        tmp_path, {"eager_loop": 1.0, "staged": 2.0}, experiment__seed=1, created_at="2026-11-16T00:00:00Z"
    )
    decided = decide(tmp_path)
    assert decided.answers[0].contests[0].winner == "eager_loop"
    assert any("a newer" in note for note in decided.notes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"environment": OTHER_MACHINE}, "mixes machines: laptop, xeon-2-cores"),
        ({"environment": OTHER_TORCH}, r"torch: 2\.13\.0\+cpu, 2\.14\.0"),
        ({"experiment__view": "cuda events"}, "cuda events, host_wall"),
        ({"experiment__cache": "cold"}, "cold, hot; .*--cache"),
    ],
)
def test_a_mixed_folder_is_refused(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5})
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5}, **other)
    with pytest.raises(ValueError, match=words):
        decide(tmp_path)
    if "experiment__cache" in other:
        assert len(decide(tmp_path, cache="cold").answers) == 1
        with pytest.raises(ValueError, match="'warm'"):
            decide(tmp_path, cache="warm")


def test_a_folder_that_does_not_know_its_machine_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5})
    for path in (tmp_path / "environments").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="which machine"):
        decide(tmp_path)


def test_folders_that_decide_nothing_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results folder"):
        decide(tmp_path / "absent")
    with pytest.raises(ValueError, match="PASSED"):
        decide(tmp_path)
    make_run(tmp_path, {"staged": "OOM"}, twin=False)
    with pytest.raises(ValueError, match="PASSED"):
        decide(tmp_path)
    make_run(tmp_path, {"staged": [0.01] * 4}, twin=False)
    with pytest.raises(ValueError, match="5 rounds"):
        decide(tmp_path)


def test_a_twin_alone_decides_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, {"eager_loop": 1.0})
    (path,) = tmp_path.glob("session=*/records.jsonl")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(ValueError, match="PASSED"):
        decide(tmp_path)


def test_changed_samples_decide_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5})
    (path,) = tmp_path.glob("session=*/samples.f64")
    path.write_bytes(np.full(3 * ROUNDS, 1e-6).tobytes())
    with pytest.raises(ValueError, match="were written"):
        decide(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"experiment__D": 0},
        {"implementation__layout": "no such layout"},
        {"experiment__activation": ""},
        {"experiment__workload": "zipf\u202e(1.2)"},
        {"experiment__dtype": "float\x9b32"},
    ],
)
def test_what_no_decision_can_hold_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5})
    make_run(tmp_path, {"eager_loop": 1.0, "staged": 0.5}, **changes)
    decided = decide(tmp_path)
    assert len(decided.answers) == 1 and decided.notes
    assert all(note.isprintable() for note in decided.notes)
    write_decisions(decided, "results\u202e", tmp_path / "decisions.json")


def test_a_file_is_whole_or_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = decide(folder)
    target = tmp_path / "decisions.json"
    with pytest.raises(ValueError, match="no folder"):
        write_decisions(decided, folder, tmp_path / "absent" / "decisions.json")
    target.write_text("old")

    def refuse(path: Path) -> None:
        raise ValueError("not good")

    monkeypatch.setattr("moe_routing_bench.results.decisions.read_decisions", refuse)
    with pytest.raises(ValueError, match="not good"):
        write_decisions(decided, folder, target)
    assert target.read_text() == "old" and not [*tmp_path.glob("*.part-*")]


def test_the_file_holds_what_the_reader_knows(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    assert write_decisions(decide(folder), folder, path) == json.loads(path.read_text())
    decisions = read_decisions(path)
    assert (decisions.machine, decisions.torch) == (this_machine().name, torch.__version__)
    assert decide(folder).machine != ENVIRONMENT["machine"]["name"]
