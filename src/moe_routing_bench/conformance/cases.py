"""The hard cases: sizes, routing, layout and data chosen so that a plausible bug shows itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.experts import GATED, ExpertWeights
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY_OP = ("topk", "make_plan", "dispatch", "grouped_gemm", "combine", "expert_ffn")
NO_LAYOUT = "-"  # topk knows no layout


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hard case. `guards` says what must hold, as the end of the sentence "... must hold: <guards>".

    Case(name="one_token", guards="a batch of one token works", T=1) takes the sizes below for the rest.
    """

    name: str
    guards: str
    T: int = 13
    D: int = 24
    F: int = 16
    E: int = 5
    K: int = 2
    choose: Callable[[Case, torch.Generator], Tensor] | None = None  # default: K distinct experts at random
    layouts: tuple[str, ...] = ("compact", "padded(capacity=24)", "block(4)")
    ragged: bool = True
    activation: str = "swiglu"
    bias: bool = False
    strided: bool = False
    float32_gates: bool = False
    equal_gates: bool = False
    cancelling: bool = False
    beyond_int32: bool = False  # x_TD has more than 2^31 elements, in overlapping memory; forward only
    ops: tuple[str, ...] = EVERY_OP
    dtypes: tuple[str, ...] = tuple(DTYPES)

    def __str__(self) -> str:
        return self.name


def distinct(case: Case, generator: torch.Generator) -> Tensor:
    return torch.rand(case.T, case.E, generator=generator).argsort(dim=1)[:, : case.K]


def only_experts(*experts: int) -> Callable[[Case, torch.Generator], Tensor]:
    def choose(case: Case, generator: torch.Generator) -> Tensor:
        order_TK = torch.rand(case.T, len(experts), generator=generator).argsort(dim=1)[:, : case.K]
        return torch.tensor(experts)[order_TK]

    return choose


def nowhere(case: Case, generator: torch.Generator) -> Tensor:
    return torch.full((case.T, case.K), -1)


def ragged(case: Case, generator: torch.Generator) -> Tensor:
    absent_TK = torch.rand(case.T, case.K, generator=generator) < 0.4
    absent_TK[1] = True
    return torch.where(absent_TK, -1, distinct(case, generator))


def out_of_range(case: Case, generator: torch.Generator) -> Tensor:
    expert_TK = distinct(case, generator)
    for t, absent in enumerate((-1, case.E, case.E + 3, 2**40, -7)):
        expert_TK[t, t % case.K] = absent
    return expert_TK


def first_and_last_experts(case: Case, generator: torch.Generator) -> Tensor:
    return torch.randint(-25, 25, (case.T, 1), generator=generator) % case.E


def last_tokens_only(case: Case, generator: torch.Generator) -> Tensor:
    expert_TK = nowhere(case, generator)
    expert_TK[-7:] = distinct(case, generator)[-7:]
    return expert_TK


TIGHT = ("padded(capacity=2)", "padded(capacity=2,drop=probs)", "padded(capacity_factor=0.5)")

CASES = (
    Case(name="plain", guards="every pair is computed by its expert with its gate", ragged=False),
    Case(name="no_tokens", guards="an empty batch gives an empty result", T=0),
    Case(name="one_token", guards="a batch of one token works", T=1),
    Case(name="one_choice", guards="K = 1 works", K=1, activation="relu"),
    Case(name="every_expert", guards="K = E works", K=5, ragged=False),
    Case(
        name="empty_experts",
        guards="experts without tokens, first and last too, own nothing and shift nobody",
        choose=only_experts(1, 3),
    ),
    Case(
        name="one_expert_takes_all",
        guards="all tokens may go to one expert",
        K=1,
        choose=only_experts(2),
        activation="silu",
    ),
    Case(name="nowhere", guards="tokens without any expert get exactly zero", choose=nowhere),
    Case(
        name="out_of_range_ids",
        guards="ids below 0 or from E on mean no expert",
        choose=out_of_range,
        activation="geglu",
    ),
    Case(name="ragged_rows", guards="tokens may have fewer than K experts", K=3, choose=ragged),
    Case(
        name="no_capacity",
        guards="with capacity 0 every pair is dropped and gives exactly zero",
        layouts=("padded(capacity=0)",),
    ),
    Case(
        name="tight_capacity",
        guards="pairs over capacity are dropped by the stated rule and add nothing",
        layouts=TIGHT,
    ),
    Case(
        name="tied_gates",
        guards="of equal gates the later pair is dropped",
        layouts=("padded(capacity=3,drop=probs)",),
        equal_gates=True,
        ops=("make_plan", "expert_ffn"),
    ),
    Case(name="odd_widths", guards="widths need not be multiples of anything", D=7, F=5, K=3),
    Case(name="strided", guards="inputs need not be contiguous", strided=True, bias=True),
    Case(
        name="square",
        guards="a square weight is not transposed",
        D=16,
        F=16,
        activation="relu",
        ops=("grouped_gemm", "expert_ffn"),
    ),
    Case(
        name="wide",
        guards="sums are taken in at least float32",
        T=24,
        D=256,
        F=128,
        ops=("grouped_gemm", "expert_ffn"),
    ),
    Case(
        name="biased",
        guards="biases are added to real rows and to nothing else",
        bias=True,
        choose=ragged,
        activation="gelu",
        ops=("grouped_gemm", "expert_ffn"),
    ),
    Case(
        name="float32_gates",
        guards="float32 gates are not rounded to the dtype of the rows",
        float32_gates=True,
        ops=("combine", "expert_ffn"),
        dtypes=("bfloat16", "float16"),
    ),
    Case(
        name="cancelling",
        guards="products and sums are taken in float32 and rounded once",
        D=64,
        cancelling=True,
        ragged=False,
        ops=("combine",),
        dtypes=("bfloat16", "float16"),
    ),
    Case(
        name="cancelling_float32_gates",
        guards="products and sums are taken in float32 and rounded once",
        D=64,
        cancelling=True,
        float32_gates=True,
        ragged=False,
        ops=("combine",),
        dtypes=("bfloat16", "float16"),
    ),
    Case(
        name="many_pairs",
        guards="the order within an expert is that of the pairs",
        T=2500,
        E=9,
        K=4,
        layouts=("compact", "padded(capacity=700,drop=probs)", "block(16)"),
        ops=("make_plan",),
        dtypes=("float32",),
    ),
    Case(
        name="many_experts",
        guards="expert times pair may pass 2^31",
        T=2**15,
        E=2**17,
        K=1,
        choose=first_and_last_experts,
        layouts=("compact", "block(4)"),
        ops=("make_plan",),
        dtypes=("float32",),
    ),
    Case(
        name="beyond_int32",
        guards="row times width may pass 2^31",
        T=40_000,
        D=65_536,
        E=4,
        K=1,
        choose=last_tokens_only,
        layouts=("padded(capacity=7)",),
        beyond_int32=True,
        ops=("dispatch",),
        dtypes=("bfloat16",),
    ),
    Case(
        name="tied_scores",
        guards="of equal scores the lower expert id comes first",
        E=64,
        K=6,
        T=50,
        equal_gates=True,
        ops=("topk",),
    ),
)


def cases_for(op: str) -> list[Case]:
    return [case for case in CASES if op in case.ops]


def layouts_for(op: str, case: Case) -> tuple[str, ...]:
    return (NO_LAYOUT,) if op == "topk" else case.layouts


def arguments(op: str, case: Case, layout: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """The op's arguments by name, fresh, drawn from the case's name and the seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + seed)
    kind = DTYPES[dtype]

    def floats(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return _strided(values.to(kind)) if case.strided else values.to(kind)

    if op == "topk":
        score_TE = floats(case.T, case.E)
        return {"score_TE": (score_TE * 2).round() / 2 if case.equal_gates else score_TE, "K": case.K}

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
        return {"x_TD": floats(case.T, D), "gate_TK": routing.gate_TK, "plan": plan, "weights": weights}
    raise ValueError(f"the conformance kit has no arguments for the op {op!r}")


def upstream(op: str, case: Case, out: Tensor, args: Mapping[str, Any]) -> Tensor:
    """The gradient that comes back to the result, in float64."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} backward".encode()))
    d_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
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
        expert_TK, gate_TK = _strided(expert_TK), _strided(gate_TK)
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


def _strided(values: Tensor) -> Tensor:
    """The same values with gaps in memory along the first and last dimension."""
    *outer, last = values.shape
    roomy = torch.full((2 * outer[0], *outer[1:], last + 3) if outer else (last + 3,), 77).to(values.dtype)
    view = roomy[::2, ..., 1 : last + 1] if outer else roomy[1 : last + 1]
    view.copy_(values)
    return view
