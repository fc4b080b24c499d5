"""ParallelMoE on a mesh, in chunks, with a balance controller, and after a change of the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from moe_routing_bench.controllers.controller import Counts, controller_for
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.parallel.placing import eplb, replicated, strided
from moe_routing_bench.parallel.ranks import Ranks
from ranks_in_processes import gradients, on_ranks

pytestmark = pytest.mark.slow
D, F, E, K = 16, 12, 8, 2
LOAD = [9, 1, 1, 5, 1, 1, 1, 3]
TOKENS = (5, 0, 7, 3)


def whole(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(D, F, E, K, router="sigmoid_bias", shared_F=4, **options).eval()


def tokens(rank: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS[rank], D, generator=dice), torch.randn(TOKENS[rank], D, generator=dice)


def stepped(layer: MoE, x_TD: Tensor, d_y_TD: Tensor, reduce: Any = None) -> dict[str, Tensor]:
    """Result, gradients, and the bias after one step of the router's controller."""
    y_TD, routing = layer(x_TD)
    y_TD.backward(d_y_TD)
    if isinstance(layer, ParallelMoE):
        layer.reduce_gradients()
    assert isinstance(routing, Routing)
    controller = controller_for(layer.router, reduce=reduce)
    controller.step(Counts.of(routing))
    return {
        "y": y_TD.detach(),
        **gradients(layer),
        **{f"moved {n}": layer.router.get_buffer(n) for n in controller.moves},
    }


def on_mesh(group: Any, chunks: int, transport: str) -> dict[str, Any]:
    """Two copies of a layer on two ranks each; experts have copies on ranks too, even two on one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    ranks = Ranks.on_mesh(eplb([90, *LOAD[1:]], ranks=2, extra=2, ranks_per_node=1), mesh)
    with pytest.raises(ValueError, match="not tp"):
        Ranks.on_mesh(ranks.placement, mesh, experts="tp")
    torch.manual_seed(dist.get_rank())  # the ranks begin unlike
    layer = ParallelMoE(
        D, F, E, K, ranks=ranks, router="sigmoid_bias", shared_F=4, chunks=chunks, dispatch_impl=transport,
        combine_impl=transport,
    )  # fmt: skip
    begun = layer.full_state_dict()
    layer.load_full_state_dict(whole().state_dict())
    found = stepped(layer.eval(), *tokens(dist.get_rank()), reduce=layer.total)
    return {"begun": begun, "held": list(ranks.experts), **found}


@pytest.mark.parametrize(
    ("chunks", "transport"),
    [
        (3, "hierarchical"),
        pytest.param(1, "all_to_all", marks=pytest.mark.nightly),
        pytest.param(2, "all_gather", marks=pytest.mark.nightly),
        pytest.param(4, "all_to_all", marks=pytest.mark.nightly),
    ],
)
def test_a_mesh_of_experts_and_data(chunks: int, transport: str) -> None:
    by_rank = on_ranks(4, on_mesh, chunks, transport)
    x_TD, d_y_TD = (torch.cat(each) for each in zip(*(tokens(rank) for rank in range(4)), strict=True))
    expected = stepped(whole(), x_TD, d_y_TD)
    torch.testing.assert_close(torch.cat([one["y"] for one in by_rank]), expected["y"])
    for one in by_rank:
        assert all(torch.equal(one["begun"][name], by_rank[0]["begun"][name]) for name in one["begun"])
        for name, value in expected.items():
            if name != "y":
                at = one["held"] if name.startswith("experts.") else slice(None)
                torch.testing.assert_close(one[name], value[at], msg=lambda m, n=name: f"{n}: {m}")
    moved = next(name for name in expected if name.startswith("moved"))
    assert expected[moved].abs().sum() > 0


def in_chunks(group: Any) -> list[str]:
    """Twelve chunks of a few tokens, some of them empty, against one; backward too."""
    wrong = []
    x_TD, d_y_TD = tokens(2 * dist.get_rank(group))
    for transport in ("all_to_all", "hierarchical", "all_gather"):
        each = []
        for chunks in (1, 12):
            ranks = Ranks(strided(E, ranks=2, ranks_per_node=1), group)
            layer = ParallelMoE(
                D, F, E, K, ranks=ranks, chunks=chunks, router="sigmoid_bias", shared_F=4,
                dispatch_impl=transport, combine_impl=transport,
            )  # fmt: skip
            layer.load_full_state_dict(whole().state_dict())
            x = x_TD.clone().requires_grad_()
            found = stepped(layer.eval(), x, d_y_TD)
            assert x.grad is not None and int(layer.dropped) == 0  # type: ignore[arg-type]
            each.append({**found, "x": x.grad})
        wrong += [
            f"{transport}, {name}"
            for name in each[0]
            if not torch.allclose(each[0][name], each[1][name], 1e-5)
        ]
    with pytest.raises(ValueError, match="each chunk would have its own capacity"):
        ParallelMoE(D, F, E, K, ranks=ranks, chunks=2, send_layout="padded(capacity=4)")
    return wrong


def test_chunks_change_nothing() -> None:
    assert on_ranks(2, in_chunks) == [[], []]


def saved(group: Any) -> dict[str, Tensor]:
    placement = replicated(LOAD, ranks=dist.get_world_size(group), extra=3)
    layer = ParallelMoE(D, F, E, K, ranks=Ranks(placement, group), router="sigmoid_bias", shared_F=4)
    return layer.full_state_dict()


def loaded(group: Any, state: dict[str, Tensor]) -> Tensor:
    ranks = Ranks(strided(E, ranks=dist.get_world_size(group)), group)
    layer = ParallelMoE(D, F, E, K, ranks=ranks, router="sigmoid_bias", shared_F=4)
    layer.load_full_state_dict(state)
    with torch.no_grad():
        return layer.eval()(tokens(dist.get_rank(group))[0])[0]


def test_a_checkpoint_of_three_ranks_on_two_and_one() -> None:
    state = on_ranks(3, saved)[0]
    one = whole()
    one.load_state_dict(state)
    with torch.no_grad():
        for world in (1, 2):
            y_TD = torch.cat(on_ranks(world, loaded, state))
            torch.testing.assert_close(y_TD, one(torch.cat([tokens(rank)[0] for rank in range(world)]))[0])
