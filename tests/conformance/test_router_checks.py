"""The checks of routers against routers that lie, one for each; and what holds for some rules alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_routing_bench.conformance.router_checks import D as WIDTH
from moe_routing_bench.conformance.router_checks import E, K, check_router, permutes
from moe_routing_bench.controllers.controller import all_controllers
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.routers.losses import z_loss
from moe_routing_bench.routers.router import Router, all_routers, build
from moe_routing_bench.routers.soft_moe import SoftMoERouter
from moe_routing_bench.routers.softmax_topk import ORDERS, SoftmaxTopkRouter

pytestmark = pytest.mark.slow


def leaning(lean: Callable[[Router, Tensor], Any] = lambda router, x_TD: 0, **claims: Any) -> type[Router]:
    """An honest router that adds something to x, and may declare something else."""

    def forward(self: SoftmaxTopkRouter, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        x_TD = self.prepare(x_TD, info)
        return SoftmaxTopkRouter.forward(self, x_TD + lean(self, x_TD), info)

    return type("Leaning", (SoftmaxTopkRouter,), {"forward": forward, **claims})


def altered(alter: Callable[[Routing], dict[str, Any]] = lambda routing: {}, **claims: Any) -> type[Router]:
    """An honest router whose answer is altered afterwards, and which may declare something else."""

    def forward(self: SoftmaxTopkRouter, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        routing = SoftmaxTopkRouter.forward(self, x_TD, info)
        return replace(routing, **alter(routing))

    return type("Altered", (SoftmaxTopkRouter,), {"forward": forward, **claims})


def scaled(factor: Callable[[SoftmaxTopkRouter, Routing, Tensor], Any]) -> type[Router]:
    """An honest router whose gates are multiplied by a factor."""

    def forward(self: SoftmaxTopkRouter, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        routing = SoftmaxTopkRouter.forward(self, x_TD, info)
        return replace(routing, gate_TK=routing.gate_TK * factor(self, routing, self.prepare(x_TD, info)))

    return type("Scaled", (SoftmaxTopkRouter,), {"forward": forward})


def ahead(x_TD: Tensor) -> Tensor:
    return x_TD.flip(0).cumsum(0).flip(0)


def doubled(routing: Routing) -> Tensor:
    return routing.gate_TK / routing.gate_TK.detach()


class GoesNegative(SoftmaxTopkRouter):
    gate_sum = "any"

    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, order="softmax_then_topk", **options)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        routing = super().forward(x_TD, info)
        return replace(routing, gate_TK=routing.gate_TK - 0.5)


class SaysNothing(Router):
    pass


class Overwrites(SoftmaxTopkRouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        routing = super().forward(x_TD, info)
        x_TD.data.mul_(2)
        return routing


class LosesMass(SoftMoERouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> SoftRouting:
        routing = super().forward(x_TD, info)
        return replace(routing, dispatch_BNS=0.9 * routing.dispatch_BNS)


class SeesMasked(SoftmaxTopkRouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        return super().forward(x_TD + x_TD.nan_to_num(1.0).sum(0), info)


class RoundsX(SoftmaxTopkRouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        return super().forward(x_TD * 1.1, info)


class CountsPlaces(SoftmaxTopkRouter):
    """By place in the batch, which no change of another token shows, but another order does."""

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        place_T1 = torch.arange(x_TD.shape[0]).unsqueeze(1) % 2
        return super().forward(self.prepare(x_TD, info) * (1 + place_T1), info)


class HasIdleParameter(SoftmaxTopkRouter):
    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, **options)
        self.idle = torch.nn.Parameter(torch.zeros(()))


class TakesAnyLoss(SoftmaxTopkRouter):
    def __init__(self, D: int, E: int, K: int, *, loss_weights: Any = None, **options: Any):
        known = {name: weight for name, weight in (loss_weights or {}).items() if name in self.loss_names}
        super().__init__(D, E, K, loss_weights=known, **options)


class DeclaresNonsense(SoftmaxTopkRouter):
    causal = False
    paper = ""

    def __init__(self, D: int, E: int, K: int, **options: Any):
        super().__init__(D, E, K, **options)
        self.gate_sum = "plenty"


# what it does, the router, what the checker must say of it
LIARS: dict[str, tuple[type[Router], list[str]]] = {
    "looks ahead": (
        leaning(lambda router, x_TD: ahead(x_TD), batch_dependent=True),
        ["causal=True, but later tokens"],
    ),
    "looks ahead in training": (
        leaning(
            lambda router, x_TD: ahead(x_TD) if router.training else x_TD.cumsum(0), batch_dependent=True
        ),
        ["causal=True, but later tokens"],
    ),
    "looks back": (
        leaning(lambda router, x_TD: x_TD.cumsum(0)),
        ["batch_dependent=False, but other tokens"],
    ),
    "counts tokens": (
        leaning(lambda router, x_TD: float(x_TD.shape[0])),
        ["batch_dependent=False, but other tokens"],
    ),
    "says not causal": (
        leaning(causal=False, batch_dependent=True),
        ["causal=False, but no trial", "batch_dependent=True, but no trial"],
    ),
    "repeats": (
        altered(lambda routing: {"expert_TK": routing.expert_TK[:, :1].expand_as(routing.expert_TK)}),
        ["twice"],
    ),
    "inflates": (altered(lambda routing: {"gate_TK": 1.01 * routing.gate_TK}), ["gate_sum is 'one'"]),
    "deflates": (altered(lambda routing: {"gate_TK": 0.99 * routing.gate_TK}), ["gate_sum is 'one'"]),
    "goes negative": (GoesNegative, ["negative"]),
    "rounds gates": (altered(lambda routing: {"gate_TK": routing.gate_TK.bfloat16()}), ["must be float32"]),
    "routes masked tokens": (
        altered(
            lambda routing: {
                "expert_TK": torch.where(
                    routing.chosen_TK(), routing.expert_TK, torch.arange(routing.num_choices)
                )
            }
        ),
        ["masked tokens somewhere"],
    ),
    "counts masked tokens": (
        altered(lambda routing: {"losses": {**routing.losses, "z": z_loss(routing.logits_TE)}}),
        ["z loss counts masked tokens"],
    ),
    "rolls dice": (
        altered(lambda routing: {"gate_TK": (routing.gate_TK + torch.rand_like(routing.gate_TK)).softmax(1)}),
        ["eval mode differ"],
    ),
    "breaks its gradient": (
        altered(
            lambda routing: {
                "gate_TK": routing.gate_TK + (routing.gate_TK - routing.gate_TK.detach()).square().sqrt()
            }
        ),
        ["gradient of x is not finite"],
    ),
    "cuts its gradient": (
        altered(lambda routing: {"gate_TK": routing.gate_TK.detach()}, loss_names=()),
        ["carry no gradient"],
    ),
    "forgets the sum": (
        altered(
            lambda routing: {
                "aux_loss": torch.stack(list(routing.losses.values())).sum() if routing.losses else None
            }
        ),
        ["aux_loss is not the sum"],
    ),
    "says nothing": (SaysNothing, ["does not declare"]),
    "says full": (altered(lambda routing: {"ragged": False}), ["ragged=False promises"]),
    "overwrites": (Overwrites, ["overwrites x"]),
    "loses mass": (LosesMass, ["dispatch weights of a slot must sum to 1"]),
    "sees masked tokens": (
        SeesMasked,
        ["what stands in masked tokens changes where the others go", "in masked tokens changes a loss"],
    ),
    "volunteers": (
        altered(lambda routing: {"losses": {**routing.losses, "extra": routing.gate_TK.sum() * 0}}),
        ["asked for losses", "losses that nobody asked for"],
    ),
    "has an idle parameter": (HasIdleParameter, ["parameter idle gets no gradient"]),
    "takes any loss": (TakesAnyLoss, ["accepts a loss weight for a loss it does not have"]),
    "declares nonsense": (
        DeclaresNonsense,
        ["causal=False needs batch_dependent=True", "names no paper", "gate_sum 'plenty' is none of"],
    ),
    "doubles its gradient": (
        scaled(lambda router, routing, x_TD: doubled(routing)),
        ["in training the gradient of its gates or losses is not their slope"],
    ),
    "doubles it in eval": (
        scaled(lambda router, routing, x_TD: 1 if router.training else doubled(routing)),
        ["in eval the gradient of its gates or losses is not their slope"],
    ),
    "breaks without opinion": (
        scaled(lambda router, routing, x_TD: 1 + 0 * routing.logits_TE.square().sum(1, keepdim=True).sqrt()),
        ["is not finite for weights of 0"],
    ),
    "breaks for equal tokens": (
        scaled(lambda router, routing, x_TD: 1 + 0 * x_TD.var(0).sum().sqrt() if len(x_TD) > 1 else 1),
        ["gradient of x is not finite for a batch of equal tokens"],
    ),
    "breaks when sure": (
        scaled(
            lambda router, routing, x_TD: (
                1 + 0 * (1 - routing.logits_TE.softmax(-1).amax(-1, keepdim=True)).sqrt()
            )
        ),
        ["is not finite for one expert that all prefer"],
    ),
    "rounds x": (RoundsX, ["bfloat16 x is not routed as its float32 copy is"]),
    "counts places": (CountsPlaces, ["in another order they are routed differently"]),
    "says equal": (altered(groups="equal"), ["groups is 'equal', but in training experts get from"]),
    "says dense": (altered(groups="dense"), ["groups is 'dense', but it returns a Routing"]),
    "says lumpy": (altered(groups="lumpy"), ["groups 'lumpy' is none of"]),
    "says no number": (altered(experts_per_token=""), ["experts_per_token must say in words"]),
    "says no arXiv": (altered(paper="Mixtral"), ["names no paper"]),
}


@pytest.mark.parametrize("name", LIARS)
def test_the_checker_sees_through(name: str) -> None:
    liar, sentences = LIARS[name]
    wrong = check_router(liar)
    for sentence in sentences:
        assert any(sentence in line for line in wrong), (sentence, wrong)


@pytest.mark.parametrize(
    "honest",
    [
        leaning(),
        leaning(lambda router, x_TD: x_TD.cumsum(0), batch_dependent=True),
        altered(),
        scaled(lambda router, routing, x_TD: 1),
    ],
)
def test_the_honest_relatives_pass(honest: type[Router]) -> None:
    assert check_router(honest) == []


SYMMETRIC = ("soft_moe", "expert_choice", "sinkhorn", "token_rounding", "base_assignment")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SYMMETRIC)
def test_these_rules_do_not_see_the_order_of_tokens_either(name: str, training: bool) -> None:
    """They depend on the batch, but on the set of its tokens: within a sequence, order does not matter."""
    for seed in range(4):
        torch.manual_seed(seed)
        assert permutes(build(name, WIDTH, E, all_routers()[name].fixed_K or K), training=training)


def test_soft_routing_is_what_dense_means() -> None:
    dense = {name for name, rule in all_routers().items() if rule.groups == "dense"}
    assert dense == {"soft_moe"}
    assert isinstance(build("soft_moe", 4, 4, 1)(torch.zeros(2, 4)), SoftRouting)


@pytest.mark.parametrize("order", ORDERS)
def test_softmax_topk_with_a_bias(order: str) -> None:
    assert check_router(SoftmaxTopkRouter, order=order, bias=True) == []


@pytest.mark.parametrize("options", [{"bias": True}, {"logits_dtype": torch.bfloat16}])
def test_the_options_of_softmax_topk_compile(options: dict[str, Any]) -> None:
    router, x_TD = SoftmaxTopkRouter(WIDTH, E, K, **options), torch.randn(32, WIDTH)
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x_TD).expert_TK, router(x_TD).expert_TK)


def test_logits_of_16_bits_are_what_a_16_bit_product_gives() -> None:
    router, x_TD = SoftmaxTopkRouter(WIDTH, E, K, logits_dtype=torch.bfloat16), torch.randn(32, WIDTH)
    routing = router(x_TD)
    assert routing.logits_TE.dtype == routing.gate_TK.dtype == torch.float32
    assert torch.equal(routing.logits_TE, (x_TD.bfloat16() @ router.w_DE.bfloat16()).float())


def test_the_controllers_that_routers_name_exist() -> None:
    named = {rule.controller for rule in all_routers().values()} - {None}
    assert named <= set(all_controllers())
