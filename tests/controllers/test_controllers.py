"""Controllers against loops, at the edges, over ranks, without a host; and that each reaches its aim."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_routing_bench.controllers.controller import (
    Controller,
    Counts,
    all_controllers,
    all_reduce_sum,
    controller_for,
)
from moe_routing_bench.core.routing import Routing, TokenInfo
from moe_routing_bench.routers.router import Router, all_routers, build, only_subclass

pytestmark = pytest.mark.slow

NAMES = ("centred_bias", "l1_strength", "p_threshold", "quantile", "sign_bias", "threshold_ema")
E, K = 4, 2


class StandIn(Router):
    """A router with every balance state there is, and no rule."""

    controller = "sign_bias"

    def __init__(self, D: int = 1, E: int = E, K: int = K):
        super().__init__(D, E, K)
        self.register_buffer("strength", torch.tensor(1e-8))
        self.register_buffer("p", torch.tensor(0.4))
        self.register_buffer("seen_batches", torch.zeros(()))
        for name in ("bias_E", "beta_E", "seen_beta_E", "threshold_E", "seen_threshold_E"):
            self.register_buffer(name, torch.zeros(E))


class Bare(Router):
    pass


def counts_of(counts: list[int], num_tokens: int | None = None) -> Counts:
    tokens = sum(counts) // K if num_tokens is None else num_tokens
    return Counts(count_E=torch.tensor(counts), num_tokens=torch.tensor(tokens))


def stand_in(**values: Any) -> StandIn:
    router = StandIn()
    for name, value in values.items():
        router.get_buffer(name).copy_(torch.tensor(value))
    return router


def rounded() -> StandIn:
    """As a cast that does not go through Router would leave it."""
    router = StandIn()
    router.bias_E = router.get_buffer("bias_E").bfloat16()
    return router


def state(router: Router) -> dict[str, Any]:
    return {name: value.tolist() for name, value in router.named_buffers()}


def test_counts_of_a_routing() -> None:
    expert_TK = torch.tensor([[0, 2], [2, -1], [3, 1]])
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.ones(3, 2), num_experts=E)
    whole, part = Counts.of(routing), Counts.of(routing, torch.tensor([True, True, False]))
    assert (whole.count_E.tolist(), whole.num_tokens.item()) == ([1, 1, 2, 1], 3)
    assert (part.count_E.tolist(), part.num_tokens.item()) == ([1, 0, 2, 0], 2)
    both = whole + part
    assert (both.count_E.tolist(), both.num_tokens.item()) == ([2, 1, 4, 1], 5)


def test_sign_bias_moves_each_expert_towards_the_mean() -> None:
    router = stand_in(bias_E=[0.5, 0.0, 0.0, 0.0])
    controller_for(router, "sign_bias", rate=0.01).step(counts_of([10, 2, 2, 2]))
    assert router.get_buffer("bias_E").tolist() == pytest.approx([0.49, 0.01, 0.01, 0.01])
    controller_for(router, "sign_bias", rate=0.01).step(counts_of([4, 8, 0, 4]))
    assert router.get_buffer("bias_E").tolist() == pytest.approx([0.49, 0.0, 0.02, 0.01])


def test_centred_bias_keeps_the_sum() -> None:
    router = stand_in()
    controller_for(router, "centred_bias", rate=0.01).step(counts_of([10, 2, 2, 2]))
    # changes -1, 1, 1, 1 have the mean 1/2
    assert router.get_buffer("bias_E").tolist() == pytest.approx([-0.015, 0.005, 0.005, 0.005])
    for _ in range(50):
        controller_for(router, "centred_bias", rate=0.01).step(counts_of(torch.randint(99, (E,)).tolist()))
    assert router.get_buffer("bias_E").sum().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["sign_bias", "centred_bias"])
def test_a_gap_of_one_token_in_a_billion_has_its_sign(name: str) -> None:
    router = stand_in()
    controller_for(router, name).step(counts_of([10**9 + 1, 10**9 - 1, 10**9, 10**9]))
    assert torch.sign(router.get_buffer("bias_E")).tolist() == [-1, 1, 0, 0]


@pytest.mark.parametrize(
    ("counts", "tokens", "direction"),
    [([3, 3, 3, 3], 5, 1), ([3, 3, 3, 3], 6, -1), ([1, 0, 0, 0], 6, -1), ([0, 0, 0, 0], 0, 0)],
)
def test_l1_strength(counts: list[int], tokens: int, direction: int) -> None:
    router = stand_in(strength=0.5)
    controller_for(router, "l1_strength").step(counts_of(counts, tokens))
    assert router.get_buffer("strength").item() == pytest.approx(0.5 * 1.2**direction)


def test_quantile_takes_the_mean_of_what_was_seen() -> None:
    router = stand_in(beta_E=[1.0, 0.0, 0.0, -1.0], seen_beta_E=[2.0, 4.0, 6.0, 8.0], seen_batches=2.0)
    controller = controller_for(router, "quantile")
    controller.step(counts_of([1, 1, 1, 1]))
    assert router.get_buffer("beta_E").tolist() == pytest.approx([-1.5, -0.5, 0.5, 1.5])
    assert router.get_buffer("seen_beta_E").tolist() == [0, 0, 0, 0]
    assert router.get_buffer("seen_batches").item() == 0
    controller.step(counts_of([1, 1, 1, 1]))  # nothing was seen since
    assert router.get_buffer("beta_E").tolist() == pytest.approx([-1.5, -0.5, 0.5, 1.5])
    slow = stand_in(beta_E=[1.0, 0.0, 0.0, -1.0], seen_beta_E=[0.0, 0.0, 0.0, 4.0], seen_batches=1.0)
    controller_for(slow, "quantile", ema=0.5).step(counts_of([1, 1, 1, 1]))
    assert slow.get_buffer("beta_E").tolist() == pytest.approx([0.0, -0.5, -0.5, 1.0])


def test_threshold_ema_is_a_moving_mean_without_its_start() -> None:
    router = StandIn()
    controller = controller_for(router, "threshold_ema", decay=0.75)
    raw = 0.0
    for step, value in enumerate([8.0, 4.0, 0.0, 4.0, 12.0, 2.0], start=1):
        router.get_buffer("seen_threshold_E").fill_(2 * value)
        router.get_buffer("seen_batches").fill_(2)
        controller.step(counts_of([1, 1, 1, 1]))
        raw = 0.75 * raw + 0.25 * value
        expected = raw / (1 - 0.75**step)
        assert router.get_buffer("threshold_E").tolist() == pytest.approx([expected] * E)
        controller.step(counts_of([1, 1, 1, 1]))  # nothing was seen since
        assert router.get_buffer("threshold_E").tolist() == pytest.approx([expected] * E)
    assert router.get_buffer("seen_batches").item() == 0
    plain = stand_in(seen_threshold_E=[1.0, 2.0, 3.0, 4.0], seen_batches=1.0)
    controller_for(plain, "threshold_ema", decay=0).step(counts_of([1, 1, 1, 1]))
    assert plain.get_buffer("threshold_E").tolist() == [1, 2, 3, 4]


def test_p_threshold_is_a_pi_controller() -> None:
    router = stand_in(p=0.4)
    controller = controller_for(router, "p_threshold", gain=0.5, integral_gain=0.25)
    errors = []
    for pairs in (30, 10, 24, 16):
        controller.step(counts_of([pairs, 0, 0, 0], 10))
        errors.append((K - pairs / 10) / E)
        assert router.get_buffer("p").item() == pytest.approx(0.4 + 0.5 * errors[-1] + 0.25 * sum(errors))
    before = state(router)
    controller.step(counts_of([0, 0, 0, 0], 0))
    assert state(router) == before


def test_p_threshold_does_not_wind_up() -> None:
    router = stand_in(p=0.9)
    controller = controller_for(router, "p_threshold")
    for _ in range(100):
        controller.step(counts_of([0, 0, 0, 0], 10))
    assert router.get_buffer("p").item() == 1
    controller.step(counts_of([40, 0, 0, 0], 10))
    assert router.get_buffer("p").item() < 0.7


@pytest.mark.parametrize("name", NAMES)
def test_balance_stays_where_it_is(name: str) -> None:
    router = stand_in(threshold_E=[0.1, 0.2, 0.3, 0.4])
    before = state(router)
    controller_for(router, name).step(counts_of([6, 6, 6, 6]))
    if name == "l1_strength":
        before["strength"] = pytest.approx(before["strength"] / 1.2)  # it never rests
    assert state(router) == before


@pytest.mark.parametrize("name", NAMES)
def test_no_host_synchronisation_and_no_gradients(name: str) -> None:
    with FakeTensorMode():
        router = StandIn()
        routing = Routing(
            expert_TK=torch.zeros(3, K, dtype=torch.int64), gate_TK=torch.ones(3, K), num_experts=E
        )
        counts = Counts.of(routing) + Counts.of(routing, torch.ones(3, dtype=torch.bool))
        controller_for(router, name, reduce=lambda tensor: tensor * 2).step(counts)
    assert not any(value.requires_grad for value in router.buffers())


# ranks


def shares(name: str) -> list[tuple[StandIn, Counts]]:
    """What two ranks saw. Their own steps would move them apart."""
    first = stand_in(seen_beta_E=[1.0, 2.0, 3.0, 4.0], seen_threshold_E=[1.0, 0, 0, 0], seen_batches=1.0)
    second = stand_in(seen_beta_E=[4.0, 0.0, 0.0, 2.0], seen_threshold_E=[0, 3.0, 0, 0], seen_batches=3.0)
    return [(first, counts_of([9, 1, 1, 1], 5)), (second, counts_of([0, 8, 2, 2], 11))]


def whole(name: str) -> StandIn:
    """One rank that saw it all."""
    (first, a), (second, b) = shares(name)
    for buffer in ("seen_beta_E", "seen_threshold_E", "seen_batches"):
        first.get_buffer(buffer).add_(second.get_buffer(buffer))
    controller_for(first, name).step(a + b)
    return first


@pytest.mark.parametrize("name", NAMES)
def test_a_fake_reduce_makes_two_ranks_one(name: str) -> None:
    (first, a), (second, b) = shares(name)
    asked: list[Tensor] = []
    controller_for(first, name, reduce=lambda tensor: asked.append(tensor.clone()) or tensor).step(a)
    assert len(asked) == 1, "one reduction a step"
    controller_for(second, name, reduce=lambda tensor: tensor.add_(asked[0])).step(b)
    want = whole(name)
    for buffer in all_controllers()[name].moves:
        assert second.get_buffer(buffer).tolist() == pytest.approx(want.get_buffer(buffer).tolist()), buffer


def test_reduce_may_overwrite_what_it_is_given() -> None:
    router, counts = StandIn(), counts_of([9, 1, 1, 1])
    for name in NAMES:
        controller_for(router, name, reduce=lambda tensor: tensor.fill_(1)).step(counts)
    assert counts.count_E.tolist() == [9, 1, 1, 1]


def rank_main(rank: int, meeting: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    buffers = {}
    for name in NAMES:
        router, counts = shares(name)[rank]
        controller_for(router, name, reduce=all_reduce_sum()).step(counts)
        buffers[name] = dict(router.named_buffers())
    torch.save(buffers, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_two_gloo_processes_move_alike(tmp_path: Path) -> None:
    mp.spawn(rank_main, args=(str(tmp_path / "meeting"), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    for name in NAMES:
        want = whole(name)
        for buffer in all_controllers()[name].moves:
            torch.testing.assert_close(first[name][buffer], want.get_buffer(buffer))
            torch.testing.assert_close(first[name][buffer], second[name][buffer], rtol=0, atol=0)


# state


def test_what_a_controller_remembers_is_saved() -> None:
    router = stand_in(p=0.4)
    controller = controller_for(router, "p_threshold")
    controller.step(counts_of([30, 0, 0, 0], 10))
    saved = controller.state_dict()
    other_router = stand_in(p=router.get_buffer("p").item())
    other = controller_for(other_router, "p_threshold")
    other.load_state_dict(saved)
    for one in (controller, other):
        one.step(counts_of([10, 0, 0, 0], 10))
    assert other_router.get_buffer("p") == router.get_buffer("p")
    assert saved["error"].item() == pytest.approx(-0.25), "a saved state does not move on"
    with pytest.raises(ValueError, match=r"sign_bias.* error"):
        controller_for(router, "sign_bias").load_state_dict(saved)


# finding and mistakes


def test_controllers_are_found_by_file() -> None:
    assert tuple(sorted(all_controllers())) == NAMES
    for controller in all_controllers().values():
        assert controller.moves and controller.source
    assert type(controller_for(StandIn())) is all_controllers()["sign_bias"]
    empty = types.ModuleType("empty")
    with pytest.raises(ValueError, match="empty must define"):
        only_subclass(empty, Controller)


def test_a_router_without_the_buffer_is_told_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: dict[str, type[Router]] = {"stand_in": StandIn, "bare": Bare}
    monkeypatch.setattr("moe_routing_bench.controllers.controller.all_routers", lambda: rules)
    with pytest.raises(ValueError, match=r"bias_E.* Bare .*stand_in"):
        controller_for(Bare(1, 4, 2), "sign_bias")
    with pytest.raises(ValueError, match=r"bias_E.* Bare .*stand_in"):
        controller_for(Bare(1, 4, 2), "centred_bias")
    rules["another"] = StandIn
    with pytest.raises(ValueError, match="another and stand_in"):
        controller_for(Bare(1, 4, 2), "sign_bias")
    with pytest.raises(ValueError, match="no router"):
        controller_for(Bare(1, 4, 2), "p_threshold")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: controller_for(Bare(1, 4, 2)), "Bare "),
        (lambda: controller_for(StandIn(), "sign_bia"), "'sign_bias'"),
        (lambda: controller_for(StandIn(), "sign_bias", rate=0), "not 0"),
        (lambda: controller_for(StandIn(), "centred_bias", rate=-1), "not -1"),
        (lambda: controller_for(StandIn(), "l1_strength", factor=1), "above 1, not 1"),
        (lambda: controller_for(StandIn(), "quantile", ema=1), "below 1, not 1"),
        (lambda: controller_for(StandIn(), "threshold_ema", decay=1.5), "not 1.5"),
        (lambda: controller_for(StandIn(), "p_threshold", integral_gain=0), "integral_gain"),
        (lambda: controller_for(StandIn()).step(counts_of([1, 2])), "2 experts .*E=4"),
        (lambda: controller_for(rounded()).step(counts_of([1, 2, 3, 4])), "bias_E is torch.bfloat16"),
        (lambda: all_reduce_sum(), "process group"),
    ],
)
def test_a_mistake_is_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


# with the real routers


def batch(step: int, T: int = 512, D: int = 16) -> Tensor:
    """Tokens that lean to one side, so that a router without control is far from balance."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(T, D, generator=generator) + 0.5


def published() -> list[tuple[str, str]]:
    return [(name, rule.controller) for name, rule in all_routers().items() if rule.controller is not None]


@pytest.mark.parametrize(("router_name", "controller_name"), published())
def test_a_router_s_own_controller_steps_it(router_name: str, controller_name: str) -> None:
    router = build(router_name, 16, 8, 2)
    controller = controller_for(router)
    assert type(controller) is all_controllers()[controller_name]
    before = {name: value.clone() for name, value in router.named_buffers()}
    routing = router.train()(batch(0), TokenInfo())
    assert isinstance(routing, Routing)
    controller.step(Counts.of(routing))
    moved = [name for name, value in router.named_buffers() if not torch.equal(value, before[name])]
    assert moved and set(moved) <= set(controller.moves)
    assert set(controller.moves) <= set(router.state_dict())
    for name in controller.moves:
        assert router.get_buffer(name).dtype == torch.float32
    assert isinstance(controller, Controller)


@pytest.mark.parametrize(
    ("router_name", "controller_name", "options"),
    [
        ("sigmoid_bias", "sign_bias", {"rate": 0.02}),
        ("sigmoid_bias", "centred_bias", {"rate": 0.02}),
        ("quantile", "quantile", {}),
        ("expert_threshold", "threshold_ema", {"decay": 0.9}),
    ],
)
def test_load_becomes_even(router_name: str, controller_name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    router = build(router_name, 16, 8, 2).train()
    torch.nn.init.normal_(router.get_parameter("w_DE"), std=0.3)
    controller = controller_for(router, controller_name, **options)
    violation = []
    for step in range(60):
        counts = Counts.of(router(batch(step)))
        violation.append((counts.count_E.max() * 8 / counts.count_E.sum() - 1).item())
        controller.step(counts)
    # expert_threshold starts from thresholds of zero, where nothing is uneven: everyone gets everything
    assert sum(violation[-10:]) / 10 < 0.35, violation
    assert router_name == "expert_threshold" or violation[0] > 0.8


def test_p_threshold_holds_the_number_of_experts() -> None:
    torch.manual_seed(0)
    router = build("top_p", 16, 8, 2)
    torch.nn.init.normal_(router.get_parameter("w_DE"), std=0.3)
    controller = controller_for(router)
    for step in range(60):
        counts = Counts.of(router(batch(step)))
        controller.step(counts)
    assert (counts.count_E.sum() / 512).item() == pytest.approx(2, abs=0.15)
