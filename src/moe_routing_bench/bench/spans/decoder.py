"""decoder: a dense decoder block, ours, torch's or Transformers'.

An implementation is ours(linear=...,attention=...,rms_norm=...), torch (plain calls), compiled (torch.compile
of these) or transformers(attention=sdpa|eager), its Arcee block. All compute in the dtype of the case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.spans.block import parse_block
from moe_routing_bench.bench.spans.span import PACKED_ONCE, Computation, Load, Span, Stage
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.experts import GATED, activate
from moe_routing_bench.core.names import base_name
from moe_routing_bench.models.decoder import TransformersBlock, rotary
from moe_routing_bench.models.dense_block import (
    PRODUCTS,
    THETA,
    DenseBlock,
    angles,
    transformers_dense,
)
from moe_routing_bench.ops.auto import choose
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.registry import BUILT_IN, all_ops
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

IMPLEMENTATIONS = (
    "torch", "compiled", "transformers", "ours", "ours(linear=onednn_packed)", "ours(linear=mkl_packed)",
    "frozen(ours)",
)  # fmt: skip
OPS = ("linear", "attention", "rms_norm")
OPTIONS = {
    "torch": {},
    "compiled": {},
    "transformers": {"attention": "sdpa"},
    "ours": dict.fromkeys(OPS, "auto"),
}
TORCH = {"linear": "torch", "attention": "sdpa", "rms_norm": "torch"}


class DecoderSpan(Span):
    name = "decoder"
    ops = OPS
    included = ("norms", "attention", "four products", "activation", "residuals")
    excluded = (*Span.excluded, "rotary angles")
    weights = in_stages = True
    case = "seed-dense"

    def all_names(self) -> list[str]:
        return list(IMPLEMENTATIONS)

    def settled(self, implementation: ImplementationRef, case: Experiment) -> ImplementationRef:
        parse_block(implementation.name, OPTIONS)
        return implementation

    def check(self, implementation: ImplementationRef) -> None:
        self.origins(implementation.name)

    def has_frozen(self, implementation: ImplementationRef, case: Experiment) -> bool:
        if case.direction != "forward" or parse_block(implementation.name, OPTIONS)[0] != "ours":
            return False
        return any(part.reads_plain for part in _picked(implementation, case)["linear"])

    def parts(self, spec: str) -> tuple[Implementation, ...]:
        return tuple(all_ops()[op].get(name) for op, name in self._given(spec))

    def compiles(self, spec: str) -> bool:
        return spec == "compiled"

    def named(self, spec: str) -> list[tuple[str, str]]:
        return [(op, base_name(name)) for op, name in self._given(spec)]

    def label(self, spec: str) -> str:
        return spec

    def origins(self, spec: str) -> list[str]:
        return [all_ops()[op].origin(name) for op, name in self.named(spec)] or [BUILT_IN]

    def _given(self, spec: str) -> list[tuple[str, str]]:
        name, options = parse_block(spec, OPTIONS)
        return [(op, options[op]) for op in OPS if options[op] != "auto"] if name == "ours" else []

    def arguments(self, call: Call) -> dict[str, Any]:
        return {"x_BND": call.x_TD.detach().view(_sequences(call.inputs.experiment))}

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        block, runs = _implementation_block(implementation, inputs)
        by: Any = _angles(inputs, inputs.dtype)
        if isinstance(block, TransformersBlock):
            _, _, N, A = inputs.experiment.query_shape
            by = rotary(N, A, THETA, torch.empty((), dtype=inputs.dtype, device=inputs.put))
        run: Any = block
        if implementation.name == "compiled":
            run = torch.compile(block)
            with torch.no_grad():  # here, so that the first timed call need not compile
                run(inputs.normal(*_sequences(inputs.experiment), place=0).to(inputs.put), by)
        return Computation(run=lambda x_BND: run(x_BND, by), runs=runs, owner=block)

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        if inputs.experiment.direction != "forward":
            return "only the forward pass of a block is measured"
        try:
            for op, parts in _picked(implementation, inputs.experiment).items():
                for part, asked in zip(parts, _arguments(inputs.experiment)[op], strict=True):
                    if (reason := part.why_not(*asked)) is not None:
                        return f"{op}.{part.label}: {reason}"
            _implementation_block(implementation, inputs)
        except (NotImplementedError, ValueError) as reason:
            return str(reason)
        return None

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        """Returns the stages of our own block; the others are one call."""
        block, _ = _implementation_block(implementation, inputs)
        if not isinstance(block, DenseBlock) or implementation.name == "compiled":
            return
        by, x_BND, held = _angles(inputs, inputs.dtype), args["x_BND"], dict[str, Tensor]()
        B, _, D = x_BND.shape
        x_TD = x_BND.view(-1, D)
        up_TF = block.product("up", x_TD)
        y_TF = activate(up_TF, block.activation)

        def norms() -> None:
            held["h_TD"] = block.norm(block.input_norm, x_TD)
            block.norm(block.post_norm, x_TD)

        def products() -> None:
            held["qkv_TF"] = block.product("qkv", held["h_TD"])
            for name in ("out", "up"):
                block.product(name, held["h_TD"])
            block.product("down", y_TF)

        yield "norms", norms
        yield "linears", products
        yield "attention", lambda: block.attend(held["qkv_TF"], B, by)
        yield "activation", partial(activate, up_TF, block.activation)

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        block = _block(inputs, dtype, {**TORCH, "attention": "plain", "rms_norm": "plain"})
        by = _angles(inputs, dtype)
        return Computation(run=lambda x_BND: block(x_BND, by))

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        """Adds the facts of the seven operations; values between them need not leave the caches."""
        cost = Cost()
        for op, calls in _arguments(inputs.experiment).items():
            cost = sum((all_ops()[op].cost(*args) for args in calls), cost)
        moved = 2 * inputs.experiment.T * inputs.experiment.D * inputs.experiment.element_size
        cost = replace(cost, activation_bytes=moved)
        return cost, inputs.workload(0).statistics(None).to_dict()

    def resolved(self, implementation: ImplementationRef, inputs: Inputs) -> list[tuple[str, str]]:
        picked = _picked(implementation, inputs.experiment)
        return list(dict.fromkeys((op, part.label) for op, parts in picked.items() for part in parts))


def _sequences(case: Experiment) -> tuple[int, int, int]:
    B, _, N, _ = case.query_shape
    return B, N, case.D


def _picked(implementation: ImplementationRef, case: Experiment) -> dict[str, list[Implementation]]:
    """Returns what computes each call of each operation; nothing for Transformers' block."""
    name, options = parse_block(implementation.name, OPTIONS)
    if name == "transformers":
        return {}
    names = options if name == "ours" else TORCH
    picked: dict[str, list[Implementation]] = {}
    for op, calls in _arguments(case).items():
        own, given = all_ops()[op], names[op]
        picked[op] = [choose(own, a).implementation if given == "auto" else own.get(given) for a in calls]
    return picked


@cache
def _arguments(case: Experiment) -> dict[str, list[tuple[Any, ...]]]:
    """Returns the arguments of the seven operations, by size. Nothing touches their memory."""

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPES[case.dtype])

    B, H, N, A = case.query_shape
    T, D, F = case.T, case.D, case.F
    G = 2 * F if case.activation in GATED else F
    sizes = ((D, 3 * D), (D, D), (D, G), (F, D))
    bias = [floats(columns) if case.bias else None for _, columns in sizes]
    q_BHNA, k_BHNA, v_BHNA = floats(B, N, 3, H, A).permute(2, 0, 3, 1, 4)
    by = angles(N, A, q_BHNA)
    norm = floats(T, D), floats(D), 1e-6
    return {
        "linear": [
            (floats(T, depth), floats(columns, depth), b_F)
            for (depth, columns), b_F in zip(sizes, bias, strict=True)
        ],
        "attention": [(q_BHNA, k_BHNA, v_BHNA, True, 0, by)],
        "rms_norm": [norm, norm],
    }


def _implementation_block(
    implementation: ImplementationRef, inputs: Inputs
) -> tuple[DenseBlock | TransformersBlock, str]:
    """The block and what runs in it, made once."""
    if implementation not in inputs.made:
        inputs.made[implementation] = _made(implementation, inputs)
    return inputs.made[implementation]


def _made(implementation: ImplementationRef, inputs: Inputs) -> tuple[DenseBlock | TransformersBlock, str]:
    name, options = parse_block(implementation.name, OPTIONS)
    if name == "transformers":
        theirs = transformers_dense(_block(inputs, inputs.dtype, TORCH), **options)
        return theirs, f"Transformers' ArceeDecoderLayer, {options['attention']} attention"
    block = _block(inputs, inputs.dtype, options if name == "ours" else TORCH)
    runs = " + ".join(f"{op}.{label}" for op, label in span.resolved(implementation, inputs))
    if name == "compiled":
        return block, f"torch.compile of {runs}"
    for product, part in zip(PRODUCTS, _picked(implementation, inputs.experiment)["linear"], strict=True):
        if inputs.freeze_of(part, implementation.frozen) is not None:
            block.freeze(product, part)
    return block, runs + (PACKED_ONCE if block.packed else "")


def _angles(inputs: Inputs, dtype: torch.dtype) -> Any:
    """A model makes them once for all layers, so they are not timed."""
    _, _, N, A = inputs.experiment.query_shape
    return angles(N, A, torch.empty((), dtype=dtype, device=inputs.put))


def _block(inputs: Inputs, dtype: torch.dtype, names: Mapping[str, Any]) -> DenseBlock:
    """The block with the case's sizes; its feed-forward network is the first expert."""
    case, weights = inputs.experiment, inputs.weights
    _, H, _, _ = case.query_shape
    with torch.device("meta"):
        block = DenseBlock(case.D, case.F, H, activation=case.activation, bias=case.bias, **names)
    values = {"up.weight": weights.w_in_EDG[0].t(), "down.weight": weights.w_out_EFD[0].t()}
    if weights.b_in_EG is not None and weights.b_out_ED is not None:
        values |= {"up.bias": weights.b_in_EG[0], "down.bias": weights.b_out_ED[0]}
    for place, (name, parameter) in enumerate(block.named_parameters()):
        if name not in values:
            scale = case.D**-0.5 if parameter.ndim == 2 else 0.1
            drawn = inputs.normal(*parameter.shape, place=43 + 2 * place, scale=scale)
            values[name] = drawn + 1 if "norm" in name else drawn
        home, _, last = name.rpartition(".")
        value = values[name].detach().to(inputs.put, dtype).contiguous()
        setattr(block.get_submodule(home), last, nn.Parameter(value, requires_grad=False))
    return block.eval()


span = DecoderSpan()
