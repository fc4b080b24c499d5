"""model: a whole MoE model of Transformers, its experts theirs or ours.

An implementation is transformers(attention=sdpa|eager,experts=grouped_mm|batched_mm|eager), or
ours(attention=sdpa|ours,impl=...,linears=True): the same model with our plug-in, and after plugin.freeze for
frozen(...) and for native(store=...). linears=True freezes the dense matrices too, without rounding them.

All layers have the same random weights, each in memory of its own, so the oracle holds one layer in float64.
The router follows the workload in every layer, as in the span block. Keys and values of the tokens before the
call are given. The call adds its own as generate() does, in a DynamicCache. lm_head reads the last token of
each sequence. It has 3,072 rows for each layer, the share of Qwen3-30B-A3B and OLMoE.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.layers import layer_of, moe_of, plain_layer, reference_of
from moe_routing_bench.bench.spans.block import BlockSpan, attention_of, block_of, past_of
from moe_routing_bench.bench.spans.span import (
    PACKED_ONCE,
    Computation,
    Load,
    Span,
    Stage,
    auto_label,
    stand_ins,
    why_not_stored,
)
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.formats.named import INT8_ROWS
from moe_routing_bench.models.decoder import Cache, TransformersBlock, rotary, transformers_model
from moe_routing_bench.models.linears import FrozenLinear
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.expert_ffn.op import with_int8_rows
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

IMPLEMENTATIONS = (
    "transformers",
    "transformers(experts=batched_mm)",
    "transformers(experts=eager)",
    "ours",
    "frozen(ours)",
    "frozen(ours(attention=ours,linears=True))",
)
HEAD_ROWS = 3072
KeysAndValues = list[tuple[Tensor, Tensor]]


class ModelSpan(BlockSpan):
    name = "model"
    included = ("rotary angles", "norms", "attention", "cache", "routers", "experts", "lm_head")
    excluded = (*Span.excluded, "embedding")
    case = "whole-model/decode-128"
    options: Mapping[str, Mapping[str, str]] = {
        "ours": {"attention": "sdpa", "impl": "auto", "linears": "False"},
        "transformers": {"attention": "sdpa", "experts": "grouped_mm"},
    }

    def all_names(self) -> list[str]:
        return list(IMPLEMENTATIONS)

    def stored_names(self, case: Experiment) -> list[str]:
        stored, rows = (f"impl=native(store={case.store}{also})" for also in ("", INT8_ROWS))
        ours = (stored, rows, f"attention=ours,linears=True,{rows}")
        return ["transformers", "frozen(ours)", *(f"ours({one})" for one in ours)]

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        model, runs = self._model(implementation, inputs)
        return Computation(run=_runner(model, inputs), runs=runs, owner=model)

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        model, _ = self._model(implementation, inputs)
        layers, called = model.model.layers, list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]()
        parts = {
            "attention": [layer.self_attn for layer in layers],
            "experts": [layer.mlp for layer in layers],
            "norms": [layer.input_layernorm for layer in layers]
            + [layer.post_attention_layernorm for layer in layers]
            + [model.model.norm],
            "lm_head": [model.lm_head],
        }

        def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            called.append((module, given, named))

        hooks = [
            module.register_forward_pre_hook(note, with_kwargs=True)
            for part in parts.values()
            for module in part
        ]
        _runner(model, inputs)(*args.values())
        for hook in hooks:
            hook.remove()
        past = _past(inputs)

        def again(part: list[nn.Module]) -> None:
            for module, given, named in called:
                if module in part:
                    if "past_key_values" in named:
                        _restore(named["past_key_values"], past)
                    module(*given, **named)

        for name, part in parts.items():
            yield name, partial(again, part)

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        moe = moe_of(plain_layer(implementation, inputs, dtype, silent=True))
        if implementation.int8_rows and dtype == inputs.dtype:
            moe.expert_ffn = replace(reference_of(expert_ffn_op), run=with_int8_rows)
        block, (norm_D, head_VD) = block_of(moe, "naive", inputs), _ends(inputs)
        a, case = attention_of(inputs.experiment), inputs.experiment
        past, before, N = _past(inputs), past_of(case), case.T // case.sequences

        def run(x_BND: Tensor) -> Tensor:
            by = rotary(N, a.head_dim, a.theta, x_BND, start=before)
            for k_BJMA, v_BJMA in past:
                cache = Cache(case.sequences, a.kv_heads, before + N, a.head_dim, x_BND)
                cache.extend(k_BJMA.to(dtype), v_BJMA.to(dtype))
                x_BND = block(x_BND, by, cache=cache)[0]
            h_B1D = F.rms_norm(x_BND[:, -1:], norm_D.shape, norm_D.to(dtype), block.post_norm.eps)
            return F.linear(h_B1D, head_VD.to(dtype))

        return Computation(run=run)

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        cost, load = super().facts(implementation, inputs)
        case = inputs.experiment
        head = case.layers * HEAD_ROWS * case.D
        flops = 2 * case.sequences * head
        cost = cost.times(flops=case.layers, bytes=case.layers)
        return cost + Cost(
            useful_flops=flops, executed_flops=flops, weight_bytes=head * case.element_size
        ), load

    def resolved(self, implementation: ImplementationRef, inputs: Inputs) -> list[tuple[str, str]]:
        if self.read(implementation.name)[1].get("impl") != "auto":
            return []
        return [("expert_ffn", auto_label("expert_ffn", stand_ins(implementation, inputs.experiment)))]

    def sizes(self, case: Experiment) -> list[str]:
        sizes, routing = super().sizes(case)
        return [f"{sizes} layers={case.layers} context={case.context or case.T // case.sequences}", routing]

    def notes(self, case: Experiment) -> list[str]:
        layers = "layer" if case.layers == 1 else "layers"
        said = [*super().notes(case), f"The model has {case.layers} {layers} and random weights."]
        if case.store:
            said.append(f"Right is the result with the experts' weights rounded to {case.store}.")
        return said

    def _model(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Any, str]:
        """Returns the model of an implementation, and what runs in it. Models share what has equal form."""
        name, options = self.read(implementation.name)
        import moe_routing_bench.models.transformers as plugin

        known, case = inputs.made, inputs.experiment
        if implementation in known:
            return known[implementation]
        for part in self.parts(implementation.name):
            if (reason := why_not_stored(part, case.store)) is not None:
                raise NotImplementedError(reason)
        linears, attention = options.get("linears") == "True", options["attention"]
        stored = any(part.stored is not None for part in self.parts(implementation.name))
        if name == "transformers":
            model = self._plain(implementation, inputs)
            model.set_experts_implementation(options["experts"])
            runs = f"{options['experts']} experts"
        elif not (implementation.frozen or stored):
            if linears:
                raise NotImplementedError("linears=True packs the dense matrices; ask for frozen(ours(...))")
            model = self._plain(implementation, inputs)
            model.set_experts_implementation(plugin.register(options["impl"]))
            runs = plugin.implementations(model, case.T)[0].implementation
        else:
            packed = ("frozen", options["impl"])
            if packed not in known:
                given = _unrounded(inputs) if stored else inputs
                known[packed] = _packed(implementation, given, options["impl"])
                for name in ("drawn", "_stored"):  # as large as a layer, and made again if asked for
                    vars(inputs).pop(name, None)
            model = _sharing(known[packed], ".experts." if linears else "")
            if linears:
                plugin.freeze(model, linears=True)
            runs = plugin.implementations(model, case.T)[0].implementation + PACKED_ONCE
        if attention == "ours":
            if case.T > case.sequences and past_of(case):
                raise NotImplementedError("our attention takes no mask: a prompt after a context needs one")
            attention = plugin.NAME
        model.set_attn_implementation(attention)
        runs = f"Transformers' {type(model).__name__}, {attention} attention, {runs}"
        packed_once = sum(isinstance(one, FrozenLinear) for one in model.modules())
        known[implementation] = model, runs + (f", {packed_once} dense matrices packed" if linears else "")
        return known[implementation]

    def _plain(self, implementation: ImplementationRef, inputs: Inputs) -> Any:
        if "transformers" not in inputs.made:
            blocks = [_block(implementation, inputs)] * inputs.experiment.layers
            inputs.made["transformers"] = transformers_model(blocks, *_ends(inputs))
        return _sharing(inputs.made["transformers"])


def _unrounded(inputs: Inputs) -> Inputs:
    """Returns inputs with the weights as they are before they are stored."""
    other = copy.copy(inputs)
    vars(other).update(weights=inputs.drawn, made={})
    return other


def _block(implementation: ImplementationRef, inputs: Inputs) -> TransformersBlock:
    staged, counting = expert_ffn_op.get("staged"), make_plan_op.get("counting")
    moe = moe_of(layer_of(implementation, inputs, staged, counting, topk="sort", silent=True))
    return TransformersBlock.of(block_of(moe, "sdpa", inputs))


def _packed(implementation: ImplementationRef, inputs: Inputs, impl: str) -> Any:
    """Returns the model with frozen experts, whose copies would share memory: each layer is packed anew."""
    import moe_routing_bench.models.transformers as plugin

    block, ends, blocks = _block(implementation, inputs), _ends(inputs), list[TransformersBlock]()
    for _ in range(inputs.experiment.layers):
        one = transformers_model([block], *ends)
        plugin.freeze(one, impl)
        blocks.append(replace(block, layer=one.model.layers[0]))
    return transformers_model(blocks, *ends)


def _sharing(model: Any, part: str = "") -> Any:
    """Returns a copy that shares the memory of the parameters with `part` in their name."""
    return copy.deepcopy(model, {id(one): one for name, one in model.named_parameters() if part in name})


def _ends(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The weights of the last norm and of lm_head."""
    D, rows = inputs.experiment.D, inputs.experiment.layers * HEAD_ROWS
    norm_D = 1 + inputs.normal(D, place=59, scale=0.1)
    return norm_D.to(inputs.put), inputs.normal(rows, D, place=61, scale=D**-0.5).to(inputs.put)


def _past(inputs: Inputs) -> KeysAndValues:
    """Keys and values of each layer for the tokens before the call."""
    a, case = attention_of(inputs.experiment), inputs.experiment
    size = case.sequences, a.kv_heads, past_of(case), a.head_dim

    def drawn(place: int) -> Tensor:
        return inputs.normal(*size, place=place).to(inputs.put)

    return [(drawn(at), drawn(at + 1)) for at in range(67, 67 + 2 * case.layers, 2)]


def _runner(model: Any, inputs: Inputs) -> Callable[[Tensor], Tensor]:
    from transformers import DynamicCache

    past, cache = _past(inputs), DynamicCache()
    for place, (k_BJMA, v_BJMA) in enumerate(past):
        cache.update(k_BJMA, v_BJMA, place)

    def run(x_BND: Tensor) -> Tensor:
        _restore(cache, past)
        return model(inputs_embeds=x_BND, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    return run


def _restore(cache: Any, past: KeysAndValues) -> None:
    """Forgets the tokens of the last call."""
    for layer, (k_BJMA, v_BJMA) in zip(cache.layers, past, strict=True):
        layer.keys, layer.values = k_BJMA, v_BJMA


span = ModelSpan()
