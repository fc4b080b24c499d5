"""Replaces a model's MoE blocks by our MoE layer with the same weights, and puts the blocks back.

    convert(model)   every MoE block becomes a ConvertedBlock around our MoE; a model with a block that cannot
                     be converted is left as it is, with the reason
    revert(model)    the model's own blocks again, with the weights as they are now

This is for models that the plug-in (models/transformers.py) cannot serve: older or remote code with a list of
experts. Weights of Transformers 5 are used where they lie in memory. Weights of a list are copied into one
tensor, and the list is empty until revert. Parameters are then other objects with other names: make the
optimizer after converting, and revert before saving. For inference, freeze() of a layer or of the plug-in
packs the weights once. A model cannot record our router by hooks on its own (output_router_logits in
Transformers 5).

Our routers compute in float32. A model in bfloat16 rounds its logits, so it may choose other experts near
ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.experts import ExpertWeights, from_expert_list, to_transformers
from moe_routing_bench.models.reading import GATED_BY, plain_activation, read, weights_of, where
from moe_routing_bench.moe.layer import MoE

# gate, up and down of one expert of a list: Qwen, OLMoE, DeepSeek; Mixtral
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# what may differ between a list's block and ours, of the largest number: float32, and 16 bits
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
ROUGH = 0.05


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a block: Parts(weights=..., K=8, router="softmax_topk", options={"order": ...},
    w_DE=..., returns_logits=False)."""

    weights: ExpertWeights
    K: int
    router: str
    options: dict[str, Any]
    w_DE: Tensor
    bias_E: Tensor | None = None
    shared: nn.Module | None = None
    returns_logits: bool = False
    give_back: Callable[[MoE], None] = field(repr=False)


class ConvertedBlock(nn.Module):
    """Takes the place of a model's MoE block: hidden states in, hidden states out, and the router's logits if
    the block returned them. `moe` is our layer; `shared` holds the model's own shared experts."""

    def __init__(self, original: nn.Module, parts: Parts, moe: MoE):
        super().__init__()
        self.moe, self.shared, self.returns_logits = moe, parts.shared, parts.returns_logits
        # in a tuple, so that its parameters are not ours
        self.original = (original, parts.give_back)

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y, routing = self.moe(hidden_states)
        if self.shared is not None:
            y = y + self.shared(hidden_states)
        return (y, routing.logits_TE.to(y.dtype)) if self.returns_logits else y


def convert(module: nn.Module, *, impl: str = "auto", layout: str = "compact") -> nn.Module:
    """Replaces every MoE block inside, or the module itself if it is one. Returns the module to use now.

    impl: an implementation of expert_ffn; "auto" as everywhere (ops/auto.py).
    """
    blocks, reasons = {}, []
    for path, block in module.named_modules():
        try:
            parts = parts_of(block)
        except NotImplementedError as reason:
            reasons.append(f"{path or type(block).__name__}: {reason}")
            continue
        if parts is not None:
            blocks[path] = (block, parts)
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise NotImplementedError(f"cannot convert {reasons[0]}{more}")
    if not blocks:
        raise ValueError(
            f"{type(module).__name__} holds no MoE block that is known here: {', '.join(_names())}, "
            "or a list of experts with a Linear called gate"
        )
    for path, (block, parts) in blocks.items():
        converted = _converted(block, parts, impl, layout)
        if not path:
            return converted
        _replace(module, path, converted)
    return module


def revert(module: nn.Module) -> nn.Module:
    """Puts the model's own blocks back, with the weights as they are now. Returns the module to use then."""
    for path, block in list(module.named_modules()):
        if isinstance(block, ConvertedBlock):
            original, give_back = block.original
            block.moe.thaw()
            give_back(block.moe)
            original.train(block.training)
            if not path:
                return original
            _replace(module, path, original)
    return module


def parts_of(block: nn.Module) -> Parts | None:
    """Returns the parts of an MoE block, or None if the module is not one. Raises NotImplementedError with
    the reason if it is a block that cannot be converted."""
    if (known := _BLOCKS.get(where(type(block)))) is not None:
        return known(block)
    experts, gate = getattr(block, "experts", None), getattr(block, "gate", None)
    if isinstance(experts, nn.ModuleList) and isinstance(gate, nn.Module):
        return _list_block(block)
    return None


def _names() -> list[str]:
    return [path.rpartition(".")[2] for path in _BLOCKS]


def _softmax(block: Any) -> Parts:
    """Qwen3-MoE, OLMoE and Mixtral of Transformers 5."""
    if getattr(block, "jitter_noise", 0):
        raise NotImplementedError(
            "its router multiplies hidden states by noise (router_jitter_noise) in training"
        )
    order = "softmax_then_topk"
    if getattr(block.gate, "norm_topk_prob", True):
        order += "_renormalised"
    return _registered(block, "softmax_topk", {"order": order})


def _deepseek_v3(block: Any) -> Parts:
    gate = block.gate
    options = {
        "score": "sigmoid",
        "groups": gate.num_group,
        "keep_groups": gate.topk_group,
        "group_score": "top2_sum",
        "renormalise": gate.norm_topk_prob,
        "scale": gate.routed_scaling_factor,
    }
    return _registered(
        block, "sigmoid_bias", options, bias_E=gate.e_score_correction_bias, shared=block.shared_experts
    )


MODELS = "transformers.models"
_BLOCKS: dict[str, Callable[[Any], Parts]] = {
    f"{MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock": _softmax,
    f"{MODELS}.olmoe.modeling_olmoe.OlmoeSparseMoeBlock": _softmax,
    f"{MODELS}.mixtral.modeling_mixtral.MixtralSparseMoeBlock": _softmax,
    f"{MODELS}.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE": _deepseek_v3,
}


def _registered(block: Any, router: str, options: dict[str, Any], **more: Any) -> Parts:
    """Handles a block of Transformers 5, whose experts are one module. Nothing is copied either way."""
    experts = block.experts
    reading = read(experts)
    if reading.activation is None:
        raise NotImplementedError(reading.why)

    def give_back(moe: MoE) -> None:
        tensors = to_transformers(moe.experts.weights(), is_transposed=experts.is_transposed)
        for name, tensor in tensors.items():
            setattr(experts, name, _parameter(tensor, moe.experts.w_in_EDG))
        router: Any = moe.router
        block.gate.weight = _parameter(router.w_DE.t(), router.w_DE)
        if "bias_E" in more:
            block.gate.e_score_correction_bias = router.bias_E

    return Parts(
        weights=weights_of(experts, reading),
        K=block.gate.top_k,
        router=router,
        options=options,
        w_DE=block.gate.weight.t(),
        give_back=give_back,
        **more,
    )


def _list_block(block: Any) -> Parts:
    """A block of older or remote code: `gate`, a Linear, and `experts`, a list of three Linears each."""
    if type(block.gate) is not nn.Linear or block.gate.bias is not None:
        raise NotImplementedError("its gate is not a plain Linear without bias")
    if others := [name for name, _ in block.named_children() if name not in ("gate", "experts")]:
        raise NotImplementedError(f"besides gate and experts it has {', '.join(others)}")
    names = next((n for n in PROJECTIONS if all(hasattr(block.experts[0], name) for name in n)), None)
    lists = {name: [getattr(expert, name, None) for expert in block.experts] for name in names or ()}
    if names is None or not all(
        isinstance(linear, nn.Linear) and linear.bias is None for each in lists.values() for linear in each
    ):
        wanted = " or ".join(", ".join(n) for n in PROJECTIONS)
        raise NotImplementedError(f"its experts are not Linears without bias called {wanted}")
    plain = plain_activation(block.experts[0].act_fn)
    if plain not in GATED_BY:
        raise NotImplementedError(f"its activation {block.experts[0].act_fn} is not one of ours")
    K = getattr(block, "top_k", None) or getattr(block, "num_experts_per_tok", None)
    # Mixtral always divides by the sum; other blocks say it in norm_topk_prob
    renormalise = True if names == PROJECTIONS[1] else getattr(block, "norm_topk_prob", None)
    if not K or renormalise is None:
        raise NotImplementedError("it has no top_k or no norm_topk_prob to read")
    weights = [[linear.weight for linear in lists[name]] for name in names]

    def give_back(moe: MoE) -> None:
        # each is a tensor of its own, because a file of weights may not hold two views of one memory
        w_in_EDG, w_out_EFD = moe.experts.w_in_EDG, moe.experts.w_out_EFD
        each = (*w_in_EDG.chunk(2, dim=-1), w_out_EFD)
        for name, w_E in zip(names, each, strict=True):
            for linear, w in zip(lists[name], w_E, strict=True):
                linear.weight = _parameter(w.t().contiguous(), w_in_EDG)
        router: Any = moe.router
        block.gate.weight = _parameter(router.w_DE.t(), router.w_DE)

    parts = Parts(
        weights=from_expert_list(*weights, activation=GATED_BY[plain]),
        K=K,
        router="softmax_topk",
        options={"order": f"softmax_then_topk{'_renormalised' if renormalise else ''}"},
        w_DE=block.gate.weight.t(),
        give_back=give_back,
        returns_logits=_returns_logits(block),
    )
    _check_numbers(block, parts)
    return parts


@torch.no_grad()
def _returns_logits(block: Any) -> bool:
    weight = block.gate.weight
    return isinstance(block(weight.new_zeros(1, 1, weight.shape[1])), tuple)


@torch.no_grad()
def _check_numbers(block: Any, parts: Parts) -> None:
    """Compares numbers: a list of experts is recognised by its attributes, and other code may have the
    same."""
    D, dtype = parts.w_DE.shape[0], parts.weights.w_in_EDG.dtype
    generator = torch.Generator().manual_seed(D)
    x = torch.randn(1, 16, D, generator=generator).to(parts.w_DE)
    training = block.training
    block.eval()
    theirs = block(x)
    block.train(training)
    ours = _converted(block, parts, "staged", "compact", strip=False)(x)
    if parts.returns_logits:
        theirs, ours = theirs[0], ours[0]
    error_T = (theirs - ours).abs().amax(-1).flatten() / theirs.abs().max()
    # rounding may choose another expert for a few tokens
    if error_T.median() > TOLERANCE.get(dtype, ROUGH):
        raise NotImplementedError("it looks like a list of experts, but computes something else than they do")


def _converted(block: nn.Module, parts: Parts, impl: str, layout: str, strip: bool = True) -> ConvertedBlock:
    weights = parts.weights
    moe = MoE(
        weights.D,
        weights.F,
        weights.num_experts,
        parts.K,
        router=parts.router,
        router_options=parts.options,
        layout=layout,
        activation=weights.activation,
        impl=impl,
        device="meta",  # the model's own tensors take their places
        dtype=weights.w_in_EDG.dtype,
    )
    for name, tensor in weights.tensors().items():
        setattr(moe.experts, name, _parameter(tensor, tensor))
    moe.router.w_DE = _parameter(parts.w_DE, parts.w_DE)
    if parts.bias_E is not None:
        moe.router.bias_E = parts.bias_E
    converted = ConvertedBlock(block, parts, moe)
    converted.train(block.training)
    if strip:
        _strip(block)
    return converted


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=like.requires_grad)


def _strip(block: Any) -> None:
    """Frees the memory of the original block until revert; its modules stay."""
    for module in (*block.experts.modules(), block.gate):
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            setattr(module, name, empty)


def _replace(root: nn.Module, path: str, block: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, block)
