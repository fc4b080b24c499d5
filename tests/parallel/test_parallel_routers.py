"""Every router on several ranks, by every transport: results and gradients of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.placement import Placement
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.parallel.placing import replicated, strided
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.routers.router import all_routers
from ranks_in_processes import gradients, on_ranks

pytestmark = pytest.mark.slow
D, F, E = 16, 12, 8
SINGLE = ("base_assignment", "switch")  # rules with one choice
ROUTERS = [name for name in all_routers() if name != "soft_moe"]
TOKENS = (5, 0, 7, 3)  # of ranks
LAYOUTS = ("compact", "block(4)")
TRANSPORTS = ("all_to_all", "hierarchical", "all_gather")


def made(kind: type[MoE], router: str, layout: str, dtype: torch.dtype, **more: Any) -> MoE:
    torch.manual_seed(0)
    K = 1 if router in SINGLE else 2
    impl = "staged(grouped_gemm=expert_loop)"
    layer = kind(D, F, E, K, router=router, layout=layout, impl=impl, shared_F=4, dtype=dtype, **more)
    return layer.eval()  # no noise


@cache
def tokens(world: int) -> list[tuple[Tensor, TokenInfo, Tensor]]:
    """x_TD, what is known of it, and the gradient of the result, of each rank."""
    dice = torch.Generator().manual_seed(world)
    each = []
    for rank in range(world):
        T = TOKENS[rank % len(TOKENS)]
        info = TokenInfo(token_id_T=torch.randint(1000, (T,), generator=dice))
        each.append((torch.randn(T, D, generator=dice), info, torch.randn(T, D, generator=dice)))
    return each


def values(layer: MoE, d_x_TD: Tensor, y_TD: Tensor) -> dict[str, Tensor]:
    """The result and all gradients; a rule that learns nothing has none: zeros."""
    return {"y": y_TD.detach(), "x": d_x_TD, **gradients(layer)}


@cache
def placements(world: int) -> dict[str, Placement]:
    per_node, extra = 2 if world > 2 else 1, 2 if world > 1 else 0
    load = [9, 1, 1, 5, 1, 1, 1, 3]
    return {
        "strided": strided(E, ranks=world, ranks_per_node=per_node),
        "replicated": replicated(load, ranks=world, extra=extra, ranks_per_node=per_node),
    }


def on_one_rank(group: Any, world: int, layouts: tuple[str, ...], transports: tuple[str, ...]) -> Any:
    rank, found = dist.get_rank(group), {}
    x_TD, info, d_y_TD = tokens(world)[rank]
    for router in ROUTERS:
        for layout in layouts:
            state = made(MoE, router, layout, torch.float32).state_dict()
            for (name, placement), transport in (
                (place, way) for place in placements(world).items() for way in transports
            ):
                layer = made(
                    ParallelMoE, router, layout, torch.float32, ranks=Ranks(placement, group),
                    dispatch_impl=transport, combine_impl=transport,
                )  # fmt: skip
                assert isinstance(layer, ParallelMoE)
                layer.load_full_state_dict(state)
                x = x_TD.clone().requires_grad_()
                y_TD, _ = layer(x, info)
                y_TD.backward(d_y_TD)
                layer.reduce_gradients()
                found[router, layout, name, transport] = values(
                    layer, torch.zeros_like(x) if x.grad is None else x.grad, y_TD
                )
    return found


def alone(router: str, layout: str, world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """In one process: every rank's tokens are routed by themselves, then computed together."""
    layer = made(MoE, router, layout, dtype)
    layer.load_state_dict(made(MoE, router, layout, torch.float32).state_dict())
    each = [x.clone().requires_grad_() for x, _, _ in tokens(world)]
    routings = [layer.router(x, info) for x, (_, info, _) in zip(each, tokens(world), strict=True)]
    joined = Routing(
        expert_TK=torch.cat([one.expert_TK for one in routings]),
        gate_TK=torch.cat([one.gate_TK for one in routings]).to(dtype),
        num_experts=E,
    )
    y_TD = layer.compute(torch.cat(each).to(dtype), joined)
    y_TD.backward(torch.cat([d_y_TD for _, _, d_y_TD in tokens(world)]).to(dtype))
    d_x = [torch.zeros_like(x) if x.grad is None else x.grad for x in each]
    return values(layer, torch.cat(d_x), y_TD)


@pytest.mark.parametrize(
    ("world", "layouts", "transports"),
    [
        (2, ("compact",), ("all_to_all",)),
        pytest.param(1, LAYOUTS, TRANSPORTS, marks=pytest.mark.nightly),
        pytest.param(2, LAYOUTS, TRANSPORTS, marks=pytest.mark.nightly),
        pytest.param(4, LAYOUTS, TRANSPORTS, marks=pytest.mark.nightly),
        pytest.param(8, ("compact",), TRANSPORTS, marks=pytest.mark.nightly),
    ],
)
def test_every_router(world: int, layouts: tuple[str, ...], transports: tuple[str, ...]) -> None:
    by_rank = on_ranks(world, on_one_rank, world, layouts, transports)
    for router in ROUTERS:
        for layout in layouts:
            plain = alone(router, layout, world, torch.float32)
            true = alone(router, layout, world, torch.float64)
            for where in [key for key in by_rank[0] if key[:2] == (router, layout)]:
                each = [found[where] for found in by_rank]
                for key in plain:
                    if key in ("x", "y"):
                        got = [(torch.cat([one[key] for one in each]), slice(None))]
                    elif key.startswith("experts."):
                        held = placements(world)[where[2]].experts_W
                        got = [(one[key], list(at)) for one, at in zip(each, held, strict=True)]
                    else:  # the same on every rank
                        got = [(one[key], slice(None)) for one in each]
                    for value, at in got:
                        verdict = judge(value, true[key][at].double(), plain[key][at], few_rows=True)
                        assert verdict.passed, f"{where}, {key}: {verdict.sentence}"
