"""The plug-in for Transformers: importing this file makes our kernels known to its models.

    import moe_routing_bench.models.transformers as plugin

    plugin.freeze(model)                                    # for inference: packs the experts' weights
    plugin.freeze(model, "int8_a8")                         # or rounds them too; says what that saves
    plugin.freeze(model, "int8_a8", linears=True)           # also attention, shared experts and lm_head
    model = plugin.load("gpt-oss-20b")                      # or, quantised: experts as they are stored
    model.set_experts_implementation("moe_routing_bench")   # or, for weights that change: training, merging
    model.set_attn_implementation("moe_routing_bench")      # attention too (models/attention.py)
    print(plugin.implementations(model))                    # what runs in each layer, and why
    with plugin.replay(model, trace):                       # take recorded choices (models/replay.py)
        model(input_ids)

"moe_routing_bench" is impl="auto" as everywhere (ops/auto.py). "moe_routing_bench:<impl>" is that
implementation of expert_ffn, or an error: "moe_routing_bench:native". Implementations that store weights in a
format need freeze. Built-in names and their listed options are registered here;
register("staged(combine=index_add,dispatch=native)") adds others.

Without freeze every call reads the weights as they are then, however they were changed. After freeze they
exist only in packed form, in as much memory as before. Changing them raises, and thaw(model) makes them plain
again. Save before freezing, or thaw. Models published in MXFP4, FP8 or compressed-tensors are bfloat16 after
from_pretrained on a CPU; load(folder) keeps their codes, and freeze(model, "mxfp4") restores MXFP4's. Experts
that stay quantised (FP8 on a GPU) have another registry, which we do not serve.

Under torch.compile without gradients the experts are one node of the graph, also with fullgraph=True. With
gradients the graph breaks there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if importlib.util.find_spec("transformers") is None:
    raise NotImplementedError("the plug-in needs transformers; pip install 'moe-routing-bench[hf]'")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_routing_bench.core.dtypes import name_of
from moe_routing_bench.core.frozen import Freezing, Frozen, as_parameter, freezing, take_place
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.models.attention import register_attention
from moe_routing_bench.models.linears import by_layer, freeze_linears, linear_for, thaw
from moe_routing_bench.models.loading import load_stored
from moe_routing_bench.models.reading import ExpertsReading, experts_modules, read, tensors_of, weights_of
from moe_routing_bench.models.replay import replay
from moe_routing_bench.models.running import (
    LAYOUT,
    run_around,
    run_experts,
    run_experts_for_training,
    stages,
)
from moe_routing_bench.moe.layer import MoE, with_format
from moe_routing_bench.ops.auto import Choice, invariant_names, pick, resolve
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.stand_ins import StandIns

__all__ = ["experts_forward", "freeze", "implementations", "load", "register", "replay", "thaw"]
NAME = "moe_routing_bench"


def register(impl: str = "auto", *, batch_invariant: bool = False) -> str:
    """Makes an implementation of expert_ffn known to Transformers. Returns the name to use there.

    batch_invariant=True takes an implementation whose results for a token do not depend on its batch, to the
    bit. It raises ValueError if `impl` does not promise that. The model's own router, attention and shared
    experts are not covered.
    """
    if batch_invariant:
        promising = invariant_names(expert_ffn_op)
        if impl == "auto" and not promising:
            raise NotImplementedError("no implementation of expert_ffn here is batch-invariant")
        impl = promising[0] if impl == "auto" else impl
        resolve(expert_ffn_op, impl, batch_invariant=True)
    if impl != "auto":
        expert_ffn_op.get(impl)  # raises if there is none of that name
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
    """Transformers calls this instead of an experts module's forward; the argument names are its own."""
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
    if reading.activation is None or _alternates(m, reading, impl):
        own = m._apply_gate if m.has_gate else m.act_fn
        after = m.post_expert_norm if getattr(m, "has_post_expert_norm", False) else None
        weights = weights_of(module, replace(reading, interleaved=False))
        y_TD = run_around(x_TD, top_k_index, gate_TK, weights, impl, own, after)
    elif torch.compiler.is_compiling() and torch.is_grad_enabled():
        y_TD = run_experts_for_training(x_TD, top_k_index, gate_TK, weights_of(module, reading), impl)
    elif torch.compiler.is_compiling() and isinstance(m.down_proj, Frozen):
        y_TD = _compiled_frozen(m, x_TD, top_k_index, gate_TK, reading, impl)
    elif torch.compiler.is_compiling():
        y_TD = torch.ops.moe_routing_bench.experts(
            x_TD, top_k_index, gate_TK, *tensors_of(module),
            reading.activation, m.is_transposed, reading.interleaved, impl,
        )  # fmt: skip
    else:
        y_TD = run_experts(x_TD, top_k_index, gate_TK, weights_of(module, reading), impl)
    return y_TD.to(hidden_states.dtype)


def _alternates(m: Any, reading: ExpertsReading, impl: str) -> bool:
    """Returns whether plain weights stay in their alternating order, with the model's own function between
    the products. Making halves would copy the whole matrix in every call."""
    if not reading.interleaved or isinstance(m.down_proj, Frozen) or torch.compiler.is_compiling():
        return False
    return impl == "auto" or expert_ffn_op.get(impl).name in ("native", "staged")


def _compiled_frozen(
    m: Any, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor, reading: ExpertsReading, impl: str
) -> Tensor:
    w_in: Any
    w_out: Any
    w_in, w_out, b_in, b_out = tensors_of(m)
    (E, D), F = (w_in.shape[0], x_TD.shape[1]), w_out.shape[1 if m.is_transposed else 2]
    return torch.ops.moe_routing_bench.frozen_experts(
        x_TD, expert_TK, gate_TK, w_in.panels, w_out.panels, b_in, b_out,
        [E, D, w_in.numel() // (E * D)], [E, F, D], w_in.form.kernel, w_in.form.store or "",
        reading.activation, reading.interleaved, impl,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Running:
    """What runs in one layer, and why.

    Running(module="model.layers.0.mlp.experts", experts="E=8 D=64 F=32 swiglu float32",
    implementation="native",
            why="preferred on amx (decisions are off): measurements/records/grid.tar.xz")
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
    """Returns what runs in each experts module of a model when it is called with this many tokens."""
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
    dtype = name_of(first.dtype)
    say: Callable[..., Running] = partial(
        Running,
        module=path,
        experts=f"E={E} D={D} F={F} {reading.activation or 'its own activation'} {dtype}",
    )
    function = ALL_EXPERTS_FUNCTIONS.get(name) if isinstance(name, str) else None
    if not isinstance(function, partial) or function.func is not experts_forward:
        return say(implementation=str(name), why="not ours; set_experts_implementation chooses")
    impl = function.keywords["impl"]
    alternates = _alternates(m, reading, impl)
    if reading.activation is None or alternates:
        try:
            parts = ", ".join(f"{op}={name}" for op, name in stages(impl).items())
        except NotImplementedError as reason:
            return say(implementation="none", why=str(reason))
        why = "its gate and up columns alternate, until freeze()" if alternates else reading.why
        return say(implementation=f"staged around the model's own function ({parts})", why=why)
    try:
        choice = _choice(module, reading, impl, tokens, now=True)
    except NotImplementedError as reason:
        return say(implementation="none", why=str(reason))
    return say(implementation=choice.implementation.label, why=choice.why)


@torch.no_grad()
def _choice(
    module: nn.Module, reading: ExpertsReading, impl: str, tokens: int = 1, *, now: bool = False
) -> Choice:
    """now: choose for the weights as they are, not as freezing would make them."""
    weights = weights_of(module, reading)
    K = min(getattr(module.config, "num_experts_per_tok", 1), weights.num_experts)
    args = tuple(expert_ffn_op.arguments(StandIns(weights, K, LAYOUT, tokens)).values())
    choice = pick(expert_ffn_op, impl, args)
    if now and (reason := choice.implementation.why_not_now(*args)) is not None:
        raise NotImplementedError(reason)
    return choice


@torch.no_grad()
def freeze(
    model: nn.Module,
    impl: str = "auto",
    *,
    linears: bool = False,
    batch_invariant: bool = False,
    keep_packed: bool | Path | str = False,
) -> Freezing | None:
    """For inference: puts our kernels into every experts module and packs the weights once, also in our own
    layers inside (models.convert). Returns how many bytes that saved and what error to expect; None if
    nothing was packed.

    impl: "auto", an implementation, or a format: "int8" is "native(store=int8)" (docs/formats.md).
    linears: also the products of attention, shared experts and lm_head, never a router (models/linears.py).
    "auto" rounds nothing, and leaves float32 ones to PyTorch. The result then has a line for each module.

    The packed form replaces the parameters: no memory is used twice, and writing to them raises. Raises
    RuntimeError if something else (an optimizer, a state_dict) can still write to one of them. Afterwards no
    parameter of the model requires gradients. batch_invariant: see register.

    keep_packed also keeps the packed form in files, in <MRB_HOME>/packed or in this folder. A process that
    freezes the same weights later maps the files instead of packing, and processes share that memory
    (packed_files.py). The files take as much disk as the packed weights; a line on stderr says how much and
    where.
    """
    kept = PackedFiles.asked(keep_packed)
    asked = with_format(impl, batch_invariant=batch_invariant)
    dense = linear_for(asked) if linears else None
    if dense is not None and kept is not None:
        raise NotImplementedError("keep_packed is for experts alone; leave out linears=True or keep_packed")
    modules = list(experts_modules(model))
    if modules:
        name = register(asked, batch_invariant=batch_invariant)
        for _, module in modules:
            _freeze(module, asked if name == NAME else name.removeprefix(f"{NAME}:"), kept)
        model.set_experts_implementation(name)  # type: ignore[operator]
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.freeze(None if asked == "auto" else asked, kept)
    model.requires_grad_(False)
    if kept is not None:
        kept.say()
    if dense is None:
        return freezing(model)
    return by_layer(model, freeze_linears(model, dense, named=asked != "auto"))


def _freeze(module: Any, impl: str, kept: PackedFiles | None) -> None:
    reading, matrices = read(module), tensors_of(module)[:2]
    if impl == "auto":
        packed = all(isinstance(w, Frozen) for w in matrices)
    else:
        packed = expert_ffn_op.get(impl).has_packed(*matrices)
    del matrices  # nothing else may refer to them
    if reading.activation is None or packed:
        return
    thaw(module)  # one of them may be frozen, or both for another implementation
    implementation = _choice(module, reading, impl).implementation
    if implementation.freeze is None:
        return
    frozen = implementation.frozen(weights_of(module, reading), kept)
    output_first = not module.is_transposed
    take_place(
        module,
        {
            "gate_up_proj" if module.has_gate else "up_proj": as_parameter(
                frozen.w_in_EDG, output_first=output_first, alternating=reading.interleaved
            ),
            "down_proj": as_parameter(frozen.w_out_EFD, output_first=output_first, alternating=False),
        },
    )


def load(
    folder: Path | str,
    impl: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    keep_packed: bool | Path | str = False,
) -> Any:
    """Loads a quantised checkpoint as a Transformers model for inference. The codes of its routed experts go
    into our kernels as they are stored, never as bfloat16 (models/loading.py says what it reads).

    impl: "auto" runs the experts as stored; "native(store=mxfp4_a8)" also rounds rows to 8 bits. Another
    format than the checkpoint's is refused. dtype: of everything else and of activations, float32 or
    bfloat16; None takes config.json's.

    The other options are as in freeze. thaw() and saving raise, because the plain weights never existed.
    """
    named = None if impl == "auto" else expert_ffn_op.get(impl)
    if named is not None and named.name != "native":
        raise NotImplementedError(f"experts as stored run in native(store=...), not in {named.label}")
    options = {} if named is None else dict(named.config)
    kept = PackedFiles.asked(keep_packed)
    model = load_stored(folder, store=options.get("store"), dtype=dtype, kept=kept)
    if named is not None or batch_invariant:
        frozen: Any = tensors_of(next(experts_modules(model))[1])[0]
        own = expert_ffn_op.get(frozen.form.label)
        options |= {**own.config, **(own.invariant_with if batch_invariant else {})}
        impl = replace(own, config=options).label
    model.set_experts_implementation(register(impl, batch_invariant=batch_invariant))
    if kept is not None:
        kept.say()
    return model


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
register_attention(NAME)
