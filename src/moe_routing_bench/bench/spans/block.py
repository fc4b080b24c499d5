"""block: a whole MoE decoder block, ours or Transformers'.

An implementation is ours(attention=sdpa|naive,impl=...) or
transformers(attention=sdpa|eager,experts=grouped_mm|...). The router after attention still follows the
workload: each expert's logit is one column of x, and the attention's last projection writes nothing to those
columns. So rounding cannot make an implementation choose other experts than the oracle, which would look like
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.layers import ROUTER, layer_of, moe_of, plain_layer
from moe_routing_bench.bench.spans.layer import span as layer_span
from moe_routing_bench.bench.spans.span import (
    Computation,
    Load,
    Span,
    Stage,
    auto_label,
    packed_once,
    stand_ins,
)
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.names import base_name, parse_spec
from moe_routing_bench.core.published import MODELS, AttentionShape
from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.models.decoder import DecoderBlock, Rotary, TransformersBlock, rotary
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.registry import BUILT_IN
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

IMPLEMENTATIONS = (
    "transformers",
    "transformers(attention=eager,experts=eager)",
    "ours(attention=naive)",
    "ours",
    "frozen(ours)",
)
OPTIONS = {
    "ours": {"attention": "sdpa", "impl": "auto"},
    "transformers": {"attention": "sdpa", "experts": "grouped_mm"},
}


class BlockSpan(Span):
    name = "block"
    ops = ("expert_ffn",)
    included = ("norms", "attention", "router projection", "topk", "make_plan", "expert_ffn", "residuals")
    excluded = (*Span.excluded, "rotary angles")
    weights = routed = in_stages = True
    case = "seed-moe-block"
    options: Mapping[str, Mapping[str, str]] = OPTIONS

    def all_names(self) -> list[str]:
        return list(IMPLEMENTATIONS)

    def read(self, name: str) -> tuple[str, dict[str, str]]:
        return parse_block(name, self.options)

    def settled(self, implementation: ImplementationRef, case: Experiment) -> ImplementationRef:
        attention_of(case)  # raises if this block cannot represent the model
        self.read(implementation.name)
        return replace(implementation, router=implementation.router or ROUTER)

    def has_frozen(self, implementation: ImplementationRef, case: Experiment) -> bool:
        name, options = self.read(implementation.name)
        if name != "ours":
            return False
        if options["impl"] == "auto":
            label = auto_label("expert_ffn", stand_ins(implementation, case))
            implementation = replace(implementation, name=f"ours(impl={label})")
        return super().has_frozen(implementation, case)

    def parts(self, name: str) -> tuple[Implementation, ...]:
        impl = self.read(name)[1].get("impl", "auto")
        return () if impl == "auto" else (expert_ffn_op.get(impl),)

    def label(self, name: str) -> str:
        return name  # its attention and its experts name it together

    def named(self, name: str) -> list[tuple[str, str]]:
        impl = self.read(name)[1].get("impl", "auto")
        return [] if impl == "auto" else [("expert_ffn", base_name(impl))]

    def origins(self, name: str) -> list[str]:
        return [expert_ffn_op.origin(part) for _, part in self.named(name)] or [BUILT_IN]

    def call(self, implementation: ImplementationRef, inputs: Inputs, number: int, step: int) -> Call:
        return layer_span.call(implementation, inputs, number, step)

    def arguments(self, call: Call) -> dict[str, Any]:
        B, D = call.inputs.experiment.sequences, call.inputs.experiment.D
        return {"x_BND": call.planted_TD.detach().view(B, -1, D)}

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        block, runs = _implementation_block(implementation, inputs)
        by = _rotary(inputs, inputs.dtype)
        if isinstance(block, DecoderBlock):
            return Computation(run=lambda x_BND: block(x_BND, by)[0], runs=runs, owner=block)
        return Computation(run=lambda x_BND: block(x_BND, by), runs=runs, owner=block)

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        if inputs.experiment.direction != "forward":
            return f"only the forward pass of a {self.name} is measured"
        try:
            self.built(implementation, inputs)
        except (NotImplementedError, ValueError) as reason:
            return str(reason)
        return None

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        block, _ = _implementation_block(implementation, inputs)
        by, x_BND, held = _rotary(inputs, inputs.dtype), args["x_BND"], dict[str, Tensor]()
        if isinstance(block, DecoderBlock):
            norms, moe = (block.input_norm, block.post_norm), block.feed_forward
            attend = lambda h: block.attention(h, by)  # noqa: E731
            info = TokenInfo(num_sequences=x_BND.shape[0])
            experts = lambda h: moe(h, info)[0]  # noqa: E731
        else:
            layer = block.layer
            norms, experts = (layer.input_layernorm, layer.post_attention_layernorm), layer.mlp
            attend = lambda h: block.attend(h, by)  # noqa: E731
        yield "norms", lambda: held.update(h=norms[0](x_BND), g=norms[1](x_BND))
        yield "attention", lambda: attend(held["h"])
        yield "experts", lambda: experts(held["g"])

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        moe = moe_of(plain_layer(implementation, inputs, dtype))
        block, by = block_of(moe, "naive", inputs), _rotary(inputs, dtype)
        return Computation(run=lambda x_BND: block(x_BND, by)[0])

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        """Returns the work of the layer, the projections and causal attention: token n of a sequence sees n
        tokens and all that came before the call."""
        cost, load = layer_span.facts(implementation, inputs)
        if inputs.experiment.store:
            part = Fraction(inputs.experiment.weight_bytes, inputs.experiment.drawn_bytes)
            cost = replace(cost, weight_bytes=round(cost.weight_bytes * part))
        a, s, B = attention_of(inputs.experiment), inputs.experiment.shape, inputs.experiment.sequences
        N, past = s.T // B, past_of(inputs.experiment)
        matrices = s.D * a.head_dim * (2 * a.heads + 2 * a.kv_heads)
        flops = 2 * s.T * matrices + 4 * a.heads * a.head_dim * B * (N * past + N * (N + 1) // 2)
        size = inputs.experiment.element_size
        cost += Cost(useful_flops=flops, executed_flops=flops, weight_bytes=matrices * size)
        return cost + Cost(activation_bytes=2 * B * past * a.kv_heads * a.head_dim * size), load

    def resolved(self, implementation: ImplementationRef, inputs: Inputs) -> list[tuple[str, str]]:
        name, options = self.read(implementation.name)
        if name != "ours":
            return []
        picked = layer_span.resolved(implementation, inputs)
        if options["impl"] == "auto":
            picked.append(
                ("expert_ffn", auto_label("expert_ffn", stand_ins(implementation, inputs.experiment)))
            )
        return picked

    def notes(self, case: Experiment) -> list[str]:
        note = attention_of(case).note
        return [f"In the model, but not here: {note}."] if note else []


def parse_block(text: str, known: Mapping[str, Mapping[str, str]] = OPTIONS) -> tuple[str, dict[str, str]]:
    """ours(attention=naive,impl=staged(combine=index_add)) as its name and options."""
    name, given = parse_spec(text)
    if name not in known:
        raise ValueError(
            f"cannot read {text!r}; write {' or '.join(known)}, with options as in {IMPLEMENTATIONS[1]}"
        )
    if unknown := next((key for key in given if key not in known[name]), None):
        raise ValueError(f"{name} has no option {unknown}; it has {', '.join(known[name]) or 'none'}")
    return name, {**known[name], **{key: str(value) for key, value in given.items()}}


def past_of(case: Experiment) -> int:
    """Returns how many tokens of a sequence came before the call. ValueError if the context is too short."""
    N = case.T // case.sequences
    if case.context and case.context < N:
        raise ValueError(f"a context of {case.context} tokens does not hold the {N} tokens of the call")
    return case.context - N if case.context else 0


def attention_of(case: Experiment) -> AttentionShape:
    """The attention of a case. By default heads of width 64, with four q heads for each k and v head."""
    group, D = case.case.partition("/")[0], case.D
    full = cases(case.scaled_from)[0].shape.D if case.scaled_from else D
    if group in MODELS:
        attention = MODELS[group].attention
        if attention.missing:
            raise NotImplementedError(attention.missing)
        return attention.scaled(D / full)
    head_dim = full // case.heads if case.heads else min(64, D // 2 * 2)
    heads = max(1, D // head_dim)
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    if case.kv_heads:
        kv_heads = max(1, heads * case.kv_heads // (case.heads or heads))
    return AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def _implementation_block(
    implementation: ImplementationRef, inputs: Inputs
) -> tuple[DecoderBlock | TransformersBlock, str]:
    if inputs.experiment.context:
        raise NotImplementedError("a block begins a sequence; measure model, with --layers 1 and --context")
    name, options = parse_block(implementation.name)
    if name == "ours":
        picked = {"expert_ffn": options["impl"], **dict(span.resolved(implementation, inputs))}
        ffn, make_plan = expert_ffn_op.get(picked["expert_ffn"]), make_plan_op.get(picked["make_plan"])
        moe = moe_of(layer_of(implementation, inputs, ffn, make_plan, topk=picked["topk"]))
        _refuse(ffn, moe, inputs, implementation)
        parts = f"topk.{picked['topk']} + make_plan.{make_plan.label} + expert_ffn.{ffn.label}"
        parts += packed_once(moe.experts.weights())
        return block_of(moe, options["attention"], inputs), f"{options['attention']} attention, {parts}"
    staged, counting = expert_ffn_op.get("staged"), make_plan_op.get("counting")
    moe = moe_of(layer_of(implementation, inputs, staged, counting, topk="sort"))
    theirs = TransformersBlock.of(block_of(moe, "sdpa", inputs), **options)
    attention, experts = options["attention"], options["experts"]
    return theirs, f"Transformers' Qwen3MoeDecoderLayer, {attention} attention, {experts} experts"


def _refuse(ffn: Implementation, moe: MoE, inputs: Inputs, implementation: ImplementationRef) -> None:
    """NotImplementedError if the implementation cannot compute the experts of this block."""
    call = inputs.at(0, 0, implementation.layout)
    if (reason := ffn.why_not(call.x_TD, call.gate_TK, call.plan, moe.experts.weights())) is not None:
        raise NotImplementedError(f"{ffn.op}.{ffn.label}: {reason}")


def _rotary(inputs: Inputs, dtype: torch.dtype) -> Rotary:
    """Returns the angles for one sequence. A model makes them once for all layers, so they are not timed."""
    a, N = attention_of(inputs.experiment), inputs.experiment.T // inputs.experiment.sequences
    return rotary(N, a.head_dim, a.theta, torch.empty((), dtype=dtype, device=inputs.put))


def block_of(moe: MoE, attention: str, inputs: Inputs) -> DecoderBlock:
    """A block around `moe` with the case's attention, in the dtype of the MoE."""
    a, D = attention_of(inputs.experiment), inputs.experiment.D
    dtype = moe.experts.w_in_EDG.dtype
    with torch.device("meta"):
        block = DecoderBlock(
            D, a.heads, a.kv_heads, a.head_dim, feed_forward=moe, method=attention,
            qk_norm=a.qk_norm, bias=a.bias, theta=a.theta,
        )  # fmt: skip
    for name, value in _parameters(a, inputs).items():
        home, _, last = name.rpartition(".")
        setattr(
            block.get_submodule(home), last, nn.Parameter(value.to(inputs.put, dtype), requires_grad=False)
        )
    return block.eval()


def _parameters(a: AttentionShape, inputs: Inputs) -> dict[str, Tensor]:
    """Weights of norms and attention, normally distributed. The logits' columns pass through unchanged."""
    if inputs.experiment.T % inputs.experiment.sequences:
        raise ValueError(
            f"{inputs.experiment.T} tokens are not {inputs.experiment.sequences} sequences of equal length"
        )
    D, generator = inputs.experiment.D, torch.Generator().manual_seed(inputs.seed + 1)
    heads = {"q_proj": a.heads, "k_proj": a.kv_heads, "v_proj": a.kv_heads}
    wide = {f"attention.{name}": (count * a.head_dim, D) for name, count in heads.items()}
    wide["attention.o_proj"] = (D, a.heads * a.head_dim)
    values = {}
    for name, (out, into) in wide.items():
        values[f"{name}.weight"] = torch.randn(out, into, generator=generator) * into**-0.5
        if a.bias:
            values[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.1
    norms = {"input_norm": D, "post_norm": D}
    if a.qk_norm:
        norms |= {"attention.q_norm": a.head_dim, "attention.k_norm": a.head_dim}
    for name, width in norms.items():
        values[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
    columns = inputs.logit_columns
    values["post_norm.weight"][columns] = 1.0
    for name in ("attention.o_proj.weight", "attention.o_proj.bias"):
        if name in values:
            values[name][columns] = 0.0
    return {name: tensor.to(inputs.dtype) for name, tensor in values.items()}


span = BlockSpan()
