"""mrb train: one run, a study, what its words say, and what is wrong with a command."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.train.settings import Size
from moe_routing_bench.train.study import said_step
from moe_routing_bench.train.study_rules import SWITCH, rule_for, studies

SIZES = "layers=1,D=16,heads=2,kv_heads=1,head_dim=8,F=16,E=4,K=2,sequence=32"
ONE_RULE = ["--only", "softmax_topk, 128 tokens"]
SMALL = ["--corpus", "synthetic", "--batch", "2", "--sizes", SIZES]


def test_one_run(tmp_path: Path) -> None:
    out = mrb("train", "run", "switch", "--steps", "4", *SMALL, "--out", tmp_path).stdout
    assert "switch, seed 0: held-out loss" in out and "nats per byte" in out and "Kept in" in out
    shown = mrb("train", "show", tmp_path).stdout
    assert "switch" in shown and "held-out" in shown
    query = "SELECT rule, steps, loss FROM trainings"
    rows = mrb_json("results", "query", query, "--folder", tmp_path)["rows"]
    assert rows[0][:2] == ["switch", 4] and rows[0][2] > 0


def test_a_run_is_a_model_to_trace(tmp_path: Path) -> None:
    mrb("train", "run", "softmax_topk", "--steps", "2", *SMALL, "--out", str(tmp_path / "runs"))
    run = next((tmp_path / "runs").glob("run=*"))
    text = tmp_path / "text.txt"
    text.write_bytes(b"some words to read, " * 40)
    trace = tmp_path / "t.safetensors"
    mrb(
        "model", "trace", "record", "--model", str(run), "--text", str(text), "--tokens", "256",
        "--sequence", "32", "--out", str(trace),
    )  # fmt: skip
    assert "256 tokens" in mrb("model", "trace", "show", trace).stdout


@pytest.mark.slow
def test_a_study_and_its_pictures(tmp_path: Path) -> None:
    words = [
        "train",
        "study",
        "balance",
        "--steps",
        "6",
        "--seeds",
        "2",
        "--rounds",
        "8",
        "--rate",
        "0.003",
        *SMALL,
    ]
    out = mrb(*words, "--only", "none", "--only", "switch loss", "--out", tmp_path).stdout
    assert "Not dominated" in out and "switch loss" in out and "byte-trigram" in out
    for name in ("pareto.json", "pareto.png", "curves.png", "load.png", "sources.png"):
        assert (tmp_path / name).stat().st_size > 1000, name
    document = mrb_json("train", "pareto", tmp_path)
    assert {one["rule"] for one in document["standings"]} == {"none", "switch loss"}


def test_steps_of_growing_sequences(tmp_path: Path) -> None:
    sizes = SIZES.replace("sequence=32", "sequence=16")
    out = mrb(
        "train", "study", "soft", "--corpus", "synthetic", "--sizes", sizes, "--rounds", "8", "--out",
        str(tmp_path), "--only", "soft_moe, 128 tokens", "--only", "softmax_topk, 128 tokens",
    ).stdout  # fmt: skip
    assert "soft_moe, 128 tokens" in out and "ms/step" in out


def test_without_a_text_it_is_made_up(tmp_path: Path) -> None:
    ran = mrb("train", "study", "soft", "--sizes", SIZES, "--rounds", "8", "--out", tmp_path, *ONE_RULE)
    assert "synthetic" in ran.stderr and "about 0:0" in ran.stderr


def test_a_study_has_the_seed_and_the_rate_it_is_given(tmp_path: Path) -> None:
    mrb(
        "train", "study", "balance", "--steps", "2", "--seeds", "2", "--seed", "5", "--rate", "0.002",
        "--rounds", "8", "--only", "none", *SMALL, "--out", tmp_path,
    )  # fmt: skip
    runs = mrb_json("train", "show", tmp_path)
    assert {(one["study"], one["seed"], one["learning_rate"]) for one in runs} == {
        ("balance", 5, 0.002),
        ("balance", 6, 0.002),
    }


def test_quick_is_small_and_may_be_overruled(tmp_path: Path) -> None:
    mrb("train", "run", "switch", "--quick", "--steps", "2", "--out", tmp_path)
    (run,) = mrb_json("train", "show", tmp_path)
    assert run["steps"] == 2 and run["settings"]["size"]["layers"] == 1


@pytest.mark.parametrize("router", ["switch", "softmax_topk", "noisy_topk", "sigmoid_bias", "top_p", "relu"])
def test_a_single_run_is_balanced_as_in_a_study(router: str) -> None:
    (in_study,) = (one.rule for one in studies()["routers"].entries if one.rule.name == router)
    assert rule_for(router, {}, Size(), name=router) == in_study


def test_routers_outside_the_study_are_balanced_too() -> None:
    assert rule_for("group_limited", {}, Size(), name="x").options == SWITCH
    assert rule_for("quantile", {}, Size(), name="x").controller == "quantile"
    given = rule_for("switch", {"jitter": 0.1}, Size(), name="x")
    assert given.options == {**SWITCH, "jitter": 0.1} and given.K == 1


def test_a_step_without_a_number_says_so() -> None:
    assert said_step(0, 600, None) == "step 0 of 600"
    assert said_step(40, 600, 1.9128) == "step 40 of 600, loss 1.913"
    assert "nan" not in said_step(40, 600, math.nan)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["study", "absent", "--out", "x"], "study 'absent'"),
        (["run", "absent", "--out", "x"], "router 'absent'"),
        (["run", "switch", "--sizes", "layers=none", "--out", "x"], "cannot read 'layers=none'"),
        (["run", "soft_moe", "--out", "x"], "sees_future"),
        (["run", "switch", "--sink", "absent", "--out", "x"], "--sink"),
    ],
)
def test_mistakes_are_said(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused("train", *words, "--corpus", "synthetic", "--steps", "2")


def test_a_file_names_a_study_and_its_options(tmp_path: Path) -> None:
    file = tmp_path / "protocol.toml"
    sizes = f'sizes = "{SIZES}"'
    file.write_text(
        f'study = "balance"\nsteps = 2\nseeds = 2\nrate = 0.002\nrounds = 8\nonly = ["none"]\n{sizes}\n'
    )
    mrb("train", "study", file, "--steps", "3", "--out", tmp_path / "runs")
    runs = mrb_json("train", "show", tmp_path / "runs")
    assert {(one["rule"], one["seed"], one["steps"]) for one in runs} == {("none", 0, 3), ("none", 1, 3)}
    file.write_text('study = "balance"\nunknown = 2\n')
    assert "unknown" in refused("train", "study", str(file), "--out", str(tmp_path / "other"))
    assert "cannot read" in refused("train", "study", "absent.toml", "--out", str(tmp_path / "other"))


def test_a_run_needs_a_folder() -> None:
    assert "--out" in mrb("train", "run", "switch", code=2).stderr


def test_texts_are_named_once(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("text " * 2000)
    words = ["train", "run", "switch", "--out", str(tmp_path / "out"), "--text", str(text)]
    assert "one of them" in refused(*words, "--corpus", "synthetic")
    assert "text file" in refused(*words[:-1], str(tmp_path / "absent.txt"))
