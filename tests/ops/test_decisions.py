"""impl="auto" with measured decisions: followed when all fits, else the preference, never in silence."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moe_routing_bench as mrb
from damaged_files import assert_one_sentence, hurt_json
from moe_routing_bench.cli import app
from moe_routing_bench.core.experts import GATED
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.ops import auto
from moe_routing_bench.ops import decisions as decisions_module
from moe_routing_bench.ops.auto import Choice, choose, pick
from moe_routing_bench.ops.decisions import Facts, read_decisions
from moe_routing_bench.ops.expert_ffn.op import op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.registry import Op, all_ops
from moe_routing_bench.ops.stand_ins import StandIns
from timing import in_time

FACTS = Facts(D=16, F=32, E=4, K=2, dtype="float32", layout="compact", activation="swiglu")
ENTRY: dict[str, Any] = {
    "op": "expert_ffn", "D": 16, "F": 32, "E": 4, "K": 2, "dtype": "float32", "layout": "compact",
    "activation": "swiglu", "threads": 1, "workload": "zipf(1.2)", "load": "skewed", "overall": "eager_loop",
    "regret_median": 0.0, "regret_worst": 0.04,
}  # fmt: skip


def winner(T: int, impl: str, ratio: float | None = 0.81, of: Op = op, **more: Any) -> dict[str, Any]:
    try:
        source = of.source_hash(impl)
    except ValueError:  # there is no such implementation
        source = "0"
    known = {"T": T, "impl": impl, "ties": [], "ratio": ratio, "low": 0.79, "high": 0.83, "source": source}
    return {**known, **more}


ENTRY["by_tokens"] = [
    winner(4, "dense_all_experts", ties=["eager_loop"]),
    winner(64, "staged(combine=index_add)", None, low=None, high=None),
]


def document(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": "moe-routing-bench decisions",
        "version": 2,
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


def weights_of(facts: Facts) -> mrb.ExpertWeights:
    G = 2 * facts.F if facts.activation in GATED else facts.F
    like = {"dtype": getattr(torch, facts.dtype), "device": facts.device}
    return mrb.ExpertWeights(
        w_in_EDG=torch.empty(facts.E, facts.D, G, **like),
        w_out_EFD=torch.empty(facts.E, facts.F, facts.D, **like),
        activation=facts.activation,
    )


def arguments(facts: Facts = FACTS, tokens: int = 1, of: Op = op) -> tuple[Any, ...]:
    source = StandIns(weights_of(facts), facts.K, mrb.Layout.parse(facts.layout), tokens)
    return tuple(of.arguments(source).values())


def auto_at(facts: Facts = FACTS, tokens: int = 1, of: Op = op) -> Choice:
    """What "auto" is, and what it warns of is raised or caught by the test."""
    return pick(of, "auto", arguments(facts, tokens, of), weights_of(facts))


def label(facts: Facts = FACTS, tokens: int = 1) -> str:
    return auto_at(facts, tokens).implementation.label


PREFERRED = choose(op, arguments()).implementation.label  # decisions are off here


def test_the_variable_is_unset_in_tests() -> None:
    assert "MRB_DECISIONS" not in os.environ


def test_off_means_the_preference_and_says_so() -> None:
    assert label() == PREFERRED and "(decisions are off)" in auto_at().why


def everywhere(impl: str, of: Op = op, **changes: Any) -> dict[str, Any]:
    """An entry with one winner for 1 to 4,096 tokens."""
    return {**ENTRY, "op": of.name, "by_tokens": [winner(T, impl, of=of) for T in (1, 4096)], **changes}


OVERALL = everywhere("eager_loop")


def test_the_measured_winner_is_chosen_when_everything_fits(write) -> None:
    mrb.use_decisions(write(document(OVERALL)))
    assert label() == "eager_loop"
    text = auto_at().why
    assert text.startswith("measured winner for D=16 F=32 E=4 K=2 float32 compact swiglu on cpu")
    assert all(word in text for word in ("at T=1,", "zipf(1.2)", "1 thread", "results/monday"))
    # names given, and choices without sizes, are not touched
    named = pick(op, "dense_all_experts", arguments())
    assert (named.implementation.label, named.why) == ("dense_all_experts", "asked for by name")
    rows = arguments(of=grouped_gemm_op)
    assert "without sizes" in choose(grouped_gemm_op, rows).why


@pytest.mark.parametrize(
    ("tokens", "winner"),
    [(4, "dense_all_experts"), (16, "dense_all_experts"), (17, "index_add"), (64, "index_add")],
)
def test_a_call_takes_the_nearest_measured_tokens_by_ratio(write, tokens: int, winner: str) -> None:
    mrb.use_decisions(write(document()))
    assert winner in label(tokens=tokens)
    assert ("at T=4," if tokens <= 16 else "at T=64,") in auto_at(tokens=tokens).why


@pytest.mark.parametrize("tokens", [0, 1, 3, 65, 10**6])
def test_nothing_is_decided_outside_the_measured_tokens(write, tokens: int) -> None:
    mrb.use_decisions(write(document()))
    assert label(tokens=tokens) == PREFERRED and "no measured decision" in auto_at(tokens=tokens).why


def test_changed_code_is_not_decided(write) -> None:
    mrb.use_decisions(write(document({**ENTRY, "by_tokens": [winner(4, "eager_loop", source="0" * 16)]})))
    assert label(tokens=4) == PREFERRED and "has changed" in auto_at(tokens=4).why


def call_with_rows(count_E: list[int]) -> tuple[Any, ...]:
    x_TD, gate_TK, plan, weights = arguments(tokens=64)
    return x_TD, gate_TK, replace(plan, count_E=torch.tensor(count_E)), weights


def test_the_class_of_load_decides_if_both_were_measured(write) -> None:
    even, skewed = everywhere("eager_loop", load="even"), everywhere("dense_all_experts", workload="uniform")
    calls = {"eager_loop": [32, 32, 32, 32], "dense_all_experts": [120, 4, 4, 0]}
    mrb.use_decisions(write(document(even, skewed)))
    for wanted, count_E in calls.items():
        assert choose(op, call_with_rows(count_E)).implementation.label == wanted
    mrb.use_decisions(write(document(skewed)))
    for count_E in calls.values():
        assert choose(op, call_with_rows(count_E)).implementation.label == "dense_all_experts"


def test_frozen_weights_follow_settings_of_their_kernel_alone(write) -> None:
    native = op.get("native")
    if native.why_not(*arguments(tokens=4)) is not None:
        pytest.skip("native cannot run here")
    *others, weights = arguments(tokens=4)
    assert native.freeze is not None
    args = (*others, native.freeze(replace(weights, w_in_EDG=torch.ones_like(weights.w_in_EDG))))
    mrb.use_decisions(write(document(everywhere("native(strip=1)", frozen=True))))
    assert choose(op, args).implementation.label == "native(strip=1)"
    assert "measured winner" in choose(op, args).why
    assert label(tokens=4) == PREFERRED  # these weights are not frozen
    for entry in (everywhere("staged", frozen=True), everywhere("native(strip=1)")):
        mrb.use_decisions(write(document(entry)))
        assert choose(op, args).implementation.label == "native"


@pytest.mark.timing
def test_a_lookup_costs_little(write) -> None:
    mrb.use_decisions(write(document()))
    args = arguments(tokens=8)
    auto._rows(op, args, None)

    def lookup() -> object:
        return auto._rows(op, args, None)

    def nothing() -> object:
        return None

    def seconds(call: Callable[[], object]) -> float:
        began = time.process_time()
        for _ in range(1000):
            call()
        return time.process_time() - began

    # 24 to 30 calls on a machine that took 5 to 7 us for a lookup (others take 1.8); 435 without the cache
    lookups, empty = map(min, zip(*((seconds(lookup), seconds(nothing)) for _ in range(20)), strict=True))
    in_time(lookups < 80 * empty, f"a lookup costs {lookups / empty:.0f} calls of an empty function")


@pytest.mark.parametrize(
    "other",
    [{"D": 17}, {"F": 33}, {"E": 5}, {"K": 1}, {"dtype": "bfloat16"}, {"layout": "block(64)"},
     {"activation": "gelu"}, {"device": "meta"}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_any_other_size_or_kind_is_the_preference(write, other: dict[str, Any]) -> None:
    mrb.use_decisions(write(document()))
    facts = FACTS._replace(**other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert label(facts) not in ("eager_loop", "dense_all_experts")
    assert "no measured decision" in auto_at(facts).why


def test_a_decision_of_another_op_is_not_used(write) -> None:
    mrb.use_decisions(write(document(everywhere("torch_grouped_mm", grouped_gemm_op))))
    assert label() == PREFERRED
    assert auto_at(of=grouped_gemm_op).implementation.label == "torch_grouped_mm"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": "xeon-64-cores"}, "xeon-64-cores"),
        ({"torch": "1.0"}, "torch 1.0"),
    ],
)
def test_another_machine_or_torch_is_told_once(write, change: dict[str, str], words: str) -> None:
    path = write(document(**change))
    mrb.use_decisions(path)
    with pytest.warns(UserWarning, match=words) as told:
        assert label() == PREFERRED
    assert "`mrb tune decide`" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert words in auto_at().why
        pick(op, "eager_loop", arguments())
    mrb.use_decisions(path)
    with pytest.warns(UserWarning, match=words):
        auto_at()


def begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(auto, "_state", auto._State())


def test_the_environment_switches_them_on_and_is_read_once(write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(document(OVERALL))
    monkeypatch.setenv("MRB_DECISIONS", str(path))
    assert label() == "eager_loop"
    # neither the variable nor the file is read again by a call, which would cost more than choosing
    write(document(everywhere("dense_all_experts")))
    monkeypatch.delenv("MRB_DECISIONS")
    assert label() == "eager_loop"
    mrb.use_decisions(path)
    assert label() == "dense_all_experts"
    mrb.use_decisions(None)
    assert label() == PREFERRED
    begin_anew(monkeypatch)
    assert label() == PREFERRED
    monkeypatch.setenv("MRB_DECISIONS", str(path))
    assert label() == PREFERRED


@pytest.mark.parametrize("path", ["/nowhere/at/all.json", "/", "a\0b"])
def test_a_file_that_is_not_there_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="decisions"):
        mrb.use_decisions(path)
    if "\0" not in path:
        monkeypatch.setenv("MRB_DECISIONS", path)
        with pytest.raises(ValueError, match="no file"):
            label()


@pytest.mark.parametrize("spec", ["gone", "eager_loop(speed=9)", "((", "staged(combine=gone)"])
def test_an_implementation_that_is_gone_is_told(write, spec: str) -> None:
    mrb.use_decisions(write(document(everywhere(spec))))
    with pytest.raises(ValueError, match=r"decisions.json.* expert_ffn"):
        label()


def test_an_absent_library_is_passed_over_aloud(write, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moe_routing_bench.ops.registry._included", [tmp_path / "more"])
    folder = tmp_path / "more" / "expert_ffn"
    folder.mkdir(parents=True)
    (folder / "needy.py").write_text('"""Needs much."""\nimport no_such_library\n')
    monkeypatch.setenv("MRB_DECISIONS", str(write(document(everywhere("needy")))))
    with pytest.warns(UserWarning, match="needy .*no_such_library"):
        assert label() == PREFERRED
    words = ["explain", "expert_ffn", "--width", "16", "--hidden", "32", "--experts", "4", "--choices", "2"]
    text = CliRunner().invoke(app, [*words, "--dtype", "float32"]).stdout
    assert f"auto -> {PREFERRED}, preferred on" in text and "no_such_library" in text


def test_a_winner_that_cannot_train_is_passed_over_aloud(write, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moe_routing_bench.ops.registry._included", [tmp_path / "more"])
    folder = tmp_path / "more" / "expert_ffn"
    folder.mkdir(parents=True)
    (folder / "quick.py").write_text(
        '"""Forward alone."""\nFORWARD_ONLY = True\ndef run(x_TD, gate_TK, plan, weights): return x_TD * 0\n'
    )
    mrb.use_decisions(write(document(everywhere("quick"))))
    layer, x = mrb.MoE(16, 32, 4, 2), torch.randn(3, 16)
    with torch.no_grad():
        assert not layer(x)[0].any() and "expert_ffn.quick (auto: measured" in layer.implementation
    with pytest.warns(UserWarning, match="quick .*no backward"):
        layer(x)[0].sum().backward()
    assert layer.experts.w_in_EDG.grad is not None
    assert "quick" in layer.implementation and "no backward" in layer.implementation
    layer(x)  # said once


def test_another_number_of_threads_decides_nothing(write) -> None:
    many = everywhere("dense_all_experts", threads=8)
    mrb.use_decisions(write(document(many, OVERALL)))
    assert label() == "eager_loop"
    mrb.use_decisions(write(document(many)))
    assert label() == PREFERRED
    assert "no measured decision" in auto_at().why and "with 1 thread" in auto_at().why


@pytest.mark.parametrize("only", ["even", "skewed"])
def test_another_class_of_load_decides_aloud(write, only: str) -> None:
    said = f"({only} load, used for every load because no other was measured)"
    mrb.use_decisions(write(document(everywhere("eager_loop", load=only))))
    layer = mrb.MoE(16, 32, 4, 2)
    words = ["explain", "expert_ffn", "--width", "16", "--hidden", "32", "--experts", "4", "--choices", "2"]
    assert said in layer.implementation
    assert said in " ".join(CliRunner().invoke(app, [*words, "--dtype", "float32"]).stdout.split())
    for rows in ([25, 25, 25, 25], [97, 1, 1, 1]):
        choice = choose(op, call_with_rows(rows))
        assert choice.implementation.label == "eager_loop" and said in choice.why
    both = [everywhere("eager_loop", load=load, workload=load) for load in ("even", "skewed")]
    mrb.use_decisions(write(document(*both)))
    assert "used for every load" not in layer.implementation and " load)" in layer.implementation


def ran(layer: mrb.MoE, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation of expert_ffn that a call of the layer really runs."""
    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(auto, "_state", replace(auto._state, on_cpu={}, ranked={}, quick={}))
        for spec in ("eager_loop", "dense_all_experts", "staged", PREFERRED, "staged(combine=index_add)"):
            found = op.get(spec)

            def run(*args: Any, found: Any = found) -> torch.Tensor:
                seen.append(found.label)
                return found.run(*args)

            patch.setattr(op._ready, spec, replace(found, run=run))
        layer(x)
    return seen[0]


def test_a_layer_follows_them_at_every_call(write, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, few, many = mrb.MoE(D=16, F=32, E=4, K=2), torch.randn(5, 16), torch.randn(60, 16)
    with torch.no_grad():
        assert ran(layer, few, monkeypatch) == PREFERRED
        before = layer(many)[0]
        mrb.use_decisions(write(document()))
        assert ran(layer, few, monkeypatch) == "dense_all_experts"
        assert "index_add" in ran(layer, many, monkeypatch)
        torch.testing.assert_close(layer(many)[0], before)
        said = layer.implementation
        assert "expert_ffn.dense_all_experts up to T=16 (auto: measured" in said
        assert "grouped_gemm=expert_loop) up to T=64 (auto: measured" in said and "at T=64" in said
        layer.bfloat16()
        assert ran(layer, few.bfloat16(), monkeypatch) == PREFERRED
        assert "(D=16 F=32 E=4 K=2 bfloat16" in layer.implementation
        layer.float()
        assert ran(layer, few, monkeypatch) == "dense_all_experts"
        mrb.use_decisions(None)
        assert ran(layer, few, monkeypatch) == PREFERRED


def test_a_layer_looks_up_its_plan_by_its_own_sizes(write) -> None:
    mrb.use_decisions(write(document(everywhere("counting", all_ops()["make_plan"]))))
    assert "make_plan.counting (auto: measured winner" in mrb.MoE(16, 32, 4, 2).implementation
    assert "make_plan.counting" not in mrb.MoE(16, 33, 4, 2).implementation
    for layer in (copy.deepcopy(mrb.MoE(16, 32, 4, 2)), pickle.loads(pickle.dumps(mrb.MoE(16, 32, 4, 2)))):
        assert "make_plan.counting (auto" in layer.implementation
        assert "make_plan.counting" not in layer.bfloat16().implementation
        assert layer.make_plan.op is all_ops()["make_plan"]


def test_a_layer_compiles_whole_and_follows_them(write) -> None:
    mrb.use_decisions(write(document()))
    layer = mrb.MoE(D=16, F=32, E=4, K=2)
    x = torch.randn(6, 16)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    try:
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    finally:
        # else the sizes seen here make later compilations of MoE.forward take sizes as variables
        torch._dynamo.reset()


def test_what_is_wrong_with_decisions_is_said_to_whoever_compiles(write) -> None:
    mrb.use_decisions(write(document(torch="1.0")))
    layer = mrb.MoE(D=16, F=32, E=4, K=2, layout="block(4)", impl="staged(grouped_gemm=block_sparse)")
    try:
        with pytest.warns(UserWarning, match="torch 1.0"):
            torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(6, 16))
    finally:
        torch._dynamo.reset()


def test_layouts_are_compared_by_meaning(write) -> None:
    mrb.use_decisions(write(document({**OVERALL, "layout": " padded( capacity_factor=1.250 ) "})))
    assert label(FACTS._replace(layout=str(mrb.Layout.padded(capacity_factor=1.25)))) == "eager_loop"


def test_explain_says_why(write, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["explain", "expert_ffn", "--width", "16", "--hidden", "32", "--experts", "4", "--choices", "2"]
    words += ["--dtype", "float32", "--tokens", "5"]
    assert f"auto -> {PREFERRED}, preferred on" in (text := CliRunner().invoke(app, words).stdout)
    assert "(decisions are off)" in text
    monkeypatch.setenv("MRB_DECISIONS", str(write(document())))
    begin_anew(monkeypatch)
    text = CliRunner().invoke(app, words).stdout
    assert "auto -> dense_all_experts, measured winner for D=16" in text and "from results/monday" in text
    write(document(machine="elsewhere"))
    begin_anew(monkeypatch)
    text = CliRunner().invoke(app, words).stdout
    assert f"auto -> {PREFERRED}" in text and "elsewhere" in text
    write(b"{")
    begin_anew(monkeypatch)
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2 and "JSON" in ran.stderr


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
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[]", "schema"),
        (json.dumps(document(version=1)).encode(), "version is 1"),
        (json.dumps(document(version=True)).encode(), "version is True"),
        (json.dumps(document(extra=1)).encode(), "unknown field 'extra'"),
        (json.dumps(document(machine="a\x1b[31m")).encode(), "machine of the file"),
        (json.dumps(document({**ENTRY, "D": True})).encode(), "D of entry 0 is True"),
        (json.dumps(document({**ENTRY, "D": 0})).encode(), "D of entry 0 is 0"),
        (json.dumps(document({**ENTRY, "E": 10**300})).encode(), "E of entry 0 is 1000"),
        (json.dumps(document({**ENTRY, "regret_worst": float("nan")})).encode(), "not JSON"),
        (json.dumps(document({**ENTRY, "regret_worst": -1})).encode(), "regret_worst"),
        (json.dumps(document({**ENTRY, "layout": "spiral"})).encode(), "layout"),
        (json.dumps(document(ENTRY, ENTRY)).encode(), "repeats"),
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
        made = document(ENTRY, {**ENTRY, "op": "combine", "overall": "index_add"})
        path = write(hurt_json(made, draw, HOSTILE, ["evil", "__class__", "D", "impl"], most=3))
        try:
            found = read_decisions(path)
            assert isinstance(found, decisions_module.Decisions)
            mrb.use_decisions(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                label()
        except ValueError as error:
            refused += 1
            assert_one_sentence(error, path)
    assert refused > 200
