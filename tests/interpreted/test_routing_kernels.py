"""topk.triton_select, score_topk.triton_fused and make_plan.triton_counting at their edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from child_process import python
from moe_routing_bench import Layout, Routing, all_ops
from moe_routing_bench.moe.presets import router_for
from moe_routing_bench.ops.make_plan import triton_counting
from moe_routing_bench.ops.score_topk.op import ScoreRule, reference
from moe_routing_bench.ops.topk.op import reference as sorted_topk

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOPK = all_ops()["topk"].get("triton_select")
FUSED = all_ops()["score_topk"].get("triton_fused")
PLAN = all_ops()["make_plan"].get("triton_counting")


def bits(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(torch.uint8)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_orders_nan_infinities_and_zeros_as_a_stable_sort_does(dtype: torch.dtype) -> None:
    special = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, -float("nan")]
    drawn_TE = torch.randint(len(special), (40, 13), generator=torch.Generator().manual_seed(0))
    score_TE = torch.tensor(special)[drawn_TE].to(dtype)
    value_TK, expert_TK = TOPK(score_TE, 13)
    assert torch.equal(expert_TK, sorted_topk(score_TE, 13)[1])
    assert torch.equal(bits(value_TK), bits(score_TE.gather(1, expert_TK))), "values are exact copies"


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("E,K", [(1, 1), (8, 2), (100, 7), (512, 10), (4096, 2)])
def test_topk_of_many_sizes_in_several_programs(E: int, K: int) -> None:
    tokens = 2 * max(1, 2048 // E) + 1
    score_TE = torch.randn(tokens, E, generator=torch.Generator().manual_seed(E))
    for got, want in zip(TOPK(score_TE, K), sorted_topk(score_TE, K), strict=True):
        assert torch.equal(got, want)


def routing_of(T: int, K: int, E: int, absent: float) -> Routing:
    generator = torch.Generator().manual_seed(T)
    expert_TK = torch.rand(T, E, generator=generator).square().argsort(dim=1)[:, :K]
    away_TK = torch.rand(T, K, generator=generator) < absent
    # -1 from a router, and what "no expert" may be besides
    expert_TK = torch.where(away_TK, torch.tensor([-1, E, 2**40])[torch.arange(K) % 3], expert_TK)
    gate_TK = torch.rand(T, K, generator=generator)
    return Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=absent > 0)


def assert_same_plan(routing: Routing, layout: str) -> None:
    rule = Layout.parse(layout)
    got, want = PLAN(routing, rule).validate(), all_ops()["make_plan"].get("argsort")(routing, rule)
    for name in ("row_TK", "pair_R", "offset_E1", "count_E", "dropped_E"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.filled == want.filled


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("layout", ["compact", "padded(capacity=3)", "block(16)"])
@pytest.mark.parametrize("absent", [0.0, 0.3])
def test_plan_of_512_experts_in_several_tiles(layout: str, absent: float) -> None:
    assert_same_plan(routing_of(140, 8, 512, absent), layout)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("layout", ["compact", "padded(capacity=200,drop=probs)", "block(4)"])
def test_plan_of_more_tiles_than_two_steps_of_the_sum(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_counting, "TILE", 32)
    monkeypatch.setattr(triton_counting, "CHUNK", 16)
    routing = routing_of(2100, 2, 7, 0.1)
    # three steps: in the second, what came before is what the first counted
    assert routing.expert_TK.numel() > 2 * 32 * triton_counting.SUM_TILES
    assert_same_plan(routing, layout)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("pairs", [1, 127, 128, 129, 1023, 1024, 1025])
def test_plan_at_the_ends_of_chunks_and_tiles(pairs: int) -> None:
    assert_same_plan(routing_of(pairs, 1, 3, 0.0), "block(8)")


RULES = [
    ScoreRule(),
    ScoreRule(renormalise=False, scale=3.0),
    ScoreRule(groups=4, keep_groups=2),
    ScoreRule(score="sigmoid", groups=4, keep_groups=3, group_score="top2_sum"),
    ScoreRule(score="sigmoid", groups=4, keep_groups=4, renormalise=False),
    ScoreRule(score="sqrtsoftplus", scale=1.5),
]


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_fused_scores_are_those_of_plain_torch(rule: ScoreRule, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_TE = torch.randn(67, 20, generator=generator)
    bias_E = torch.randn(20, generator=generator) if bias else None
    leaves = [logits_TE.clone().requires_grad_() for _ in range(2)]
    d_gate_TK = torch.randn(67, 6, generator=generator)
    results = [FUSED(leaves[0], bias_E, 6, rule), reference(leaves[1], bias_E, 6, rule)]
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for gate_TK, _ in results:
        gate_TK.backward(d_gate_TK)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("rule", RULES[:1] + RULES[3:4], ids=str)
def test_fused_keeps_the_tie_rule_and_masked_experts_out(rule: ScoreRule) -> None:
    logits_TE = torch.zeros(3, 8)
    logits_TE[1, :4] = float("-inf")
    logits_TE[2, 5] = 1.0
    gate_TK, expert_TK = FUSED(logits_TE, None, 3, rule)
    assert expert_TK.tolist() == [[0, 1, 2], [4, 5, 6], [5, 0, 1]]
    torch.testing.assert_close(gate_TK[:2], torch.full((2, 3), 1 / 3) * rule.scale)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("preset", ["deepseek-v3", "olmoe"])
def test_a_router_of_one_kernel_is_the_plain_router(preset: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x_TD, d_gate_TK = torch.randn(67, 16, generator=generator), torch.randn(67, 4, generator=generator)
    plain = router_for(preset, D=16, E=32, K=4)
    fused = router_for(preset, D=16, E=32, K=4, fused="triton_fused")
    fused.load_state_dict(plain.state_dict())
    found = []
    for router in (plain, fused):
        if preset == "deepseek-v3":
            router.bias_E.copy_(torch.linspace(-0.3, 0.3, 32))
        leaf_TD = x_TD.clone().requires_grad_()
        routing = router(leaf_TD)
        routing.gate_TK.backward(d_gate_TK)
        found.append((routing, leaf_TD.grad, router.w_DE.grad))
    assert torch.equal(found[0][0].expert_TK, found[1][0].expert_TK)
    torch.testing.assert_close(found[1][0].gate_TK, found[0][0].gate_TK, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][1:], found[0][1:], rtol=1e-4, atol=1e-5)


def test_what_they_cannot_do_they_say() -> None:
    assert "float64" in str(TOPK.why_not(torch.zeros(2, 4, dtype=torch.float64), 2))
    assert "4097" in str(TOPK.why_not(torch.zeros(2, 4097), 2))
    assert "float64" in str(FUSED.why_not(torch.zeros(2, 4, dtype=torch.float64), None, 2, ScoreRule()))
    assert "8192" in str(FUSED.why_not(torch.zeros(2, 4097), None, 2, ScoreRule()))
    narrow = Routing(expert_TK=torch.zeros(2, 1, dtype=torch.int32), gate_TK=torch.ones(2, 1), num_experts=3)
    assert "int64" in str(PLAN.why_not(narrow, Layout.compact()))
    wide = Routing(expert_TK=torch.zeros(2, 1, dtype=torch.int64), gate_TK=torch.ones(2, 1), num_experts=4000)
    assert "2048" in str(PLAN.why_not(wide, Layout.compact()))


ON_A_GPU = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from moe_routing_bench import Layout, Routing, all_ops
from moe_routing_bench.ops.targets import Target, as_if
from moe_routing_bench.ops.score_topk.op import ScoreRule

op = all_ops()
assert "runs on a GPU" in op["topk"].get("triton_select").why_not(torch.zeros(2, 4), 2)
with FakeTensorMode(), as_if(Target.named("sm_90a")):
    score_TE = torch.empty(9, 5, device="cuda")
    value_TK, expert_TK = op["topk"].get("triton_select").run(score_TE, 2)
    assert value_TK.shape == expert_TK.shape == (9, 2)
    gate_TK, expert_TK = op["score_topk"].get("triton_fused").run(score_TE, None, 2, ScoreRule())
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=5)
    for layout in ("compact", "padded(capacity=3)", "block(4)"):
        plan = op["make_plan"].get("triton_counting").run(routing, Layout.parse(layout))
        assert plan.pair_R.shape == (plan.layout.num_rows(9, 2, 5),)
"""


def test_on_a_gpu_no_value_is_read_on_the_host_and_a_cpu_tensor_is_refused() -> None:
    """In a process that does not interpret, with GPU tensors that have no values."""
    python(ON_A_GPU, without="TRITON_INTERPRET")


@pytest.mark.parametrize("E", [3, 61, 300])
@pytest.mark.parametrize("layout", ["compact", "padded(capacity=5)", "block(8)"])
def test_without_a_histogram_the_plan_is_the_same(monkeypatch, E: int, layout: str) -> None:
    expert_TK = torch.randint(-1, E, (300, 4), generator=torch.Generator().manual_seed(E))
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.rand(300, 4), num_experts=E)
    with_it = triton_counting.run(routing, Layout.parse(layout))
    monkeypatch.setitem(triton_counting._right, expert_TK.device, False)
    without = triton_counting.run(routing, Layout.parse(layout))
    for name in ("row_TK", "pair_R", "offset_E1", "count_E", "dropped_E"):
        assert torch.equal(getattr(with_it, name), getattr(without, name)), name


def test_a_histogram_that_counts_wrong_is_not_used(monkeypatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(triton_counting, "_right", {})
    assert triton_counting.histogram_is_right(device)
    counted, asked = triton_counting._counted, []

    def wrong(expert_P: torch.Tensor, E: int) -> torch.Tensor:
        asked.append(E)
        load_NE = counted(expert_P, E)
        load_NE[2, 7] += 1
        return load_NE

    monkeypatch.setattr(triton_counting, "_right", {})
    monkeypatch.setattr(triton_counting, "_counted", wrong)
    with pytest.warns(RuntimeWarning, match="tl.histogram counts wrong on cpu"):
        assert not triton_counting.histogram_is_right(device)
    assert not triton_counting.histogram_is_right(device) and len(asked) == 1  # once for each device
