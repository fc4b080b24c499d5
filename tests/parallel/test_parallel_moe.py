"""ParallelMoE on 1, 2, 4 and 8 processes gives what MoE gives in one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.parallel.placing import assigned, contiguous, greedy, replicated, strided
from moe_routing_bench.parallel.ranks import Ranks
from ranks_in_processes import gradients, on_ranks

pytestmark = pytest.mark.slow
D, F, E, K = 16, 12, 8, 2
LOAD = (9, 1, 1, 5, 1, 1, 1, 3)
IMPL = "staged(grouped_gemm=expert_loop)"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens of each rank, and what they choose."""

    name: str
    tokens: tuple[int, ...]  # rank w has tokens[w % len]
    chosen: str = "random"  # random, one (all to expert 0), ragged, none
    layout: str = "compact"
    dtype: torch.dtype = torch.float32
    bias: bool = False


CASES = (
    Case(name="plain", tokens=(7,)),
    Case(name="uneven", tokens=(0, 9, 1, 4)),
    Case(name="nobody", tokens=(0,)),
    Case(name="all to one expert", tokens=(5, 3), chosen="one"),
    Case(name="ragged", tokens=(6, 2), chosen="ragged"),
    Case(name="no choice", tokens=(3,), chosen="none"),
    Case(name="blocks", tokens=(7, 0, 5), layout="block(4)", bias=True),
    Case(name="capacity", tokens=(8, 3), layout="padded(capacity=3)"),
    Case(name="bfloat16", tokens=(6, 1), dtype=torch.bfloat16),
)


@cache
def placements(world: int) -> dict[str, Placement]:
    return {
        "contiguous": contiguous(E, ranks=world),
        "strided": strided(E, ranks=world, ranks_per_node=2 if world > 2 else 1),
        "greedy": greedy(LOAD, ranks=world),
        "assigned": assigned(LOAD, ranks=world, ranks_per_node=2 if world > 2 else 1),
        "replicated": replicated(LOAD, ranks=world, extra=world if world > 1 else 0, ranks_per_node=1),
    }


def inputs(case: Case, world: int) -> list[tuple[Tensor, Routing, Tensor]]:
    """x_TD, what is chosen, and the gradient of the result, of each rank."""
    dice = torch.Generator().manual_seed(len(case.name))
    found = []
    for rank in range(world):
        T = case.tokens[rank % len(case.tokens)]
        x_TD = torch.randn(T, D, generator=dice).to(case.dtype)
        expert_TK = torch.rand(T, E, generator=dice).argsort(1)[:, :K]
        if case.chosen == "one":
            expert_TK = torch.tensor([0, 1]).expand(T, K).clone()
        elif case.chosen == "ragged":
            expert_TK[::2, 1] = -1
        elif case.chosen == "none":
            expert_TK[:] = -1
        gate_TK = torch.rand(T, K, generator=dice)
        routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E)
        found.append((x_TD, routing, torch.randn(T, D, generator=dice).to(case.dtype)))
    return found


def layer_options(case: Case) -> dict[str, Any]:
    return {"layout": case.layout, "impl": IMPL, "bias": case.bias, "dtype": case.dtype, "shared_F": 4}


def by(transport: str) -> dict[str, str]:
    """Its parts are those that IMPL is made of, for equal bits."""
    return {"dispatch_impl": transport, "combine_impl": transport}


def possible(case: Case, send: str, transport: str) -> bool:
    """Tokens are sent in fixed numbers only if all ranks have equally many."""
    return transport == "all_to_all" or send == "compact" or len(case.tokens) == 1


def whole(case: Case) -> MoE:
    torch.manual_seed(0)
    return MoE(D, F, E, K, **layer_options(case))


def run(layer: MoE, x_TD: Tensor, routing: Routing, d_y_TD: Tensor) -> dict[str, Tensor]:
    """Result and gradients of one call with a given routing; `chosen` is without the shared expert, whose
    matmul may round otherwise for another number of tokens."""
    layer.zero_grad()
    x_TD, gate_TK = x_TD.clone().requires_grad_(), routing.gate_TK.clone().requires_grad_()
    given = Routing(expert_TK=routing.expert_TK, gate_TK=gate_TK, num_experts=E)
    y_TD = layer.compute(x_TD, given)
    y_TD.backward(d_y_TD)
    if isinstance(layer, ParallelMoE):
        layer.reduce_gradients()
    nothing = torch.zeros_like
    with torch.no_grad():
        chosen_TD = layer.chosen_computed(x_TD, given, None)
    d_gate_TK = nothing(gate_TK) if gate_TK.grad is None else gate_TK.grad  # of a rank without tokens
    found = {"chosen": chosen_TD, "y": y_TD.detach(), "x": x_TD.grad, "gate": d_gate_TK}
    found |= {name: grad for name, grad in gradients(layer).items() if not name.startswith("router.")}
    return {name: value.clone() if value is not None else nothing(x_TD) for name, value in found.items()}


def on_one_rank(
    group: Any, world: int, send: str, transport: str
) -> dict[tuple[str, str], dict[str, Tensor]]:
    rank = dist.get_rank(group)
    found = {}
    for case in CASES:
        if not possible(case, send, transport):
            continue
        x_TD, routing, d_y_TD = inputs(case, world)[rank]
        state = whole(case).state_dict()
        for name, placement in placements(world).items():
            layer = ParallelMoE(
                D, F, E, K, ranks=Ranks(placement, group), send_layout=send, **by(transport),
                **layer_options(case),
            )  # fmt: skip
            layer.load_full_state_dict(state)
            full = layer.full_state_dict()
            assert full.keys() == state.keys() and all(torch.equal(full[key], state[key]) for key in state)
            results = run(layer, x_TD, routing, d_y_TD)
            held = layer.ranks.experts
            for key in [key for key in results if key.startswith("experts.")]:
                shape = (E, *results[key].shape[1:])
                spread = torch.full(shape, float("nan"), dtype=results[key].dtype)
                spread[list(held)] = results[key]
                results[key] = spread
            found[case.name, name] = results
    return found


def alone(case: Case, world: int) -> dict[str, Tensor]:
    """The same in one process: all tokens after one another."""
    each = inputs(case, world)
    routing = Routing(
        expert_TK=torch.cat([one.expert_TK for _, one, _ in each]),
        gate_TK=torch.cat([one.gate_TK for _, one, _ in each]),
        num_experts=E,
    )
    x_TD, d_y_TD = (torch.cat([one[place] for one in each]) for place in (0, 2))
    return run(whole(case), x_TD, routing, d_y_TD)


@pytest.mark.parametrize(
    ("world", "send", "transport"),
    [
        (1, "compact", "all_to_all"),
        (4, "compact", "all_to_all"),
        (2, "padded(capacity=16)", "all_to_all"),
        *(
            pytest.param(world, send, transport, marks=pytest.mark.nightly)
            for world, send, transport in (
                (2, "compact", "all_to_all"),
                (8, "compact", "all_to_all"),
                (4, "padded(capacity=16)", "all_to_all"),
                (4, "compact", "hierarchical"),
                (8, "compact", "hierarchical"),
                (4, "padded(capacity=16)", "hierarchical"),
                (2, "compact", "all_gather"),
                (4, "compact", "all_gather"),
                (2, "padded(capacity=16)", "all_gather"),
            )
        ),
    ],
)
def test_as_in_one_process(world: int, send: str, transport: str) -> None:
    by_rank = on_ranks(world, on_one_rank, world, send, transport)
    for case in [case for case in CASES if possible(case, send, transport)]:
        expected = alone(case, world)
        for name, placement in placements(world).items():
            if placement.most_copies > 1 and case.layout.startswith("padded"):
                continue  # a copy has a capacity of its own
            each = [found[case.name, name] for found in by_rank]
            for key in ("chosen", "y", "x", "gate"):
                got = torch.cat([one[key] for one in each])
                where = f"{case.name}, {name}, {key}"
                if key == "chosen" and placement.most_copies == 1 and transport == "all_to_all":
                    assert torch.equal(got, expected[key]), where
                else:  # other transports round the sum of each rank and node, too
                    near = case.dtype == torch.bfloat16 and transport != "all_to_all"
                    bounds = {"rtol": 2e-2, "atol": 2e-2} if near else {}
                    torch.testing.assert_close(
                        got, expected[key], msg=lambda m, w=where: f"{w}: {m}", **bounds
                    )
            for key in [key for key in expected if key.startswith(("experts.", "shared."))]:
                for one in each:
                    held = ~one[key].isnan()
                    near = {"rtol": 2e-2, "atol": 2e-2} if case.dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(one[key][held], expected[key][held], **near)


def begin(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(dist.get_rank(group))
    layers = [ParallelMoE(D, F, E, K, ranks=Ranks(placement, group)) for placement in placements(2).values()]
    return layers[0].full_state_dict(), layers[-1].full_state_dict()


def test_ranks_begin_alike_and_experts_differ() -> None:
    (first, copied), (again, _) = on_ranks(2, begin)
    assert all(torch.equal(first[name], again[name]) for name in first)
    weights = copied["experts.w_in_EDG"]
    assert len({float(one.sum()) for one in weights}) == E


def too_few(group: Any) -> tuple[int, str]:
    ranks = Ranks(contiguous(E, ranks=2), group)
    layer = ParallelMoE(D, F, E, K, ranks=ranks, send_layout="padded(capacity=1)")
    routing = Routing(expert_TK=torch.zeros(5, 1, dtype=torch.int64), gate_TK=torch.ones(5, 1), num_experts=E)
    y_TD = layer.compute(torch.randn(5, D), routing)
    assert layer.dropped is not None
    with pytest.raises(ValueError, match="one rank cannot use a plan"):
        layer.compute(torch.randn(5, D), routing, object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on 3 ranks for a group of 2"):
        Ranks(contiguous(E, ranks=3), group)
    return int(layer.dropped), str((y_TD != 0).any(1).tolist())


def test_what_finds_no_room_is_counted() -> None:
    assert on_ranks(2, too_few) == [(4, "[True, False, False, False, False]")] * 2


def test_a_single_rank_needs_no_group() -> None:
    layer = ParallelMoE(D, F, E, K, ranks=Ranks(contiguous(E, ranks=1)), impl=IMPL, **by("all_to_all"))
    plain = MoE(D, F, E, K, impl=IMPL)
    layer.load_full_state_dict(plain.state_dict())
    x = torch.randn(3, 5, D)
    assert torch.equal(layer(x)[0], plain(x)[0])
    with pytest.raises(ValueError, match="placement is of 8"):
        ParallelMoE(D, F, 4, K, ranks=layer.ranks)
