"""Presets against the routers of Transformers: the real modules, random weights, the same x."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.published import FAMILIES, MODELS
from moe_routing_bench.moe.presets import ROUTED, load_router, router_for
from moe_routing_bench.routers.losses import hf_loss
from moe_routing_bench.routers.router import Router, all_routers

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
T, D, E, K = 300, 64, 32, 4
SIZES = {"D": D, "E": E, "K": K}

# preset, Transformers' module and class, its configuration class, what its config calls our sizes and options
PEERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3-moe": (
        "qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig",
        {"hidden_size": D, "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True},
    ),
    "qwen2-moe": (
        "qwen2_moe", "Qwen2MoeTopKRouter", "Qwen2MoeConfig",
        {"hidden_size": D, "num_experts": E, "num_experts_per_tok": K},
    ),
    "olmoe": (
        "olmoe", "OlmoeTopKRouter", "OlmoeConfig",
        {"hidden_size": D, "num_experts": E, "num_experts_per_tok": K},
    ),
    "mixtral": (
        "mixtral", "MixtralTopKRouter", "MixtralConfig",
        {"hidden_size": D, "num_local_experts": E, "num_experts_per_tok": K},
    ),
    "gpt-oss": (
        "gpt_oss", "GptOssTopKRouter", "GptOssConfig",
        {"hidden_size": D, "num_local_experts": E, "num_experts_per_tok": K},
    ),
    "granite-moe": (
        "granitemoe", "GraniteMoeTopKRouter", "GraniteMoeConfig",
        {"hidden_size": D, "num_local_experts": E, "num_experts_per_tok": K},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config",
        {"hidden_size": D, "n_routed_experts": E, "num_experts_per_tok": K, "topk_method": "greedy"},
    ),
    "deepseek-v2": (
        "deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config",
        {
            "hidden_size": D, "n_routed_experts": E, "num_experts_per_tok": K, "n_group": 8, "topk_group": 3,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config",
        {"hidden_size": D, "n_routed_experts": E, "num_experts_per_tok": K},
    ),
    "glm4-moe": (
        "glm4_moe", "Glm4MoeTopkRouter", "Glm4MoeConfig",
        {"hidden_size": D, "n_routed_experts": E, "num_experts_per_tok": K},
    ),
    "llama4": (
        "llama4", "Llama4Router", "Llama4TextConfig",
        {"hidden_size": D, "num_local_experts": E, "num_experts_per_tok": 1},
    ),
    "switch": (
        "switch_transformers", "SwitchTransformersTop1Router", "SwitchTransformersConfig",
        {"hidden_size": D, "num_experts": E, "expert_capacity": T},
    ),
}  # fmt: skip
IN_FLOAT32 = ("deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "glm4-moe")
IN_MODEL_DTYPE = ("qwen3-moe", "qwen2-moe", "olmoe", "mixtral", "gpt-oss", "granite-moe")


def peer(name: str, seed: int = 0) -> nn.Module:
    """The real router module with random weights, its biases far from 0."""
    folder, router, config, options = PEERS[name]
    home = f"transformers.models.{folder}"
    made = getattr(importlib.import_module(f"{home}.configuration_{folder}"), config)(**options)
    module = getattr(importlib.import_module(f"{home}.modeling_{folder}"), router)(made)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.ndim == 1 else 0.1)
    return module.eval()


def ours(name: str, module: nn.Module, **options: Any) -> Router:
    sizes = {**SIZES, "K": 1} if name in ("llama4", "switch") else SIZES
    return load_router(router_for(name, **sizes, **options), module).eval()


@torch.no_grad()
def theirs(name: str, module: nn.Module, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and weights as the module returns them, T x K."""
    if name == "llama4":
        score_TE, _ = module(x_TD)
        weight_TK, expert_TK = score_TE.max(1, keepdim=True)
        return expert_TK, weight_TK
    if name == "switch":
        expert_1TE, weight_1T1, _ = module(x_TD.unsqueeze(0))
        return expert_1TE[0].argmax(1, keepdim=True), weight_1T1[0]
    _, weight_TK, expert_TK = module(x_TD)
    return expert_TK, weight_TK


def by_id(expert_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
    order_TK = expert_TK.argsort(1)
    return expert_TK.gather(1, order_TK), weight_TK.gather(1, order_TK)


def agree(name: str, module: nn.Module, router: Router, x_TD: Tensor) -> None:
    expert_TK, weight_TK = theirs(name, module, x_TD)
    with torch.no_grad():
        routing = router(x_TD)
        exact = load_router(router_for(name, router.D, router.E, router.K, dtype=torch.float64), module)
        oracle = exact.eval()(x_TD.double())
    if name not in ("deepseek-v3", "glm4-moe", "deepseek-v2", "deepseek-v2-lite"):  # sorted=False there
        assert torch.equal(routing.expert_TK, expert_TK)
    (mine_TK, gate_TK), (expert_TK, weight_TK) = (
        by_id(routing.expert_TK, routing.gate_TK),
        by_id(expert_TK, weight_TK),
    )
    assert torch.equal(mine_TK, expert_TK)
    oracle_TK, exact_TK = by_id(oracle.expert_TK, oracle.gate_TK)
    assert torch.equal(oracle_TK, expert_TK)
    # the oracle is ours: were it another rule, the judge would blame the module and let everything pass
    torch.testing.assert_close(weight_TK.double(), exact_TK, rtol=1e-5, atol=1e-6)
    verdict = judge(gate_TK, exact_TK, weight_TK.float())
    assert verdict.passed, verdict.sentence


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PEERS)
def test_choices_and_weights_are_those_of_transformers(name: str, seed: int) -> None:
    module = peer(name, seed)
    agree(name, module, ours(name, module), torch.randn(T, D))


@pytest.mark.parametrize("name", PEERS)
def test_bfloat16_x_is_routed_as_its_float32_values_are(name: str) -> None:
    module = peer(name)
    x_TD = torch.randn(T, D).bfloat16()
    expert_TK, _ = theirs(name, module, x_TD.float())
    assert torch.equal(ours(name, module)(x_TD).expert_TK.sort(1).values, expert_TK.sort(1).values)


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_bfloat16_model_that_routes_in_float32(name: str) -> None:
    module, x_TD = peer(name).bfloat16(), torch.randn(T, D).bfloat16()
    expert_TK, _ = theirs(name, module, x_TD)
    router = ours(name, module)
    assert router.w_DE.dtype == torch.float32
    assert torch.equal(router(x_TD).expert_TK.sort(1).values, expert_TK.sort(1).values)


@pytest.mark.parametrize("name", IN_MODEL_DTYPE)
def test_a_bfloat16_model_that_rounds_its_logits(name: str) -> None:
    module, x_TD = peer(name).bfloat16(), torch.randn(T, D).bfloat16()
    expert_TK, weight_TK = theirs(name, module, x_TD)
    with torch.no_grad():
        routing = ours(name, module, logits_dtype=torch.bfloat16, topk="torch_topk")(x_TD)
        plain = ours(name, module)(x_TD)
    assert torch.equal(routing.expert_TK, expert_TK)
    # the modules round weights to bfloat16: half an eps of 1; gpt-oss has its softmax there too
    torch.testing.assert_close(routing.gate_TK, weight_TK.float(), rtol=0, atol=2**-8)
    # what rounding the logits costs: with 32 experts some tokens go elsewhere
    assert 0 < (plain.expert_TK.sort(1).values != expert_TK.sort(1).values).any(1).sum() < 0.2 * T


@pytest.mark.parametrize("name", PEERS)
def test_equal_logits_go_to_the_lower_id_and_transformers_says_nothing(name: str) -> None:
    module = peer(name)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.zero_()
    x_TD = torch.randn(5, D)
    router = ours(name, module)
    assert router(x_TD).expert_TK.tolist() == [list(range(router.K))] * 5
    expert_TK, weight_TK = theirs(name, module, x_TD)
    # whichever it takes, the weights are the same
    torch.testing.assert_close(router(x_TD).gate_TK, weight_TK)
    if name in IN_MODEL_DTYPE:
        same = ours(name, module, topk="torch_topk")
        assert torch.equal(same(x_TD).expert_TK, expert_TK)


def test_the_bias_of_deepseek_chooses_and_does_not_weigh() -> None:
    module = peer("deepseek-v3")
    module.e_score_correction_bias.data[:] = 0
    module.e_score_correction_bias.data[5] = 100.0
    routing = ours("deepseek-v3", module)(torch.randn(T, D))
    assert bool((routing.expert_TK == 5).any(1).all())
    assert routing.gate_TK.max() < 2.5
    torch.testing.assert_close(routing.gate_TK.sum(1), torch.full((T,), 2.5))


# losses


@pytest.mark.parametrize("masked", [False, True])
def test_hf_dialect_is_transformers_loss(masked: bool) -> None:
    theirs_of = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    logits_TE = 2 * torch.randn(24, 8)
    mask_BN = torch.arange(12) < torch.tensor([[12], [7]]) if masked else None
    expected = theirs_of.load_balancing_loss_func((logits_TE,), 8, 2, mask_BN)
    mask_T = None if mask_BN is None else mask_BN.flatten()
    score_TE, expert_TK = logits_TE.softmax(-1), logits_TE.topk(2).indices
    torch.testing.assert_close(hf_loss(score_TE, expert_TK, 8, mask_T), expected)


def test_a_preset_gives_transformers_loss_from_its_own_routing() -> None:
    theirs_of = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    module, x_TD = peer("qwen3-moe"), torch.randn(T, D)
    expected = theirs_of.load_balancing_loss_func((module(x_TD)[0],), E, K)
    routing = ours("qwen3-moe", module, loss_weights={"hf": 1.0})(x_TD)
    torch.testing.assert_close(routing.losses["hf"], expected)


# the table


def test_every_family_has_models_and_a_model_type() -> None:
    assert {model.family for model in MODELS.values()} == set(FAMILIES)
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    assert {family.model_type for family in FAMILIES.values()} <= set(known)
    assert ROUTED["qwen3-moe"].name == "qwen3-30b-a3b" and ROUTED["gpt-oss"].name == "gpt-oss-20b"


@pytest.mark.parametrize("name", ROUTED)
def test_every_router_can_be_built_at_full_size(name: str) -> None:
    model = ROUTED[name]
    if model.routing.missing:
        with pytest.raises(NotImplementedError, match="routes by"):
            router_for(name)
        return
    with torch.device("meta"):
        router = router_for(name)
    assert type(router) is all_routers()[model.routing.rule]
    assert (router.D, router.E, router.K) == (model.D, model.E, model.K)
    assert router_for(name, D=8, E=model.E, topk="sort").D == 8


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: router_for("mixtrall"), "did you mean 'mixtral'"),
    (lambda: router_for("mixtral", K=9), "K=9 choices per token"),
    (lambda: load_router(router_for("mixtral", **SIZES), nn.ReLU()), "ReLU has no weight of E x D"),
    (lambda: load_router(router_for("mixtral", D=D, E=E, K=2), peer("mixtral")), "chooses 4 experts"),
    (
        lambda: load_router(router_for("mixtral", D=8, E=E, K=K), peer("mixtral")),
        "8, 32. here, .64, 32",
    ),
    (lambda: load_router(router_for("mixtral", **SIZES), peer("gpt-oss")), "weights for b_E, which"),
    (lambda: load_router(router_for("gpt-oss", **SIZES), peer("mixtral")), "the router has b_E, but"),
    (lambda: load_router(router_for("mixtral", **SIZES), peer("deepseek-v3")), "weights for bias_E, which"),
]


@pytest.mark.parametrize(("make", "sentence"), MISTAKES)
def test_mistakes_get_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_refused_load_changes_nothing() -> None:
    router = router_for("mixtral", **SIZES)
    before = router.w_DE.detach().clone()
    with pytest.raises(ValueError, match="weights for b_E"):
        load_router(router, peer("gpt-oss"))
    assert torch.equal(router.w_DE, before)
