"""Every transport of ep_dispatch and ep_combine gives what all_to_all gives, and moves what is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.ep_combine.op import ep_combine
from moe_routing_bench.ops.ep_dispatch.op import ep_dispatch
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.parallel.placing import contiguous, replicated, strided
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import settle
from ranks_in_processes import on_ranks
from rows_sent import Rows, rows_sent

pytestmark = pytest.mark.slow
D, E, K = 16, 8, 3
OTHERS = ("hierarchical", "all_gather")
LOAD = (9, 1, 1, 5, 1, 1, 1, 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    tokens: tuple[int, ...] = (6, 3, 0, 4)
    chosen: str = "random"  # random, one, twice (an expert twice), some (-1 among them), none
    layout: str = "compact"
    dtype: torch.dtype = torch.float32


CASES = (
    Case(name="plain"),
    Case(name="wide", tokens=(40,)),
    Case(name="one", chosen="one"),
    Case(name="twice", chosen="twice"),
    Case(name="some", chosen="some"),
    Case(name="none", chosen="none"),
    Case(name="nobody", tokens=(0,)),
    Case(name="room", tokens=(6,), layout="padded(capacity=8)"),
    Case(name="little room", tokens=(9,), layout="padded(capacity=2,drop=probs)", chosen="some"),
    Case(name="factor", tokens=(5,), layout="padded(capacity_factor=1.5)", chosen="twice"),
    Case(name="nobody, padded", tokens=(0,), layout="padded(capacity=2)"),
    Case(name="bfloat16", dtype=torch.bfloat16),
)


def drawn(case: Case, rank: int) -> tuple[Tensor, Routing]:
    dice = torch.Generator().manual_seed(100 * len(case.name) + rank)
    T = case.tokens[rank % len(case.tokens)]
    expert_TK = torch.rand(T, E, generator=dice).argsort(1)[:, :K]
    if case.chosen == "one":
        expert_TK = torch.zeros(T, 1, dtype=torch.int64).expand(T, K) + torch.arange(K)
    elif case.chosen == "twice":
        expert_TK[:, 2] = expert_TK[:, 0]
    elif case.chosen == "some":
        expert_TK[::2, 1] = -1
    elif case.chosen == "none":
        expert_TK[:] = -1
    gate_TK = torch.rand(T, K, generator=dice)
    x_TD = torch.randn(T, D, generator=dice).to(case.dtype)
    return x_TD, Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E)


def there_and_back(case: Case, ranks: Ranks, impl: str, back: str = "") -> dict[str, Tensor]:
    """x_QD, the combined result of rows that know where they are, and gradients."""
    x_TD, routing = drawn(case, ranks.rank)
    gate_TK = routing.gate_TK.clone().requires_grad_()
    x_TD.requires_grad_()
    plan = make_plan(ranks.to_slots(routing), Layout.parse(case.layout))
    traffic = settle(plan, ranks)
    x_QD = ep_dispatch(x_TD, plan, traffic, impl=impl)
    scale_Q = (1 + traffic.place_Q + 0.25 * ranks.rank).unsqueeze(1)
    y_QD = torch.where(traffic.place_Q.unsqueeze(1) >= 0, x_QD * scale_Q.to(x_QD.dtype), float("nan"))
    back = back or impl.replace("dispatch=", "combine=")
    y_TD = ep_combine(y_QD, gate_TK, plan, traffic, impl=back)
    y_TD.backward(torch.linspace(-1, 1, y_TD.numel()).view_as(y_TD).to(y_TD.dtype))
    gradients = {"d_x": x_TD.grad, "d_gate": gate_TK.grad}
    found = {name: torch.zeros(0) if grad is None else grad for name, grad in gradients.items()}
    return {"x_QD": x_QD.detach(), "y": y_TD.detach(), **{n: g for n, g in found.items() if g.numel()}}


def compare(group: Any, world: int, per_node: int) -> list[str]:
    wrong = []
    placements = {
        "strided": strided(E, ranks=world, ranks_per_node=per_node),
        "replicated": replicated(LOAD, ranks=world, extra=world, ranks_per_node=per_node),
    }
    for name, placement in placements.items():
        ranks = Ranks(placement, group)
        for case in CASES:
            expected = there_and_back(case, ranks, "all_to_all")
            ways = [(impl, "") for impl in OTHERS]
            if case.name == "plain":
                ways += [(f"{impl}(dispatch=native)", "") for impl in OTHERS]
                ways += [("hierarchical", "all_to_all"), ("all_to_all", "all_gather")]
            for impl, back in ways:
                found = there_and_back(case, ranks, impl, back)
                for key, value in found.items():
                    exact = key == "x_QD"  # sums are made in another order, and rounded at each hop
                    near = {"rtol": 3e-2, "atol": 3e-2} if case.dtype == torch.bfloat16 else {}
                    try:
                        torch.testing.assert_close(
                            value, expected[key], **({"rtol": 0, "atol": 0} if exact else near)
                        )
                    except AssertionError as difference:
                        wrong.append(f"{name}, {case.name}, {impl}, {key}: {difference}")
    return wrong


@pytest.mark.parametrize(
    ("world", "per_node"),
    [
        (4, 2),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(2, 2, marks=pytest.mark.nightly),
        pytest.param(4, 1, marks=pytest.mark.nightly),
        pytest.param(4, 4, marks=pytest.mark.nightly),
        pytest.param(8, 4, marks=pytest.mark.nightly),
        pytest.param(8, 2, marks=pytest.mark.nightly),
    ],
)
def test_all_transports_agree(world: int, per_node: int) -> None:
    for wrong in on_ranks(world, compare, world, per_node):
        assert not wrong, "\n".join(wrong)


@contextmanager
def counted_rows(ranks: Ranks, width: int) -> Iterator[dict[str, int]]:
    """Rows of floats with this width that leave this rank, seen at torch.distributed itself."""
    found, node = {"within": 0, "between": 0}, ranks.rank // ranks.placement.ranks_per_node
    per_node, plain_all_to_all, plain_gather = (
        ranks.placement.ranks_per_node,
        dist.all_to_all_single,
        dist.all_gather,
    )

    def leave(rows: int, to: int) -> None:
        if to != ranks.rank:
            found["within" if to // per_node == node else "between"] += rows

    def all_to_all(
        out: Tensor, rows: Tensor, receive: Any = None, send: Any = None, group: Any = None
    ) -> Any:
        if rows.is_floating_point() and rows.shape[-1] == width:
            members = dist.get_process_group_ranks(group)
            for to, number in zip(members, send or [rows.shape[1]] * len(members), strict=True):
                leave(number, to)
        return plain_all_to_all(out, rows, receive, send, group=group)

    def all_gather(out: Any, rows: Tensor, group: Any = None) -> Any:
        if rows.is_floating_point() and rows.shape[-1] == width:
            for to in dist.get_process_group_ranks(group):
                leave(rows.shape[0], to)
        return plain_gather(out, rows, group=group)

    dist.all_to_all_single, dist.all_gather = all_to_all, all_gather
    try:
        yield found
    finally:
        dist.all_to_all_single, dist.all_gather = plain_all_to_all, plain_gather


def moved(group: Any, world: int, per_node: int) -> list[tuple[str, str, Rows, Rows, bool]]:
    found = []
    for case in CASES:
        if case.layout != "compact":
            continue
        ranks = Ranks(strided(E, ranks=world, ranks_per_node=per_node), group)
        x_TD, routing = drawn(case, ranks.rank)
        plan = make_plan(ranks.to_slots(routing), Layout.compact())
        traffic = settle(plan, ranks)
        for impl in ("all_to_all", "hierarchical", "all_gather"):
            expected = rows_sent(plan.expert_TK(), ranks, impl, max(traffic.tokens))
            with counted_rows(ranks, D) as seen:
                x_QD = ep_dispatch(x_TD, plan, traffic, impl=impl)
            there = Rows(**seen)
            with counted_rows(ranks, D) as seen:
                ep_combine(x_QD, routing.gate_TK, plan, traffic, impl=impl)
            found.append((case.name, impl, expected, there, Rows(**seen)))
    return found


def test_the_bytes_are_those_predicted() -> None:
    by_rank = on_ranks(4, moved, 4, 2)
    fewer = 0
    for at in zip(*by_rank, strict=True):
        name, impl = at[0][:2]
        each = [(one[2], one[3], one[4]) for one in at]
        if impl == "hierarchical":  # who sends on is another rank, so `within` is compared as a sum
            assert [e.between for e, _, _ in each] == [s.between for _, s, _ in each], name
            assert sum(e.within for e, _, _ in each) == sum(s.within for _, s, _ in each), name
        else:
            assert [e for e, _, _ in each] == [s for _, s, _ in each], (name, impl)
        total = [
            (sum(r.within for r in rows), sum(r.between for r in rows)) for rows in zip(*each, strict=True)
        ]
        assert total[0] == total[1] == total[2], (name, impl)
    between = {(at[0][0], at[0][1]): sum(one[2].between for one in at) for at in zip(*by_rank, strict=True)}
    for name in {case.name for case in CASES if case.layout == "compact"}:
        assert between[name, "hierarchical"] <= between[name, "all_to_all"]
        fewer += between[name, "hierarchical"] < between[name, "all_to_all"]
    assert fewer >= 4


def test_the_example_of_the_docstring() -> None:
    class FirstOfFour(Ranks):
        rank = 0

    placement = contiguous(4, ranks=4, ranks_per_node=2)
    ranks = object.__new__(FirstOfFour)
    object.__setattr__(ranks, "placement", placement)
    slot_TK = torch.tensor([[1, 2, 3]])
    assert rows_sent(slot_TK, ranks, "all_to_all") == Rows(within=1, between=2)
    assert rows_sent(slot_TK, ranks, "hierarchical") == Rows(within=2, between=1)
    assert rows_sent(slot_TK, ranks, "all_gather") == Rows(within=1, between=2)
    with pytest.raises(ValueError, match="no prediction"):
        rows_sent(slot_TK, ranks, "carrier_pigeon")


def fixed_sizes(group: Any) -> str:
    ranks = Ranks(contiguous(E, ranks=2), group)
    x_TD, routing = drawn(Case(name="plain"), ranks.rank)
    plan = make_plan(ranks.to_slots(routing), Layout.padded(capacity=4))
    with pytest.raises(NotImplementedError, match="the ranks have 6, 3 tokens"):
        ep_dispatch(x_TD, plan, settle(plan, ranks), impl="all_gather")
    return "refused"


def test_fixed_sizes_need_equally_many_tokens() -> None:
    assert on_ranks(2, fixed_sizes) == ["refused"] * 2
