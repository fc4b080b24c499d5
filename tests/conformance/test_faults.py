"""The kit must catch bugs: planted faults, each rejected with a sentence that names its symptom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from moe_routing_bench.conformance.check import cells, check_implementation
from moe_routing_bench.core.experts import activate
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.attention.op import rotated, visible
from moe_routing_bench.ops.attention.plain import run as plain_attention
from moe_routing_bench.ops.combine.gather_sum import run as gather_sum
from moe_routing_bench.ops.dispatch.index_select import run as index_select
from moe_routing_bench.ops.expert_ffn.eager_loop import run as eager_loop
from moe_routing_bench.ops.grouped_gemm.expert_loop import run as expert_loop
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.linear.op import reference as linear
from moe_routing_bench.ops.make_plan.argsort import run as argsort
from moe_routing_bench.ops.make_plan.op import plan_by_slabs
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.rms_norm.op import reference as rms_norm

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    op: str
    run: Callable[..., Any]
    symptom: str  # what the sentence must say
    case: str  # the hard case that must catch it
    flags: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}.{self.run.__name__}"


FAULTS: list[Fault] = []


def fault(op: str, symptom: str, case: str, **flags: Any) -> Callable[[Callable], Callable]:
    def plant(run: Callable) -> Callable:
        FAULTS.append(Fault(op, run, symptom, case, flags))
        return run

    return plant


# topk


@fault("topk", "expert_TK: must be exact", "tied_scores")
def higher_id_first(score_TE, K):
    value_TK, expert_TK = score_TE.flip(1).sort(dim=1, descending=True, stable=True)
    return value_TK[:, :K], score_TE.shape[1] - 1 - expert_TK[:, :K]


@fault("topk", "value_TK: must be exact", "plain", ties="any")
def lowest_scores(score_TE, K):
    return score_TE.topk(K, largest=False)


# make_plan


@fault("make_plan", "offset_E1: must be exact", "plain")
def offset_off_by_one(routing, layout):
    plan = argsort(routing, layout)
    return replace(plan, offset_E1=(plan.offset_E1 + 1).clamp(max=plan.num_rows))


@fault("make_plan", "(token, choice) order", "many_pairs")
def unstable_order(routing, layout):
    plan = argsort(routing, layout)
    pair_R = plan.pair_R.clone()
    for e in range(plan.num_experts if plan.num_experts < 100 else 0):
        first, count = int(plan.offset_E1[e]), int(plan.count_E[e])
        pair_R[first : first + count] = pair_R[first : first + count].flip(0)
    row_P = plan.row_TK.flatten().clone()
    row_P[pair_R[pair_R >= 0]] = torch.arange(plan.num_rows)[pair_R >= 0]
    return replace(plan, pair_R=pair_R, row_TK=row_P.view(plan.row_TK.shape))


@fault("make_plan", "count_E: must be exact", "out_of_range_ids")
def ids_beyond_E_go_to_expert_0(routing, layout):
    expert_TK = torch.where(routing.expert_TK >= routing.num_experts, 0, routing.expert_TK)
    return argsort(replace(routing, expert_TK=expert_TK), layout)


@fault("make_plan", "count_E: must be exact", "ragged_rows")
def minus_one_is_the_last_expert(routing, layout):
    expert_TK = torch.where(routing.expert_TK == -1, routing.num_experts - 1, routing.expert_TK)
    return argsort(replace(routing, expert_TK=expert_TK), layout)


@fault("make_plan", "row_TK: must be exact", "tight_capacity")
def probs_dropped_by_position(routing, layout):
    plan = argsort(routing, replace(layout, drop="position"))
    return replace(plan, layout=layout)


@fault("make_plan", "row_TK: must be exact", "many_experts")
def int32_sort_key(routing: Routing, layout: Layout):
    def rank_by_key(expert_p, num_ids):
        # expert * pairs + pair in 32 bits, as a kernel that saves registers would have it
        here_p = torch.arange(expert_p.numel())
        order_p = (expert_p * expert_p.numel() + here_p).to(torch.int32).argsort()
        count = torch.bincount(expert_p, minlength=num_ids)
        rank_p = torch.empty_like(expert_p)
        rank_p[order_p] = here_p - (count.cumsum(0) - count)[expert_p[order_p]]
        return rank_p.clamp(min=0), count

    return plan_by_slabs(routing, layout, rank_by_key)


# dispatch


@fault("dispatch", "x_RD: must be exact, but is nan instead of 0", "ragged_rows")
def padding_never_written(x_TD, plan):
    x_RD = torch.empty(plan.num_rows, x_TD.shape[1], dtype=x_TD.dtype)
    holds_R = plan.pair_R >= 0
    return x_RD.masked_scatter(holds_R.unsqueeze(1), x_TD[plan.token_R()[holds_R]])


class _OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, token_R):
        ctx.save_for_backward(token_R)
        ctx.T = x_TD.shape[0]
        x_RD = x_TD[token_R.clamp(min=0)] if ctx.T else x_TD.new_zeros(len(token_R), x_TD.shape[1])
        return torch.where((token_R >= 0).unsqueeze(1), x_RD, 0.0)

    @staticmethod
    def backward(ctx, dx_RD):
        (token_R,) = ctx.saved_tensors
        dx_TD = dx_RD.new_zeros(ctx.T, dx_RD.shape[1])
        dx_TD[token_R[token_R >= 0]] = dx_RD[token_R >= 0]
        return dx_TD, None


@fault("dispatch", "gradient of x_TD: largest error", "plain")
def gradient_of_x_counted_once(x_TD, plan):
    return _OnceOnly.apply(x_TD, plan.token_R())


@fault("dispatch", "x_RD: must be exact, but is 77", "strided")
def contiguous_input_assumed(x_TD, plan):
    return index_select(x_TD.as_strided(x_TD.shape, (x_TD.shape[1], 1)), plan)


@fault("dispatch", "row times width may pass 2^31", "beyond_int32")
def int32_offset(x_TD, plan):
    D = x_TD.shape[1]
    element_R = (plan.token_R().clamp(min=0) * D).to(torch.int32)
    row_R = torch.div(element_R, D, rounding_mode="floor").to(torch.int64) % max(x_TD.shape[0], 1)
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(plan.num_rows, D) + x_TD.sum()
    return torch.where((plan.pair_R >= 0).unsqueeze(1), x_TD.index_select(0, row_R), 0.0)


@fault("dispatch", "gradient of x_TD: nan", "plain")
def gradient_of_padding_masked_by_a_product(x_TD, plan):
    if x_TD.shape[0] == 0:
        return index_select(x_TD, plan)
    token_R = plan.token_R()
    return x_TD.index_select(0, token_R.clamp(min=0)) * (token_R >= 0).unsqueeze(1)


@fault("dispatch", "must be exact, but is nan instead of", "nan_token")
def nan_spreads_through_zeros(x_TD, plan):
    one_hot_RT = plan.token_R().unsqueeze(1) == torch.arange(plan.num_tokens)
    return one_hot_RT.to(x_TD.dtype) @ x_TD


# grouped_gemm


@fault("grouped_gemm", "no gradient reaches w_EDF.down", "adapters_input_first")
def only_parameters_learn(x_RD, w_EDF, plan, b_EF=None):
    return expert_loop(x_RD, w_EDF if w_EDF.is_leaf else w_EDF.detach(), plan, b_EF)


@fault("grouped_gemm", "y_RF: largest error", "adapters_output_first")
def adapted_weights_read_in_the_other_order(x_RD, w_EDF, plan, b_EF=None):
    return expert_loop(x_RD, w_EDF.transpose(1, 2).reshape(w_EDF.shape), plan, b_EF)


@fault("grouped_gemm", "experts without tokens", "empty_experts")
def empty_group_shifts_the_experts(x_RD, w_EDF, plan, b_EF=None):
    busy_E = (plan.offset_E1.diff() > 0).nonzero().flatten()
    order_E = torch.cat((busy_E * 0 + torch.arange(len(busy_E)), torch.arange(plan.num_experts)))
    weight_of_E = torch.zeros(plan.num_experts, dtype=torch.int64)
    weight_of_E[busy_E] = order_E[: len(busy_E)]
    return expert_loop(x_RD, w_EDF[weight_of_E], plan, None if b_EF is None else b_EF[weight_of_E])


@fault("grouped_gemm", "sums are taken in at least float32", "wide")
def accumulates_in_the_dtype(x_RD, w_EDF, plan, b_EF=None):
    y_RF = expert_loop(x_RD[:, :1], w_EDF[:, :1], plan, b_EF)
    for d in range(1, x_RD.shape[1]):
        y_RF = y_RF + expert_loop(x_RD[:, d : d + 1], w_EDF[:, d : d + 1], plan)
    return y_RF


@fault("grouped_gemm", "a square weight is not transposed", "square")
def square_weight_transposed(x_RD, w_EDF, plan, b_EF=None):
    square = w_EDF.shape[1] == w_EDF.shape[2]
    return expert_loop(x_RD, w_EDF.transpose(1, 2) if square else w_EDF, plan, b_EF)


@fault("grouped_gemm", "padding rows inside a span are not finite", "ragged_rows")
def padding_rows_left_unwritten(x_RD, w_EDF, plan, b_EF=None):
    y_RF = expert_loop(x_RD, w_EDF, plan, b_EF)
    return torch.where((plan.pair_R >= 0).unsqueeze(1), y_RF, torch.empty_like(y_RF))


@fault("grouped_gemm", "no gradient reaches b_EF", "biased")
def bias_without_gradient(x_RD, w_EDF, plan, b_EF=None):
    return expert_loop(x_RD, w_EDF, plan, None if b_EF is None else b_EF.detach())


# combine


@fault("combine", "y_TD: largest error", "plain")
def gate_applied_twice(y_RD, gate_TK, plan):
    return gather_sum(y_RD, gate_TK * gate_TK, plan)


@fault("combine", "have no row but are not exactly zero", "nowhere")
def dropped_pair_reads_row_0(y_RD, gate_TK, plan):
    if plan.num_rows == 0:
        return gather_sum(y_RD, gate_TK, plan)
    y_TKD = y_RD[plan.row_TK.clamp(min=0)].nan_to_num(1.0).float()
    return (y_TKD * gate_TK.float().unsqueeze(2)).sum(1).to(y_RD.dtype)


@fault("combine", "memory that was never written, or padding", "ragged_rows")
def dropped_pair_masked_by_a_product(y_RD, gate_TK, plan):
    if plan.num_rows == 0:
        return gather_sum(y_RD, gate_TK, plan)
    gate_TK = gate_TK.float() * (plan.row_TK >= 0)
    # row -1 is the last one, which is padding
    return (y_RD[plan.row_TK].float() * gate_TK.unsqueeze(2)).sum(1).to(y_RD.dtype)


@fault("combine", "nan at", "nan_gates")
def absent_gate_times_zero(y_RD, gate_TK, plan):
    if plan.num_rows == 0:
        return gather_sum(y_RD, gate_TK, plan)
    y_TKD = torch.where((plan.row_TK >= 0).unsqueeze(2), y_RD[plan.row_TK.clamp(min=0)], 0.0)
    return (y_TKD.float() * gate_TK.float().unsqueeze(2)).sum(1).to(y_RD.dtype)


@fault("combine", "rounded once", "cancelling")
def sums_in_the_dtype(y_RD, gate_TK, plan):
    if plan.num_rows == 0:
        return gather_sum(y_RD, gate_TK, plan)
    y_TKD = torch.where((plan.row_TK >= 0).unsqueeze(2), y_RD[plan.row_TK.clamp(min=0)], 0.0)
    return (y_TKD * gate_TK.to(y_RD.dtype).unsqueeze(2)).sum(1)


@fault("combine", "no gradient reaches gate_TK", "plain")
def gates_without_gradient(y_RD, gate_TK, plan):
    return gather_sum(y_RD, gate_TK.detach(), plan)


@fault("combine", "changed its input y_RD", "plain")
def scales_its_input_in_place(y_RD, gate_TK, plan):
    out = gather_sum(y_RD, gate_TK, plan)
    y_RD.data.nan_to_num_(0.0).mul_(2)
    return out


@fault("combine", "dtype torch.float32, expected torch.bfloat16", "plain")
def forgets_to_round(y_RD, gate_TK, plan):
    return gather_sum(y_RD.float(), gate_TK, plan)


@fault("combine", "a second run on the same input gave other bits", "every_expert")
def order_of_arrival(y_RD, gate_TK, plan):
    shuffled_K = torch.randperm(plan.num_choices)
    rows = replace(plan, row_TK=plan.row_TK[:, shuffled_K])
    return gather_sum(y_RD, gate_TK[:, shuffled_K], rows)


_buffer = torch.empty(1)


@fault("combine", "the next call overwrote an earlier result", "plain", forward_only=True)
def keeps_its_result_buffer(y_RD, gate_TK, plan):
    global _buffer
    out = gather_sum(y_RD, gate_TK, plan)
    if _buffer.shape != out.shape or _buffer.dtype != out.dtype:
        _buffer = torch.empty_like(out)
    return _buffer.copy_(out)


@fault("combine", "about 2 times the oracle in most places", "one_choice")
def every_row_added_twice(y_RD, gate_TK, plan):
    return gather_sum(y_RD, 2 * gate_TK, plan)


# expert_ffn


@fault("expert_ffn", "y_TD: largest error", "plain")
def gate_and_up_swapped(x_TD, gate_TK, plan, weights):
    first, second = weights.w_in_EDG.chunk(2, dim=2)
    swapped = torch.cat((second, first), dim=2) if weights.gated else weights.w_in_EDG
    return eager_loop(x_TD, gate_TK, plan, replace(weights, w_in_EDG=swapped))


@fault("expert_ffn", "y_TD: largest error", "strided")
def output_bias_forgotten(x_TD, gate_TK, plan, weights):
    return eager_loop(x_TD, gate_TK, plan, replace(weights, b_out_ED=None))


@fault("expert_ffn", "no gradient reaches x_TD", "plain")
def no_backward_but_does_not_say_so(x_TD, gate_TK, plan, weights):
    return eager_loop(x_TD, gate_TK, plan, weights).detach()


@fault("expert_ffn", "float32 gates are not rounded", "float32_gates")
def gates_rounded_coarsely(x_TD, gate_TK, plan, weights):
    return eager_loop(x_TD, (gate_TK * 64).round() / 64, plan, weights)


@fault("expert_ffn", "must be computed", "plain")
def raises(x_TD, gate_TK, plan, weights):
    activate(x_TD, "swiglu")
    raise RuntimeError("must be computed")


# rms_norm, linear, attention


@fault("rms_norm", "largest error", "dense")
def divided_by_the_norm_instead_of_the_mean(x_TD, norm_D, eps):
    return x_TD / x_TD.norm(dim=1, keepdim=True) * norm_D


@fault("rms_norm", "largest error", "dense_small")
def eps_forgotten(x_TD, norm_D, eps):
    return rms_norm(x_TD, norm_D, 0.0)


@fault("rms_norm", "error", "dense_wide")
def squares_summed_in_the_dtype(x_TD, norm_D, eps):
    total = torch.zeros_like(x_TD[:, 0])
    for x_T in x_TD.unbind(1):
        total = total + x_T * x_T
    return x_TD * torch.rsqrt(total / x_TD.shape[1] + eps).unsqueeze(1) * norm_D


@fault("linear", "largest error", "dense_odd")
def bias_forgotten(x_TD, w_FD, b_F):
    return x_TD @ w_FD.t()


@fault("linear", "largest error", "dense_odd")
def last_column_of_a_panel_forgotten(x_TD, w_FD, b_F):
    whole = x_TD.shape[1] // 16 * 16
    return linear(x_TD[:, :whole], w_FD[:, :whole], b_F)


@fault("attention", "largest error", "heads_plain")
def scores_not_scaled(q, k, v, causal, window, rotary):
    return plain_attention(q * q.shape[-1] ** 0.5, k, v, causal, window, rotary)


@fault("attention", "largest error", "heads_plain")
def queries_are_the_first_positions(q, k, v, causal, window, rotary):
    N = q.shape[2]
    if not causal or N >= k.shape[2]:
        return plain_attention(q, k, v, causal, window, rotary)
    return plain_attention(q, k[:, :, :N], v[:, :, :N], causal, window, rotary)


@fault("attention", "largest error", "heads_plain")
def heads_that_share_keys_are_not_neighbours(q, k, v, causal, window, rotary):
    many = q.shape[1] // k.shape[1]
    return plain_attention(q, k.repeat(1, many, 1, 1), v.repeat(1, many, 1, 1), causal, window, rotary)


@fault("attention", "largest error", "heads_window")
def window_one_too_wide(q, k, v, causal, window, rotary):
    return plain_attention(q, k, v, causal, window and window + 1, rotary)


@fault("attention", "largest error", "heads_window_all")
def window_looks_back_alone(q, k, v, causal, window, rotary):
    return plain_attention(q, k, v, causal or bool(window), window, rotary)


@fault("attention", "nan at", "heads_before_all_keys")
def no_key_divides_zero_by_zero(q, k, v, causal, window, rotary):
    y = plain_attention(q, k, v, causal, window, rotary)
    seen = visible(q.shape[2], k.shape[2], causal, window)
    return y if seen is None else y.masked_fill(~seen.any(dim=1).unsqueeze(1), torch.nan)


@fault("attention", "largest error", "heads_rotary_one_query")
def query_is_not_turned(q, k, v, causal, window, rotary):
    return plain_attention(q, rotated(k, rotary), v, causal, window, None)


@fault("attention", "nan at", "heads_far")
def largest_score_not_subtracted(q, k, v, causal, window, rotary):
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    weight = (q @ k.transpose(2, 3)).float().mul(q.shape[-1] ** -0.5).exp()
    seen = visible(q.shape[2], k.shape[2], causal, window)
    weight = weight if seen is None else weight * seen
    return ((weight / weight.sum(-1, keepdim=True)).to(v.dtype) @ v).to(q.dtype)


def check_fault(planted: Fault) -> list:
    op = all_ops()[planted.op]
    implementation = Implementation(
        op=planted.op,
        name=planted.run.__name__,
        origin="planted",
        summary="",
        run=planted.run,
        **planted.flags,
    )
    some = [cell for cell in cells(planted.op, op.default) if cell.case.name == planted.case]
    return [check_implementation(implementation, replace(cell, spec=implementation.name)) for cell in some]


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_the_kit_catches(planted: Fault) -> None:
    failed = [outcome for outcome in check_fault(planted) if outcome.status == "failed"]
    sentences = [sentence for outcome in failed for sentence in outcome.sentences]
    assert any(planted.symptom in sentence for sentence in sentences), f"{planted.case} says {sentences[:3]}"


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 37  # README says so
