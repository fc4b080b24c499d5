"""The checks of routers against routers that lie, one for each; and what holds for some rules alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_routing_bench.conformance.router_checks import D as WIDTH
from moe_routing_bench.conformance.router_checks import E, K, check_router, permutes
from moe_routing_bench.controllers.controller import all_controllers
from moe_routing_bench.routers.router import Router, all_routers, build
from moe_routing_bench.routers.softmax_topk import ORDERS, SoftmaxTopkRouter
from moe_routing_bench.routing import Routing, SoftRouting, TokenInfo

torch.set_num_threads(1)


class Altered(SoftmaxTopkRouter):
    """An honest router whose gates are multiplied by factor_TK."""

    def factor(self, routing: Routing, x_TD: Tensor) -> Tensor:
        return torch.ones_like(routing.gate_TK)

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        routing = super().forward(x_TD, info)
        return replace(routing, gate_TK=routing.gate_TK * self.factor(routing, self.prepare(x_TD, info)))


class DoublesItsGradient(Altered):
    def factor(self, routing: Routing, x_TD: Tensor) -> Tensor:
        return routing.gate_TK / routing.gate_TK.detach()


class DoublesItInEval(DoublesItsGradient):
    def factor(self, routing: Routing, x_TD: Tensor) -> Tensor:
        return torch.ones_like(routing.gate_TK) if self.training else super().factor(routing, x_TD)


class BreaksWithoutOpinion(Altered):
    def factor(self, routing: Routing, x_TD: Tensor) -> Tensor:
        assert routing.logits_TE is not None
        return 1 + 0 * routing.logits_TE.square().sum(1, keepdim=True).sqrt()


class BreaksForEqualTokens(Altered):
    def factor(self, routing: Routing, x_TD: Tensor) -> Tensor:
        if x_TD.shape[0] < 2:
            return torch.ones_like(routing.gate_TK)
        return 1 + 0 * x_TD.var(0).sum().sqrt()


class BreaksWhenSure(Altered):
    def factor(self, routing: Routing, x_TD: Tensor) -> Tensor:
        assert routing.logits_TE is not None
        doubt_T1 = 1 - routing.logits_TE.softmax(-1).amax(-1, keepdim=True)
        return 1 + 0 * doubt_T1.sqrt()


class RoundsX(SoftmaxTopkRouter):
    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        return super().forward(x_TD * 1.1, info)


class CountsPlaces(SoftmaxTopkRouter):
    """By place in the batch, which no change of another token shows, but another order does."""

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing:
        place_T1 = torch.arange(x_TD.shape[0]).unsqueeze(1) % 2
        return super().forward(self.prepare(x_TD, info) * (1 + place_T1), info)


class SaysEqual(SoftmaxTopkRouter):
    groups = "equal"


class SaysDense(SoftmaxTopkRouter):
    groups = "dense"


class SaysLumpy(SoftmaxTopkRouter):
    groups = "lumpy"


class SaysNoNumber(SoftmaxTopkRouter):
    experts_per_token = ""


class SaysNoArxiv(SoftmaxTopkRouter):
    paper = "Mixtral"


LIARS: list[tuple[type[Router], str]] = [
    (DoublesItsGradient, "in training the gradient of its gates or losses is not their slope"),
    (DoublesItInEval, "in eval the gradient of its gates or losses is not their slope"),
    (BreaksWithoutOpinion, "is not finite for weights of 0"),
    (BreaksForEqualTokens, "gradient of x is not finite for a batch of equal tokens"),
    (BreaksWhenSure, "is not finite for one expert that all prefer"),
    (RoundsX, "bfloat16 x is not routed as its float32 copy is"),
    (CountsPlaces, "in another order they are routed differently"),
    (SaysEqual, "groups is 'equal', but in training experts get from"),
    (SaysDense, "groups is 'dense', but it returns a Routing"),
    (SaysLumpy, "groups 'lumpy' is none of"),
    (SaysNoNumber, "experts_per_token must say in words"),
    (SaysNoArxiv, "names no paper"),
]


@pytest.mark.parametrize(("liar", "sentence"), LIARS)
def test_checker_sees_through(liar: type[Router], sentence: str) -> None:
    found = check_router(liar)
    assert any(sentence in line for line in found), found


def test_the_honest_relative_passes() -> None:
    assert check_router(Altered) == []


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
    torch.manual_seed(0)
    router, x_TD = SoftmaxTopkRouter(WIDTH, E, K, **options), torch.randn(32, WIDTH)
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x_TD).expert_TK, router(x_TD).expert_TK)


def test_logits_of_16_bits_are_what_a_16_bit_product_gives() -> None:
    torch.manual_seed(0)
    router, x_TD = SoftmaxTopkRouter(WIDTH, E, K, logits_dtype=torch.bfloat16), torch.randn(32, WIDTH)
    routing = router(x_TD)
    assert routing.logits_TE.dtype == routing.gate_TK.dtype == torch.float32
    assert torch.equal(routing.logits_TE, (x_TD.bfloat16() @ router.w_DE.bfloat16()).float())


def test_the_controllers_that_routers_name_exist() -> None:
    named = {rule.controller for rule in all_routers().values()} - {None}
    assert named <= set(all_controllers())
