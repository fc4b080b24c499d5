"""mrb bench balance: the stream, what is followed, the files it writes, and the sentences for mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from command_line import mrb, mrb_json, refused
from moe_routing_bench.report.balance_pictures import STYLES, draw_balance
from moe_routing_bench.studies.drift import (
    SERIES,
    SUBJECTS,
    BalanceStudy,
    Stream,
    Subject,
    Track,
    follow,
    study_balance,
)
from moe_routing_bench.workloads.trace import read_trace

pytestmark = pytest.mark.slow

SMALL = Stream(steps=12, T=64, D=16, E=8, topics=6)
BY_NAME = {subject.name: subject for subject in SUBJECTS}


def test_a_step_is_a_pure_function() -> None:
    x_TD, label_T = SMALL.tokens(7)
    torch.manual_seed(99)
    torch.randn(5)
    again_TD, again_T = SMALL.tokens(7)
    assert torch.equal(x_TD, again_TD) and torch.equal(label_T, again_T)
    assert not torch.equal(x_TD, SMALL.tokens(8)[0])
    assert not torch.equal(x_TD, replace(SMALL, seed=1).tokens(7)[0])
    assert x_TD.shape == (64, 16) and int(label_T.max()) < 6


def test_topics_drift_and_jump() -> None:
    stream = Stream(steps=600)
    assert stream.jumps == (200, 400)

    def change(step: int) -> float:
        return float((stream.chance_L(step) - stream.chance_L(step - 1)).abs().sum())

    slow = [change(step) for step in range(1, 600) if step not in stream.jumps]
    assert 0 < min(slow) and max(slow) < 0.05
    assert min(change(jump) for jump in stream.jumps) > 0.4


def test_a_router_without_control_agrees_with_itself_and_stays() -> None:
    track = follow(SMALL, BY_NAME["no control"])
    assert set(track.series) == set(SERIES)
    assert all(len(values) == SMALL.steps for values in track.series.values())
    assert track.series["agreement"] == [1.0] * SMALL.steps
    assert track.series["experts_per_token"] == [2.0] * SMALL.steps
    assert max(track.series["max_violation"]) > 0.5


def test_both_bias_updates_choose_alike_and_even_the_load() -> None:
    stream = replace(SMALL, steps=60)
    sign, centred = (
        follow(stream, Subject(name=name, router="sigmoid_bias", controller=name, options={"rate": 0.02}))
        for name in ("sign_bias", "centred_bias")
    )
    assert sign.series == centred.series
    free = follow(stream, BY_NAME["no control"])
    for name, better in (("max_violation", -1), ("entropy_bits", 1), ("drop_rate", -1)):
        assert better * fmean(sign.series[name][-10:]) > better * fmean(free.series[name][-10:])


def test_the_capacity_is_the_same_for_wide_rows() -> None:
    """A ragged rule has rows of E places; capacity from T * E would never drop anything."""
    relu = follow(SMALL, BY_NAME["l1_strength"])
    # about half of the 8 experts take a token at first, and there are places for 2.5
    assert relu.series["experts_per_token"][0] > 3
    assert relu.series["drop_rate"][0] > 0.2


def track_of(violation: list[float]) -> Track:
    series = {name: [1.0 if name == "agreement" else 0.0] * 60 for name in SERIES}
    series["max_violation"] = violation
    return Track(subject=SUBJECTS[0], series=series, seconds=0.0)


def test_the_summary() -> None:
    """60 steps, jumps at 20 and 40: settled are 10-19, 30-39 and 50-59, after a jump 20-29 and 40-49."""
    violation = [0.2] * 20 + [2.0] * 5 + [0.2] * 15 + [2.0] * 20
    study = BalanceStudy(stream=replace(SMALL, steps=60), chance=0.2, tracks=(), seconds=0.0)
    summary = study.summary(track_of(violation))
    assert summary.settled["max_violation"] == pytest.approx((0.2 + 0.2 + 2.0) / 3)
    assert summary.after_jump["max_violation"] == pytest.approx(((5 * 2.0 + 5 * 0.2) / 10 + 2.0) / 2)
    assert summary.steps_to_even == (5, None)
    assert summary.settled["agreement"] == 1
    mild = study.summary(track_of([0.2] * 20 + [0.34] * 20 + [0.36] * 20))
    assert mild.steps_to_even == (0, None)


def test_a_study_leaves_the_threads_alone_and_repeats() -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    steps: list[tuple[int, int]] = []
    subjects = SUBJECTS[:2]
    first = study_balance(SMALL, subjects, on_progress=lambda done, total: steps.append((done, total)))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(usual)
    assert steps[0] == (1, 24) and steps[-1] == (24, 24)
    second = study_balance(SMALL, subjects)
    assert [track.series for track in first.tracks] == [track.series for track in second.tracks]
    assert first.chance == second.chance > 0


def test_every_subject_has_a_line_of_its_own() -> None:
    assert set(STYLES) == {subject.name for subject in SUBJECTS}
    assert len(set(STYLES.values())) == len(SUBJECTS)


def test_the_command_writes_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "new" / "folder"
    stdout = mrb("bench", "balance", "--steps", "6", "--seed", "3", "--out", out).stdout
    for subject in SUBJECTS:
        assert subject.name in stdout
    assert sorted(path.suffix for path in out.glob("balance.*")) == [".json", ".png", ".txt"]
    document = json.loads((out / "balance.json").read_text())
    assert document["stream"]["steps"] == 6 and document["stream"]["seed"] == 3
    assert document["command"].startswith("mrb") and document["machine"]["name"]
    assert [track["subject"]["name"] for track in document["tracks"]] == list(STYLES)
    assert all(len(values) == 6 for track in document["tracks"] for values in track["series"].values())
    table = (out / "balance.txt").read_text()
    assert stdout.splitlines()[:11] == table.splitlines()[:11]
    assert (out / "balance.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_document() -> None:
    assert mrb_json("bench", "balance", "--steps", "3")["stream"]["jumps"] == [1, 2]


def test_a_picture_of_a_few_steps(tmp_path: Path) -> None:
    draw_balance(study_balance(replace(SMALL, steps=3), SUBJECTS[:1]), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "100000" in refused("bench", "balance", "--steps", "2")
    words = ("bench", "balance", "--steps", "3", "--out", tmp_path / "file")
    assert "the folder" in refused(*words)


def test_its_stream_as_a_trace(tmp_path: Path) -> None:
    mrb("bench", "balance", "--steps", "6", "--trace", tmp_path / "t.safetensors")
    trace = read_trace(tmp_path / "t.safetensors")
    stream = Stream(steps=6)
    assert trace.routing.expert_TK.shape == (6 * stream.T, stream.K)
    assert "steps=6" in trace.source
    assert "no folder" in refused("bench", "balance", "--steps", "3", "--trace", tmp_path / "a/b")
