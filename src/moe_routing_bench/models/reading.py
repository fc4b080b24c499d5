"""Reads Transformers' experts modules: which of our activations one computes, its weights as ExpertWeights.

Transformers 5 keeps all experts of a layer in one module. Flags (is_transposed, has_bias, has_gate,
has_post_expert_norm) and the functions `_apply_gate` and `act_fn` say what it computes. Models replace these
functions; we recognise them by module and name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.experts import OAI_ALPHA, OAI_LIMIT, ExpertWeights, from_transformers
from moe_routing_bench.prepared import Prepared, release

# a gated expert's name for  act(gate) * up
GATED_BY = {"silu": "swiglu", "gelu": "geglu"}
FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
# by module and name, so that Transformers need not be imported; GELUActivation is the exact form in both
# of its spellings
DEFAULT_GATE = "transformers.integrations.moe._default_apply_gate"
CLASSES = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}


@dataclass(frozen=True, kw_only=True)
class Overridden:
    """A model's own `_apply_gate` that we know: gpt-oss's has alpha and limit as attributes of the module,
    and reads gate and up from alternating columns."""

    alpha: str
    limit: str
    interleaved: bool = False


# all three compute swiglu_oai
MODELS = "transformers.models"
OVERRIDDEN = {
    f"{MODELS}.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": Overridden(
        alpha="alpha", limit="limit", interleaved=True
    ),
    f"{MODELS}.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": (
        Overridden(alpha="alpha", limit="limit")
    ),
    f"{MODELS}.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": Overridden(
        alpha="swiglu_alpha", limit="swiglu_limit"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Qwen3-MoE: Reading(activation="swiglu"). A module with functions of its own:
    Reading(activation=None, why="its _apply_gate is Step3p7TextMoeExperts._apply_gate, not one of ours")."""

    activation: str | None
    why: str = ""
    interleaved: bool = False


def read(module: nn.Module) -> Reading:
    """What an experts module computes, in our words; activation=None if we have no name for it.

    torch.compile guards every value read here: one graph may serve many layers.
    """
    m: Any = module
    if getattr(m, "has_post_expert_norm", False):
        return Reading(activation=None, why="it normalises an expert's output before the gates")
    if not m.has_gate:
        plain = plain_activation(m.act_fn)
        return Reading(activation=plain, why="" if plain else f"its activation is {_name(m.act_fn)}")
    gate = "its own" if "_apply_gate" in m.__dict__ else where(type(m), "_apply_gate")
    if gate == DEFAULT_GATE:
        plain = plain_activation(m.act_fn)
        if plain in GATED_BY:
            return Reading(activation=GATED_BY[plain])
        return Reading(activation=None, why=f"its activation is {_name(m.act_fn)}, with a gate")
    if (known := OVERRIDDEN.get(gate)) is not None:
        alpha, limit = getattr(m, known.alpha), getattr(m, known.limit)
        if alpha == OAI_ALPHA and limit == OAI_LIMIT:
            return Reading(activation="swiglu_oai", interleaved=known.interleaved)
        why = f"its alpha is {alpha} and its limit {limit}, not {OAI_ALPHA} and {OAI_LIMIT}"
        return Reading(activation=None, why=why)
    return Reading(activation=None, why=f"its _apply_gate is {gate}, not one we know")


def plain_activation(act_fn: Any) -> str | None:
    """Our name for a model's activation function; None if we have none."""
    if isinstance(act_fn, nn.GELU):
        return "gelu" if type(act_fn) is nn.GELU and act_fn.approximate == "none" else None
    if isinstance(act_fn, nn.Module):
        return CLASSES.get(where(type(act_fn)))
    return FUNCTIONS.get(act_fn)


@torch.compiler.assume_constant_result
def where(cls: type, attribute: str = "") -> str:
    """Where a class, or a function of it, was defined: module and name."""
    thing = getattr(cls, attribute) if attribute else cls
    return f"{thing.__module__}.{thing.__qualname__}"


def _name(act_fn: Any) -> str:
    return where(type(act_fn)) if isinstance(act_fn, nn.Module) else str(act_fn)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every experts module that Transformers' registry serves, with its path."""
    for path, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_concatenated"):
            yield path, module


def tensors_of(module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """First and second projection and their biases, as the module keeps them."""
    m: Any = module
    first = "gate_up_proj" if m.has_gate else "up_proj"
    if not m.has_bias:
        return getattr(m, first), m.down_proj, None, None
    return getattr(m, first), m.down_proj, getattr(m, f"{first}_bias"), m.down_proj_bias


def make_weights(
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    *,
    activation: str,
    is_transposed: bool,
    interleaved: bool,
) -> ExpertWeights:
    """The module's tensors as ExpertWeights: views, except that alternating columns are copied into halves.

    Without gradients the copy is kept until the tensor changes; with gradients it is made in every call, as a
    part of the graph.
    """
    weights = ExpertWeights(
        w_in_EDG=w_in if is_transposed else w_in.transpose(1, 2),
        w_out_EFD=w_out if is_transposed else w_out.transpose(1, 2),
        b_in_EG=b_in,
        b_out_ED=b_out,
        activation=activation,
    )
    if not interleaved:
        return weights
    if torch.is_grad_enabled() and any(t.requires_grad for t in weights.tensors().values()):
        return _halves(weights)
    kept = reordered(weights)
    if not kept.holds(weights):
        reordered.forget(weights)
        kept = reordered(weights)
    return _in_halves(weights, kept)


def weights_of(module: nn.Module, reading: Reading) -> ExpertWeights:
    m: Any = module
    return make_weights(
        *tensors_of(module),
        activation=reading.activation or "silu",  # not read if we have no name for it
        is_transposed=m.is_transposed,
        interleaved=reading.interleaved,
    )


def _halves(weights: ExpertWeights) -> ExpertWeights:
    return from_transformers(
        weights.w_in_EDG,
        weights.w_out_EFD,
        activation=weights.activation,
        gate_up_proj_bias=weights.b_in_EG,
        down_proj_bias=weights.b_out_ED,
        is_transposed=True,
        is_concatenated=False,
    )


@dataclass(frozen=True)
class Reordered:
    """The first projection with gate and up in halves, and samples of the tensors it was made from, because
    torch does not count writes through `.data`."""

    w_in_EDG: Tensor
    b_in_EG: Tensor | None
    place: tuple[Tensor, ...]  # expert, input, column
    samples: tuple[Tensor, ...]

    def holds(self, weights: ExpertWeights) -> bool:
        return all(map(torch.equal, _sampled(weights, self.place), self.samples))


def _in_halves(weights: ExpertWeights, kept: Reordered) -> ExpertWeights:
    return replace(weights, w_in_EDG=kept.w_in_EDG, b_in_EG=kept.b_in_EG)


def _reorder(weights: ExpertWeights) -> Reordered:
    E, D, G = weights.w_in_EDG.shape
    generator = torch.Generator().manual_seed(E)
    expert, row, column = (torch.randint(n, (max(64, E),), generator=generator) for n in (E, D, G))
    expert[:E] = torch.arange(E)
    place = tuple(p.to(weights.w_in_EDG.device) for p in (expert, row, column))
    with torch.no_grad():
        halves = _halves(weights)
        return Reordered(halves.w_in_EDG, halves.b_in_EG, place, _sampled(weights, place))


def _sampled(weights: ExpertWeights, place: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    expert, _, column = place
    w_s = weights.w_in_EDG.detach()[place]
    return (w_s,) if weights.b_in_EG is None else (w_s, weights.b_in_EG.detach()[expert, column])


reordered = Prepared(_reorder, nbytes=lambda kept: kept.w_in_EDG.nbytes)


def release_weights(module: nn.Module) -> int:
    """Free what was prepared from a module's weights; returns how many bytes that frees."""
    reading = read(module)
    if reading.activation is None:
        return 0
    with torch.no_grad():
        weights = weights_of(module, replace(reading, interleaved=False))
        kept = reordered.peek(weights)
        # first what was prepared from the reordered copy, then the copy itself
        freed = 0 if kept is None else release(_in_halves(weights, kept))
        return freed + release(weights)
