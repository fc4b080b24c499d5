"""Makes the arguments of an operation from a hard case: fresh, seeded, on any device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.conformance.cases import Case
from moe_routing_bench.conformance.choices import distinct
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.experts import GATED, ExpertWeights
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.attention.op import Rotary
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.ops.registry import get_op
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.parallel.traffic import Traffic


class HardArguments:
    """The arguments of a hard case by name: HardArguments(case, "compact", "bfloat16").x_TD

    Each is drawn from the case's name, its own name and the seed, so it does not matter which others are
    used. An operation gets those it has parameters for (`Op.arguments`).
    """

    def __init__(self, case: Case, layout: str, dtype: str, seed: int = 0):
        self.case, self.dtype, self.seed, self._layout = case, DTYPES[dtype], seed, layout
        self._key = (case, layout, dtype, seed)

    @property
    def K(self) -> int:
        return self.case.K

    @property
    def rule(self) -> ScoreRule:
        return self.case.rule

    @property
    def layout(self) -> Layout:
        return Layout.parse(self._layout)

    @property
    def score_TE(self) -> Tensor:
        return self._rounded(self._floats("score_TE", self.case.T, self.case.E))

    @property
    def logits_TE(self) -> Tensor:
        logits_TE, far = self._floats("logits_TE", self.case.T, self.case.E), self.case.far_logits
        return self._rounded(logits_TE * 20 + far if far else logits_TE)

    def _rounded(self, values: Tensor) -> Tensor:
        return (values * 2).round() / 2 if self.case.equal_gates else values

    @property
    def bias_E(self) -> Tensor | None:
        return torch.randn(self.case.E, generator=self._draws("bias_E")) * 0.1 if self.case.bias else None

    @property
    def routing(self) -> Routing:
        case, draws = self.case, self._draws("routing")
        expert_TK = (case.choose or distinct)(case, draws)
        gate_TK = torch.rand(case.T, case.K, generator=draws) * 1.5 - 0.25
        if case.cancelling:
            gate_TK = gate_TK.abs() + 0.25
        if case.equal_gates:
            gate_TK = torch.full_like(gate_TK, 0.5)
        gate_TK = gate_TK.to(torch.float32 if case.float32_gates else self.dtype)
        if case.nan_gates:
            gate_TK = torch.where((expert_TK >= 0) & (expert_TK < case.E), gate_TK, float("nan"))
        if case.strided:
            expert_TK, gate_TK = (_strided(given, case.column_step) for given in (expert_TK, gate_TK))
        return Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=case.E, ragged=case.ragged)

    @property
    def gate_TK(self) -> Tensor:
        return self.routing.gate_TK

    @property
    def plan(self) -> RoutingPlan:
        return _plan(*self._key)

    @property
    def x_TD(self) -> Tensor:
        T, D = self.case.T, self.case.D
        if self.case.beyond_int32:
            # row t starts at element t, so T * D logical elements take T + D of memory
            return self._floats("x_TD", T + D).as_strided((T, D), (1, 1))
        return self._poisoned(self._floats("x_TD", T, D, scale=self.case.x_scale), torch.arange(T))

    @property
    def x_RD(self) -> Tensor:
        x_RD = self._floats("x_RD", self.plan.num_rows, self.case.D)
        x_RD = x_RD.masked_fill_((self.plan.pair_R < 0).unsqueeze(1), 0.0) if len(x_RD) else x_RD
        return self._poisoned(x_RD, self.plan.token_R())

    @property
    def y_RD(self) -> Tensor:
        plan, gate_TK = self.plan, self.gate_TK
        y_RD = self._floats("y_RD", plan.num_rows, self.case.D)
        if self.case.cancelling:
            # the second row nearly cancels the first: the rest is as small as one rounding
            first_T, second_T = plan.row_TK[:, 0], plan.row_TK[:, 1]
            ratio_T1 = (gate_TK[:, 0].double() / gate_TK[:, 1].double()).unsqueeze(1)
            y_RD[second_T] = (-y_RD[first_T].double() * ratio_T1).to(self.dtype)
        y_RD = self._poisoned(y_RD, plan.token_R())
        # rows that must never be read
        return y_RD.masked_fill_((plan.pair_R < 0).unsqueeze(1), float("nan"))

    def _poisoned(self, values: Tensor, token: Tensor) -> Tensor:
        """Puts NaN into the rows of token 1, if the case asks for it."""
        return values.masked_fill_((token == 1).unsqueeze(1), float("nan")) if self.case.nan_token else values

    @property
    def y_QD(self) -> Tensor:
        return self.y_RD

    @property
    def traffic(self) -> Traffic:
        return Traffic.alone(self.plan)

    @property
    def weights(self) -> ExpertWeights:
        case, G = self.case, self._G
        return ExpertWeights(
            w_in_EDG=self._weight("w_in_EDG", case.D, G),
            w_out_EFD=self._weight("w_out_EFD", case.F, case.D),
            b_in_EG=self._floats("b_in_EG", case.E, G) if case.bias else None,
            b_out_ED=self._floats("b_out_ED", case.E, case.D) if case.bias else None,
            activation=case.activation,
        )

    @property
    def w_EDF(self) -> Tensor:
        return self._weight("w_EDF", self.case.D, self._G)

    @property
    def b_EF(self) -> Tensor | None:
        return self._floats("b_EF", self.case.E, self._G) if self.case.bias else None

    @property
    def _G(self) -> int:
        return 2 * self.case.F if self.case.activation in GATED else self.case.F

    @property
    def norm_D(self) -> Tensor:
        return 1 + self._floats("norm_D", self.case.D, scale=0.1)

    @property
    def w_FD(self) -> Tensor:
        return self._floats("w_FD", self.case.F, self.case.D, scale=self.case.D**-0.5)

    @property
    def b_F(self) -> Tensor | None:
        return self._floats("b_F", self.case.F) if self.case.bias else None

    @property
    def eps(self) -> float:
        return 1e-6

    @property
    def q_BHNA(self) -> Tensor:
        heads = self.case.heads
        return self._floats("q_BHNA", heads.B, heads.H, heads.N, heads.A, scale=self.case.x_scale)

    @property
    def k_BJMA(self) -> Tensor:
        heads = self.case.heads
        return self._floats("k_BJMA", heads.B, heads.J, heads.M, heads.A, scale=self.case.x_scale)

    @property
    def v_BJMA(self) -> Tensor:
        heads = self.case.heads
        return self._floats("v_BJMA", heads.B, heads.J, heads.M, heads.A)

    @property
    def causal(self) -> bool:
        return self.case.heads.causal

    @property
    def window(self) -> int:
        return self.case.heads.window

    @property
    def rotary(self) -> Rotary | None:
        heads = self.case.heads
        if not heads.rotary:
            return None
        angle_MC = torch.rand(heads.M, heads.A // 2, generator=self._draws("rotary")) * 6
        return Rotary(cos_MC=angle_MC.cos(), sin_MC=angle_MC.sin())

    def _draws(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.case.name} {name}".encode()) + self.seed)

    def _floats(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        values = (torch.randn(shape, generator=self._draws(name)) * scale).to(self.dtype)
        return _strided(values, self.case.column_step) if self.case.strided else values

    def _weight(self, name: str, inputs: int, outputs: int) -> Tensor:
        # a strided weight is the transposed view that Transformers' layout becomes
        if self.case.strided:
            return self._floats(name, self.case.E, outputs, inputs, scale=inputs**-0.5).transpose(1, 2)
        return self._floats(name, self.case.E, inputs, outputs, scale=inputs**-0.5)


@lru_cache(maxsize=64)
def _plan(case: Case, layout: str, dtype: str, seed: int) -> RoutingPlan:
    source = HardArguments(case, layout, dtype, seed)
    return make_plan(source.routing, source.layout)


def arguments(op: str, case: Case, layout: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Returns fresh arguments of the op by name."""
    return get_op(op).arguments(HardArguments(case, layout, dtype, seed))


def upstream(op: str, case: Case, shape: torch.Size, args: Mapping[str, Any]) -> Tensor:
    """Returns the upstream gradient of the result, in float64, for args on the host."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} backward".encode()))
    return get_op(op).upstream(torch.randn(shape, generator=generator, dtype=torch.float64), args)


def _strided(values: Tensor, step: int = 1) -> Tensor:
    """Returns the same values with gaps in memory along the first and last dimension; numbers of the last one
    are `step` elements apart."""
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
    """Returns new arguments on a device. with_grad makes every floating tensor and weight a leaf that
    requires a gradient. With adapters, the adapters are trained instead of the weights; leaves_of finds
    them."""

    def leaf(tensor: Tensor) -> Tensor:
        if case.adapters and tensor.ndim == 3:
            return _adapted(tensor)
        tensor = on_device(tensor.double() if double and tensor.is_floating_point() else tensor, device)
        return tensor.requires_grad_(with_grad and tensor.is_floating_point())

    def _adapted(weight: Tensor) -> Tensor:
        """Returns w + (down @ up) / 2 for each expert, in the case's order; `weight` is E x inputs x
        outputs."""
        (E, inputs, outputs), rank = weight.shape, 3
        draws = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {inputs} {outputs}".encode()) + seed)
        sizes = ((E, inputs, rank), (E, rank, outputs))
        down, up = (torch.randn(size, generator=draws) / size[1] ** 0.5 for size in sizes)
        if case.adapters == "output first":
            weight, down, up = (w.transpose(1, 2).contiguous() for w in (weight, down, up))
        kind = torch.float64 if double else weight.dtype
        # rounded first, so that all precisions start from the same numbers
        down, up = (w.to(weight.dtype).to(device, kind).requires_grad_(with_grad) for w in (down, up))
        delta = torch.bmm(down, up) if case.adapters == "input first" else torch.bmm(up, down)
        adapted = weight.to(device, kind) + 0.5 * delta
        adapted = adapted if case.adapters == "input first" else adapted.transpose(1, 2)
        adapted.adapters = {"down": down, "up": up}  # type: ignore[attr-defined]
        return adapted

    made: dict[str, Any] = {}
    for name, value in arguments(op_name, case, layout, dtype, seed).items():
        if isinstance(value, Tensor):
            made[name] = leaf(value)
        elif isinstance(value, ExpertWeights):
            leaves: dict[str, Any] = {n: leaf(t) for n, t in value.tensors().items()}
            made[name] = replace(value, **leaves)
        elif isinstance(value, (Routing, RoutingPlan, Traffic, Rotary)):
            tensors = {f.name: getattr(value, f.name) for f in fields(value)}
            moved: Any = {n: on_device(t, device) for n, t in tensors.items() if isinstance(t, Tensor)}
            made[name] = replace(value, **moved)
        else:
            made[name] = value
    return made


def memory_of(tensor: Tensor) -> Tensor:
    """Returns all memory behind a tensor once; a view may repeat elements or leave gaps."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def on_device(tensor: Tensor, device: str) -> Tensor:
    """Returns a copy with the same strides; Tensor.to() would close the gaps of a view."""
    moved = memory_of(tensor).to(device, copy=True)
    return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def leaves_of(args: Mapping[str, Any]) -> dict[str, Tensor]:
    leaves: dict[str, Tensor] = {}
    for name, value in args.items():
        tensors = value.tensors() if isinstance(value, ExpertWeights) else {name: value}
        for key, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            adapters = getattr(tensor, "adapters", None)
            leaves |= {key: tensor} if adapters is None else {f"{key}.{n}": t for n, t in adapters.items()}
    return leaves
