"""Decoder blocks to measure: sizes of their attention, inputs, contenders, operations, and the judge.

The router behind attention still chooses as the workload says: each expert's logit is one column of x, and
the attention's last projection writes nothing to those columns. So no contender chooses other experts than
the oracle because of rounding, which would look like an error and is none.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.accuracy import judge as judge_values
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.paired import Contender
from moe_routing_bench.bench.spans import SPANS, cost_of_span, layer_of
from moe_routing_bench.layer import MoE
from moe_routing_bench.models.decoder import DecoderBlock, TransformersBlock, rotary
from moe_routing_bench.ops.auto import pick
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.registry import Implementation
from moe_routing_bench.plan import Layout
from moe_routing_bench.workloads.cases import BenchCase, cases

DEFAULT_CONTENDERS = (
    "transformers",
    "transformers(attention=eager,experts=eager)",
    "ours(attention=naive)",
    "ours",
)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """AttentionShape(heads=32, kv_heads=4, head_dim=128, qk_norm=True) is Qwen3-30B-A3B's."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False
    theta: float = 10_000.0
    note: str = ""  # what the model has and the block here has not
    missing: str = ""  # why the block here cannot stand for the model at all

    def scaled(self, factor: float) -> AttentionShape:
        """Fewer heads of the same width, for a block of `factor` times the width."""
        kv_heads = max(1, round(self.kv_heads * factor))
        return replace(self, kv_heads=kv_heads, heads=kv_heads * (self.heads // self.kv_heads))


# heads, kv heads and width from the models' config.json: Qwen3 as in Megatron-LM's and slime's model scripts,
# Granite from huggingface.co, the others as the defaults of Transformers' config classes
ATTENTION = {
    "qwen3-30b-a3b": AttentionShape(heads=32, kv_heads=4, head_dim=128, qk_norm=True, theta=1e6),
    "qwen3-235b-a22b": AttentionShape(heads=64, kv_heads=4, head_dim=128, qk_norm=True, theta=1e6),
    "qwen1.5-moe-a2.7b": AttentionShape(
        heads=16, kv_heads=16, head_dim=128, theta=1e6, note="the model has biases on q, k and v"
    ),
    "mixtral-8x7b": AttentionShape(heads=32, kv_heads=8, head_dim=128, theta=1e6),
    "deepseek-v3": AttentionShape(
        heads=128, kv_heads=128, head_dim=128,
        missing="deepseek-v3 has latent attention, and the block here grouped-query attention; "
        "measure its MoE with `mrb bench layer --model deepseek-v3`",
    ),
    "olmoe-1b-7b": AttentionShape(
        heads=16, kv_heads=16, head_dim=128, note="the model norms q and k over all heads together"
    ),
    "gpt-oss-20b": AttentionShape(
        heads=64, kv_heads=8, head_dim=64, bias=True, theta=150_000.0,
        note="the model has attention sinks, and a window in every second layer",
    ),
    "gpt-oss-120b": AttentionShape(
        heads=64, kv_heads=8, head_dim=64, bias=True, theta=150_000.0,
        note="the model has attention sinks, and a window in every second layer",
    ),
    "phi-3.5-moe": AttentionShape(
        heads=32, kv_heads=8, head_dim=128, bias=True, note="the model has LayerNorm, not RMSNorm"
    ),
    "granite-3-moe": AttentionShape(
        heads=24, kv_heads=8, head_dim=64, note="the model scales its residuals, which is not timed"
    ),
}  # fmt: skip


def attention_of(case: BenchCase) -> AttentionShape:
    """The attention of a case. Ours, where it says nothing: heads of 64, four of q for one of k and v."""
    group, D = case.name.partition("/")[0], case.shape.D
    if group in ATTENTION:
        found = ATTENTION[group]
        if found.missing:
            raise NotImplementedError(found.missing)
        full = cases(case.scaled_from)[0].shape.D if case.scaled_from else D
        return found.scaled(D / full)
    full = cases(case.scaled_from)[0].shape.D if case.scaled_from else D
    head_dim = full // case.heads if case.heads else min(64, D // 2 * 2)
    heads = max(1, D // head_dim)
    return AttentionShape(heads=heads, kv_heads=heads // 4 if heads % 4 == 0 else heads, head_dim=head_dim)


class BlockInputs:
    """One case's block: BlockInputs(case, "zipf(1.2)").x(7) is the input of call 7, B x N x D."""

    def __init__(self, case: BenchCase, workload: str, *, seed: int = 0):
        if case.shape.T % case.sequences:
            raise ValueError(f"{case.shape.T} tokens are not {case.sequences} sequences of equal length")
        self.case, self.attention = case, attention_of(case)
        self.layer_inputs = Inputs(replace(case, span="layer"), workload, seed=seed)
        self.seed, self.dtype = seed, self.layer_inputs.dtype

    def x(self, number: int) -> Tensor:
        (x_TD,) = self.layer_inputs.call(number, self.case.layout)
        return x_TD.view(self.case.sequences, -1, self.case.shape.D)

    @cached_property
    def rotary(self) -> tuple[Tensor, Tensor]:
        """Of one sequence; a model makes it once for all its layers, so it is not timed."""
        return self._rotary(self.dtype)

    def _rotary(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, N = self.attention, self.case.shape.T // self.case.sequences
        return rotary(N, a.head_dim, a.theta, torch.empty((), dtype=dtype))

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        """Of norms and attention: normal, norms about 1; the logits' columns pass through untouched."""
        D, a = self.case.shape.D, self.attention
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = {"q_proj": a.heads, "k_proj": a.kv_heads, "v_proj": a.kv_heads}
        wide = {f"attention.{name}": (heads * a.head_dim, D) for name, heads in rows.items()}
        wide["attention.o_proj"] = (D, a.heads * a.head_dim)
        found = {}
        for name, (out, into) in wide.items():
            found[f"{name}.weight"] = torch.randn(out, into, generator=generator) * into**-0.5
            if a.bias:
                found[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.1
        norms = {"input_norm": D, "post_norm": D}
        if a.qk_norm:
            norms |= {"attention.q_norm": a.head_dim, "attention.k_norm": a.head_dim}
        for name, width in norms.items():
            found[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
        logit_D = self.layer_inputs.router_DE.any(dim=1)
        found["post_norm.weight"][logit_D] = 1.0
        for name in ("attention.o_proj.weight", "attention.o_proj.bias"):
            if name in found:
                found[name][logit_D] = 0.0
        return {name: tensor.to(self.dtype) for name, tensor in found.items()}

    def block(self, moe: MoE, kind: str) -> DecoderBlock:
        """A block around `moe` with the case's attention, in the dtype of the MoE."""
        a, D = self.attention, self.case.shape.D
        dtype = moe.experts.w_in_EDG.dtype
        with torch.device("meta"):
            block = DecoderBlock(
                D, a.heads, a.kv_heads, a.head_dim, moe=moe, kind=kind, qk_norm=a.qk_norm, bias=a.bias,
                theta=a.theta,
            )  # fmt: skip
        for name, value in self._parameters.items():
            home, _, last = name.rpartition(".")
            parameter = nn.Parameter(value.to(dtype), requires_grad=False)
            setattr(block.get_submodule(home), last, parameter)
        return block.eval()

    def moe(self, impl: str = "auto") -> MoE:
        """Our layer around the inputs' weights."""
        return our_layer(self.layer_inputs, self._layer, impl)

    @cached_property
    def _layer(self) -> MoE:
        return layer_of(expert_ffn_op.get("staged"), self.layer_inputs, self.case.layout)

    @cached_property
    def flops(self) -> int:
        """Useful operations of a call: projections, causal attention (half of N x N), and the MoE layer."""
        a, T, D = self.attention, self.case.shape.T, self.case.shape.D
        N = T // self.case.sequences
        projections = 2 * T * D * a.head_dim * (2 * a.heads + 2 * a.kv_heads)
        core = 4 * a.heads * a.head_dim * self.case.sequences * N * (N + 1) // 2
        moe = cost_of_span(SPANS["layer"], self.layer_inputs, self.case.layout).useful_flops
        return projections + core + moe

    def judge(self, y_BND: Tensor, number: int) -> Verdict:
        oracle, baseline = (self._plain(number, dtype) for dtype in (torch.float64, self.dtype))
        return judge_values(y_BND, oracle, baseline)

    @torch.no_grad()
    def _plain(self, number: int, dtype: torch.dtype) -> Tensor:
        """Attention written out and the reference experts, in `dtype`: the oracle in float64."""
        key = (number, dtype)
        if key not in self._expected:
            block = self.block(plain_layer(self.layer_inputs, self.case.layout, dtype), "naive")
            self._expected[key] = block(self.x(number).to(dtype), self._rotary(dtype))[0]
        return self._expected[key]

    @cached_property
    def _expected(self) -> dict[tuple[int, torch.dtype], Tensor]:
        return {}

    def contender(self, spec: str) -> Contender:
        """transformers(attention=sdpa|eager,experts=grouped_mm|eager|batched_mm) or
        ours(attention=sdpa|naive,impl=...)."""
        name, options = parse_contender(spec)
        try:
            if name == "ours":
                return self._ours(spec, **options)
            return self._transformers(spec, **options)
        except NotImplementedError as reason:
            return Contender(name=spec, missing=str(reason))
        except TypeError:
            raise ValueError(f"{spec!r} has an option that {name} does not take") from None

    def _ours(self, spec: str, *, attention: str = "sdpa", impl: str = "auto") -> Contender:
        block = self.block(self.moe(impl), attention)
        by = self.rotary
        return Contender(
            name=spec,
            label=f"{attention} attention, {block.moe.implementation}",
            call=lambda x_BND: block(x_BND, by)[0],
            parts={
                "norms": [block.input_norm, block.post_norm],
                "attention": [block.attention],
                "route": [block.moe.router],
                "experts": [block.moe],
            },
        )

    def _transformers(self, spec: str, *, attention: str = "sdpa", experts: str = "grouped_mm") -> Contender:
        theirs = TransformersBlock.of(
            self.block(self.moe("staged"), "sdpa"), attention=attention, experts=experts
        )
        layer, by = theirs.layer, self.rotary
        return Contender(
            name=spec,
            label=f"Transformers' Qwen3MoeDecoderLayer, {attention} attention, {experts} experts",
            call=lambda x_BND: theirs(x_BND, by),
            parts={
                "norms": [layer.input_layernorm, layer.post_attention_layernorm],
                "attention": [layer.self_attn],
                "route": [layer.mlp.gate],
                "experts": [layer.mlp],
            },
        )


def our_layer(inputs: Inputs, base: MoE, impl: str = "auto") -> MoE:
    """`base` with another implementation, on the same weights, so that all share what is made of them;
    NotImplementedError if `impl` cannot compute them."""
    layout = str(base.layout)
    case, rule, routing = inputs.case, Layout.parse(layout), inputs.routing(0)
    weights = base.experts.weights()
    x_TD = torch.empty(case.shape.T, case.shape.D, dtype=inputs.dtype, device=weights.w_in_EDG.device)
    asked = (x_TD, routing.gate_TK, inputs.plan(0, layout), weights)
    layer = copy.copy(base)
    with torch.no_grad():
        layer.expert_ffn = pick(expert_ffn_op, impl, asked).implementation
    layer.make_plan = pick(make_plan_op, "auto", (routing, rule), weights).implementation
    return layer


def plain_layer(inputs: Inputs, layout: str, dtype: torch.dtype) -> MoE:
    """The layer in plain torch, in `dtype`: experts by the op's reference, the router in float32 at least."""
    reference = Implementation(
        op="expert_ffn", name="reference", origin="", summary="", run=expert_ffn_op.reference,
        unsupported=lambda *args: None,
    )  # fmt: skip
    wide = _Wide(inputs, dtype) if dtype != inputs.dtype else inputs
    layer = layer_of(reference, wide, layout)  # type: ignore[arg-type]
    layer.router.dtype = torch.promote_types(dtype, torch.float32)
    return layer


class _Wide:
    """Inputs with the same numbers in another dtype, as far as layer_of looks."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype):
        self.case, self.dtype, self.router_DE = inputs.case, dtype, inputs.router_DE
        self.weights = inputs.weights.to(dtype=dtype)
        self.shared = None if inputs.shared is None else inputs.shared.to(dtype=dtype)


def parse_contender(spec: str) -> tuple[str, dict[str, str]]:
    """ours(attention=naive,impl=staged(combine=index_add)) as its name and options."""
    match = re.fullmatch(r"\s*(ours|transformers)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise ValueError(
            f"cannot read {spec!r}; write ours or transformers, with options as in {DEFAULT_CONTENDERS[1]}"
        )
    options = {}
    for word in re.findall(r"(?:[^,()]|\((?:[^()]|\([^()]*\))*\))+", match[2] or ""):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise ValueError(f"cannot read {word!r} in {spec!r}; write option=value")
        options[key] = value
    return match[1], options


def contenders_of(inputs: BlockInputs, specs: Sequence[str]) -> list[Contender]:
    return [inputs.contender(spec) for spec in specs or DEFAULT_CONTENDERS]
