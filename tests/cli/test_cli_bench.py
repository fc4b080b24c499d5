"""mrb bench and mrb sweep as people use them; test_runner.py and test_sweep.py test what they measure."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.cli.choosing import chosen_cases, chosen_subjects, scaled_once, split_words
from moe_routing_bench.cli.options import SizeOptions, WhatOptions
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.store import iterate
from moe_routing_bench.workloads.cases import cases

QUICK = ["--rounds", "8", "--seconds", "2", "--checked", "1"]
SMALL = "--tokens 16 --width 32 --hidden 16 --experts 4 --choices 2 --dtype float32".split()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_bench_shows_a_ranked_table():
    text = mrb("bench", "combine", *SMALL, *QUICK, "--repro").stdout
    lines = text.splitlines()
    assert "own/16x32x16-e4-k2: combine, T=16 D=32 F=16 E=4 K=2, float32, zipf(1.2)" in text
    assert any(line.startswith("gather_sum") and "baseline" in line for line in lines)
    head = next(line.split() for line in lines if line.startswith("implementation"))
    assert head[1:5] == ["ms", "tokens/s", "GB/s", "ratio"]  # it has no weights: no TFLOP/s
    ratios = [line.split()[5] for line in lines if line.split()[:1] in (["gather_sum"], ["index_add"])]
    assert ratios == sorted(ratios, key=float)
    assert "8 interleaved rounds on 1 thread, hot caches" in text and "twin is" in text
    repro = next(line for line in lines if line.startswith("index_add: mrb bench"))
    words = shlex.split(repro.partition(": ")[2])
    assert words[:3] == ["mrb", "bench", "combine"] and "index_add @ compact" in words


def test_a_repro_command_measures_the_same_cell_again():
    (first,) = mrb_json("bench", "pack", *SMALL, *QUICK, "--impl", "index_select+index_add")
    (again,) = mrb_json(*shlex.split(first["implementations"][0]["repro"])[1:])
    assert again["cell_key"] == first["cell_key"]


def test_bench_json_holds_samples_stages_and_status():
    words = ["--impl", "staged,staged(grouped_gemm=padded_bmm)", "--stages"]
    (cell,) = mrb_json("bench", "layer", *SMALL, *QUICK, *words)
    staged, padded, twin = cell["implementations"]
    assert len(staged["samples"]) == cell["rounds"] == 8 and twin["role"] == "twin"
    assert set(staged["stages"]) == {"route", "plan", "dispatch", "gemm", "combine"}
    assert padded["status"] == "UNSUPPORTED" and padded["median_seconds"] is None
    assert staged["tokens_per_second"] == pytest.approx(16 / staged["median_seconds"])
    assert cell["direction"] == "forward" and staged["layer"] == ""


def test_bench_says_that_a_twin_stands_in_for_a_case_too_big():
    text = mrb(
        "bench", "topk", "--case", "seed-routing/32768-e256~scaled", *QUICK, "--impl", "torch_topk"
    ).stdout
    assert "seed-routing/32768-e256" in text
    words = ["--model", "qwen3-30b-a3b", "--tokens", "1", "--impl", "staged"]
    text = mrb("bench", "layer", *words, *QUICK).stdout
    assert "qwen3-30b-a3b/decode-1~scaled" in text and "was measured instead" in text


def test_a_workload_these_sizes_cannot_have_is_a_state():
    words = ["--workload", "lognormal(maxvio=8)", "--impl", "gather_sum"]
    text = mrb("bench", "combine", *SMALL, *QUICK, *words).stdout
    assert "UNSUPPORTED" in text and "Not timed" in text


def test_sweep_writes_and_goes_on_where_it_was(tmp_path: Path):
    words = ["sweep", "granite-3-moe/decode-1", "--out", tmp_path, "--impl", "staged"]
    words += ["--workload", "uniform,zipf(1.2)", *QUICK]
    plan = mrb_json(*words, "--dry-run")
    assert plan["to_do"] == 2 and plan["about_seconds"] > 0 and not list(tmp_path.iterdir())
    text = mrb(*words).stdout
    assert "2 cells to measure" in text and text.count("1 timed") == 2
    assert "0 cells to measure" in mrb(*words).stdout
    assert "1 cells to measure" in mrb(*words, "--workload", "balanced").stdout
    assert len(list(iterate(tmp_path))) == 6
    _, rows = run_query(tmp_path, "SELECT count(*) FROM records WHERE role = 'baseline'")
    assert rows == [(3,)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "combin"], "there is no span 'combin'"),
        (["bench", "block", "--model", "deepseek-v3"], "latent attention"),
        (["bench", "layer", "--model", "olmo"], "there is no model 'olmo'"),
        (["bench", "layer", "--model", "olmoe-1b-7b", "--width", "3"], "fixes all sizes but --tokens"),
        (["bench", "layer", "--case", "seed-grid", "--model", "olmoe-1b-7b"], "either --model or --case"),
        (["bench", "combine", "--impl", "gather"], "has no implementation 'gather'"),
        (["bench", "combine", "--workload", "zipff(1.2)"], "there is no workload 'zipff'"),
        (["bench", "combine", "--layout", "dense"], "dense"),
        (["bench", "combine", "--rounds", "2"], "at least 8"),
        (["bench", "combine", "--cache", "warm"], "no cache policy"),
        (["bench", "combine", "--dtype", "float8"], "float8"),
        (["bench", "pack", "--impl", "index_select"], "pack is dispatch + combine"),
        (["bench", "pack", "--router", "switch"], "pack has no router"),
        (["bench", "layer", "--router", "swich"], "there is no router 'swich'"),
        (["bench", "layer", "--layer-kind", "tower"], "there is no layer 'tower'"),
        (["bench", "layer", "--direction", "sideways"], "there is no direction 'sideways'"),
        (["bench", "layer", "--tokens", "8,many"], "cannot read T = '8,many'"),
        (["sweep", "seed-nothing", "--out", "x"], "there is no case 'seed-nothing'"),
        (["sweep", "seed-pack", "--out", "x", "--engine", "ray"], "there is no engine 'ray'"),
    ],
)
def test_mistakes_get_one_sentence(words, sentence):
    assert sentence in refused(*words)


def test_words_and_subjects():
    assert split_words("a,b(x=1,y=2), c") == ["a", "b(x=1,y=2)", "c"]
    (case,) = cases("seed-grid/32x128-e4-d1024-c1.25")
    what = WhatOptions(impl=["staged", "eager_loop @ block(64)"], layout=["compact,case"])
    assert [one.name for one in chosen_subjects(span_named("layer"), case, what)] == [
        "staged | compact | softmax_topk",
        "staged | padded(capacity_factor=1.25,drop=position) | softmax_topk",
        "eager_loop | block(64) | softmax_topk",
    ]
    what = WhatOptions(
        impl=["staged"], router=["switch,top_p(p=0.8)"], layer_kind=["moe,chain(iterations=2)"]
    )
    assert [(one.router, one.layer) for one in chosen_subjects(span_named("layer"), case, what)] == [
        ("switch", ""), ("switch", "chain(iterations=2)"), ("top_p(p=0.8)", ""),
        ("top_p(p=0.8)", "chain(iterations=2)"),
    ]  # fmt: skip


def test_sizes_and_directions_are_lists():
    sizes = SizeOptions(tokens="8,16", experts="4,8", topk="1,2", width="32")
    what = WhatOptions(direction=["forward,train"])
    chosen = chosen_cases(span_named("layer"), sizes, what)
    assert len(chosen) == 16 and len({(case.shape, case.direction) for case in chosen}) == 16
    assert {case.shape.D for case in chosen} == {32} and all(case.weights for case in chosen)
    assert not any(case.weights for case in chosen_cases(span_named("pack"), sizes, WhatOptions()))
    assert [case.shape.T for case in chosen_cases(
        span_named("layer"), SizeOptions(model="olmoe-1b-7b", tokens="1,64"), WhatOptions()
    )] == [1, 64]  # fmt: skip


def test_routers_and_directions_are_ranked_in_one_table(tmp_path: Path):
    words = ["--router", "switch,softmax_topk,soft_moe,expert_choice", "--direction", "forward,train"]
    text = mrb("bench", "layer", *SMALL, *QUICK, *words, "--out", tmp_path).stdout
    summary = text[text.rindex("tokens/s") - 200 :]
    assert all(name in summary for name in ("switch", "softmax_topk", "soft_moe", "expert_choice"))
    assert "forward" in summary and "train" in summary
    kept = [record for record in iterate(tmp_path) if record.implementation.role != "twin"]
    assert len(kept) == 8 and all(record.timing is not None for record in kept)
    assert {(r.what.router, r.what.direction) for r in kept} == {
        (router, way) for router in words[1].split(",") for way in ("forward", "train")
    }
    assert all("topk." in r.implementation.runs and "make_plan." in r.implementation.runs for r in kept)
    shown = mrb("results", "--folder", tmp_path, "--router", "soft_moe").stdout
    assert "soft_moe" in shown and "expert_choice" not in shown
    again = next(r for r in kept if (r.what.router, r.what.direction) == ("soft_moe", "train")).repro
    (cell,) = mrb_json(*shlex.split(again)[1:])
    assert [one["router"] for one in cell["implementations"][:2]] == ["switch", "soft_moe"]
    assert cell["direction"] == "train"


def test_a_sweep_over_sizes(tmp_path: Path):
    words = ["--tokens", "8,16", "--experts", "4,8", "--width", "32", "--hidden", "16"]
    plan = mrb_json("sweep", "layer", "--out", tmp_path, *words, "--impl", "staged", "--dry-run")
    assert plan["to_do"] == 4
    assert "fixes all sizes" in refused("sweep", "seed-pack", "--out", tmp_path, "--tokens", "8")
    assert mrb_json("sweep", "topk-grid", "--out", tmp_path, "--dry-run")["to_do"] == 27


def test_twins_that_are_the_same_are_measured_once():
    twins = scaled_once(cases("seed-grid"))
    assert len(twins) == 12 and all(case.scaled_from for case in twins)
    assert len({(case.shape, case.layout) for case in twins}) == 12
