"""From a hard case to the arguments of an operation: fresh, seeded, on any device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.conformance.cases import DTYPES, Case, distinct
from moe_routing_bench.experts import GATED, ExpertWeights
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing


def arguments(op: str, case: Case, layout: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """The op's arguments by name, fresh, drawn from the case's name and the seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + seed)
    kind = DTYPES[dtype]

    def floats(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return _strided(values.to(kind), case.column_step) if case.strided else values.to(kind)

    if op == "topk":
        score_TE = floats(case.T, case.E)
        return {"score_TE": (score_TE * 2).round() / 2 if case.equal_gates else score_TE, "K": case.K}

    if op == "score_topk":
        logits_TE = floats(case.T, case.E)
        logits_TE = logits_TE * 20 + case.far_logits if case.far_logits else logits_TE
        logits_TE = (logits_TE * 2).round() / 2 if case.equal_gates else logits_TE
        bias_E = torch.randn(case.E, generator=generator) * 0.1 if case.bias else None
        return {"logits_TE": logits_TE, "bias_E": bias_E, "K": case.K, "rule": case.rule}

    routing = _routing(case, generator, dtype)
    if op == "make_plan":
        return {"routing": routing, "layout": Layout.parse(layout)}

    plan = _plan(case, layout, dtype, seed)
    D, F = case.D, case.F
    G = 2 * F if case.activation in GATED else F
    if op == "dispatch":
        if case.beyond_int32:
            # row t starts at element t: T * D logical elements in T + D of memory
            x_TD = floats(case.T + D).as_strided((case.T, D), (1, 1))
        else:
            x_TD = floats(case.T, D)
        return {"x_TD": x_TD, "plan": plan}
    if op == "grouped_gemm":
        holds_R1 = (plan.pair_R >= 0).unsqueeze(1)
        x_RD = floats(plan.num_rows, D)
        x_RD = x_RD.masked_fill_(~holds_R1, 0.0) if plan.num_rows else x_RD
        b_EF = floats(case.E, G) if case.bias else None
        return {"x_RD": x_RD, "w_EDF": _weight(floats, case, D, G), "plan": plan, "b_EF": b_EF}
    if op == "combine":
        y_RD = floats(plan.num_rows, D)
        gate_TK = routing.gate_TK
        if case.cancelling:
            # the second row nearly undoes the first: what is left is of the size of one rounding
            first_T, second_T = plan.row_TK[:, 0], plan.row_TK[:, 1]
            ratio_T1 = (gate_TK[:, 0].double() / gate_TK[:, 1].double()).unsqueeze(1)
            y_RD[second_T] = (-y_RD[first_T].double() * ratio_T1).to(kind)
        # nobody may read these
        y_RD.masked_fill_((plan.pair_R < 0).unsqueeze(1), float("nan"))
        return {"y_RD": y_RD, "gate_TK": gate_TK, "plan": plan}
    if op == "expert_ffn":
        weights = ExpertWeights(
            w_in_EDG=_weight(floats, case, D, G),
            w_out_EFD=_weight(floats, case, F, D),
            b_in_EG=floats(case.E, G) if case.bias else None,
            b_out_ED=floats(case.E, D) if case.bias else None,
            activation=case.activation,
        )
        x_TD = floats(case.T, D, scale=case.x_scale)
        return {"x_TD": x_TD, "gate_TK": routing.gate_TK, "plan": plan, "weights": weights}
    raise ValueError(f"the conformance kit has no arguments for the op {op!r}")


def upstream(op: str, case: Case, shape: torch.Size, args: Mapping[str, Any]) -> Tensor:
    """The gradient that comes back to the result, in float64, for args on the host."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} backward".encode()))
    d_out = torch.randn(shape, generator=generator, dtype=torch.float64)
    if op == "dispatch":
        holds_R1 = (args["plan"].pair_R >= 0).unsqueeze(1)
        d_out = torch.where(holds_R1, d_out, float("nan"))
    if op == "grouped_gemm":
        # as combine and the activation send it back: zero for padding, anything where no expert is
        plan = args["plan"]
        d_out = torch.where((plan.pair_R >= 0).unsqueeze(1), d_out, 0.0)
        d_out = torch.where((plan.expert_R() < plan.num_experts).unsqueeze(1), d_out, float("nan"))
    return d_out


def _routing(case: Case, generator: torch.Generator, dtype: str) -> Routing:
    expert_TK = (case.choose or distinct)(case, generator)
    gate_TK = torch.rand(case.T, case.K, generator=generator) * 1.5 - 0.25
    if case.cancelling:
        gate_TK = gate_TK.abs() + 0.25
    if case.equal_gates:
        gate_TK = torch.full_like(gate_TK, 0.5)
    gate_TK = gate_TK.to(torch.float32 if case.float32_gates else DTYPES[dtype])
    if case.strided:
        expert_TK, gate_TK = (_strided(given, case.column_step) for given in (expert_TK, gate_TK))
    return Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=case.E, ragged=case.ragged)


@lru_cache(maxsize=64)
def _plan(case: Case, layout: str, dtype: str, seed: int) -> RoutingPlan:
    args = arguments("make_plan", case, layout, dtype, seed)
    return make_plan(args["routing"], args["layout"])


def _weight(floats: Callable[..., Tensor], case: Case, inputs: int, outputs: int) -> Tensor:
    # a strided weight is the transposed view that Transformers' layout becomes
    if case.strided:
        return floats(case.E, outputs, inputs, scale=inputs**-0.5).transpose(1, 2)
    return floats(case.E, inputs, outputs, scale=inputs**-0.5)


def _strided(values: Tensor, step: int = 1) -> Tensor:
    """The same values with gaps in memory along the first and last dimension; the latter's numbers are `step`
    from each other."""
    *outer, last = values.shape
    wide = step * last + 3
    roomy = torch.full((2 * outer[0], *outer[1:], wide) if outer else (wide,), 77).to(values.dtype)
    inside = slice(1, step * last + 1, step)
    view = roomy[::2, ..., inside] if outer else roomy[inside]
    view.copy_(values)
    return view


def fresh_arguments(
    op_name: str,
    case: Case,
    layout: str,
    dtype: str,
    *,
    with_grad: bool = False,
    double: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """The arguments anew, on a device; with_grad makes every floating tensor and weight a leaf that wants a
    gradient."""

    def leaf(tensor: Tensor) -> Tensor:
        tensor = on_device(tensor.double() if double and tensor.is_floating_point() else tensor, device)
        return tensor.requires_grad_(with_grad and tensor.is_floating_point())

    found: dict[str, Any] = {}
    for name, value in arguments(op_name, case, layout, dtype, seed).items():
        if isinstance(value, Tensor):
            found[name] = leaf(value)
        elif isinstance(value, ExpertWeights):
            leaves: dict[str, Any] = {n: leaf(t) for n, t in value.tensors().items()}
            found[name] = replace(value, **leaves)
        elif isinstance(value, (Routing, RoutingPlan)):
            tensors = {f.name: getattr(value, f.name) for f in fields(value)}
            moved: Any = {n: on_device(t, device) for n, t in tensors.items() if isinstance(t, Tensor)}
            found[name] = replace(value, **moved)
        else:
            found[name] = value
    return found


def memory_of(tensor: Tensor) -> Tensor:
    """All the memory behind a tensor, once: a view may repeat elements or leave gaps."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def on_device(tensor: Tensor, device: str) -> Tensor:
    """A copy with the same strides; Tensor.to() would close the gaps of a view."""
    moved = memory_of(tensor).to(device, copy=True)
    return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def leaves_of(args: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in args.items():
        if isinstance(value, ExpertWeights):
            found.update(value.tensors())
        elif isinstance(value, Tensor) and value.is_floating_point():
            found[name] = value
    return found
