"""ParallelMoE with torch's own tools: clip_grad_norm_, fully_shard and torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from moe_routing_bench.core.placement import Placement
from moe_routing_bench.moe.expert_parallel import ParallelMoE
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.parallel.placing import contiguous, strided
from moe_routing_bench.parallel.ranks import Ranks
from ranks_in_processes import on_ranks

pytestmark = pytest.mark.slow
D, F, E, K = 16, 12, 8, 2
TOKENS = (5, 0, 7, 3)  # of ranks
OPTIONS: dict[str, Any] = {
    "router": "sigmoid_bias",
    "shared_F": 4,
    "impl": "staged(grouped_gemm=expert_loop)",
}


def whole() -> MoE:
    torch.manual_seed(0)
    return MoE(D, F, E, K, **OPTIONS).eval()


def tokens(rank: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS[rank], D, generator=dice), torch.randn(TOKENS[rank], D, generator=dice)


def stepped(called: nn.Module, layer: MoE, x_TD: Tensor, d_y_TD: Tensor) -> float:
    """One step with clipped gradients; the norm before it."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    called(x_TD)[0].backward(d_y_TD)
    if isinstance(layer, ParallelMoE) and len(layer.experts.w_in_EDG.device_mesh.shape) == 1:
        layer.reduce_gradients()
    norm = clip_grad_norm_([p for p in layer.parameters() if p.grad is not None], 0.5)
    optimizer.step()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


class Block(nn.Module):
    """A model around the layer."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Any]:
        y_TD, routing = self.layer(x_TD)
        return y_TD, routing


def on_mesh(group: Any, sharded: str) -> tuple[float, dict[str, Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    layer = ParallelMoE(D, F, E, K, ranks=Ranks.on_mesh(contiguous(E, ranks=2), mesh), **OPTIONS).eval()
    layer.load_full_state_dict(whole().state_dict())
    called: Any = Block(layer) if sharded == "around" else layer
    if sharded:
        fully_shard(called, mesh=mesh["dp"])
        called.set_force_sum_reduction_for_comms(True)
        called.set_gradient_divide_factor(1.0)  # sums, as reduce_gradients
        with pytest.raises(ValueError, match="leave reduce_gradients out"):
            layer.reduce_gradients()
        with pytest.raises(ValueError, match="load them before"):
            layer.load_full_state_dict(whole().state_dict())
    norm = stepped(called, layer, *tokens(dist.get_rank()))
    return norm, layer.full_state_dict(), layer.experts.w_in_EDG.to_local().shape[0]


@pytest.mark.parametrize("sharded", ["", "itself", "around"])
def test_a_step_with_clipped_gradients(sharded: str) -> None:
    one = whole()
    x_TD, d_y_TD = (torch.cat(each) for each in zip(*(tokens(rank) for rank in range(4)), strict=True))
    expected = stepped(one, one, x_TD, d_y_TD)
    assert expected > 0.5
    for norm, state, rows in on_ranks(4, on_mesh, sharded):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert rows == (E // 4 if sharded else E // 2)
        for name, value in one.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}")


def strided_and_sharded(group: Any) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for around in (lambda layer: layer, Block):
        layer = ParallelMoE(D, F, E, K, ranks=Ranks.on_mesh(strided(E, ranks=2), mesh), **OPTIONS)
        called = fully_shard(around(layer), mesh=mesh["dp"])
        with pytest.raises(NotImplementedError, match="order of experts"):
            called(torch.randn(3, D))
        with pytest.raises(NotImplementedError, match="order of experts"):
            layer.state_dict()
    layer = ParallelMoE(D, F, E, K, ranks=Ranks.on_mesh(contiguous(E, ranks=2), mesh), **OPTIONS)
    fully_shard(layer.experts, mesh=mesh["dp"])  # which nobody calls, so nothing gathers its weights
    with pytest.raises(ValueError, match="a module around it"):
        layer(torch.randn(3, D))
    return "refused"


def test_only_whole_layers_with_experts_in_order_are_sharded_further() -> None:
    assert on_ranks(2, strided_and_sharded) == ["refused"] * 2


def frozen_and_thawed(group: Any) -> list[str]:
    wrong = []
    x_TD = tokens(dist.get_rank())[0]
    for name, placement in placements(2).items():
        layer = made(group, placement)[0]  # an optimizer would use its weights
        before, y_TD = layer.full_state_dict(), layer(x_TD)[0].detach()
        layer.freeze("native")
        if layer.frozen is None:
            wrong.append(f"{name}, nothing is frozen")
        with pytest.raises(RuntimeError, match="thaw"):
            layer.state_dict()
        torch.testing.assert_close(layer(x_TD)[0], y_TD)
        after = layer.thaw().full_state_dict()
        wrong += [f"{name}, {key}" for key, value in before.items() if not torch.equal(value, after[key])]
        assert all(isinstance(layer.state_dict()[name], DTensor) for name, _ in layer.named_parameters())
        layer.freeze("eager_loop")  # has no packed form
        assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
    return wrong


def test_a_layer_is_frozen_and_thawed() -> None:
    whole().freeze("native")  # compiles outside the ranks, whose time is limited
    assert on_ranks(2, frozen_and_thawed) == [[], []]


def weights_loaded(group: Any) -> list[str]:
    one, wrong = whole(), []
    for name, placement in placements(2).items():
        layer, _ = made(group, placement)
        layer.experts.load_weights(one.experts.weights())
        assert layer.shared is not None and one.shared is not None
        layer.shared.load_weights(one.shared.weights())
        for key, value in layer.full_state_dict().items():
            if "router" not in key and not torch.equal(value, one.state_dict()[key]):
                wrong.append(f"{name}, {key}")
        with pytest.raises(ValueError, match="w_in_EDG is "):
            layer.experts.load_weights(MoE(D, F, E // 2, K).experts.weights())
    return wrong


def test_each_rank_takes_its_experts_from_the_weights_of_all() -> None:
    assert on_ranks(2, weights_loaded) == [[], []]


def reduced_twice(group: Any) -> bool:
    layer, optimizer = made(group, placements(2)["copies"])
    x_TD, d_y_TD = tokens(dist.get_rank())

    def summed(passes: int) -> dict[str, Tensor]:
        optimizer.zero_grad()
        for _ in range(passes):
            layer(x_TD)[0].backward(d_y_TD)
        layer.reduce_gradients()
        return {name: grad.clone() for name, grad in layer.gradients_here().items()}

    once, twice = summed(1), summed(2)
    for again in (False, True):
        if again:
            layer(x_TD)[0].backward(d_y_TD)
        with pytest.raises(ValueError, match="already summed"):
            layer.reduce_gradients()
    return all(torch.allclose(2 * once[name], twice[name], atol=1e-6) for name in once)


def test_gradients_are_summed_once() -> None:
    assert on_ranks(2, reduced_twice) == [True] * 2


def placements(world: int) -> dict[str, Placement]:
    blocks = contiguous(E, ranks=world).experts_W
    return {
        "contiguous": contiguous(E, ranks=world),
        "strided": strided(E, ranks=world),
        "copies": Placement(
            experts_W=tuple(
                tuple(sorted({*held, blocks[(w + 1) % world][0]})) for w, held in enumerate(blocks)
            ),
            num_experts=E,
        ),
        "uneven": Placement(
            experts_W=(*((w,) for w in range(world - 1)), tuple(range(world - 1, E))), num_experts=E
        ),
    }


def two_copies_on_a_rank(group: Any) -> str:
    double = Placement(experts_W=((0, 0, *range(1, 4)), tuple(range(4, E))), num_experts=E)
    layer = ParallelMoE(D, F, E, K, ranks=Ranks(double, group), **OPTIONS)
    with pytest.raises(NotImplementedError, match="two copies"):
        layer.state_dict()
    return str(len(layer.full_state_dict()["experts.w_in_EDG"]))


def test_two_copies_on_a_rank_have_no_state_dict() -> None:
    assert on_ranks(2, two_copies_on_a_rank) == [str(E)] * 2


def made(group: Any, placement: Placement) -> tuple[ParallelMoE, torch.optim.Optimizer]:
    layer = ParallelMoE(D, F, E, K, ranks=Ranks(placement, group), **OPTIONS)
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


def momenta(layer: ParallelMoE, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: optimizer.state[parameter]["exp_avg"].full_tensor()  # type: ignore[attr-defined]
        for name, parameter in layer.named_parameters()
        if parameter in optimizer.state
    }


def saved(group: Any, folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, placement in placements(4).items():
        layer, optimizer = made(group, placement)
        state: dict[str, Any] = {"layer": layer.state_dict()}
        found[name] = layer.full_state_dict()
        if name == "contiguous":  # with an optimizer, whose rows are slots
            layer(tokens(dist.get_rank(group))[0])[0].sum().backward()
            layer.reduce_gradients()
            optimizer.step()
            parts = get_state_dict(layer, optimizer)
            state = dict(zip(("layer", "optimizer"), parts, strict=True))
            found[name], found["momenta"] = layer.full_state_dict(), momenta(layer, optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
    return found


def loaded(group: Any, folder: str, expected: dict[str, dict[str, Tensor]]) -> list[str]:
    wrong = []

    def compare(where: str, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        wrong.extend(f"{where}, {key}" for key in wanted if not torch.equal(got[key], wanted[key]))
        wrong.extend(f"{where}, keys" for _ in [0] if got.keys() != wanted.keys())

    world = dist.get_world_size(group)
    for name in placements(4):
        for other, placement in placements(world).items():
            layer, _ = made(group, placement)
            state = {"layer": layer.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            compare(f"{name} as {other}", layer.full_state_dict(), expected[name])
            again, _ = made(group, placement)
            again.load_state_dict(state["layer"])
            compare(f"{name} as {other}, again", again.full_state_dict(), expected[name])
    # from layer to layer: what slots hold is gathered, and rows of another rank are refused
    states = {name: made(group, placement)[0] for name, placement in placements(world).items()}
    states["strided"].load_state_dict(states["contiguous"].state_dict())
    compare(
        "in order as strided", states["strided"].full_state_dict(), states["contiguous"].full_state_dict()
    )
    with pytest.raises(ValueError, match="on another rank"):
        states["contiguous"].load_state_dict(states["strided"].state_dict())
    layer, optimizer = made(group, placements(world)["contiguous"])
    parts = dict(zip(("layer", "optimizer"), get_state_dict(layer, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=f"{folder}/contiguous")
    set_state_dict(
        layer, optimizer, model_state_dict=parts["layer"], optim_state_dict=parts["optimizer"]
    )  # fmt: skip
    compare("with an optimizer", layer.full_state_dict(), expected["contiguous"])
    compare("momenta", momenta(layer, optimizer), expected["momenta"])
    return wrong


def into_one_process(group: Any, folder: str) -> dict[str, Tensor]:
    state = {"layer": whole().state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/copies")
    return state["layer"]


def test_a_checkpoint_of_four_ranks_on_two(tmp_path: Path) -> None:
    expected = on_ranks(4, saved, str(tmp_path))
    assert len({float(state["experts.w_in_EDG"].sum()) for state in expected[0].values()}) > 3
    assert on_ranks(2, loaded, str(tmp_path), expected[0]) == [[], []]
    (one,) = on_ranks(1, into_one_process, str(tmp_path))
    assert all(torch.equal(one[key], value) for key, value in expected[0]["copies"].items())
