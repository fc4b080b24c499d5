"""The hard cases: sizes, routing, layout and data that make a plausible bug visible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.conformance.choices import (
    first_and_last_experts,
    last_tokens_only,
    nowhere,
    only_experts,
    out_of_range,
    ragged,
)
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.ops.registry import Op
from moe_routing_bench.ops.score_topk.op import PLAIN, ScoreRule

NO_LAYOUT = "-"  # for an op without layouts


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hard case. `guards` completes the sentence "Must hold: <guards>".

    Case(name="one_token", guards="a batch of one token works", T=1) takes its other sizes from the defaults.
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
    column_step: int = 1  # of strided inputs; 2 leaves a gap after every number
    float32_gates: bool = False
    equal_gates: bool = False
    cancelling: bool = False
    adapters: str = ""  # "input first", "output first": trained low-rank adapters on weights in that order
    nan_token: bool = False  # one token is NaN
    nan_gates: bool = False  # gates without an expert are NaN
    x_scale: float = 1.0  # of expert_ffn
    rule: ScoreRule = PLAIN  # of score_topk
    far_logits: float = 0.0  # mean of the logits: near -60 scores underflow, near 100 exp(z) overflows
    beyond_int32: bool = False  # x_TD has more than 2^31 elements, in overlapping memory; forward only
    batches: bool = False  # also check whether a token's bits depend on its batch
    ops: tuple[str, ...] = ()  # the ops it is hard for; (): every op
    dtypes: tuple[str, ...] = tuple(DTYPES)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class KitCell:
    """One implementation on one case. A line of `mrb check` summarises several of these.

    KitCell(op="combine", spec="index_add", case=<plain>, layout="block(4)", dtype="bfloat16")
    """

    op: str
    spec: str
    case: Case
    layout: str
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.op}.{self.spec}-{self.case}-{self.layout}-{self.dtype}-{self.device}"


ANY_BATCH = "what says BATCH_INVARIANT gives a token the same bits in every batch"
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
    Case(
        name="strided",
        guards="inputs need not be contiguous",
        strided=True,
        bias=True,
        activation="swiglu_oai",
    ),
    Case(
        name="every_other_number",
        guards="the numbers of a row need not be side by side",
        strided=True,
        column_step=2,
        bias=True,
        layouts=("block(4)",),
        dtypes=("float32", "bfloat16"),
    ),
    Case(
        name="saturated",
        guards="an activation with limits keeps to them: large numbers are cut on both sides",
        x_scale=64.0,
        layouts=("compact",),
        activation="swiglu_oai",
        ops=("expert_ffn",),
    ),
    Case(
        name="square",
        guards="a square weight is not transposed",
        D=16,
        F=16,
        activation="relu2",
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
        name="deep",  # with tiles of 64 there are 64 steps; sums rounded at each have six times the error
        guards="sums are kept in at least float32 from the first step of the depth to the last",
        T=8,
        D=4096,
        F=8,
        E=2,
        K=1,
        layouts=("block(4)",),
        ops=("grouped_gemm",),  # expert_ffn would take a minute in the interpreter
        dtypes=("bfloat16",),
    ),
    Case(
        name="biased",
        guards="biases are added to real rows and to nothing else",
        bias=True,
        choose=ragged,
        activation="gelu",
        ops=("grouped_gemm", "expert_ffn"),
    ),
    *(
        Case(
            name=f"adapters_{order}_first",
            guards="adapters on weights of either order learn, and are not transposed",
            layouts=("compact", "block(4)"),
            adapters=f"{order} first",
            ops=("grouped_gemm", "expert_ffn"),
        )
        for order in ("input", "output")
    ),
    Case(
        name="nan_token",
        guards="NaN in one token reaches no other, nor experts it did not choose",
        nan_token=True,
        ops=("dispatch", "grouped_gemm", "combine", "expert_ffn"),
    ),
    Case(
        name="nan_gates",
        guards="a gate without an expert is never used, NaN neither",
        choose=ragged,
        layouts=("compact", "padded(capacity=3,drop=probs)", "block(4)"),
        nan_gates=True,
        ops=("make_plan", "combine", "expert_ffn"),
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
        ops=("topk", "score_topk"),
    ),
    Case(
        name="scaled_softmax",
        guards="gates that are not renormalised sum over all experts, and the scale is kept",
        E=20,
        K=3,
        rule=ScoreRule(renormalise=False, scale=16.0),
        ops=("score_topk",),
    ),
    Case(
        name="softmax_groups",
        guards="experts outside the best groups are not chosen",
        T=40,
        E=12,
        K=4,
        rule=ScoreRule(groups=3, keep_groups=2, renormalise=False),
        ops=("score_topk",),
    ),
    Case(
        name="sigmoid_bias",
        guards="the bias chooses and does not weigh; groups are ranked by their two best",
        T=40,
        E=24,
        K=5,
        bias=True,
        rule=ScoreRule(score="sigmoid", scale=2.5, groups=6, keep_groups=3, group_score="top2_sum"),
        ops=("score_topk",),
    ),
    Case(
        name="softmax_bias",
        guards="the bias chooses and does not weigh",
        E=9,
        K=3,
        bias=True,
        rule=ScoreRule(renormalise=False),
        ops=("score_topk",),
    ),
    Case(
        name="sqrtsoftplus",
        guards="gates and gradients are those of sqrt(log(1 + exp(z)))",
        E=9,
        K=3,
        bias=True,
        rule=ScoreRule(score="sqrtsoftplus", renormalise=False),
        ops=("score_topk",),
    ),
    *(
        Case(
            name=f"far_{score}",
            guards="gates and gradients are finite where scores underflow",
            T=40,
            E=6,
            K=4,
            far_logits=-60.0,
            rule=ScoreRule(score=score),
            ops=("score_topk",),
        )
        for score in ("softmax", "sigmoid", "sqrtsoftplus")
    ),
    *(
        Case(
            name=f"high_{score}",
            guards="gates and gradients are finite where exp(z) overflows",
            T=40,
            E=6,
            K=4,
            far_logits=100.0,
            rule=ScoreRule(score=score),
            ops=("score_topk",),
        )
        for score in ("softmax", "sqrtsoftplus")
    ),
    # odd, silu, sigmoid, sqrtsoftplus: torch has one formula for full vectors and one for their end
    # wide: long sums, and enough numbers for torch to use several threads
    *(
        Case(name=f"any_batch{name}", guards=ANY_BATCH, ragged=False, batches=True, **sizes)  # type: ignore[arg-type]
        for name, sizes in (
            ("", {"T": 67, "E": 9, "K": 3, "layouts": ("compact", "block(4)")}),
            (
                "_odd",
                {"T": 41, "D": 37, "F": 19, "layouts": ("compact",), "activation": "gelu", "bias": True},
            ),
            (
                "_silu",
                {"T": 41, "F": 19, "layouts": ("compact",), "activation": "silu", "ops": ("expert_ffn",)},
            ),
            ("_sigmoid", {"T": 41, "E": 9, "rule": ScoreRule(score="sigmoid"), "ops": ("score_topk",)}),
            (
                "_sqrtsoftplus",
                {"T": 41, "E": 9, "rule": ScoreRule(score="sqrtsoftplus"), "ops": ("score_topk",)},
            ),
            (
                "_wide",
                {"T": 97, "D": 264, "F": 200, "layouts": ("block(16)",), "dtypes": ("float32", "bfloat16")},
            ),
        )
    ),
)


def cases_for(op: Op) -> list[Case]:
    return [
        case
        for case in CASES
        if (not case.ops or op.name in case.ops) and (not case.batches or op.by_token is not None)
    ]


def layouts_for(op: Op, case: Case) -> tuple[str, ...]:
    return case.layouts if op.has_layout else (NO_LAYOUT,)
