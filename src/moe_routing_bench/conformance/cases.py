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
class Heads:
    """The sizes of an attention, and what its queries see: Heads(B=2, H=4, J=2, N=5, M=9, A=16, window=3)."""

    B: int = 2
    H: int = 4
    J: int = 2
    N: int = 5
    M: int = 9
    A: int = 16
    causal: bool = True
    window: int = 0
    rotary: bool = False


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
    heads: Heads = Heads()  # of attention
    ops: tuple[str, ...] = ()  # the ops it is hard for; (): every op of an MoE layer
    dtypes: tuple[str, ...] = tuple(DTYPES)

    def rows(self, op: str) -> int:
        """Of its result. The errors within one row are not independent."""
        heads = self.heads
        return heads.B * heads.H * heads.N if op == "attention" else self.T * self.K

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


DENSE = ("rms_norm", "linear")
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
    Case(name="dense", guards="every number of the result is right", ops=DENSE),
    Case(name="dense_no_tokens", guards="an empty batch gives an empty result", T=0, ops=DENSE),
    Case(name="dense_one_token", guards="a batch of one token works", T=1, ops=DENSE),
    Case(
        name="dense_odd", guards="widths need not be multiples of anything", D=37, F=19, bias=True, ops=DENSE
    ),
    Case(name="dense_wide", guards="sums are taken in at least float32", T=40, D=1024, F=96, ops=DENSE),
    Case(name="dense_strided", guards="inputs need not be contiguous", strided=True, bias=True, ops=DENSE),
    Case(
        name="dense_every_other_number",
        guards="the numbers of a row need not be side by side",
        strided=True,
        column_step=2,
        bias=True,
        ops=DENSE,
    ),
    Case(
        name="dense_large", guards="squares and sums do not overflow", D=64, x_scale=100.0, ops=("rms_norm",)
    ),
    Case(name="dense_small", guards="eps keeps tiny tokens finite", D=64, x_scale=1e-4, ops=("rms_norm",)),
    Case(name="dense_nan_token", guards="NaN in one token reaches no other", nan_token=True, ops=DENSE),
    *(
        Case(name=f"heads_{name}", guards=guards, heads=heads, ops=("attention",))
        for name, guards, heads in (
            ("plain", "every query sees the keys up to its position", Heads()),
            ("all", "without causal a query sees every key", Heads(causal=False)),
            ("own_keys", "as many heads of keys as of queries work", Heads(J=4, N=9)),
            ("one_query", "one query with a cache of keys works", Heads(N=1, M=70, A=32)),
            ("one_query_one_head", "one head works", Heads(B=1, H=1, J=1, N=1, M=3)),
            ("shared_by_many", "heads that share keys are neighbours", Heads(H=12, J=2, N=1, M=130, A=8)),
            ("many_queries", "blocks of queries and keys meet at their edges", Heads(B=1, N=70, M=150, A=24)),
            ("odd", "widths need not be multiples of anything", Heads(N=7, M=11, A=13)),
            ("odd_one_query", "widths need not be multiples of anything", Heads(N=1, M=11, A=13)),
            ("window", "a query sees only keys near it", Heads(N=40, M=90, window=17)),
            (
                "window_all",
                "a window without causal looks both ways",
                Heads(N=40, M=40, window=5, causal=False),
            ),
            ("window_one_query", "a query sees only keys near it", Heads(N=1, M=300, window=9)),
            ("no_keys", "a query that sees no key gets exactly zero", Heads(M=0)),
            ("before_all_keys", "a query that sees no key gets exactly zero", Heads(N=9, M=4)),
            ("no_queries", "no queries give an empty result", Heads(N=0)),
            ("rotary", "queries and keys are turned by their own positions", Heads(N=30, M=50, rotary=True)),
            ("rotary_one_query", "the query has the last position", Heads(N=1, M=50, rotary=True)),
        )
    ),
    Case(name="heads_strided", guards="inputs need not be contiguous", strided=True, ops=("attention",)),
    Case(
        name="heads_far",
        guards="weights are finite where exp overflows",
        x_scale=12.0,
        heads=Heads(N=30, M=70),
        ops=("attention",),
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
        if (op.name in case.ops if case.ops else op.routed) and (not case.batches or op.by_token is not None)
    ]


def layouts_for(op: Op, case: Case) -> tuple[str, ...]:
    return case.layouts if op.has_layout else (NO_LAYOUT,)
