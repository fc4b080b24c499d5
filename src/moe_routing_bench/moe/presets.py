"""Routing of published models: router_for("deepseek-v3"), and weights from Transformers' modules.

Rules, options and sizes are in core/published.py. In float32 the choices are those of Transformers' own
router with the same weights, in the same order if it promises one, and the gates are the same up to rounding.

Ties: of equal scores the lower expert id is chosen here. Transformers calls torch.topk, which promises no
order (of 64 equal logits torch 2.13 on a CPU takes expert 44 first); topk="torch_topk" makes the same call.

16 bit: the routers of DeepSeek and GLM compute in float32, like ours. The routers of Qwen, Mixtral, OLMoE,
Granite and gpt-oss round logits to the model's dtype; logits_dtype=torch.bfloat16 does the same here. Switch
(rounds probabilities) and Llama 4 (rounds logits) are reproduced only for float32 models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.published import MODELS, model
from moe_routing_bench.routers.router import Router, build

# a family means its first model
ROUTED = {published.family: published for published in reversed(MODELS.values())} | MODELS


def router_for(
    name: str, D: int | None = None, E: int | None = None, K: int | None = None, **overrides: Any
) -> Router:
    """The router of a published model or family, with the model's sizes unless others are given.

    router_for("deepseek-v3")                      D=7168, E=256, K=8, groups, bias and scale as published
    router_for("deepseek-v3", D=64, E=16, K=2)     the same rule, small
    router_for("gpt-oss")                          gpt-oss-20b, the first of its family
    overrides are options of the rule, such as loss_weights={"hf": 0.001}.

    >>> mrb.router_for("deepseek-v3", D=64, E=16, K=2)(torch.randn(5, 64)).expert_TK.shape
    torch.Size([5, 2])
    """
    published = model(name, ROUTED)
    routing = published.routing
    if routing.missing:
        raise NotImplementedError(f"the routing of {name} is not here: {routing.missing}")
    pairs = ((D, published.D), (E, published.E), (K, published.K))
    sizes = [own if given is None else given for given, own in pairs]
    return build(routing.rule, *sizes, **{**routing.options, **overrides})


@torch.no_grad()
def load_router(router: Router, module: nn.Module) -> Router:
    """Copies the weights of a Transformers router module into ours and returns the router.

    weight (E x D) goes to w_DE transposed, bias to b_E, e_score_correction_bias to bias_E. In Switch
    Transformers they are in the module's `classifier`.

    >>> router, theirs = mrb.router_for("qwen3-30b-a3b", D=8, E=4, K=2), torch.nn.Linear(8, 4, bias=False)
    >>> torch.equal(mrb.load_router(router, theirs).w_DE, theirs.weight.T)
    True
    """
    inner = getattr(module, "classifier", module)
    weight_ED = getattr(inner, "weight", None)
    if not isinstance(weight_ED, Tensor):
        raise ValueError(f"{type(module).__name__} has no weight of E x D; give the router module itself")
    given: dict[str, Tensor | None] = {
        "w_DE": weight_ED.t(),
        "b_E": getattr(inner, "bias", None),
        "bias_E": getattr(module, "e_score_correction_bias", None),
    }
    top_k = getattr(module, "top_k", router.K)
    if top_k != router.K:
        raise ValueError(f"{type(module).__name__} chooses {top_k} experts, this router {router.K}")
    mine = router.state_dict(keep_vars=True)
    for name, value in given.items():
        if value is None:
            if name in mine and name != "bias_E":
                raise ValueError(f"the router has {name}, but {type(module).__name__} has nothing for it")
            continue
        if name not in mine:
            raise ValueError(
                f"{type(module).__name__} has weights for {name}, which the router does not have"
            )
        if mine[name].shape != value.shape:
            raise ValueError(
                f"{name} is {tuple(mine[name].shape)} here, {tuple(value.shape)} in {type(module).__name__}"
            )
    for name, value in given.items():
        if value is not None:
            mine[name].copy_(value)
        elif name in mine:  # a bias that the model does not have is 0
            mine[name].zero_()
    return router
