"""Routers with fused=: choices and gates from op score_topk, the same as without; the bench's judge of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_routing_bench import MoE, TokenInfo
from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.judging import Judge, Judgement
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.published import FAMILIES
from moe_routing_bench.moe.presets import ROUTED, router_for
from moe_routing_bench.ops.score_topk.op import PLAIN, reference
from moe_routing_bench.ops.score_topk.op import op as score_topk_op
from moe_routing_bench.routers.router import Router, build
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

pytestmark = pytest.mark.slow

RULES = ("softmax_topk", "sigmoid_bias", "group_limited")
NAMES = [name for name in FAMILIES if ROUTED[name].routing.rule in RULES]
SIZES = {"D": 16, "E": 32, "K": 4}
T = 40


def pair_of(preset: str, **options: Any) -> tuple[Router, Router]:
    """The same router twice: plain, and fused."""
    plain, fused = (router_for(preset, **SIZES, **options, **more) for more in ({}, {"fused": "eager"}))
    generator = torch.Generator().manual_seed(1)
    for value in plain.state_dict(keep_vars=True).values():  # larger than at birth, so that choices are clear
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(T, 16, generator=generator), torch.randn(T, 4, generator=generator)


def gradients(router: Router, x_TD: Tensor) -> dict[str, Tensor | None]:
    return {"x_TD": x_TD.grad, **{name: value.grad for name, value in router.named_parameters()}}


@pytest.mark.parametrize("preset", NAMES)
def test_choices_gates_and_gradients_are_those_of_the_plain_router(preset: str) -> None:
    x_TD, d_gate_TK = tokens()
    found = []
    for router in pair_of(preset):
        leaf_TD = x_TD.clone().requires_grad_()
        routing: Any = router(leaf_TD)
        routing.gate_TK.backward(d_gate_TK)
        found.append((routing, gradients(router, leaf_TD)))
    (plain, plain_grads), (fused, fused_grads) = found
    assert torch.equal(fused.expert_TK, plain.expert_TK)
    assert torch.equal(fused.logits_TE, plain.logits_TE)
    assert (fused.ragged, fused.num_experts, fused.losses) == (plain.ragged, plain.num_experts, plain.losses)
    torch.testing.assert_close(fused.gate_TK, plain.gate_TK)
    # a softmax's gradient is a small difference; deepseek-v2's is then multiplied by 16
    torch.testing.assert_close(fused_grads, plain_grads, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("preset", NAMES)
def test_losses_are_those_of_the_plain_router(preset: str) -> None:
    info = TokenInfo(mask_T=torch.arange(T) < 33, num_sequences=2)
    asked = dict.fromkeys(router_for(preset, **SIZES).loss_names, 0.5)
    found = []
    for router in pair_of(preset, loss_weights=asked):
        leaf_TD = tokens()[0].requires_grad_()
        routing: Any = router(leaf_TD, info)
        routing.aux_loss.backward()
        found.append((dict(routing.losses), gradients(router, leaf_TD)))
    assert set(found[0][0]) == set(asked)
    torch.testing.assert_close(found[1], found[0])


class Wide(TorchDispatchMode):
    """Counts the results of T x E that are made inside."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # a transposed or detached tensor is not a new one
        self.made += isinstance(out, Tensor) and out.shape == (T, SIZES["E"]) and not func.is_view
        return out


@pytest.mark.parametrize("preset", ["qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_scores_of_all_experts_are_made_for_losses_alone(preset: str) -> None:
    def nothing(logits_TE: Tensor, bias_E: Tensor | None, K: int, rule: Any) -> tuple[Tensor, Tensor]:
        return torch.ones(T, K), torch.arange(K).expand(T, K)

    for asked, most in (({}, 1), ({"z": 1.0}, 1), ({"switch": 1.0}, 99)):
        _, router = pair_of(preset, loss_weights=asked)
        assert router.fused is not None
        router.fused = replace(router.fused, run=nothing)
        with torch.no_grad(), Wide() as counter:
            router(tokens()[0])
        assert 1 <= counter.made <= most, "the logits alone"
        assert ("switch" in asked) == (counter.made > 1)


@pytest.mark.parametrize(
    "rule,options",
    [
        ("softmax_topk", {}),
        ("softmax_topk", {"order": "softmax_then_topk", "bias": True}),
        ("sigmoid_bias", {"groups": 4, "keep_groups": 2, "scale": 2.5}),
        ("sigmoid_bias", {"score": "sqrtsoftplus", "renormalise": False}),
        ("group_limited", {"groups": 4, "keep_groups": 2}),
    ],
)
def test_it_conforms(rule: str, options: dict[str, Any]) -> None:
    assert check_router(rule, fused="eager", **options) == []


@pytest.mark.parametrize(
    "rule,options,told",
    [
        ("softmax_topk", {"fused": "eagre"}, "'eager'"),
        ("softmax_topk", {"fused": "auto", "topk": "torch_topk"}, "topk='torch_topk' and fused='auto'"),
        (
            "sigmoid_bias",
            {"fused": "auto", "groups": 4, "keep_groups": 2, "group_score": "topk_sum"},
            "'topk_sum'",
        ),
        (
            "group_limited",
            {"fused": "auto", "groups": 4, "keep_groups": 2, "group_score": "topk_sum"},
            "fused",
        ),
    ],
)
def test_what_cannot_be_fused_is_said_when_the_router_is_built(
    rule: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        build(rule, 8, 8, 4, **options)


def test_a_group_score_that_ranks_nothing_does_not_matter() -> None:
    router = build("sigmoid_bias", 8, 8, 2, fused="auto", groups=2, keep_groups=2, group_score="topk_sum")
    assert router.fused is not None and router.fused.label == "auto"
    router(torch.randn(3, 8))
    router(torch.randn(3, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gates_have_the_dtype_of_the_router(dtype: torch.dtype) -> None:
    routing: Any = build("softmax_topk", 8, 8, 2, fused="eager", dtype=dtype)(torch.randn(5, 8))
    assert routing.gate_TK.dtype == dtype


def test_a_layer_passes_the_option_on() -> None:
    plain, fused = (MoE(16, 8, 8, 2, router_options=given) for given in ({}, {"fused": "eager"}))
    fused.load_state_dict(plain.state_dict())
    assert fused.router.fused is not None and plain.router.fused is None
    x_TD, _ = tokens()
    torch.testing.assert_close(fused(x_TD)[0], plain(x_TD)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # dynamo's own
@pytest.mark.parametrize("rule", RULES)
def test_it_compiles_without_graph_breaks(rule: str) -> None:
    router = build(rule, 16, 8, 2, fused="eager", loss_weights={"switch": 0.1}).eval()
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    plain, fast = router(tokens()[0]), compiled(tokens()[0])
    assert torch.equal(fast.expert_TK, plain.expert_TK)  # type: ignore[union-attr]
    torch.testing.assert_close(fast.gate_TK, plain.gate_TK)  # type: ignore[union-attr]


# the bench


def judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, logits_TE: Tensor | None = None
) -> Judgement:
    """What the parent says of a worker's result that was changed."""
    case = Experiment(case="own/x", span="score_topk", T=24, D=1, F=1, E=8, K=2)
    inputs = Inputs(case)
    if logits_TE is not None:
        monkeypatch.setattr(Call, "logits_TE", logits_TE)
    args = span_named("score_topk").arguments(inputs.at(3, 1, "compact"))
    gate_TK, expert_TK = change(*reference(*args.values()))
    save_file({"0": gate_TK.contiguous(), "1": expert_TK.contiguous()}, tmp_path / "out")
    implementation = ImplementationRef(name="eager")
    return Judge(span_named("score_topk"), inputs).judge(tmp_path / "out", 3, 1, implementation)


@pytest.mark.parametrize(
    "change,status,told",
    [
        (lambda gate, expert: (gate, expert), Status.PASSED, ""),
        (lambda gate, expert: (gate * 1.01, expert), Status.WRONG_VALUE, "1.01 times|largest error"),
        (lambda gate, expert: (gate * float("nan"), expert), Status.NONFINITE, "nan at"),
        (lambda gate, expert: (gate.double(), expert), Status.WRONG_DTYPE, "float64"),
        (lambda gate, expert: (gate[:, :1], expert), Status.WRONG_SHAPE, "shape"),
        (lambda gate, expert: (gate.flip(1), expert.flip(1)), Status.WRONG_STRUCTURE, "expert_TK"),
        (lambda gate, expert: (gate, expert.int()), Status.WRONG_STRUCTURE, "expert_TK: dtype"),
        (lambda gate, expert: (gate, expert[:, :1]), Status.WRONG_STRUCTURE, "expert_TK: shape"),
        (lambda gate, expert: (gate, expert * 0), Status.WRONG_STRUCTURE, "expert_TK"),
        (lambda gate, expert: (gate, expert + 8), Status.WRONG_STRUCTURE, "expert_TK"),
    ],
)
def test_the_bench_judges_ids_and_gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, status: Status, told: str
) -> None:
    finding = judged(tmp_path, monkeypatch, change)
    assert finding.status is status
    assert any(part in finding.reason for part in told.split("|")), finding.reason


def test_the_bench_lets_a_choice_differ_by_rounding_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(gate_TK: Tensor, expert_TK: Tensor) -> tuple[Tensor, Tensor]:
        return gate_TK.flip(1), expert_TK.flip(1)

    near_TE = torch.zeros(24, 8)
    near_TE[:, 3], near_TE[:, 5] = 1.0, 1.0 - torch.finfo(torch.float32).eps
    assert judged(tmp_path, monkeypatch, swapped, near_TE).status is Status.PASSED
    near_TE[:, 5] = 1.0
    assert judged(tmp_path, monkeypatch, swapped, near_TE).status is Status.WRONG_STRUCTURE, (
        "a tie has its rule"
    )


def test_the_bench_follows_the_workload_in_float32() -> None:
    case = Experiment(case="own/x", span="score_topk", T=64, D=1, F=1, E=32, K=8)
    inputs = Inputs(case)
    args = span_named("score_topk").arguments(inputs.at(2, 1, "compact"))
    logits_TE, bias_E, K, rule = args.values()
    assert logits_TE.dtype == torch.float32 and bias_E is None and (K, rule) == (8, PLAIN)
    assert torch.equal(reference(logits_TE, None, K, rule)[1], inputs.workload(1).routing.expert_TK)
    # 64 x 32 logits of 4 bytes in, 64 x 8 gates of 4 and ids of 8 bytes out; with a bias 32 numbers more
    assert score_topk_op.cost(logits_TE, None, 8, PLAIN) == Cost(activation_bytes=8192 + 6144)
    assert score_topk_op.cost(logits_TE, torch.zeros(32), 8, PLAIN).bytes == 8192 + 6144 + 128
