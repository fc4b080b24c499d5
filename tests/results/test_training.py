"""Training on disk: killed and gone on with, studies, quality against cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_routing_bench.report.training_figures import draw_study
from moe_routing_bench.results.read import TRAININGS, LeftOut
from moe_routing_bench.results.trainings import finished, read_trainings
from moe_routing_bench.train.loop import State
from moe_routing_bench.train.pareto import Spread, pareto, sentences
from moe_routing_bench.train.records import (
    EVENTS,
    STATE,
    execute,
    read_events,
    read_state,
    run_folder,
    write_state,
)
from moe_routing_bench.train.settings import Rule, Run, Size
from moe_routing_bench.train.study import PLACES, STUDY, TIMES, USED, StudyRun
from moe_routing_bench.train.study_rules import MAX_RATE, MIN_RATE, TUNING_SEEDS
from moe_routing_bench.train.text import Corpus, synthetic
from timing import in_time
from tiny_training import TINY, tiny

SIZES = "layers=2,D=16,heads=2,kv_heads=1,head_dim=8,F=16,E=4,K=2,sequence=32"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return synthetic(size=6000)


def losses(home: Path) -> list[Any]:
    """Everything but times."""
    return [{key: value for key, value in one.items() if "seconds" not in key} for one in read_events(home)]


def test_a_record_says_what_came_of_it(tmp_path: Path, corpus: Corpus) -> None:
    record = execute(tiny(), corpus, tmp_path, study="s")
    assert [one.key for one in read_trainings(tmp_path)] == [record.key]
    assert read_trainings(tmp_path)[0] == record
    assert record.curve[-1].loss == record.loss == record.losses["low"]
    assert record.tokens == 6 * 2 * 32 and record.experts_per_token == 2
    assert sum(record.parts.values()) == pytest.approx(1)
    assert len(record.layers) == 2 and set(record.layers[0].tells) == {"source", "character", "position"}
    assert Run.from_dict(record.settings) == tiny()


def test_a_finished_run_is_not_trained_again(tmp_path: Path, corpus: Corpus) -> None:
    first = execute(tiny(), corpus, tmp_path)
    before, lines = (
        (run_folder(tmp_path, tiny().key) / EVENTS).read_bytes(),
        (tmp_path / TRAININGS).read_bytes(),
    )
    assert execute(tiny(), corpus, tmp_path) == first
    assert (tmp_path / TRAININGS).read_bytes() == lines
    assert (run_folder(tmp_path, tiny().key) / EVENTS).read_bytes() == before


def killed(words: list[str], when: Any, seconds: float = 300) -> None:
    """Start mrb, kill -9 it and its children as soon as `when()` holds."""
    command = [sys.executable, "-m", "moe_routing_bench", *words]
    process = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + seconds
    while not when():
        assert process.poll() is None, "it ended before it could be killed"
        in_time(time.monotonic() < until, f"it did not get there in {seconds} s")
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(600)
def test_a_run_killed_in_the_middle_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second part is a process that never saw the first; states are written after every step."""
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from moe_routing_bench.train import records as training\n"
        "training.SAVE_SECONDS = 0.0\n"
        "from moe_routing_bench.train.text import synthetic\n"
        "from tiny_training import tiny\n"
        "training.execute(tiny('noisy_topk', steps=160), synthetic(size=6000), Path(sys.argv[1]))\n"
    )
    run = tiny("noisy_topk", steps=160)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]),
    }

    def start(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(folder)], env=environment)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole).wait(timeout=380) == 0
    for steps in (20, 80):
        with start(broken) as process:
            try:
                while (state := _step(broken / f"run={run.key}")) < steps:
                    assert process.poll() is None, f"it ended at step {state}"
                    time.sleep(0.005)
            finally:
                process.kill()
    assert start(broken).wait(timeout=380) == 0
    first, second = (losses(run_folder(folder, run.key)) for folder in (whole, broken))
    assert first == second and len([one for one in first if "norm" in one]) == 160


def _step(home: Path) -> int:
    state = read_state(home)
    return state.step if state else 0


def test_a_state_is_read_while_a_run_replaces_it(tmp_path: Path) -> None:
    homes = [tmp_path / "short", tmp_path / "long"]
    for step, home in enumerate(homes):
        home.mkdir()
        write_state(home, State(step=step, train_seconds=0.0, tensors={"x": torch.zeros(9 + 4000 * step)}), 0)
    ended = threading.Event()

    def replaces() -> None:
        while not ended.is_set():
            for home in homes:
                os.link(home / STATE, tmp_path / "next")
                (tmp_path / "next").replace(tmp_path / STATE)

    writer = threading.Thread(target=replaces)
    writer.start()
    try:
        steps = [_step(tmp_path) for _ in range(5000)]
    finally:
        ended.set()
        writer.join()
    assert set(steps) == {0, 1}


def test_a_damaged_state_is_said(tmp_path: Path, corpus: Corpus) -> None:
    execute(tiny(), corpus, tmp_path)
    home = run_folder(tmp_path, tiny().key)
    whole = bytearray((home / STATE).read_bytes())
    whole[-1] ^= 1
    for damaged in (b"no tensors", whole[:-1], whole):
        (home / STATE).write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            execute(tiny(), corpus, tmp_path)


def test_bad_lines_are_left_out(tmp_path: Path, corpus: Corpus) -> None:
    record = execute(tiny(), corpus, tmp_path)
    wrong = json.loads(record.line())
    wrong["loss"] = -1.0
    with (tmp_path / TRAININGS).open("ab") as file:
        file.write(json.dumps(wrong).encode() + b"\nnonsense\n" + record.line()[:50])
    left_out = LeftOut()
    assert read_trainings(tmp_path, left_out) == [record]
    assert left_out.count == 3


def study(folder: Path, corpus: Corpus, **more: Any) -> StudyRun:
    like = Run(rule=Rule(name="like"), size=TINY, steps=20, batch=2, warmup=4, evaluations=4, pieces=4)
    rules = ("softmax_topk", "switch", "hashed", "soft_moe", "dense, equal FLOPs")
    options = {"like": like, "seeds": 2, "jobs": 2, "rates": (3e-3, 1e-2), "only": rules, **more}
    return StudyRun("routers", corpus, folder, **options)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_study_from_learning_rates_to_findings(tmp_path: Path, corpus: Corpus) -> None:
    """20 steps on the synthetic corpus: what CI trains."""
    work = study(tmp_path, corpus)
    work.run(rounds=8)
    done = read_trainings(tmp_path)
    assert len([one for one in done if one.study == "routers"]) == 10
    tuning = [one for one in done if one.study == "routers tuning"]
    assert {one.seed for one in tuning} == set(TUNING_SEEDS) and len(tuning) >= 20
    chosen = work.chosen_rates()
    for one in done:
        if one.study == "routers":
            assert one.learning_rate == chosen[one.rule]
    for rule, grid in work.tuning_runs().items():  # inside its grid, or as far as grids go
        best = chosen[rule]
        assert min(grid) < best < max(grid) or not MIN_RATE < best / 2 < best * 2 < MAX_RATE
    found = pareto(tmp_path)
    assert {one.rule for one in found.standings} == {entry.rule.name for entry in work.entries}
    last = found.standings[-1]
    assert last.rule == "soft_moe" and last.sees_future and "later tokens" in last.why_not_decoded
    by_rule = {one.rule: one for one in found.standings}
    assert by_rule["switch"].flops_per_token < by_rule["softmax_topk"].flops_per_token
    assert by_rule["softmax_topk"].difference.mean == 0 and by_rule["softmax_topk"].decode.keys() == {
        1,
        8,
        32,
    }
    words = " ".join(sentences(found))
    assert "byte-trigram" in words and "hashed against softmax_topk" in words and "sees later tokens" in words
    # nothing is done twice
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*") if path.name != STUDY}
    study(tmp_path, corpus).run(rounds=8)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {STUDY, TIMES, USED} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="other settings"):
        study(tmp_path, corpus, rates=(1e-3,)).run(rounds=8)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_killed_study_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    words = [
        "train", "study", "capacity", "--corpus", "synthetic", "--steps", "40", "--batch", "2",
        "--seeds", "1",
        "--sizes", SIZES, "--jobs", "2", "--rounds", "8", "--only", "dropless",
    ]  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = [sys.executable, "-m", "moe_routing_bench"]
    assert subprocess.run([*run, *words, "--out", str(whole)], capture_output=True).returncode == 0

    def enough() -> bool:
        return sum(path.read_bytes().count(b"\n") for path in broken.glob("run=*/events.jsonl")) > 40

    killed([*words, "--out", str(broken)], enough)
    time.sleep(0.3)  # children notice that they are alone
    ran = subprocess.run([*run, *words, "--out", str(broken)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    keys = [path.name for path in whole.glob("run=*")]
    assert keys and all(losses(whole / key) == losses(broken / key) for key in keys)


def test_a_study_of_some_rules_is_not_gone_on_with_all(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / PLACES).write_text('{"lengths": {"switch": {"tokens": 20}}}')
    assert study(tmp_path, corpus, only=("switch",)).lengths() == {"switch": {"tokens": 20}}
    with pytest.raises(ValueError):
        study(tmp_path, corpus).lengths()


@pytest.mark.slow
def test_what_moves_to_another_text_begins_with_the_weights(tmp_path: Path, corpus: Corpus) -> None:
    like = replace(tiny(), size=Size(**vars(TINY)), steps=8)
    work = StudyRun("specialise", corpus, tmp_path, like=like, seeds=1, rates=(1e-2,))
    work.run(rounds=8)
    runs = [planned.run for planned in work.runs({})]
    events = {run.rule.name: losses(run_folder(tmp_path, run.key)) for run in runs}
    assert set(events) == {"home", "all", "gates", "gates, then all"}
    assert events["all"][0]["losses"] == events["gates"][0]["losses"]
    gates = [one for one in events["gates"] if "losses" in one][-1]
    assert gates["losses"] == events["gates, then all"][0]["losses"]
    assert set(gates["losses"]) == {"high"}


@pytest.mark.slow
def test_a_branch_is_the_short_run_to_the_bit(tmp_path: Path, corpus: Corpus) -> None:
    rules = ("softmax_topk", "dense, equal FLOPs")
    options: dict[str, Any] = {"rates": (1e-2,), "only": rules, "shares": (0.5, 1.0), "looks": (2, 3)}
    work = study(tmp_path / "whole", corpus, seeds=3, **options)
    work.run(rounds=8)
    done = finished(tmp_path / "whole")
    planned = work.runs({}, seeds=2)
    assert all(one.run.key in done for one in planned)
    branch = next(one for one in planned if one.trunk)
    assert branch.own_steps < branch.run.steps / 2
    alone = execute(branch.run, corpus, tmp_path / "alone")
    assert alone.loss == done[branch.run.key].loss
    assert alone.tokens == done[branch.run.key].tokens
    found = pareto(tmp_path / "whole")
    assert set(found.decisions) == {"tokens", "0.5", "1"}
    for compared in found.decisions.values():
        assert compared["dense, equal FLOPs"].seeds in (2, 3)
    assert not list((tmp_path / "whole").rglob("state-*"))
    assert "curves.png" in draw_study(tmp_path / "whole", found, tmp_path)  # branches have other lengths
    (tmp_path / "whole" / TIMES).unlink()
    assert pareto(tmp_path / "whole").decisions == found.decisions  # a study that goes on


def test_a_state_to_branch_from_is_there_after_a_kill(tmp_path: Path, corpus: Corpus) -> None:
    """The process may end after it wrote the state and before it copied it."""
    run = tiny()
    home = run_folder(tmp_path, run.key)

    class KilledError(Exception):
        pass

    def kill(event: object) -> None:
        if isinstance(event, State):
            raise KilledError

    with pytest.raises(KilledError):
        execute(run, corpus, tmp_path, keep=(3,), on_event=kill)
    (kept,) = home.glob("state-*")
    kept.unlink()
    execute(run, corpus, tmp_path, keep=(3,))
    assert [*home.glob("state-*")] == [kept]


def test_intervals_over_seeds() -> None:
    spread = Spread.of([1.0, 2.0, 3.0])
    assert spread.mean == 2 and spread.interval is not None
    assert spread.interval[1] - 2 == pytest.approx(4.302653 * 1 / 3**0.5, rel=1e-6)  # t of 2 degrees
    assert not spread.clear or spread.interval[0] > 0
    assert Spread.of([1.0]).interval is None and not Spread.of([-0.1, 0.1]).clear
