"""The plug-in for Transformers: importing this file makes our kernels known to its models.

    import moe_routing_bench.models.transformers as plugin

    model.set_experts_implementation("moe_routing_bench")   # or from_pretrained(experts_implementation=...)
    print(plugin.implementations(model))                    # what runs in each layer, and why

"moe_routing_bench" is impl="auto" as everywhere (ops/auto.py). "moe_routing_bench:<impl>" is that
implementation of expert_ffn, or an error: "moe_routing_bench:native", "moe_routing_bench:native(store=int8)".
Built-in names and their listed options are registered here;
register("staged(combine=index_add,dispatch=native)") adds others.

`native` packs the weights at the first call without gradients: as much memory again, and for gpt-oss two
thirds more, because its alternating columns are first put into halves. release(model) gives it back. Weights
that are loaded, moved or trained afterwards are noticed. Quantised experts (FP8) have another registry and
are not served.

torch.compile: without gradients the experts are one node of the graph, also with fullgraph=True; with them
the graph breaks there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

if importlib.util.find_spec("transformers") is None:
    raise NotImplementedError("the plug-in needs transformers; pip install 'moe-routing-bench[hf]'")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_routing_bench.models.reading import (
    experts_modules,
    read,
    release_weights,
    tensors_of,
    weights_of,
)
from moe_routing_bench.models.running import (
    LAYOUT,
    run_around,
    run_experts,
    run_experts_for_training,
    stages,
)
from moe_routing_bench.ops.auto import pick
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.stand_ins import StandIns

NAME = "moe_routing_bench"


def register(impl: str = "auto") -> str:
    """Make an implementation of expert_ffn known to Transformers; answers the name to give it there."""
    if impl != "auto":
        expert_ffn_op.get(impl)  # says in words what is wrong with it
    name = NAME if impl == "auto" else f"{NAME}:{impl}"
    ALL_EXPERTS_FUNCTIONS.register(name, partial(experts_forward, impl=impl))
    return name


def experts_forward(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    impl: str = "auto",
) -> Tensor:
    """What Transformers calls in place of an experts module's forward; argument names are its own."""
    m: Any = module
    if torch.is_autocast_enabled(hidden_states.device.type):
        # autocast would round what plain torch operations multiply; these compute in the weights' dtype
        with torch.autocast(hidden_states.device.type, enabled=False):
            return experts_forward(module, hidden_states, top_k_index, top_k_weights, impl=impl)
    reading = read(module)
    x_TD = hidden_states.to(m.down_proj.dtype)
    gate_TK = top_k_weights
    if gate_TK.dtype not in (x_TD.dtype, torch.float32):
        gate_TK = gate_TK.to(torch.promote_types(x_TD.dtype, torch.float32))
    if reading.activation is None:
        own = m._apply_gate if m.has_gate else m.act_fn
        after = m.post_expert_norm if getattr(m, "has_post_expert_norm", False) else None
        y_TD = run_around(x_TD, top_k_index, gate_TK, weights_of(module, reading), impl, own, after)
    elif torch.compiler.is_compiling() and torch.is_grad_enabled():
        y_TD = run_experts_for_training(x_TD, top_k_index, gate_TK, weights_of(module, reading), impl)
    elif torch.compiler.is_compiling():
        y_TD = torch.ops.moe_routing_bench.experts(
            x_TD, top_k_index, gate_TK, *tensors_of(module),
            reading.activation, m.is_transposed, reading.interleaved, impl,
        )  # fmt: skip
    else:
        y_TD = run_experts(x_TD, top_k_index, gate_TK, weights_of(module, reading), impl)
    return y_TD.to(hidden_states.dtype)


@dataclass(frozen=True, kw_only=True)
class Running:
    """What runs in one layer, and why.

    Running(module="model.layers.0.mlp.experts", experts="E=8 D=64 F=32 swiglu float32",
    implementation="native",
            why="preferred on amx (decisions are off): measurements/cpu/cpu_grid.txt")
    """

    module: str
    experts: str
    implementation: str
    why: str

    def __str__(self) -> str:
        return f"{self.module}: {self.implementation} ({self.experts}; {self.why})"


class Implementations(tuple[Running, ...]):
    """One Running for each experts module; print() shows them as lines."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def implementations(model: nn.Module, tokens: int = 1) -> Implementations:
    """What runs in each experts module of a model when it is called with this many tokens."""
    return Implementations(_running(path, module, tokens) for path, module in experts_modules(model))


def _running(path: str, module: nn.Module, tokens: int) -> Running:
    m: Any = module
    name = m.config._experts_implementation
    reading = read(module)
    first, second, *_ = tensors_of(module)
    E, D, F = (
        first.shape[0],
        second.shape[2 if m.is_transposed else 1],
        second.shape[1 if m.is_transposed else 2],
    )
    dtype = f"{first.dtype}".removeprefix("torch.")
    say: Callable[..., Running] = partial(
        Running,
        module=path,
        experts=f"E={E} D={D} F={F} {reading.activation or 'its own activation'} {dtype}",
    )
    function = ALL_EXPERTS_FUNCTIONS.get(name) if isinstance(name, str) else None
    if not isinstance(function, partial) or function.func is not experts_forward:
        return say(implementation=str(name), why="not ours; set_experts_implementation chooses")
    impl = function.keywords["impl"]
    if reading.activation is None:
        try:
            parts = ", ".join(f"{op}={name}" for op, name in stages(impl).items())
        except NotImplementedError as reason:
            return say(implementation="none", why=str(reason))
        return say(implementation=f"staged around the model's own function ({parts})", why=reading.why)
    with torch.no_grad():
        weights = weights_of(module, reading)
        K = min(getattr(m.config, "num_experts_per_tok", 1), E)
        args = expert_ffn_op.arguments(StandIns(weights, K, LAYOUT, tokens))
        try:
            choice = pick(expert_ffn_op, impl, tuple(args.values()))
        except NotImplementedError as reason:
            return say(implementation="none", why=str(reason))
    return say(implementation=choice.implementation.label, why=choice.why)


def release(model: nn.Module) -> int:
    """Free what was made of the model's weights (packed, reordered); the next call makes it anew. Answers how
    many bytes that frees."""
    return sum(release_weights(module) for _, module in experts_modules(model))


def _register_all() -> None:
    register()
    for name in expert_ffn_op.names():
        # hf_* are Transformers' own functions under our benchmark
        if name.startswith("hf_"):
            continue
        try:
            implementation = expert_ffn_op.get(name)
        except NotImplementedError:
            continue  # a library it needs is absent; register(name) says which
        register(name)
        for config in implementation.configs:
            if config:
                register(f"{name}({','.join(f'{option}={value}' for option, value in config.items())})")


_register_all()
