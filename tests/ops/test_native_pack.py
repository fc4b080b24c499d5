"""make_plan, dispatch and combine in C++: equal to plain torch, safe on bad input and from two threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_routing_bench import Layout, Routing, all_ops
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells_of, check
from moe_routing_bench.core import cpp
from tiny_layers import MAKE_PLAN, assert_same_plan, routing_of

pytestmark = pytest.mark.slow

OPS = all_ops()
PLAN, DISPATCH, COMBINE = OPS["make_plan"], OPS["dispatch"], OPS["combine"]
LAYOUTS = ("compact", "padded(capacity=3)", "padded(capacity_factor=1.25)", "block(4)", "block(64)")
EVERY = (
    ("make_plan", "native"), ("dispatch", "native"), ("dispatch", "native_reused"), ("combine", "native"),
)  # fmt: skip

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("level", ["", "avx2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_are_those_of_argsort(layout: str, level: str) -> None:
    draw = random.Random(layout)
    make = PLAN.get(f"native(level={level})" if level else "native")
    for _ in range(60):
        E = draw.choice((1, 2, 7, 64, 500))
        routing = routing_of(
            draw.choice((0, 1, 5, 300)), draw.randint(1, min(E, 8)), E, absent=0.3 * (draw.random() < 0.7)
        )
        assert_same_plan(
            make(routing, Layout.parse(layout)).validate(), MAKE_PLAN(routing, Layout.parse(layout))
        )


def test_plans_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_routing_bench.ops.make_plan import native as launcher

    monkeypatch.setattr(launcher, "PAIRS_FOR_THREADS", 0)
    for threads in (2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        for layout in map(Layout.parse, LAYOUTS):
            for T in (8, 97, 1000):
                routing = routing_of(T, 3, 5, absent=0.3)
                assert_same_plan(launcher.run(routing, layout), MAKE_PLAN(routing, layout))


@pytest.mark.parametrize("layout", ["compact", "padded(capacity=9)", "block(4)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_results_are_the_same_with_streaming_and_threads(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths that large cases take, on small ones."""
    from moe_routing_bench.ops import rows
    from moe_routing_bench.ops.combine import native as combine
    from moe_routing_bench.ops.dispatch import native as dispatch
    from moe_routing_bench.ops.dispatch import native_reused as reused

    def run_all(D: int) -> list[Tensor]:
        torch.manual_seed(1)
        plan = MAKE_PLAN(routing_of(40, 2, 6, absent=0.3), Layout.parse(layout))
        x_TD = torch.randn(40, D).to(dtype).requires_grad_()
        x_RD = dispatch.run(x_TD, plan)
        gate_TK = torch.rand(40, 2).requires_grad_()
        y_TD = combine.run(x_RD, gate_TK, plan)
        y_TD.square().sum().backward()
        assert x_TD.grad is not None and gate_TK.grad is not None
        kept = [x_RD, reused.run(x_TD.detach(), plan).clone(), y_TD, x_TD.grad, gate_TK.grad]
        return [tensor.detach() for tensor in kept]

    for D in (64, 96, 100):
        plain = run_all(D)
        with monkeypatch.context() as patch:
            patch.setattr(rows, "BYTES_FOR_THREADS", 0)
            patch.setattr(rows, "BYTES_TO_STREAM", 0)
            patch.setattr(torch, "get_num_threads", lambda: 2)
            for one, other in zip(plain, run_all(D), strict=True):
                assert torch.equal(one, other)


def test_rows_without_a_pair_are_never_read() -> None:
    for layout in map(Layout.parse, ("padded(capacity=9)", "block(16)")):
        routing = routing_of(20, 2, 5, absent=0.3)
        plan = PLAN.get("native")(routing, layout)
        empty_R = plan.pair_R < 0
        assert bool(empty_R.any())
        x_RD = DISPATCH.get("native")(torch.ones(20, 24, dtype=torch.bfloat16), plan)
        assert bool((x_RD[empty_R] == 0).all()) and bool((x_RD[~empty_R] == 1).all())

        y_RD = torch.randn(plan.num_rows, 24)
        y_RD[empty_R] = float("nan")
        y_RD.requires_grad_()
        gate_TK = routing.gate_TK.clone().requires_grad_()
        y_TD = COMBINE.get("native")(y_RD, gate_TK, plan)
        y_TD.sum().backward()
        assert y_RD.grad is not None and gate_TK.grad is not None
        assert bool(y_TD.isfinite().all()) and bool(gate_TK.grad.isfinite().all())
        assert bool((y_RD.grad[empty_R] == 0).all())
        assert bool((gate_TK.grad[plan.row_TK < 0] == 0).all())

        x_TD = torch.randn(20, 24, requires_grad=True)
        poison_RD = torch.where(empty_R.unsqueeze(1), float("nan"), 1.0).expand(-1, 24)
        DISPATCH.get("native")(x_TD, plan).backward(poison_RD)
        assert x_TD.grad is not None
        assert torch.equal(x_TD.grad, (plan.row_TK >= 0).sum(1, keepdim=True).float().expand(-1, 24))


def test_two_threads_may_call_at_once() -> None:
    layout = Layout.block(4)
    jobs = []
    for n in range(8):
        routing = routing_of(50 + n, 2, 6, absent=0.3)
        plan = MAKE_PLAN(routing, layout)
        x_TD = torch.randn(50 + n, 33)
        x_RD = DISPATCH.get("index_select")(x_TD, plan)
        jobs.append((routing, plan, x_TD, x_RD, COMBINE.get("native")(x_RD, routing.gate_TK, plan)))

    def work(n: int) -> bool:
        routing, plan, x_TD, x_RD, y_TD = jobs[n % len(jobs)]
        made = PLAN.get("native")(routing, layout)
        reused_RD = DISPATCH.get("native_reused")(x_TD, plan)
        same = torch.equal(reused_RD, x_RD) and torch.equal(DISPATCH.get("native")(x_TD, made), x_RD)
        return same and torch.equal(COMBINE.get("native")(reused_RD, routing.gate_TK, made), y_TD)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(200)))


def arguments_of(op: str) -> tuple:
    routing = routing_of(6, 2, 4, absent=0.3)
    plan = MAKE_PLAN(routing, Layout.compact())
    return {
        "make_plan": (routing, Layout.compact()),
        "dispatch": (torch.randn(6, 8), plan),
        "combine": (torch.randn(plan.num_rows, 8), routing.gate_TK, plan),
    }[op]


@pytest.mark.parametrize("op,name", EVERY)
def test_no_compiler_is_a_reason(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments_of(op)
    assert OPS[op].why_not(name, *args) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpp.missing_tool.cache_clear(), cpp._why_not_loaded.cache_clear()
    try:
        assert "C++ compiler" in str(OPS[op].why_not(name, *args))
        with pytest.raises(NotImplementedError, match="install g"):
            OPS[op].get(name)(*args)
    finally:
        monkeypatch.undo()
        cpp.missing_tool.cache_clear(), cpp._why_not_loaded.cache_clear()


@pytest.mark.parametrize("op,name", EVERY[1:])
def test_it_says_what_it_cannot_do(op: str, name: str) -> None:
    first, *rest = arguments_of(op)
    for other, word in (
        (first.double(), "float64"),
        (first.to("meta"), "meta"),
        (first.T.contiguous().T, "side by side"),
        (first.to_sparse(), "plain tensors"),
    ):
        assert word in str(OPS[op].why_not(name, other, *rest))
    assert OPS[op].why_not(name, first[:, :1].expand(-1, 1), *rest) is None


def test_gates_of_another_dtype_are_refused() -> None:
    y_RD, gate_TK, plan = arguments_of("combine")
    assert "float32 or" in str(COMBINE.why_not("native", y_RD, gate_TK.half(), plan))
    assert COMBINE.why_not("native", y_RD.half(), gate_TK, plan) is None


def test_dropping_by_gate_is_refused() -> None:
    routing, _ = arguments_of("make_plan")
    assert "drop=probs" in str(PLAN.why_not("native", routing, Layout.padded(capacity=2, drop="probs")))


@pytest.mark.parametrize("op,name", EVERY[1:])
def test_a_wrong_plan_is_an_error_and_no_crash(op: str, name: str) -> None:
    *tensors, plan = arguments_of(op)
    far = replace(plan, row_TK=plan.row_TK + 2**40)
    with pytest.raises(ValueError, match="index outside"):
        OPS[op].get(name)(*tensors, far)
    with pytest.raises(ValueError, match="was made"):
        OPS[op].get(name)(tensors[0][:-1], *tensors[1:], plan)


@pytest.mark.parametrize("op,name", EVERY)
def test_avx2_passes_the_kit(op: str, name: str) -> None:
    """What a processor without AVX-512 runs. Exact operations are held to the same bits by the kit."""

    def cells() -> list[KitCell]:
        return [cell for cell in cells_of(op, f"{name}(level=avx2)") if not cell.case.beyond_int32]

    failed = [outcome for outcome in map(check, cells()) if outcome.status == "failed"]
    assert not failed, failed[:3]


@pytest.mark.parametrize("level", ["", "avx2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_rounded_as_torch_rounds(dtype: torch.dtype, level: str) -> None:
    """Every 16-bit number times a gate: infinities, not-a-number, numbers below the normal ones, and ties,
    which 1.5 makes of odd numbers and 1 + eps / 2 of powers of two."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x_TD = bits.view(dtype).reshape(64, -1)
    # all 32 bits set: rounding up by adding would carry into the sign and give zero
    no_number_T1 = torch.full((64, 1), -1, dtype=torch.int32).view(torch.float32)
    routing = Routing(
        expert_TK=torch.zeros(64, 1, dtype=torch.int64),
        gate_TK=torch.ones(64, 1),
        num_experts=1,
        ragged=False,
    )
    plan = PLAN.get("native")(routing, Layout.compact())
    combine = COMBINE.get(f"native(level={level})" if level else "native")
    gates = (1.0, 0.5, 1.5, 0.7509, 1 + torch.finfo(dtype).eps / 2)
    for gate_TK in (*(torch.full((64, 1), gate) for gate in gates), no_number_T1):
        got, want = combine(x_TD, gate_TK, plan), (x_TD.float() * gate_TK).to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))
