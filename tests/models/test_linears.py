"""plugin.freeze(linears=True): the dense matrices of a Transformers model, its routers left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import moe_routing_bench.models.transformers as plugin
from moe_routing_bench import all_ops
from moe_routing_bench.core.frozen import Freezing, Frozen
from moe_routing_bench.models.linears import FrozenLinear, freeze_linears, linear_for
from tiny_layers import needs_compiler
from tiny_models import close, make, tokens

pytestmark = [pytest.mark.slow, needs_compiler]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def frozen(model: Any, impl: str = "auto") -> Freezing:
    found = plugin.freeze(model, impl, linears=True)
    assert found is not None
    return found


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(tokens()).logits
    return result


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_logits_are_those_of_the_stored_weights(name: str) -> None:
    model = make(name)
    plain = copy.deepcopy(model)
    others = {
        path: value.clone()
        for path, value in model.state_dict().items()
        if "gate.weight" in path or "router" in path
    }
    stored = all_ops()["linear"].get("native(store=int8_g32)").stored
    assert stored is not None
    for module in linears(plain).values():
        module.weight.data.copy_(stored(module.weight))
    plugin.freeze(plain, "int8_g32")
    found = frozen(model, "int8_g32")
    assert not found.left
    paths = linears(model)
    assert len(paths) >= 9 and all(isinstance(one.weight, Frozen) for one in paths.values())
    assert paths.keys() <= found.layers.keys() and found.layers["lm_head"].label == "native(store=int8_g32)"
    assert found.after == sum(one.after or 0 for one in found.layers.values())
    assert found.before == sum(one.before for one in found.layers.values())
    assert all(torch.equal(model.state_dict()[path], value) for path, value in others.items()) and others
    close(logits(model), logits(plain))
    with pytest.raises(NotImplementedError, match="int8_g32"):
        plugin.thaw(model)


def greedy(model: Any) -> tuple[list[int], list[bool]]:
    """The tokens, and for each whether the best is better than the next by more than bfloat16 may round."""
    ids = tokens(1, 5)
    out = model.generate(
        ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids), output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    best = [step[0].float().topk(2).values.tolist() for step in out.logits]
    size = max(float(step.abs().max()) for step in out.logits)
    return out.sequences[0, 5:].tolist(), [high - low > 0.02 * size for high, low in best]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_freezing_in_bfloat16_loses_nothing(name: str) -> None:
    model = make(name).bfloat16()
    wanted, sure = greedy(model)
    some = sure.index(False) if False in sure else len(sure)
    assert some >= 2

    def same(model: Any) -> bool:
        return greedy(model)[0][:some] == wanted[:some]

    values = {path: value.detach().clone() for path, value in model.named_parameters()}
    plugin.freeze(model)
    assert same(model)
    found = frozen(model)
    assert found.error == 0 and "no weight was rounded" in str(found) and "lm_head: native" in str(found)
    assert same(model) and same(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match="frozen"):
        model.lm_head.weight.data.zero_()
    plugin.thaw(model)
    assert all(torch.equal(value, values[path]) for path, value in model.named_parameters())
    assert {type(module) for module in linears(model).values()} == {nn.Linear}
    assert same(model)


def test_a_tied_head_gets_weights_of_its_own() -> None:
    model = make("qwen3_moe", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight
    assert model.lm_head.weight is embedding
    want = logits(model)
    found = frozen(model, "native")
    assert model.model.embed_tokens.weight is embedding and not isinstance(embedding, Frozen)
    head = found.layers["lm_head"]
    assert head.before == 0 and head.after and "lm_head: native, MB 0.0" in str(found)
    close(logits(model), want)
    assert frozen(model, "native") == found  # again is nothing new
    plugin.thaw(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight is embedding
    close(logits(model), want)


def test_auto_leaves_float32_to_torch() -> None:
    model = make("qwen3_moe")
    found = frozen(model)
    assert {type(module) for module in linears(model).values()} == {nn.Linear}
    assert found.left.keys() == linears(model).keys() and "float32" in found.left["lm_head"]


def test_what_is_refused_leaves_the_model_plain(tmp_path: Any) -> None:
    model = make("qwen3_moe")
    for impl, options in (("staged", {}), ("native(level=avx2)", {}), ("auto", {"keep_packed": tmp_path})):
        with pytest.raises(NotImplementedError, match=r"linears=True"):
            plugin.freeze(model, impl, linears=True, **options)
    assert not any(isinstance(one, Frozen) for one in model.parameters())
    held = model.lm_head.weight
    with pytest.raises(RuntimeError, match="something else also uses weight"):
        plugin.freeze(model, "native", linears=True)
    assert model.lm_head.weight is held and type(model.lm_head) is nn.Linear
    with pytest.raises(NotImplementedError, match=r"q_proj.*float64"):
        freeze_linears(make("qwen3_moe").double(), linear_for("native(store=int8)"), named=True)
    left = freeze_linears(make("qwen3_moe").double(), linear_for("auto"), named=False)
    assert len(left) == 9 and "float64" in left["lm_head"]


class ToyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 48), nn.Linear(32, 32, bias=False)
        self.gate, self.shared_expert_gate = nn.Linear(32, 8), nn.Linear(32, 1)
        self.own = FrozenLinear.__bases__[0](32, 32)
        self.own.__class__ = type("Adapted", (nn.Linear,), {})


def toy(of: str = "attention") -> nn.Module:
    return nn.ModuleDict({of: ToyAttention(), "projector": nn.Linear(32, 32)})


def test_routers_and_what_is_not_known_stay_as_they_are() -> None:
    model = toy()
    left = freeze_linears(model, linear_for("native(store=int8)"), named=True)
    assert left == {
        "attention.gate": "it is a router or a gate",
        "attention.shared_expert_gate": "it is a router or a gate",
        "attention.own": "it is a Adapted",
        "projector": "it is not of attention, a feed-forward network or lm_head of the text decoder",
    }
    assert len(freeze_linears(toy("vision_tower"), linear_for("auto"), named=False)) == 6


@pytest.mark.parametrize("store", ["int8", "int4_g32", "int8_a8"])
def test_the_expected_error_is_that_of_results(store: str) -> None:
    torch.manual_seed(0)
    model, x = toy(), torch.randn(64, 32)
    module: Any = model.get_submodule("attention.o_proj")
    with torch.no_grad():
        want = module(x)
    freeze_linears(model, linear_for(f"native(store={store})"), named=True)
    error = float((module(x) - want).square().mean().sqrt() / want.square().mean().sqrt())
    expected = module.weight.panels.error
    if store.endswith("_a8"):
        assert error < expected < 5 * error
    else:
        assert 0.8 * expected < error < 1.25 * expected


def test_compiled_and_under_autocast() -> None:
    model, x = toy(), torch.randn(2, 3, 32)
    freeze_linears(model, linear_for("native(store=int8_a8)"), named=True)
    module: Any = model.get_submodule("attention.q_proj")
    with torch.no_grad():
        want = module(x)
        assert want.shape == (2, 3, 48) and want.dtype == torch.float32
        torch._dynamo.reset()
        assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), want)
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(module(x), want)
    with pytest.raises(NotImplementedError, match="no_grad"):
        module(x.requires_grad_())
