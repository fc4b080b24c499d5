"""impl="auto": what is preferred on which machine, chosen at every call, said with its reason."""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from typer.testing import CliRunner

import moe_routing_bench as mrb
from moe_routing_bench import MoE, all_ops
from moe_routing_bench.cli import app
from moe_routing_bench.core import cpp
from moe_routing_bench.ops import auto
from moe_routing_bench.ops.auto import choose, pick, resolve
from moe_routing_bench.ops.preference import GPUS, MACHINES, PLAIN, Preference, machine_of, preferences
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.ops.stand_ins import StandIns
from moe_routing_bench.ops.targets import Target, as_if
from repository import ROOT
from tiny_layers import needs_compiler

OPS = all_ops()
FFN, PLAN = OPS["expert_ffn"], OPS["make_plan"]
CPU = torch.device("cpu")
TABLES = "moe_routing_bench.ops.{}.preferences"


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing was chosen, said or asked about this machine before."""
    monkeypatch.setattr(auto, "_state", auto._State())
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget() -> None:
    for question in (cpp.best_level, cpp.missing_tool, cpp._granted, cpp._why_not_loaded):
        question.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, *instructions: str, granted: bool = True) -> None:
    machine = replace(cpp.this_machine(), instructions=instructions)
    monkeypatch.setattr(cpp, "this_machine", lambda: machine)
    monkeypatch.setattr(cpp, "_tiles_granted", lambda: granted)
    forget()


def prefer(monkeypatch: pytest.MonkeyPatch, op: str, *rows: Preference) -> None:
    monkeypatch.setattr(import_module(TABLES.format(op)), "PREFERENCES", rows)


def arguments(layer: MoE, T: int) -> tuple[Any, ...]:
    source = StandIns(layer.experts.weights(), layer.router.K, layer.layout, T)
    return tuple(FFN.arguments(source).values())


def lacking(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    which = cpp.shutil.which
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None if name == tool else which(name))
    forget()


# ---- the tables


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_every_machine_has_a_row_with_its_evidence(op: Any, machine: str) -> None:
    *rows, last = preferences(op, machine)
    assert rows and not last.order and rows[-1].always, f"{op.name} has no row for {machine}"
    for row in rows:
        assert set(row.machines) <= set(MACHINES) and row.order
        for spec in row.order:
            assert spec.partition("(")[0] in op.names()
            if not spec.startswith("triton"):
                found = op.get(spec)
                # what auto may run: for training too, with the tie rule, and a result that stays
                assert not (found.forward_only or found.reuses_output or found.stored)
                assert found.ties == "lower id first"
        files = re.findall(r"measurements/[\w./-]+\w", row.evidence)
        assert all((ROOT / file).exists() for file in files)
        assert files or row.evidence.startswith("not timed: ")
        if machine in GPUS:
            assert row.evidence.startswith("not timed: "), "nothing has run on a GPU"


def test_every_default_runs_anything() -> None:
    """It is the last resort, so it may not refuse."""
    layer = MoE(12, 8, 5, 2, dtype=torch.float64, device="meta", layout="padded(capacity=3,drop=probs)")
    source = StandIns(layer.experts.weights(), 2, layer.layout, 9, train=True)
    for op in OPS.values():
        assert op.why_not(op.default, *op.arguments(source).values()) is None
        assert op.get(op.default).origin == "built in"


@pytest.mark.parametrize(
    ("instructions", "granted", "machine"),
    [
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8"), True, "amx"),
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8"), False, "avx512"),
        (("avx2", "avx512f", "avx512_vnni"), True, "vnni"),
        (("avx2", "avx512f"), True, "avx512"),
        (("avx2",), True, "avx2"),
        (("asimd", "sve"), True, PLAIN),
        (("asimd", "asimddp", "sve", "bf16"), True, PLAIN),  # it runs by name: no ARM was timed
    ],
)
def test_the_class_of_a_processor(anew, instructions: tuple[str, ...], granted: bool, machine: str) -> None:
    anew.setattr(cpp.shutil, "which", lambda name: f"/usr/bin/{name}")
    pretend(anew, *instructions, granted=granted)
    assert machine_of(CPU) == machine
    assert machine_of(torch.device("meta")) == PLAIN
    lacking(anew, "g++")
    assert machine_of(CPU) == PLAIN


def test_the_class_of_a_gpu(anew) -> None:
    gpu = torch.device("cuda:1")
    assert machine_of(gpu) == "sm_80"  # absent: as ops/targets.py has it
    anew.setattr(torch.cuda, "is_available", lambda: True)
    anew.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert machine_of(gpu) == "sm_89"
    with as_if(Target.named("gfx950")):
        assert machine_of(gpu) == "gfx950"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["compact", "padded(capacity=8)", "block(4)"])
@pytest.mark.parametrize("D", [64, 12])  # rows of 12 numbers are too odd for grouped_mm
def test_on_a_gpu_a_layer_never_waits_for_the_device(layout: str, dtype: torch.dtype, D: int) -> None:
    """Triton's kernel for few pairs (at most 64) or its fused one, if there is Triton, else torch's grouped
    product; never a loop over experts."""
    for target, (T, best) in product(
        ("sm_80", "sm_90a", "gfx942"), ((1, "triton_decode"), (32, "triton_decode"), (33, "triton_fused"))
    ):
        with FakeTensorMode(), as_if(Target.named(target)), torch.no_grad():
            w_in, w_out = (torch.empty(8, *s, dtype=dtype, device="cuda") for s in ((D, 96), (48, D)))
            weights = mrb.ExpertWeights(w_in_EDG=w_in, w_out_EFD=w_out)
            source = StandIns(weights, 2, mrb.Layout.parse(layout), T)
            chosen = choose(FFN, tuple(FFN.arguments(source).values())).implementation
            assert not chosen.host_sync, chosen.label
            best = best if find_spec("triton") else "staged(grouped_gemm=torch_grouped_mm)"
            assert D == 12 or chosen.label == FFN.get(best).label


# ---- the choice


@needs_compiler
def test_the_first_snippet_gets_the_fast_path() -> None:
    """dtype and device are those of the call: .bfloat16() comes after the layer was built."""
    layer = MoE(D=64, F=48, E=8, K=2).bfloat16()
    assert choose(FFN, arguments(layer, 16)).implementation.label == "native"
    assert re.fullmatch(
        r"make_plan\.native \(auto: preferred on \w+ \(decisions are off\): measurements/.*\) \+ "
        r"expert_ffn\.native \(auto: preferred on \w+ \(decisions are off\): measurements/.*\)",
        layer.implementation,
    )
    x = torch.randn(16, 64).bfloat16()
    same = MoE(D=64, F=48, E=8, K=2, impl="native", plan_impl="native").bfloat16()
    same.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(layer(x)[0], same(x)[0])
    # with gradients wanted too
    assert choose(FFN, arguments(layer, 16)).implementation.label == "native"
    assert all(torch.equal(*pair) for pair in zip(gradients(layer, x), gradients(same, x), strict=True))
    assert "staged" in layer.double().implementation and "native cannot run" in layer.implementation
    assert "staged" in layer.float().to("meta").implementation


def gradients(layer: MoE, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    layer(x)[0].square().sum().backward()
    return [p.grad for p in layer.parameters() if p.grad is not None]


@needs_compiler
def test_autocast_is_obeyed() -> None:
    layer, x = MoE(16, 8, 4, 2), torch.randn(5, 16)
    assert layer(x)[0].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert "torch.autocast" in layer.implementation
        plain = MoE(16, 8, 4, 2, impl="staged")
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x)[0], plain(x)[0])
        assert layer.bfloat16()(x.bfloat16())[0].dtype == torch.bfloat16
        assert "expert_ffn.native (auto" in layer.implementation
    for name in ("expert_ffn", "grouped_gemm"):
        source = StandIns(MoE(16, 8, 4, 2).experts.weights(), 2, mrb.Layout.compact(), 3)
        args = OPS[name].arguments(source).values()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="autocast"):
            OPS[name].get("native")(*args)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_c_plus_plus_cannot_differentiate_is_not_wrong_in_silence() -> None:
    layers = [MoE(16, 8, 4, 2), MoE(16, 8, 4, 2, impl="staged", plan_impl="argsort")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(5, 16)

    def loss(layer: MoE, parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    # torch.func and forward mode see through torch's operations alone, and are given those
    slopes, tangents = [], []
    for layer in layers:
        parameters = dict(layer.named_parameters())
        slopes.append(torch.func.grad(lambda p, layer=layer: loss(layer, p))(parameters))
        with forward_ad.dual_level():
            y_TD, _ = layer(forward_ad.make_dual(x, x))
            tangents.append(forward_ad.unpack_dual(y_TD).tangent)
    for name, slope in slopes[1].items():
        torch.testing.assert_close(slopes[0][name], slope)
    torch.testing.assert_close(*tangents)
    layer, w_EDG = layers[0], layers[0].experts.w_in_EDG
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(layer(x)[0].square().sum(), w_EDG, create_graph=True)


def test_a_table_by_size_is_followed_by_a_layer_built_once(anew) -> None:
    few = Preference(machines=MACHINES, order=("eager_loop",), evidence="few.txt", most_elements=4 * 12)
    prefer(anew, "expert_ffn", few, Preference(machines=MACHINES, order=("staged",), evidence="many.txt"))
    layer = MoE(12, 8, 5, 2)
    seen: list[str] = []
    for spec in ("eager_loop", "staged"):
        found = FFN.get(spec)

        def run(*args: Any, found: Any = found) -> Tensor:
            seen.append(found.name)
            return found.run(*args)

        anew.setattr(FFN._ready, spec, replace(found, run=run))
    for T in (1, 4, 5, 64, 2):
        layer(torch.randn(T, 12))
    assert seen == ["eager_loop", "eager_loop", "staged", "staged", "eager_loop"]
    said = layer.implementation
    assert "expert_ffn.eager_loop up to T=4 (auto" in said and "few.txt" in said
    assert "grouped_gemm=expert_loop) from T=5 (auto" in said and "many.txt" in said


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("B", [1, 4, 16, 32])
def test_decoding_many_sequences_is_still_decoding(B: int, dtype: torch.dtype) -> None:
    """torch's own sharing of keys took 17 times as long as folded queries."""

    def picked(N: int, H: int = 32, J: int = 8) -> str:
        q, k, v = (torch.empty(B, heads, n, 128, dtype=dtype) for heads, n in ((H, N), (J, 64), (J, 64)))
        return choose(OPS["attention"], (q.requires_grad_(), k, v, True, 0, None)).implementation.name

    assert picked(1) == "sdpa_folded" and picked(64) == "sdpa"  # with gradients
    with torch.no_grad():
        assert picked(1) == "native"
        assert picked(1, H=64, J=4) == "sdpa_folded"  # native would pack the keys for 16 queries


def test_a_row_is_for_its_dtype_and_for_gradients_or_none(anew) -> None:
    def row(spec: str, **conditions: Any) -> Preference:
        return Preference(machines=MACHINES, order=(spec,), evidence="x.txt", **conditions)

    wide = row("dense_all_experts", dtype=torch.float64)
    trained = row("eager_loop", gradients=True, most_rows=1.0)
    prefer(anew, "expert_ffn", wide, trained, row("staged"))
    layer = MoE(12, 8, 5, 2)

    def name(T: int) -> str:
        return choose(FFN, arguments(layer, T)).implementation.name

    assert (name(2), name(3)) == ("eager_loop", "staged")  # 4 and 6 pairs of 5 experts
    with torch.no_grad():
        assert name(2) == "staged"
    assert "eager_loop up to T=2 (auto" in layer.implementation
    layer.requires_grad_(False)
    assert name(2) == "staged"
    assert layer.double() and name(2) == "dense_all_experts"


MAX_CALLS = 13  # of Python functions; there were 16 to 27 when choosing took 5 to 13 us


@needs_compiler
@pytest.mark.parametrize(
    "name", ["topk", "make_plan", "dispatch", "grouped_gemm", "combine", "expert_ffn", "expert_ffn frozen"]
)
def test_choosing_takes_few_calls_and_reads_no_environment(name: str, anew) -> None:
    op, layer = OPS[name.removesuffix(" frozen")], MoE(16, 8, 4, 2)
    if name.endswith(" frozen"):
        layer.freeze()
    args = tuple(op.arguments(StandIns(layer.experts.weights(), 2, layer.layout, 3)).values())
    part = resolve(op, "auto", layer.experts.weights)
    part.choice(*args)
    called: list[str] = []
    sys.setprofile(
        lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None
    )
    try:
        part.choice(*args)
    finally:
        sys.setprofile(None)
    assert len(called) <= MAX_CALLS, called
    assert not [name for name in called if "Environ" in name]


def test_the_first_that_can_run_does_and_the_default_is_last(anew) -> None:
    order = ("staged(grouped_gemm=padded_bmm)", "staged(grouped_gemm=block_sparse)")
    prefer(anew, "expert_ffn", Preference(machines=MACHINES, order=order, evidence="x.txt"))
    blocks = choose(FFN, arguments(MoE(12, 8, 5, 2, layout="block(4)"), 3))
    assert "block_sparse" in blocks.implementation.label and blocks.warning is None
    assert "x.txt; staged(grouped_gemm=padded_bmm) cannot run: grouped_gemm.padded_bmm: it" in blocks.why
    compact = choose(FFN, arguments(MoE(12, 8, 5, 2), 3))
    assert compact.implementation.label == FFN.get("staged").label
    assert compact.why.startswith("the default of expert_ffn (decisions are off); staged(")
    prefer(anew, "expert_ffn")
    anew.setattr(auto, "_state", auto._State())
    assert choose(FFN, arguments(MoE(12, 8, 5, 2), 3)).why.startswith("the default")


def test_nothing_is_ranked_twice(anew) -> None:
    asked: list[str] = []
    rank = auto._rank
    anew.setattr(auto, "_rank", lambda op, *rest: asked.append(op.name) or rank(op, *rest))
    layers = [MoE(12, 8, 5, 2), MoE(16, 8, 4, 1)]
    for T in range(20):
        for layer in layers:
            layer(torch.randn(T, layer.D))
    assert sorted(asked) == ["expert_ffn", "make_plan", "topk"]


def test_what_is_named_runs_or_raises() -> None:
    layer = MoE(12, 8, 5, 2, impl="staged", plan_impl="counting")
    parts = "combine=gather_sum,dispatch=index_select,grouped_gemm=expert_loop"
    assert layer.implementation == f"make_plan.counting + expert_ffn.staged({parts})"
    assert "make_plan=counting" in repr(layer) and parts in repr(layer)
    with pytest.raises(NotImplementedError, match=r"^expert_ffn\.staged\(.*padded"):
        MoE(12, 8, 5, 2, impl="staged(grouped_gemm=padded_bmm)")(torch.randn(2, 12))
    with pytest.raises(ValueError, match="implementation 'auto'"):
        MoE(12, 8, 5, 2, impl="staged(grouped_gemm=auto)")
    # what a benchmark does: one layer, other implementations on the same weights
    other = copy.copy(MoE(12, 8, 5, 2))
    other.expert_ffn, other.make_plan = FFN.get("eager_loop"), PLAN.get("argsort")
    other(torch.randn(2, 12))
    assert other.implementation == "make_plan.argsort + expert_ffn.eager_loop"


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("flags", [[], ["--train"], ["--dtype", "float64"], ["--layout", "block(64)"]])
@pytest.mark.parametrize("op", ["expert_ffn", "make_plan"])
def test_explain_shows_what_a_layer_runs(op: str, flags: list[str], tokens: int, anew) -> None:
    few = Preference(machines=MACHINES, order=("counting",), evidence="few.txt", most_elements=16 * 2)
    prefer(anew, "make_plan", few, *preferences(PLAN, machine_of(CPU)))
    sizes = ["--width", "32", "--hidden", "16", "--experts", "8", "--choices", "2", "--tokens", str(tokens)]
    ran = CliRunner().invoke(app, ["explain", op, *sizes, "--json", *flags])
    document = json.loads(ran.stdout)
    layer = MoE(
        32, 16, 8, 2, dtype=torch.float64 if "float64" in flags else torch.bfloat16,
        layout="block(64)" if "block(64)" in flags else "compact",
    )  # fmt: skip
    source = StandIns(layer.experts.weights(), 2, layer.layout, tokens)
    part: Any = layer.expert_ffn if op == "expert_ffn" else layer.make_plan
    choice = part.choice(*OPS[op].arguments(source).values())
    assert document["chosen"]["implementation"] == choice.implementation.label
    assert document["why_chosen"] == choice.why and document["chosen"]["answer"] == "could run"
    assert (choice.implementation.label == "counting") == (op == "make_plan" and tokens <= 16)


def test_a_compiled_layer_holds_the_choice(anew) -> None:
    few = Preference(machines=MACHINES, order=("dense_all_experts",), evidence="few.txt", most_rows=8 * 2 / 5)
    many = Preference(machines=MACHINES, order=("native", "dense_all_experts"), evidence="many.txt")
    prefer(anew, "expert_ffn", few, many)
    layer = MoE(12, 8, 5, 2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    try:
        for T in (6, 20):
            x = torch.randn(T, 12)
            torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    finally:
        torch._dynamo.reset()


# ---- compiling, and what it needs


@pytest.mark.parametrize(("tool", "command"), [("g++", "apt install g++"), ("ninja", "pip install ninja")])
def test_a_missing_tool_is_said_once_with_the_command(anew, tool: str, command: str) -> None:
    pretend(anew, "avx2")
    lacking(anew, tool)
    layer, x = MoE(12, 8, 5, 2), torch.randn(3, 12)
    with pytest.warns(UserWarning, match=r'impl="auto" would run compiled C\+\+ here') as told:
        layer(x)
    assert [command in str(one.message) for one in told] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        MoE(12, 8, 5, 2)(x)
        assert command in layer.implementation and "preferred on plain" in layer.implementation
        assert command in choose(FFN, arguments(layer, 3)).why
    assert command in CliRunner().invoke(app, ["explain", "expert_ffn"]).stdout


def test_nothing_is_said_where_no_tool_would_help(anew) -> None:
    lacking(anew, "g++")
    x = torch.randn(3, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(OPS["score_topk"], "auto")(x, None, 2, ScoreRule())  # it has no kernel in C++
        MoE(12, 8, 5, 2, impl="staged", plan_impl="argsort", router_options={"topk": "sort"})(x)
        assert choose(FFN, arguments(MoE(12, 8, 5, 2, device="meta"), 3)).warning is None
        pretend(anew, "asimd")
        MoE(12, 8, 5, 2)(x)


TINY = 'extern "C" int answer() { return 42; }\n'


def tiny(folder: Path, text: str) -> Path:
    source = folder / "an_op" / "native.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(text)
    return source


@needs_compiler
def test_compiling_is_said_once_with_its_seconds(anew, tmp_path: Path, capfd) -> None:
    anew.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    source = tiny(tmp_path, TINY)
    for _ in range(2):
        assert cpp.load(source, "avx2").answer() == 42
    cpp._load.cache_clear()
    assert cpp.load(source, "avx2").answer() == 42
    said = capfd.readouterr().err
    assert re.fullmatch(r"moe_routing_bench: compiling an_op/native.cpp for avx2, once: \d+ s\n", said)
    cpp._load.cache_clear()


@needs_compiler
def test_a_file_that_does_not_compile_is_said_and_tried_once(anew, tmp_path: Path, capfd) -> None:
    anew.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    source = tiny(tmp_path, "this is no C++\n")
    for _ in range(3):
        with pytest.raises(NotImplementedError, match=r"it did not compile here: ."):
            cpp.load(source, "avx2")
    said = capfd.readouterr().err
    assert re.fullmatch(r"moe_routing_bench: compiling an_op/native.cpp .* once: \d+ s, failed\n", said)
    cpp._load.cache_clear()


def test_pick_says_what_auto_would_say(anew) -> None:
    pretend(anew, "avx2")
    lacking(anew, "ninja")
    layer = MoE(12, 8, 5, 2)
    with pytest.warns(UserWarning, match="pip install ninja"):
        assert pick(FFN, "auto", arguments(layer, 3)).implementation.name == "staged"
