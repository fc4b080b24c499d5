"""Routing as published models do it: router_for("deepseek-v3"), and weights from Transformers' modules.

A preset is a routing rule, its options and the sizes of one model. In float32 the choices are those of
Transformers' own router with the same weights, in the same order where it promises one, and the gates are
its weights within rounding.

Ties: of equal scores the lower expert id wins here. Transformers calls torch.topk, which promises nothing
(of 64 equal logits torch 2.13 on a CPU takes expert 44 first); topk="torch_topk" makes the same call.

16 bit: the routers of DeepSeek and GLM compute in float32 as ours do. Those of Qwen, Mixtral, OLMoE, Granite
and gpt-oss round logits to the model's dtype; logits_dtype=torch.bfloat16 does the same here. Switch (rounds
probabilities) and Llama 4 (rounds logits) are reproduced for float32 models alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.names import did_you_mean
from moe_routing_bench.routers.losses import hf_loss
from moe_routing_bench.routers.router import Router, build


@dataclass(frozen=True, kw_only=True)
class RouterPreset:
    """How one model routes: RouterPreset(rule="softmax_topk", D=4096, E=8, K=2, sizes_of="mixtral-8x7b").

    sizes_of is the checkpoint whose config.json holds D, E, K and the options. `note` says where the layer
    around the router differs from ours; `missing`, if not empty, why the rule is not here at all.
    """

    rule: str
    D: int
    E: int
    K: int
    sizes_of: str
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    missing: str = ""


RENORMALISED = {"order": "softmax_then_topk_renormalised"}
RAW = {"order": "softmax_then_topk"}
TOPK_FIRST = {"order": "topk_then_softmax"}

PRESETS = {
    "deepseek-v3": RouterPreset(
        rule="sigmoid_bias",
        D=7168,
        E=256,
        K=8,
        sizes_of="deepseek-v3",
        options={"groups": 8, "keep_groups": 4, "group_score": "top2_sum", "scale": 2.5},
    ),
    "deepseek-v2": RouterPreset(
        rule="group_limited",
        D=5120,
        E=160,
        K=6,
        sizes_of="deepseek-v2",
        options={"groups": 8, "keep_groups": 3, "group_score": "max", "renormalise": False, "scale": 16.0},
    ),
    "deepseek-v2-lite": RouterPreset(
        rule="softmax_topk", D=2048, E=64, K=6, sizes_of="deepseek-v2-lite", options=RAW
    ),
    "glm4-moe": RouterPreset(rule="sigmoid_bias", D=4096, E=128, K=8, sizes_of="glm-4.5-air"),
    "qwen3-moe": RouterPreset(
        rule="softmax_topk",
        D=2048,
        E=128,
        K=8,
        sizes_of="qwen3-30b-a3b",
        options=RENORMALISED,
        note="Transformers' Qwen3MoeConfig does not renormalise unless told to; the published models do",
    ),
    "qwen2-moe": RouterPreset(
        rule="softmax_topk", D=2048, E=60, K=4, sizes_of="qwen1.5-moe-a2.7b", options=RAW
    ),
    "mixtral": RouterPreset(
        rule="softmax_topk", D=4096, E=8, K=2, sizes_of="mixtral-8x7b", options=RENORMALISED
    ),
    "olmoe": RouterPreset(rule="softmax_topk", D=2048, E=64, K=8, sizes_of="olmoe-1b-7b", options=RAW),
    "gpt-oss": RouterPreset(
        rule="softmax_topk", D=2880, E=32, K=4, sizes_of="gpt-oss-20b", options={**TOPK_FIRST, "bias": True}
    ),
    "granite-moe": RouterPreset(
        rule="softmax_topk", D=1536, E=40, K=8, sizes_of="granite-3-moe", options=TOPK_FIRST
    ),
    "switch": RouterPreset(
        rule="switch",
        D=768,
        E=8,
        K=1,
        sizes_of="switch-base-8",
        options={"jitter": 0.01},
        note="the model gives each expert room for 64 tokens of a sequence; that is the layout's part here",
    ),
    "llama4": RouterPreset(
        rule="sigmoid_bias",
        D=5120,
        E=16,
        K=1,
        sizes_of="llama-4-scout",
        options={"renormalise": False},
        note="choices and weights are the model's, but it multiplies the expert's input by the weight, "
        "f(g x), where our layer multiplies the output, g f(x): the results differ",
    ),
    "phi-3.5-moe": RouterPreset(
        rule="",
        D=4096,
        E=16,
        K=2,
        sizes_of="phi-3.5-moe",
        missing="it routes by SparseMixer-v2 (arXiv:2409.12136): each choice has its own softmax over the "
        "experts close to the best, and training samples; no rule here does that",
    ),
}


def router_for(
    name: str, D: int | None = None, E: int | None = None, K: int | None = None, **overrides: Any
) -> Router:
    """The router of a published model, with the model's sizes unless others are given.

    router_for("deepseek-v3")                      D=7168, E=256, K=8, groups, bias and scale as published
    router_for("deepseek-v3", D=64, E=16, K=2)     the same rule, small
    router_for("gpt-oss", E=128)                   gpt-oss-120b
    overrides are options of the rule, such as loss_weights={"hf": 0.001}.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ValueError(f"there is no router preset {name!r}; {hint}there are {', '.join(sorted(PRESETS))}")
    preset = PRESETS[name]
    if preset.missing:
        raise NotImplementedError(f"the routing of {name} is not here: {preset.missing}")
    sizes = [
        mine if given is None else given for given, mine in ((D, preset.D), (E, preset.E), (K, preset.K))
    ]
    return build(preset.rule, *sizes, **{**preset.options, **overrides})


@torch.no_grad()
def load_router(router: Router, module: nn.Module) -> Router:
    """Copy the weights of a Transformers router module into ours; returns the router.

    weight (E x D) goes to w_DE transposed, bias to b_E, e_score_correction_bias to bias_E. For
    Switch Transformers the module holds them in `classifier`.
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
            raise ValueError(f"{type(module).__name__} has weights for {name}, which the router has not")
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


def hf_loss_of_layers(logits: Sequence[Tensor], K: int, mask_T: Tensor | None = None) -> Tensor:
    """Transformers' load_balancing_loss_func: logits_TE of all layers as if they were one layer's tokens.

    It chooses again by the plain logits: bias and groups do not count. Layers that are unbalanced in
    opposite ways cancel. mask_T (the attention mask, flattened) holds for every layer.
    """
    score_TE = torch.cat([logits_TE.softmax(-1) for logits_TE in logits])
    expert_TK = torch.cat([logits_TE.topk(K, dim=-1).indices for logits_TE in logits])
    mask = None if mask_T is None else mask_T.repeat(len(logits))
    return hf_loss(score_TE, expert_TK, score_TE.shape[1], mask)
