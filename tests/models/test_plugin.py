"""The plug-in for Transformers gives what the models' own experts give, notices changed weights, says what
runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.integrations.moe import use_experts_implementation

import moe_routing_bench.models.transformers as plugin
from changing_weights import WAYS, outcome
from moe_routing_bench import use_decisions
from moe_routing_bench.core import cpp
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.models.convert import convert, revert
from moe_routing_bench.models.reading import experts_modules, read
from moe_routing_bench.ops.decisions import SCHEMA, VERSION
from moe_routing_bench.ops.registry import get_op
from tiny_layers import needs_compiler
from tiny_models import MODELS, choices, close, gradients, make, tokens

pytestmark = pytest.mark.slow

OURS = "moe_routing_bench"


@pytest.mark.parametrize("impl", [OURS, f"{OURS}:staged"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_those_of_eager(name: str, impl: str) -> None:
    model, ids = make(name), tokens()
    logits, gradient = gradients(model, ids)
    model.set_experts_implementation(impl)
    ours, our_gradient = gradients(model, ids)
    close(ours, logits)
    assert our_gradient.keys() == gradient.keys()
    for path in gradient:
        close(our_gradient[path], gradient[path])
    with torch.no_grad():
        close(model(ids).logits, logits)  # without gradients other kernels run
    # the experts matter: without them the logits are others
    for _, module in experts_modules(model):
        module.down_proj.data.zero_()
    with torch.no_grad():
        assert (model(ids).logits - logits).abs().max() > 0.01 * logits.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_precise_as_eager(name: str) -> None:
    """Judged on texts for which float64 and bfloat16 choose the same experts: rounding may choose others."""
    exact, model = make(name).bfloat16().double(), make(name).bfloat16()
    compared: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    texts = 0
    for seed in range(60):
        ids = tokens(1, 4, seed)
        model.set_experts_implementation("eager")
        true_choices, plain_choices = choices(exact, ids), choices(model, ids)
        model.set_experts_implementation(OURS)
        if not all(map(same, true_choices, plain_choices, choices(model, ids))):
            continue
        (ours, our_gradient), (oracle, true_gradient) = gradients(model, ids), gradients(exact, ids)
        with torch.no_grad():
            without = model(ids).logits
        model.set_experts_implementation("eager")
        plain, plain_gradient = gradients(model, ids)
        compared.setdefault("logits", []).append((ours, oracle, plain))
        compared.setdefault("logits without gradients", []).append((without, oracle, plain))
        for path in true_gradient:
            numbers = our_gradient[path], true_gradient[path], plain_gradient[path]
            compared.setdefault(path, []).append(numbers)
        texts += 1
        if texts == 6:
            break
    assert texts == 6
    for what, numbers in compared.items():
        verdict = judge(*(torch.stack(each) for each in zip(*numbers, strict=True)))
        assert verdict.passed, f"{what}: {verdict.sentence}"


def same(*tensors: Tensor) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model, ids = make(name), tokens(1, 5)
    given = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **given)
    model.set_experts_implementation(OURS)
    assert torch.equal(model.generate(ids, **given), expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=f"{OURS}:staged")
    assert again.config._experts_implementation == f"{OURS}:staged"
    assert torch.equal(again.generate(ids, **given), expected)


def test_names() -> None:
    model = make("qwen3_moe")
    model.set_experts_implementation(f"{OURS}:native(store=int8)")
    with pytest.raises(ValueError, match="not supported"):
        model.set_experts_implementation(f"{OURS}:staged(combine=index_add,dispatch=one_hot_matmul)")
    name = plugin.register("staged(combine=index_add,dispatch=one_hot_matmul)")
    model.set_experts_implementation(name)
    model(tokens())
    with pytest.raises(ValueError, match=r"'natvie'.*'native'"):
        plugin.register("natvie")


@needs_compiler
def test_what_runs_is_said() -> None:
    model = make("gpt_oss")
    model.set_experts_implementation(OURS)
    assert "columns alternate" in str(plugin.implementations(model))
    plugin.freeze(model)
    rows = plugin.implementations(model)
    assert [one.module for one in rows] == [path for path, _ in experts_modules(model)] and len(rows) == 2
    assert rows[0].implementation == "native"
    assert "swiglu_oai" in str(rows) and "packed once" in str(rows)
    model = make("qwen3_moe").double()
    model.set_experts_implementation(OURS)
    assert plugin.implementations(model)[0].implementation.startswith("staged(")
    assert "native cannot run" in str(plugin.implementations(model))
    model.set_experts_implementation("eager")
    assert plugin.implementations(model)[0].implementation == "eager"
    own = make("gelu_tanh")
    own.set_experts_implementation(OURS)
    assert "own function" in str(plugin.implementations(own))
    assert "GELUTanh" in str(plugin.implementations(own))


@needs_compiler
def test_a_named_implementation_that_cannot_run_says_why() -> None:
    model = make("qwen3_moe").double()
    model.set_experts_implementation(f"{OURS}:native")
    with pytest.raises(NotImplementedError, match="float64"), torch.no_grad():
        model(tokens())
    assert plugin.implementations(model)[0].implementation == "none"
    own = make("gelu_tanh")
    own.set_experts_implementation(f"{OURS}:eager_loop")
    with pytest.raises(NotImplementedError, match="does not know"), torch.no_grad():
        own(tokens())


def test_measured_decisions_are_followed(decided: Callable[..., Path]) -> None:
    model = make("qwen3_moe")
    model.set_experts_implementation(OURS)
    use_decisions(decided("eager_loop"))
    try:
        assert plugin.implementations(model, tokens=14)[0].implementation == "eager_loop"
        assert "measured winner" in str(plugin.implementations(model, tokens=14))
        want = gradients(make("qwen3_moe"), tokens())[0]
        with torch.no_grad():
            close(model(tokens()).logits, want)
    finally:
        use_decisions(None)


@pytest.fixture
def decided(tmp_path: Path) -> Callable[..., Path]:
    def write(impl: str) -> Path:
        entry = {
            "op": "expert_ffn", "D": 32, "F": 24, "E": 8, "K": 2, "dtype": "float32", "layout": "compact",
            "activation": "swiglu", "workload": "uniform", "load": "even", "overall": impl, "threads": 1,
            "regret_median": 0.0, "regret_worst": 0.0,
            "by_tokens": [
                {
                    "T": T, "impl": impl, "ties": [], "ratio": 0.9, "low": 0.8, "high": 0.95,
                    "source": get_op("expert_ffn").source_hash(impl),
                }
                for T in (1, 4096)
            ],
        }  # fmt: skip
        here = this_machine()
        document = {
            "schema": SCHEMA, "version": VERSION, "machine": here.name, "torch": here.torch,
            "made_at": "2026-11-14T10:00:00Z", "from": "results/test", "entries": [entry],
        }  # fmt: skip
        path = tmp_path / "decisions.json"
        path.write_text(json.dumps(document))
        return path

    return write


def experts_of(name: str) -> Any:
    return next(module for _, module in experts_modules(make(name)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h", "gelu_tanh"])
def test_ids_past_the_experts_add_exactly_nothing(name: str, grad: bool) -> None:
    module = experts_of(name)
    x = torch.randn(5, 32, requires_grad=grad)
    ids = torch.tensor([[0, 8], [8, 3], [8, 8], [2, 11], [5, 1]])
    there = ids < 8
    gates = torch.where(there, torch.rand(5, 2), torch.nan).requires_grad_(grad)
    d_y = torch.randn(5, 32)

    def run(ids: Tensor, gates: Tensor, impl: str) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(grad):
            y = plugin.experts_forward(module, x, ids, gates, impl=impl)
            wanted = [x, gates, *module.parameters()]
            return (y, *(torch.autograd.grad(y, wanted, d_y) if grad else ()))

    for impl in ("native", "staged"):
        if impl == "native" and cpp.why_not():
            continue
        y, *gradient = run(ids, gates, impl)
        assert torch.equal(y[2], torch.zeros(32))
        assert all(one.isfinite().all() for one in (y, *gradient))
        # the same with the absent pairs given to an expert at gate 0
        zero = torch.where(there, gates, 0.0).detach().requires_grad_(grad)
        want, *expected = run(torch.where(there, ids, (ids[:, :1] + 4) % 8), zero, impl)
        close(y, want)
        for i, (got, true) in enumerate(zip(gradient, expected, strict=True)):
            close(got, torch.where(there, true, 0.0) if i == 1 else true)


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_changed_weights_are_noticed(name: str) -> None:
    module, other = experts_of(name), make(name, seed=1)
    x, ids, gates = torch.randn(4, 32), torch.randint(8, (4, 1)), torch.ones(4, 1)

    def check(what: str) -> None:
        with torch.no_grad():
            got = plugin.experts_forward(module, x.to(module.down_proj.dtype), ids, gates, impl="native")
            module.config._experts_implementation = "eager"
            want = module(x.to(module.down_proj.dtype), ids, gates.to(module.down_proj.dtype))
            wide = got.dtype == torch.bfloat16
            torch.testing.assert_close(
                got, want, rtol=3e-2 if wide else 1e-4, atol=3e-2 if wide else 1e-4, msg=what
            )

    check("at first")
    module.load_state_dict(next(m for _, m in experts_modules(other)).state_dict())
    check("load_state_dict")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    plugin.experts_forward(module, x, ids, gates).square().mean().backward()
    optimizer.step()
    check("optimizer step")
    for parameter in module.parameters():
        parameter.data.mul_(-1.5)
    check("a write through .data")
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) / 6
    check("other memory")
    module.bfloat16()
    check("another dtype")
    module.float()
    check("and back")
    with torch.inference_mode():
        got = plugin.experts_forward(module, x, ids, gates, impl="native")
    close(got, plugin.experts_forward(module, x, ids, gates, impl="staged").detach())


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_model_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model, ids = make(name), tokens(1, 5)
    given = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **given)
    values = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    plugin.freeze(model)
    assert torch.equal(model.generate(ids, **given), expected)
    model(ids)  # nothing requires gradients, so this needs no torch.no_grad()
    own = name == "gelu_tanh"  # its activation has no name with us, so nothing was packed
    assert all(isinstance(m.down_proj, Frozen) != own for _, m in experts_modules(model))
    assert own or "packed once" in str(plugin.implementations(model))
    assert all(torch.equal(p.clone(), values[path]) for path, p in model.named_parameters())
    if not own:
        with pytest.raises(RuntimeError, match="frozen"):
            model.save_pretrained(tmp_path)
        model.set_experts_implementation("grouped_mm")
        with pytest.raises(RuntimeError, match="frozen"):
            model(ids)
    plugin.thaw(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    plugin.freeze(again)
    assert torch.equal(again.generate(ids, **given), expected)


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_are_right_or_raise(way: str, name: str) -> None:
    x, ids, gates = torch.randn(40, 32), torch.randint(8, (40, 1)), torch.ones(40, 1)
    results = {}
    for case, impl in (("plain", OURS), ("frozen", OURS), ("eager", "eager")):
        model = make(name)
        model.set_experts_implementation(impl)
        module = next(module for _, module in experts_modules(model))

        def run(module: Any = module) -> Tensor:
            return module(x, ids, gates)

        freeze = partial(plugin.freeze, model) if case == "frozen" else None
        with torch.no_grad():
            said = outcome(WAYS[way], module, "gate_up_proj", run, freeze)
            results[case] = said, run() if said == "right" else None
    assert results["plain"][0] == results["eager"][0] == "right"
    assert results["frozen"][0] != "no change"
    for case in ("plain", "frozen"):
        if results[case][0] == "right":
            close(results[case][1], results["eager"][1])


@needs_compiler
def test_frozen_models_may_be_rounded_and_converted_ones_frozen() -> None:
    model, ids = make("qwen3_moe"), tokens()
    want = model(ids).logits.detach()
    named = copy.deepcopy(model)
    frozen = plugin.freeze(model, "int8")
    assert 0 < (model(ids).logits - want).abs().max() < 0.1 * want.abs().max()
    assert frozen == plugin.freeze(named, "native(store=int8)") and frozen.label == "native(store=int8)"
    assert torch.equal(named(ids).logits, model(ids).logits)
    experts = [p for p in model.parameters() if isinstance(p, Frozen)]
    assert frozen.after == sum(p.panels.nbytes for p in experts) and 0 < frozen.error < 0.05
    assert plugin.freeze(model) == frozen  # again is nothing new
    with pytest.raises(NotImplementedError, match="int8"):
        plugin.freeze(model, "int4_g32")
    with pytest.raises(ValueError, match=r"int8_g128.*q4_k"):
        plugin.freeze(make("qwen3_moe"), "int5")
    model = make("qwen3_moe")
    convert(model)
    plugin.freeze(model)
    close(model(ids).logits, want)
    assert any(isinstance(parameter, Frozen) for parameter in model.parameters())
    revert(model)
    close(model(ids).logits, want)
    convert(model)
    assert plugin.freeze(model, "int8") == frozen


@needs_compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_does_not_round_its_weights_in_every_call(compiled: bool) -> None:
    model, ids = make("qwen3_moe"), tokens()
    model.set_experts_implementation(f"{OURS}:native(store=int8)")
    row = plugin.implementations(model)[0]
    assert row.implementation == "none" and "freeze" in row.why
    forward = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad(), pytest.raises(NotImplementedError, match="freeze"):
        forward(ids)
    plugin.freeze(model, "int8")
    assert plugin.implementations(model)[0].implementation == "native(store=int8)"
    with torch.no_grad():
        model(ids)


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "converted"])
def test_a_frozen_model_is_packed_once_for_all_processes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, logits, said = tokens(), [], []
    original = make("qwen3_moe" if name == "converted" else name)
    for keep_packed in (False, tmp_path, tmp_path):
        model = copy.deepcopy(original)
        if name == "converted":
            convert(model, impl="native(store=int8_g32)")
        plugin.freeze(model, "native(store=int8_g32)", keep_packed=keep_packed)
        logits.append(model(ids).logits)
        said.append(capsys.readouterr().err)
        if keep_packed:
            monkeypatch.setattr("moe_routing_bench.ops.coded.pack", None)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    files = list(tmp_path.iterdir())
    assert len(files) == sum(isinstance(parameter, Frozen) for parameter in model.parameters()) > 0
    assert not said[0] and "0 GB mapped" in said[1] and "0 GB written" in said[2]
    assert str(tmp_path) in said[1]


@needs_compiler
def test_gpt_oss_runs_in_the_bits_it_was_published_in() -> None:
    """On a CPU Transformers makes bfloat16 of MXFP4 when it loads a model; freezing brings back its codes."""
    model, ids = make("gpt_oss"), tokens()
    for _, module in experts_modules(model):
        for name in ("gate_up_proj", "down_proj"):  # experts x depth x columns
            published = quantise(getattr(module, name), "mxfp4").decoded().weights(torch.bfloat16)
            getattr(module, name).data.copy_(published)
    want = model(ids).logits.detach()
    rounded = copy.deepcopy(model)
    plugin.freeze(model, "native(store=mxfp4)")
    close(model(ids).logits, want)
    plugin.freeze(rounded, "native(store=mxfp4_a8)")
    assert 0 < (rounded(ids).logits - want).abs().max() < 0.1 * want.abs().max()


@pytest.mark.parametrize("impl", ["auto", "staged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_in_the_dtype_of_the_weights(dtype: torch.dtype, impl: str) -> None:
    module = experts_of("qwen3_moe").to(dtype)
    x, ids, gates = torch.randn(4, 32), torch.randint(8, (4, 2)), torch.rand(4, 2)
    want = plugin.experts_forward(module, x.to(dtype), ids, gates, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        got = plugin.experts_forward(module, x, ids, gates, impl=impl)
        rounded = plugin.experts_forward(module, x, ids, gates.bfloat16(), impl=impl)
    assert got.dtype == rounded.dtype == torch.float32
    assert torch.equal(got, want.float())
    torch.testing.assert_close(rounded, got, rtol=2e-2, atol=2e-2)


@use_experts_implementation(has_post_expert_norm=True)
class NormedExperts(nn.Module):
    """As in muse_spark: an expert's output is normalised before the gates."""

    def __init__(self, config: Any):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))
        self.act_fn = nn.SiLU()
        self.post_expert_norm = nn.LayerNorm(8)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for t, k in torch.cartesian_prod(torch.arange(len(y)), torch.arange(top_k_index.shape[1])).tolist():
            if (e := int(top_k_index[t, k])) < 4:
                gate, up = (self.gate_up_proj[e] @ hidden_states[t]).chunk(2)
                y_D = self.post_expert_norm(self.down_proj[e] @ (self.act_fn(gate) * up))
                y[t] = y[t] + top_k_weights[t, k] * y_D
        return y


@pytest.mark.parametrize("impl", ["auto", "staged"])
def test_a_norm_after_the_experts(impl: str) -> None:
    class Config:
        _experts_implementation = "eager"

    module = NormedExperts(Config())
    x, ids = torch.randn(5, 8), torch.tensor([[0, 1], [3, 4], [2, 0], [4, 4], [1, 3]])
    gates = torch.rand(5, 2)
    want = module(x, ids, gates)
    got = plugin.experts_forward(module, x, ids, gates, impl=impl)
    close(got, want)
    for ours, true in zip(
        torch.autograd.grad(got.square().sum(), list(module.parameters())),
        torch.autograd.grad(want.square().sum(), list(module.parameters())),
        strict=True,
    ):
        close(ours, true)
    assert "normalises" in read(module).why


def test_gates_of_other_strength_are_not_mistaken_for_gpt_oss() -> None:
    module = experts_of("gpt_oss")
    assert read(module).activation == "swiglu_oai" and read(module).interleaved
    module.limit = 2.0
    assert read(module).activation is None and "2.0" in read(module).why
    x, ids, gates = torch.randn(4, 32) * 9, torch.randint(8, (4, 2)), torch.rand(4, 2)
    module.config._experts_implementation = "eager"
    close(plugin.experts_forward(module, x, ids, gates).detach(), module(x, ids, gates).detach())
    changed = experts_of("qwen3_moe")
    changed._apply_gate = lambda h: h[..., :24]
    assert read(changed).activation is None


@needs_compiler
def test_gpt_oss_is_clamped_alike() -> None:
    module = experts_of("gpt_oss")
    x, ids, gates = torch.randn(6, 32) * 20, torch.randint(8, (6, 2)), torch.rand(6, 2)
    module.config._experts_implementation = "eager"
    with torch.no_grad():
        want = module(x, ids, gates)
        for impl in ("native", "native(level=avx2)", "staged"):
            close(plugin.experts_forward(module, x, ids, gates, impl=impl), want)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own, in dynamo
def test_compiled(name: str) -> None:
    module = experts_of(name)
    x, gates = torch.randn(4, 32, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    chosen = torch.rand(4, 8).argsort(-1)[:, :2]
    module.config._experts_implementation = OURS
    leaves = [x, gates, *module.parameters()]
    want = module(x, chosen, gates)
    true = torch.autograd.grad(want.square().sum(), leaves)
    whole = torch.compile(copy.copy(module), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(whole(x, chosen, gates), want)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients"):
        whole(x, chosen, gates)
    torch._dynamo.reset()
    broken = torch.compile(copy.copy(module), backend="aot_eager")
    for got, expected in zip(
        torch.autograd.grad(broken(x, chosen, gates).square().sum(), leaves), true, strict=True
    ):
        close(got, expected)
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_compiled_and_frozen(name: str) -> None:
    model, other = make(name), make(name, seed=1)
    args = torch.randn(4, 32), torch.rand(4, 8).argsort(-1)[:, :2], torch.rand(4, 2)
    plugin.freeze(model)
    plugin.freeze(other)
    module, another = (next(m for _, m in experts_modules(one)) for one in (model, other))
    torch._dynamo.reset()
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = module(*args)
        assert torch.equal(whole(*args), want)
        for path, parameter in another.named_parameters():
            setattr(module, path, parameter)
        assert not torch.equal(another(*args), want)
        assert torch.equal(whole(*args), another(*args))
        plugin.thaw(model)
        module.down_proj.data[:, 3] *= -2
        close(whole(*args), module(*args))
        assert not torch.allclose(module(*args), another(*args))
    torch._dynamo.reset()


def test_one_graph_serves_no_layer_of_another_kind() -> None:
    """torch.compile shares graphs between modules of a class; what was read must be guarded."""
    x, gates = torch.randn(4, 32), torch.rand(4, 2)
    chosen = torch.rand(4, 8).argsort(-1)[:, :2]
    changes = {
        "qwen3_moe": [
            {},
            {"act_fn": nn.GELU()},
            {"act_fn": nn.ReLU()},
            {"_apply_gate": lambda h: h[..., :24]},
        ],
        "gpt_oss": [{}, {"limit": 0.5}],
    }
    for name, variants in changes.items():
        torch._dynamo.reset()
        compiled = torch.compile(lambda module, *args: module(*args), backend="aot_eager")
        for variant in variants:
            module = experts_of(name)
            for attribute, value in variant.items():
                setattr(module, attribute, value)
            with torch.no_grad():
                module.config._experts_implementation = "grouped_mm"
                want = module(x, chosen, gates)
                module.config._experts_implementation = OURS
                close(compiled(module, x, chosen, gates), want)
    torch._dynamo.reset()


def test_a_function_of_the_models_own_breaks_the_graph_and_says_so() -> None:
    module = experts_of("gelu_tanh")
    module.config._experts_implementation = OURS
    args = (torch.randn(4, 32), torch.rand(4, 8).argsort(-1)[:, :2], torch.rand(4, 2))
    with torch.no_grad():
        close(torch.compile(module, backend="aot_eager")(*args), module(*args))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="own activation"):
            torch.compile(module, fullgraph=True, backend="aot_eager")(*args)
    torch._dynamo.reset()
