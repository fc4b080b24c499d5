"""mrb bench and mrb sweep as people use them; test_runner.py and test_sweep.py test what they measure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench.choosing import (
    SizeOptions,
    WhatOptions,
    chosen_cases,
    chosen_implementations,
    fitted_once,
)
from moe_routing_bench.bench.runner import Progress
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.cli.bench import end
from moe_routing_bench.core.names import split_words
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.report.console import bar, shown_progress, spinner
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.query import run_query
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.experiment import ImplementationRef
from sample_outcomes import an_outcome

QUICK = ["--threads", "1", "--rounds", "8", "--seconds", "180", "--checked", "1"]
SMALL = "--tokens 16 --width 32 --hidden 16 --experts 4 --choices 2 --dtype float32".split()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_bench_shows_a_ranked_table():
    text = mrb("bench", "combine", *SMALL, *QUICK, "--repro").stdout
    lines = text.splitlines()
    title = next(line for line in lines if line.startswith("own/16x32x16-e4-k2"))
    assert all(word in title for word in ("combine", "T=16", "D=32", "K=2", "float32", "zipf(1.2)"))
    assert any(line.startswith("gather_sum") and "baseline" in line for line in lines)
    head = next(line for line in lines if line.startswith("implementation"))
    assert head.split()[1:4] == ["ms", "tokens/s", "GB/s"]  # it has no weights: no TFLOP/s
    end = head.index("ratio") + len("ratio")
    ratios = [line[:end].split()[-1] for line in lines if line.split()[:1] in (["gather_sum"], ["index_add"])]
    assert ratios == sorted(ratios, key=float)
    assert (
        "8 interleaved rounds on 1 thread, hot caches" in text and "copies of the baseline differed" in text
    )
    repro = next(line for line in lines if line.startswith("index_add: mrb bench"))
    words = shlex.split(repro.partition(": ")[2])
    assert words[:3] == ["mrb", "bench", "combine"] and "index_add @ compact" in words


def test_a_repro_command_measures_the_same_cell_again():
    (first,) = mrb_json("bench", "pack", *SMALL, *QUICK, "--impl", "index_select+index_add")
    (again,) = mrb_json(*shlex.split(first["implementations"][0]["repro"])[1:])
    assert again["cell_key"] == first["cell_key"]


def test_bench_json_holds_samples_stages_and_status():
    words = ["--impl", "staged,staged(grouped_gemm=padded_bmm)", "--stages"]
    (experiment,) = mrb_json("bench", "layer", *SMALL, *QUICK, *words, code=1)  # padded needs another layout
    staged, padded, twin = experiment["implementations"]
    assert len(staged["samples"]) == experiment["rounds"] == 8 and twin["role"] == "twin"
    assert set(staged["stages"]) == {"route", "plan", "dispatch", "gemm", "combine"}
    assert padded["status"] == "UNSUPPORTED" and padded["median_seconds"] is None
    assert staged["tokens_per_second"] == pytest.approx(16 / staged["median_seconds"])
    assert experiment["direction"] == "forward" and staged["layer"] == ""


def test_bench_says_that_a_twin_stands_in_for_a_case_too_big():
    text = mrb(
        "bench", "topk", "--case", "seed-routing/32768-e256~scaled", *QUICK, "--impl", "torch_topk"
    ).stdout
    assert "seed-routing/32768-e256" in text
    text = mrb("bench", "layer", "--case", "granite-3-moe/decode-1~scaled", "--impl", "staged", *QUICK).stdout
    assert "granite-3-moe/decode-1" in text


def test_a_workload_these_sizes_cannot_have_is_a_state():
    words = ["--workload", "lognormal(maxvio=8)", "--impl", "gather_sum"]
    text = mrb("bench", "combine", *SMALL, *QUICK, *words, code=1).stdout
    assert "UNSUPPORTED" in text and "Not timed" in text


def test_sweep_writes_and_goes_on_where_it_was(tmp_path: Path):
    words = ["sweep", "granite-3-moe/decode-1~scaled", "--out", tmp_path, "--impl", "staged"]
    words += ["--workload", "uniform,zipf(1.2)", *QUICK]
    plan = mrb_json(*words, "--dry-run")
    assert plan["to_do"] == 2 and plan["about_seconds"] > 0 and not list(tmp_path.iterdir())
    text = mrb(*words).stdout
    assert "2 cells" in text and text.count("1 timed") == 2
    assert "0 cells" in mrb(*words).stdout
    assert "1 cells" in mrb(*words, "--workload", "balanced").stdout
    assert len(list(iterate(tmp_path))) == 6
    _, rows = run_query(tmp_path, "SELECT count(*) FROM records WHERE role = 'baseline'")
    assert rows == [(3,)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["bench", "combin"], "'combin'"),
        (["bench", "block", "--model", "deepseek-v3"], "latent attention"),
        (["bench", "layer", "--model", "olmo"], "model 'olmo'"),
        (["bench", "layer", "--model", "olmoe-1b-7b", "--width", "3"], "but --tokens"),
        (["bench", "layer", "--case", "seed-grid", "--model", "olmoe-1b-7b"], "either --model or --case"),
        (["bench", "combine", "--impl", "gather"], "implementation 'gather'"),
        (["bench", "combine", "--workload", "zipff(1.2)"], "workload 'zipff'"),
        (["bench", "combine", "--workload", "trace(none.safetensors)"], "file none.safetensors"),
        (["bench", "combine", "--threads", "4096"], "4096"),
        (["bench", "combine", "--no-save", "--out", "x"], "--no-save"),
        (["sweep", "topk-grid", "--out", "x", "--threads", "4096"], "4096"),
        (["bench", "combine", "--layout", "dense"], "dense"),
        (["bench", "combine", "--rounds", "2"], "at least 8"),
        (["bench", "combine", "--cache", "warm"], "cache"),
        (["bench", "combine", "--dtype", "float8"], "float8"),
        (["bench", "pack", "--impl", "index_select"], "dispatch + combine"),
        (["bench", "pack", "--router", "switch"], "no router"),
        (["bench", "layer", "--router", "swich"], "router 'swich'"),
        (["bench", "layer", "--layer-kind", "tower"], "layer 'tower'"),
        (["bench", "layer", "--direction", "sideways"], "direction 'sideways'"),
        (["bench", "layer", "--tokens", "8,many"], "'8,many'"),
        (["sweep", "seed-nothing", "--out", "x"], "case 'seed-nothing'"),
        (["sweep", "seed-pack", "--out", "x", "--engine", "rays"], "engine 'rays'"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(words, named):
    assert named in refused(*words)


def test_what_was_asked_for_and_not_timed_is_an_error():
    words = ["bench", "expert_ffn", *SMALL, *QUICK, "--no-save", "--impl"]
    failed = mrb(*words, "staged,staged(grouped_gemm=padded_bmm)", code=1)
    assert "staged(grouped_gemm=padded_bmm) @ compact (UNSUPPORTED)" in failed.stderr
    assert "baseline" in failed.stdout  # what could be timed was
    passed, crashed = ImplementationRef(name="staged"), ImplementationRef(name="eager_loop")
    end(
        [an_outcome(0.01, "UNSUPPORTED", implementations=(passed, crashed))], WhatOptions()
    )  # nobody named it
    end([an_outcome(0.01, implementations=(passed,))], WhatOptions(impl=["staged"]))
    for outcome, what in (
        (an_outcome(0.01, "CRASHED", implementations=(passed, crashed)), WhatOptions()),
        (an_outcome("UNSUPPORTED", implementations=(passed,)), WhatOptions()),
        (
            an_outcome(0.01, "UNSUPPORTED", implementations=(passed, crashed)),
            WhatOptions(impl=["staged,eager_loop"]),
        ),
    ):
        with pytest.raises(typer.Exit) as exit:
            end([outcome], what)
        assert exit.value.exit_code == 1


def test_results_are_saved_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MRB_HOME", str(tmp_path / "home"))
    refused("results")  # nothing is saved yet
    words = ["bench", "topk", *SMALL, *QUICK, "--impl", "sort"]
    mrb(*words, "--no-save")
    assert not (tmp_path / "home" / "results").exists()
    text = mrb(*words).stdout
    folder = tmp_path / "home" / "results"
    assert str(folder) in text.splitlines()[-1] and "`mrb results`" in text.splitlines()[-1]
    assert [record.implementation.spec for record in iterate(folder)] == ["sort", "sort"]  # and its twin
    assert "topk own/16x32x16-e4-k2" in mrb("results").stdout
    monkeypatch.setenv("MRB_HOME", "/dev/null/nowhere")
    unsaved = mrb(*words)
    assert "not saved" in unsaved.stderr and "/dev/null/nowhere" not in unsaved.stdout


@pytest.mark.parametrize("command", ["bench", "sweep"])
def test_ctrl_c_says_how_to_go_on(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def stopped_in_the_second(self, cells, **_):
        yield an_outcome(0.01, implementations=(ImplementationRef(name="staged"),))
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalExecutor, "run", stopped_in_the_second)
    ran = mrb(command, "layer", "--tokens", "8,16", "--impl", "staged", "--out", tmp_path, code=130)
    assert "1 of 2 cells" in ran.stderr and f"--folder {tmp_path}" in ran.stderr
    assert ("continues" in ran.stderr) == (command == "sweep")
    assert len(list(iterate(tmp_path))) == 1


def test_in_a_pipe_progress_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    experiment = an_outcome(0.01, implementations=(ImplementationRef(name="staged"),)).experiment
    with shown_progress(2) as progress:
        for second in range(0, 300, 10):
            now[0] = second
            progress.update(
                experiment, Progress(what=f"round {second}", share=second / 600, left=600.0 - second)
            )
    lines = capsys.readouterr().err.splitlines()
    # a cell's own budget says what is left of it; of several cells the speed so far
    assert (
        lines[0] == f"1:00 1/2 {experiment.title}: round 60; 5 % done, about 19:00 left" and len(lines) == 4
    )
    assert all(len(re.findall("round", line)) == 1 for line in lines)


def test_a_bar_and_a_spinner_in_a_pipe_say_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with bar("comparing", "pairs") as shown, spinner("waiting") as doing:
        for second in range(0, 130, 10):
            now[0] = second
            shown.update(second, 1_200, phase="first", now="a")
            doing(f"waiting {second}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["comparing: first 60 of 1,200 pairs, about 19:00 left; a", "waiting 60"]
    assert len(lines) == 4


def test_words_and_implementations():
    assert split_words("a,b(x=1,y=2), c") == ["a", "b(x=1,y=2)", "c"]
    (case,) = cases("seed-grid/32x128-e4-d1024-c1.25")
    what = WhatOptions(impl=["staged", "eager_loop @ block(64)"], layout=["compact,case"])
    assert [one.title for one in chosen_implementations(span_named("layer"), case, what)] == [
        "staged | compact | softmax_topk",
        "staged | padded(capacity_factor=1.25,drop=position) | softmax_topk",
        "eager_loop | block(64) | softmax_topk",
    ]
    what = WhatOptions(
        impl=["staged"], router=["switch,top_p(p=0.8)"], layer_kind=["moe,chain(iterations=2)"]
    )
    assert [(one.router, one.layer) for one in chosen_implementations(span_named("layer"), case, what)] == [
        ("switch", ""), ("switch", "chain(iterations=2)"), ("top_p(p=0.8)", ""),
        ("top_p(p=0.8)", "chain(iterations=2)"),
    ]  # fmt: skip


def test_sizes_and_directions_are_lists():
    sizes = SizeOptions(tokens="8,16", experts="4,8", topk="1,2", width="32")
    what = WhatOptions(direction=["forward,train"])
    chosen = chosen_cases(span_named("layer"), sizes, what)
    assert len(chosen) == 16 and len({(case.shape, case.direction) for case in chosen}) == 16
    assert {case.D for case in chosen} == {32} and all(case.weights for case in chosen)
    assert not any(case.weights for case in chosen_cases(span_named("pack"), sizes, WhatOptions()))
    assert [case.T for case in chosen_cases(
        span_named("layer"), SizeOptions(model="olmoe-1b-7b", tokens="1,64"), WhatOptions()
    )] == [1, 64]  # fmt: skip


def test_routers_and_directions_are_ranked_in_one_table(tmp_path: Path):
    words = ["--router", "switch,softmax_topk,soft_moe,expert_choice", "--direction", "forward,train"]
    text = mrb("bench", "layer", *SMALL, *QUICK, *words, "--out", tmp_path).stdout
    summary = text[text.rindex("tokens/s") - 200 :]
    assert all(name in summary for name in ("switch", "softmax_topk", "soft_moe", "expert_choice"))
    assert "forward" in summary and "train" in summary
    kept = [record for record in iterate(tmp_path) if record.implementation.role != "twin"]
    assert len(kept) == 8
    reasons = [f"{one.implementation.router}: {one.correctness.reason}" for one in kept if one.timing is None]
    assert not reasons, reasons
    assert {(r.implementation.router, r.experiment.direction) for r in kept} == {
        (router, way) for router in words[1].split(",") for way in ("forward", "train")
    }
    assert all("topk." in r.implementation.runs and "make_plan." in r.implementation.runs for r in kept)
    # how little it computes stands beside its time: in the table, in the record, in what was saved
    E, pairs = kept[0].experiment.E, kept[0].experiment.T * kept[0].experiment.K
    said = f"{E} slots, {100 * E / pairs:.3g} % of the pairs"
    soft = [record.implementation.runs for record in kept if record.implementation.router == "soft_moe"]
    assert said in " ".join(summary.split()) and all(said in runs for runs in soft)
    assert not any("slots" in r.implementation.runs for r in kept if r.implementation.router != "soft_moe")
    shown = mrb("results", "--folder", tmp_path, "--router", "soft_moe").stdout
    assert said in " ".join(shown.split())
    assert "soft_moe" in shown and "expert_choice" not in shown
    again = next(
        r for r in kept if (r.implementation.router, r.experiment.direction) == ("soft_moe", "train")
    ).repro
    (experiment,) = mrb_json(*shlex.split(again)[1:])
    assert [one["router"] for one in experiment["implementations"][:2]] == ["switch", "soft_moe"]
    assert experiment["direction"] == "train"


def test_a_sweep_over_sizes(tmp_path: Path):
    words = ["--tokens", "8,16", "--experts", "4,8", "--width", "32", "--hidden", "16"]
    plan = mrb_json("sweep", "layer", "--out", tmp_path, *words, "--impl", "staged", "--dry-run")
    assert plan["to_do"] == 4
    assert "fixes" in refused("sweep", "seed-pack", "--out", tmp_path, "--tokens", "8")
    assert mrb_json("sweep", "topk-grid", "--out", tmp_path, "--dry-run")["to_do"] == 27


def test_sizes_given_by_number_are_measured_or_refused():
    (case,) = chosen_cases(
        span_named("layer"), SizeOptions(model="olmoe-1b-7b", tokens="16384"), WhatOptions()
    )
    assert case.T == 16384 and not case.scaled_from
    words = "--tokens 16 --width 20000 --hidden 40000 --experts 256 --impl staged".split()
    assert "not replaced" in refused("bench", "layer", *words)


def test_twins_that_are_the_same_are_measured_once():
    twins = fitted_once(cases("seed-grid"))
    assert len(twins) < len(cases("seed-grid"))
    assert len({(case.shape, case.layout) for case in twins}) == len(twins)
