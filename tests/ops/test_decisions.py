"""impl="auto" with measured decisions: chosen when all fits, the default otherwise, never in silence."""

from __future__ import annotations

import copy
import json
import os
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moe_routing_bench as mrb
from damaged_files import assert_one_sentence, hurt_json
from moe_routing_bench.cli import app
from moe_routing_bench.machine import this_machine
from moe_routing_bench.ops import auto
from moe_routing_bench.ops import decisions as decisions_module
from moe_routing_bench.ops.auto import resolve, why
from moe_routing_bench.ops.decisions import Facts, read_decisions
from moe_routing_bench.ops.expert_ffn.op import op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op

FACTS = Facts(D=16, F=32, E=4, K=2, dtype="float32", layout="compact", activation="swiglu")
ENTRY: dict[str, Any] = {
    "op": "expert_ffn", "D": 16, "F": 32, "E": 4, "K": 2, "dtype": "float32", "layout": "compact",
    "activation": "swiglu", "threads": 1, "workload": "zipf(1.2)", "overall": "eager_loop",
    "regret_median": 0.0, "regret_worst": 0.04,
    "by_tokens": [
        {"T": 4, "impl": "dense_all_experts", "ties": ["eager_loop"], "ratio": 0.81},
        {"T": 64, "impl": "staged(combine=index_add)", "ties": [], "ratio": None},
    ],
}  # fmt: skip


def document(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": "moe-routing-bench decisions",
        "version": 1,
        "machine": this_machine().name,
        "torch": torch.__version__,
        "made_at": "2026-11-15T02:00:00Z",
        "from": "results/monday",
        "entries": copy.deepcopy(list(entries) or [ENTRY]),
        **changes,
    }


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_state", auto._State())


@pytest.fixture
def write(tmp_path: Path):
    def write(content: dict[str, Any] | bytes) -> Path:
        path = tmp_path / "decisions.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def default() -> str:
    return op.get(op.default).label


def test_the_variable_is_unset_in_tests() -> None:
    assert "MRB_DECISIONS" not in os.environ


def test_off_means_the_default_and_says_so() -> None:
    assert resolve(op, "auto", FACTS).label == default()
    assert why(op, FACTS) == "the default of expert_ffn: decisions are off"


def test_the_measured_winner_is_chosen_when_everything_fits(write) -> None:
    mrb.use_decisions(write(document()))
    assert resolve(op, "auto", FACTS).label == "eager_loop"
    text = why(op, FACTS)
    assert text.startswith("measured winner for D=16 F=32 E=4 K=2 float32 compact swiglu on cpu")
    assert "over all measured T, zipf(1.2), 1 thread, on this machine, from results/monday" in text
    # names given, and choices without sizes, are not touched
    assert resolve(op, "dense_all_experts", FACTS).label == "dense_all_experts"
    assert resolve(op, "auto").label == default()
    assert "without sizes" in why(op)


@pytest.mark.parametrize(
    ("tokens", "label"),
    [(1, "dense_all_experts"), (15, "dense_all_experts"), (17, "index_add"), (10**6, "index_add")],
)
def test_a_hint_takes_the_nearest_measured_tokens_by_ratio(write, tokens: int, label: str) -> None:
    mrb.use_decisions(write(document()))
    facts = replace(FACTS, tokens=tokens)
    assert label in resolve(op, "auto", facts).label
    assert ("at T=4," if tokens < 16 else "at T=64,") in why(op, facts)


def test_a_hint_without_measured_tokens_takes_the_overall_winner(write) -> None:
    mrb.use_decisions(write(document({**ENTRY, "by_tokens": []})))
    assert resolve(op, "auto", replace(FACTS, tokens=3)).label == "eager_loop"


@pytest.mark.parametrize(
    "other",
    [{"D": 17}, {"F": 33}, {"E": 5}, {"K": 1}, {"dtype": "bfloat16"}, {"layout": "block(64)"},
     {"activation": "gelu"}, {"device": "cuda"}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_any_other_size_or_kind_is_the_default(write, other: dict[str, Any]) -> None:
    mrb.use_decisions(write(document()))
    facts = replace(FACTS, **other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(op, "auto", facts).label == default()
    assert why(op, facts).startswith("the default of expert_ffn: no measured decision for these sizes")


def test_a_decision_of_another_op_is_not_used(write) -> None:
    mrb.use_decisions(write(document({**ENTRY, "op": "grouped_gemm", "overall": "torch_grouped_mm"})))
    assert resolve(op, "auto", FACTS).label == default()
    assert resolve(grouped_gemm_op, "auto", FACTS).label == "torch_grouped_mm"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": "xeon-64-cores"}, "were made on xeon-64-cores, this machine is"),
        ({"torch": "1.0"}, "were made with torch 1.0, this is"),
    ],
)
def test_another_machine_or_torch_is_told_once(write, change: dict[str, str], words: str) -> None:
    path = write(document(**change))
    mrb.use_decisions(path)
    with pytest.warns(UserWarning, match=words) as told:
        chosen = resolve(op, "auto", FACTS)
    assert chosen.label == default()
    assert "make decisions here with `mrb decide`" in str(told[0].message)
    assert why(op, FACTS).startswith("the default of expert_ffn: the decisions in ") and words in why(
        op, FACTS
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(op, "auto", FACTS)
        resolve(op, "eager_loop", FACTS)
    mrb.use_decisions(path)
    with pytest.warns(UserWarning, match=words):
        resolve(op, "auto", FACTS)


def test_the_environment_switches_them_on(write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(document())
    monkeypatch.setenv("MRB_DECISIONS", str(path))
    assert resolve(op, "auto", FACTS).label == "eager_loop"
    # a file made anew is seen
    write(document({**ENTRY, "overall": "dense_all_experts"}))
    assert resolve(op, "auto", FACTS).label == "dense_all_experts"
    mrb.use_decisions(None)
    assert resolve(op, "auto", FACTS).label == default()


@pytest.mark.parametrize("path", ["/nowhere/at/all.json", "/", "a\0b"])
def test_a_file_that_is_not_there_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="decisions"):
        mrb.use_decisions(path)
    if "\0" not in path:
        monkeypatch.setenv("MRB_DECISIONS", path)
        with pytest.raises(ValueError, match="there is no file of decisions"):
            resolve(op, "auto", FACTS)


@pytest.mark.parametrize("spec", ["gone", "eager_loop(speed=9)", "((", "staged(combine=gone)"])
def test_an_implementation_that_is_gone_is_told(write, spec: str) -> None:
    mrb.use_decisions(write(document({**ENTRY, "overall": spec})))
    with pytest.raises(ValueError, match=r"the decisions in .* name expert_ffn.*make them anew"):
        resolve(op, "auto", FACTS)


def test_an_absent_library_is_raised_and_not_passed_over(write, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moe_routing_bench.ops.registry._included", [tmp_path / "more"])
    folder = tmp_path / "more" / "expert_ffn"
    folder.mkdir(parents=True)
    (folder / "needy.py").write_text('"""Needs much."""\nimport no_such_library\n')
    monkeypatch.setenv("MRB_DECISIONS", str(write(document({**ENTRY, "overall": "needy", "by_tokens": []}))))
    assert why(op, FACTS).startswith("measured winner")
    with pytest.raises(NotImplementedError, match="needs no_such_library"):
        resolve(op, "auto", FACTS)
    words = ["explain", "expert_ffn", "--width", "16", "--hidden", "32", "--experts", "4", "--choices", "2"]
    text = CliRunner().invoke(app, [*words, "--dtype", "float32"]).stdout
    assert "auto -> needy, measured winner" in text and "needs no_such_library" in text


def test_the_same_thread_count_is_preferred(write) -> None:
    many = {**ENTRY, "threads": 8, "overall": "dense_all_experts"}
    mrb.use_decisions(write(document(many, ENTRY)))
    assert resolve(op, "auto", FACTS).label == "eager_loop"
    mrb.use_decisions(write(document(many)))
    assert resolve(op, "auto", FACTS).label == "dense_all_experts" and "8 threads" in why(op, FACTS)


def test_a_layer_resolves_when_it_is_built(write) -> None:
    def build(**options: Any) -> mrb.MoE:
        return mrb.MoE(D=16, F=32, E=4, K=2, **options)

    before = build()
    mrb.use_decisions(write(document()))
    assert before.expert_ffn.label == default()
    assert build().expert_ffn.label == "eager_loop"
    assert build(tokens=5).expert_ffn.label == "dense_all_experts"
    assert build(dtype=torch.bfloat16, tokens=5).expert_ffn.label == default()
    assert build(layout="block(8)", tokens=5).expert_ffn.label == default()
    assert build(impl="staged").expert_ffn.label == default()
    with pytest.raises(ValueError, match="at least 1"):
        build(tokens=0)
    layer, x = build(tokens=64), torch.randn(6, 16)
    layer.load_state_dict(before.state_dict())
    mrb.use_decisions(None)
    assert "index_add" in layer.implementation
    torch.testing.assert_close(layer(x)[0], before(x)[0])


def test_a_chosen_layer_compiles_whole(write) -> None:
    mrb.use_decisions(write(document()))
    layer = mrb.MoE(D=16, F=32, E=4, K=2, tokens=4)
    x = torch.randn(6, 16)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    try:
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    finally:
        # else the sizes seen here make later compilations of MoE.forward take sizes as variables
        torch._dynamo.reset()


def test_layouts_are_compared_by_meaning(write) -> None:
    mrb.use_decisions(write(document({**ENTRY, "layout": " padded( capacity_factor=1.250 ) "})))
    facts = replace(FACTS, layout=str(mrb.Layout.padded(capacity_factor=1.25)))
    assert resolve(op, "auto", facts).label == "eager_loop"


def test_explain_says_why(write, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["explain", "expert_ffn", "--width", "16", "--hidden", "32", "--experts", "4", "--choices", "2"]
    words += ["--dtype", "float32", "--tokens", "5"]
    assert "the default of expert_ffn: decisions are off" in CliRunner().invoke(app, words).stdout
    monkeypatch.setenv("MRB_DECISIONS", str(write(document())))
    text = CliRunner().invoke(app, words).stdout
    assert "auto -> dense_all_experts, measured winner for D=16" in text and "from results/monday" in text
    write(document(machine="elsewhere"))
    text = CliRunner().invoke(app, words).stdout
    assert "auto -> staged" in text and "were made on elsewhere" in text
    write(b"{")
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2 and "is not JSON" in ran.stderr


def test_the_file_is_read_whole(write) -> None:
    path = write(document())
    found = read_decisions(path)
    assert (found.source, found.path, found.made_at) == ("results/monday", path, "2026-11-15T02:00:00Z")
    (entry,) = found.entries
    assert (entry.regret_worst, entry.by_tokens[0].ties) == (0.04, ("eager_loop",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\x80\x04\x95\x0b\x00", "not JSON"),
        (b'{"a": 1, "a": 2}', "names something twice"),
        (b"[]", "schema"),
        (json.dumps(document(version=2)).encode(), "version is 2"),
        (json.dumps(document(version=True)).encode(), "version is True"),
        (json.dumps(document(extra=1)).encode(), "unknown field 'extra'"),
        (json.dumps(document(machine="a\x1b[31m")).encode(), "machine of the file"),
        (json.dumps(document({**ENTRY, "D": True})).encode(), "D of entry 0 is True"),
        (json.dumps(document({**ENTRY, "D": 0})).encode(), "D of entry 0 is 0"),
        (json.dumps(document({**ENTRY, "E": 10**300})).encode(), "E of entry 0 is 1000"),
        (json.dumps(document({**ENTRY, "regret_worst": float("nan")})).encode(), "not JSON"),
        (json.dumps(document({**ENTRY, "regret_worst": -1})).encode(), "regret_worst"),
        (json.dumps(document({**ENTRY, "layout": "spiral"})).encode(), "layout"),
        (json.dumps(document(ENTRY, ENTRY)).encode(), "repeats an earlier one"),
        (json.dumps(document({**ENTRY, "by_tokens": ENTRY["by_tokens"][:1] * 2})).encode(), "same T"),
        (json.dumps(document(entries=[0] * 10_001)).encode(), "at most 10,000"),
        (json.dumps(document({k: v for k, v in ENTRY.items() if k != "overall"})).encode(), "no overall"),
        (b" " * (16 * 2**20 + 1), "too many"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_a_sentence(write, content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_decisions(write(content))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


HOSTILE = [
    *(None, True, -1, 0, 2**63, 10**400, 1.5, 1e308, [], {}, [[[]]], {"a": {}}),
    *("", "x" * 5000, "\x1b[2J", "\ud800", "a\nb", "__import__('os')", "../../etc/passwd"),
    *("padded(capacity=1e9)", "block(0)"),
]


def test_300_mutated_files_give_a_value_or_a_sentence(write) -> None:
    draw, refused = random.Random(20261115), 0
    for _ in range(300):
        made = document(ENTRY, {**ENTRY, "op": "combine", "overall": "index_add", "by_tokens": []})
        path = write(hurt_json(made, draw, HOSTILE, ["evil", "__class__", "D", "impl"], most=3))
        try:
            found = read_decisions(path)
            assert isinstance(found, decisions_module.Decisions)
            mrb.use_decisions(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                resolve(op, "auto", FACTS)
        except ValueError as error:
            refused += 1
            assert_one_sentence(error, path)
    assert refused > 200
