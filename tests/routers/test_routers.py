"""What every router keeps: the contract, documents, compilers, mistakes. Formulas are tested beside this."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.core.routing import SoftRouting, TokenInfo
from moe_routing_bench.routers.router import GATE_SUMS, Router, all_routers, build, only_subclass
from plain_loops import assert_finite_gradients

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", all_routers())
def test_conforms(name: str) -> None:
    assert check_router(name) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("switch", {"jitter": 0.3}),
        ("softmax_topk", {"order": "softmax_then_topk"}),
        ("softmax_topk", {"order": "topk_then_softmax", "topk": "torch_topk"}),
        ("soft_moe", {"slots_per_expert": 3}),
        ("hashed", {"seed": 7}),
        ("sigmoid_bias", {"score": "sqrtsoftplus", "groups": 4, "keep_groups": 2, "scale": 2.5}),
        ("sigmoid_bias", {"score": "softmax", "renormalise": False}),
        ("group_limited", {"groups": 4, "keep_groups": 1, "renormalise": True}),
        ("top_p", {"p": 0.9, "most": 3, "renormalise": True}),
        ("relu", {"most": 2}),
        ("token_rounding", {"tile": 3, "rounding": "up"}),
        ("token_rounding", {"tile": 5, "rounding": "down", "most": 3}),
        ("expert_choice", {"over": "sequence"}),
        ("expert_choice", {"most": 3}),
        ("expert_threshold", {"most": 2, "fallback_top1": True}),
        ("quantile", {"gates": "sigmoid"}),
        ("random_fixed", {"gates": "uniform", "seed": 3}),
    ],
)
def test_conforms_with_options(name: str, options: dict[str, Any]) -> None:
    assert check_router(name, **options) == []


@pytest.mark.parametrize("name", all_routers())
def test_is_documented(name: str) -> None:
    rule = all_routers()[name]
    summary = (__import__(rule.__module__, fromlist=["_"]).__doc__ or "").partition("\n")[0]
    assert summary.endswith(".") and len(summary) < 110
    assert "arXiv:" in rule.paper and rule.gate_sum in GATE_SUMS


SAME_IN_TRAINING = ("sigmoid_bias", "group_limited", "top_p", "relu", "token_rounding")


@pytest.mark.parametrize("name", ["switch", "softmax_topk", "noisy_topk", "soft_moe", *SAME_IN_TRAINING])
def test_autocast_does_not_reach_the_router(name: str) -> None:
    router, x_TD = build(name, 16, 8, all_routers()[name].fixed_K or 2).eval(), 4 * torch.randn(32, 16)
    plain = router(x_TD)
    with torch.autocast("cpu", torch.bfloat16):
        cast = router.train(name in SAME_IN_TRAINING)(x_TD)
    fields = ("expert_TK", "logits_TE", "gate_TK", "dispatch_BNS", "combine_BNS")
    there = [field for field in fields if getattr(plain, field, None) is not None]
    assert len(there) >= 2
    for field in there:
        assert torch.equal(getattr(plain, field), getattr(cast, field))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own
@pytest.mark.parametrize("name", all_routers())
def test_compiles_without_graph_breaks(name: str) -> None:
    rule = all_routers()[name]
    router = rule(8, 8, rule.fixed_K or 2, loss_weights=dict.fromkeys(rule.loss_names, 0.1))
    info = TokenInfo(token_id_T=torch.arange(16), mask_T=torch.arange(16) < 13, num_sequences=2)
    backend = "inductor" if name == "softmax_topk" else "eager"
    compiled = torch.compile(router.eval(), fullgraph=True, backend=backend)
    x_TD = torch.randn(16, 8)
    plain, fast = router(x_TD, info), compiled(x_TD, info)
    if isinstance(plain, SoftRouting):
        torch.testing.assert_close(fast.combine_BNS, plain.combine_BNS)
    else:
        assert torch.equal(fast.expert_TK, plain.expert_TK)
        torch.testing.assert_close(fast.gate_TK, plain.gate_TK)
        torch.testing.assert_close(dict(fast.losses), dict(plain.losses))


def test_routers_are_found_by_file_and_mistakes_are_named() -> None:
    assert {"switch", "softmax_topk", "noisy_topk", "soft_moe", "hashed"} <= set(all_routers())
    assert not {"router", "losses"} & set(all_routers())
    with pytest.raises(ValueError, match="'softmax_topk'"):
        build("softmax_top", 4, 4, 2)
    with pytest.raises(ValueError, match=r"'xyz'.*switch"):
        build("xyz", 4, 4, 2)
    empty, double = types.ModuleType("empty"), types.ModuleType("double")
    for name in ("One", "Two"):
        setattr(double, name, type(name, (Router,), {"__module__": "double"}))
    with pytest.raises(ValueError, match="empty must define"):
        only_subclass(empty, Router)
    with pytest.raises(ValueError, match="One, Two"):
        only_subclass(double, Router)


@pytest.mark.parametrize(
    ("name", "sizes", "options", "named"),
    [
        ("switch", (4, 4, 2), {}, "K=1"),
        ("switch", (4, 4, 1), {"jitter": 1.5}, "jitter"),
        ("soft_moe", (4, 4, 2), {}, "K=1"),
        ("soft_moe", (4, 4, 1), {"slots_per_expert": 0}, "slots_per_expert"),
        ("soft_moe", (4, 4, 1), {"loss_weights": {"z": 1.0}}, "loss z"),
        ("softmax_topk", (4, 4, 5), {}, "K=5"),
        ("softmax_topk", (4, 4, 0), {}, "K=0"),
        ("softmax_topk", (0, 4, 1), {}, "D >= 1"),
        ("softmax_topk", (4, 4, 2), {"order": "best"}, "order 'best'"),
        ("softmax_topk", (4, 4, 2), {"topk": "fastest"}, "'fastest'"),
        ("softmax_topk", (4, 4, 2), {"loss_weights": {"load": 1.0}}, "loss load.* switch, hf, z"),
        ("sigmoid_bias", (4, 8, 2), {"score": "tanh"}, "score 'tanh'"),
        ("sigmoid_bias", (4, 8, 2), {"scale": 0.0}, "scale"),
        ("sigmoid_bias", (4, 8, 2), {"groups": 3}, "groups=3.* E=8"),
        ("sigmoid_bias", (4, 8, 2), {"groups": 0}, "groups=0"),
        ("sigmoid_bias", (4, 8, 2), {"groups": 4, "keep_groups": 5}, "keep_groups=5"),
        ("sigmoid_bias", (4, 8, 3), {"groups": 4, "keep_groups": 1}, "K=3"),
        ("sigmoid_bias", (4, 8, 2), {"groups": 4, "group_score": "mean"}, "group_score 'mean'"),
        ("sigmoid_bias", (4, 8, 2), {"groups": 8, "keep_groups": 2}, "'max'"),
        ("group_limited", (4, 8, 1), {"groups": 4, "keep_groups": 2, "group_score": "topk_sum"},
         "needs K >= keep_groups"),
        ("group_limited", (4, 8, 2), {"scale": -1.0}, "scale"),
        ("top_p", (4, 8, 2), {"p": 1.5}, r"\bp must"),
        ("top_p", (4, 8, 3), {"most": 2}, "most=2.* K=3 to E=8"),
        ("relu", (4, 8, 3), {"most": 9}, "most=9.* K=3 to E=8"),
        ("token_rounding", (4, 8, 3), {"most": 1}, "most=1"),
        ("token_rounding", (4, 8, 3), {"tile": 0}, "tile"),
        ("token_rounding", (4, 8, 3), {"rounding": "random"}, "rounding 'random'"),
        ("expert_choice", (4, 8, 2), {"over": "layer"}, "over 'layer'"),
        ("expert_choice", (4, 8, 2), {"most": 1}, "K=2 to E=8"),
        ("expert_threshold", (4, 8, 2), {"most": 9}, "K=2 to E=8"),
        ("sinkhorn", (4, 8, 2), {"iterations": 0}, "iterations"),
        ("base_assignment", (4, 8, 2), {}, "K=1"),
        ("base_assignment", (4, 8, 1), {"slack": 0.0}, "slack"),
        ("quantile", (4, 8, 2), {"gates": "relu"}, "gates 'relu'"),
        ("random_fixed", (4, 8, 2), {"gates": "relu"}, "gates 'relu'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(
    name: str, sizes: tuple[int, int, int], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        build(name, *sizes, **options)


@pytest.mark.parametrize(
    ("name", "x_TD", "info", "named"),
    [
        ("hashed", torch.zeros(3, 4), TokenInfo(), "vocabulary"),
        ("switch", torch.zeros(3, 5), TokenInfo(), "reads T x 4"),
        ("switch", torch.zeros(3, 4), TokenInfo(mask_T=torch.ones(2)), "mask_T"),
        ("soft_moe", torch.zeros(3, 4), TokenInfo(num_sequences=2), "sequences"),
    ],
)
def test_tokens_that_do_not_fit_are_named(name: str, x_TD: Tensor, info: TokenInfo, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(name, 4, 4, 1)(x_TD, info)


def test_reset_parameters_with_a_generator_repeats() -> None:
    for name, rule in all_routers().items():
        router = build(name, 64, 32, rule.fixed_K or 2)
        before: dict[str, Tensor] = {}
        for _ in range(2):
            router.reset_parameters(torch.Generator().manual_seed(5))
            state = {key: value.clone() for key, value in router.state_dict().items()}
            assert not before or all(torch.equal(state[key], before[key]) for key in state)
            before = state
        if "w_DE" in before:
            assert before["w_DE"].std().item() == pytest.approx(0.02, rel=0.1)


# properties


sizes = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))


def drawn(name: str, size: tuple[int, int, int, int], scale: float) -> tuple[Router, Tensor, TokenInfo]:
    T, D, E, seed = size
    torch.manual_seed(seed)
    rule = all_routers()[name]
    K = rule.fixed_K or 1 + seed % E
    router = rule(D, E, K, loss_weights=dict.fromkeys(rule.loss_names, 1.0))
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    info = TokenInfo(token_id_T=torch.randint(2**40, (T,)), mask_T=torch.rand(T) < 0.8)
    return router, scale * torch.randn(T, D), info


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(all_routers())), sizes, st.sampled_from([0.0, 1.0, 100.0]), st.booleans())
def test_experts_are_distinct_and_gates_sum_as_declared(
    name: str, size: tuple[int, int, int, int], scale: float, training: bool
) -> None:
    router, x_TD, info = drawn(name, size, scale)
    routing = router.train(training)(x_TD, info)
    keep_T = info.mask_T
    assert keep_T is not None
    if isinstance(routing, SoftRouting):
        totals = routing.combine_BNS[0, keep_T].sum(1).tolist()
    else:
        assert not bool(routing.chosen_TK()[~keep_T].any())
        totals = []
        for row, gates in zip(routing.expert_TK.tolist(), routing.gate_TK.tolist(), strict=True):
            chosen = [e for e in row if 0 <= e < router.E]
            assert len(set(chosen)) == len(chosen)
            if chosen:
                totals.append(sum(gate for e, gate in zip(row, gates, strict=True) if e in chosen))
    for total in totals:
        assert total >= (1 - 1e-5 if router.gate_sum == "one" else 0)
        assert total <= 1 + 1e-5 or router.gate_sum == "any"


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(all_routers())), sizes, st.sampled_from([0.0, 1e-3, 1.0, 100.0, 1e4]))
def test_gradients_are_finite(name: str, size: tuple[int, int, int, int], scale: float) -> None:
    router, x_TD, info = drawn(name, size, scale)
    x_TD.requires_grad_()
    routing = router(x_TD, info)
    total = (
        routing.combine_BNS.sum() + routing.dispatch_BNS.square().sum()
        if isinstance(routing, SoftRouting)
        else routing.gate_TK.square().sum()
    )
    if routing.aux_loss is not None:
        assert bool(routing.aux_loss.isfinite())
        total = total + routing.aux_loss
    if total.requires_grad:
        total.backward()
        assert_finite_gradients(x_TD, *router.parameters())
