"""BATCH_INVARIANT is a promise the kit holds one to: planted dependences are found, honest ones pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells_of, check_implementation
from moe_routing_bench.conformance.run import CaseOutcome, Row
from moe_routing_bench.ops.combine.gather_sum import run as gather_sum
from moe_routing_bench.ops.registry import get_op


def cell(op: str, spec: str, case: str = "any_batch") -> KitCell:
    return next(one for one in cells_of(op, spec, ("float32",)) if one.case.name == case)


def nudged(out: Tensor, where: Any) -> Tensor:
    """Two units in the last place: far inside what accuracy allows."""
    factor_T1 = torch.ones(len(out), 1)
    factor_T1[where] += 2**-22
    return out * factor_T1


def alone(y_RD: Tensor, gate_TK: Tensor, plan: Any) -> Tensor:
    out = gather_sum(y_RD, gate_TK, plan)
    return nudged(out, slice(None)) if len(out) == 1 else out


def at_a_place(y_RD: Tensor, gate_TK: Tensor, plan: Any) -> Tensor:
    return nudged(gather_sum(y_RD, gate_TK, plan), slice(0, 1))


def in_a_tail(y_RD: Tensor, gate_TK: Tensor, plan: Any) -> Tensor:
    out = gather_sum(y_RD, gate_TK, plan)
    return nudged(out, slice(len(out) - len(out) % 16, None))


def under_load(y_RD: Tensor, gate_TK: Tensor, plan: Any) -> Tensor:
    out = gather_sum(y_RD, gate_TK, plan)
    return nudged(out, slice(None)) if int(plan.count_E.max()) > 40 and len(out) == 67 else out


def on_two_threads(y_RD: Tensor, gate_TK: Tensor, plan: Any) -> Tensor:
    out = gather_sum(y_RD, gate_TK, plan)
    return nudged(out, slice(0, len(out) // 2)) if torch.get_num_threads() == 2 else out


def with_gradients(y_RD: Tensor, gate_TK: Tensor, plan: Any) -> Tensor:
    out = gather_sum(y_RD, gate_TK, plan)
    return out + 0 if not out.requires_grad or len(out) > 8 else out * (1 + 2**-22)


@pytest.mark.parametrize(
    "planted,says",
    [
        (alone, "batch of 1 "),
        (at_a_place, "batch of 1"),
        (in_a_tail, "batch of"),
        (under_load, "another load"),
        (on_two_threads, "2 threads"),
        (with_gradients, "with gradients"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_false_promise_fails(planted: Callable[..., Tensor], says: str) -> None:
    honest = get_op("combine").get("gather_sum")
    liar = replace(honest, run=planted)
    outcome = check_implementation(liar, cell("combine", "gather_sum"))
    assert outcome.status == "failed"
    assert "BATCH_INVARIANT" in outcome.sentences[0] and says in outcome.sentences[0]
    silent = check_implementation(replace(liar, batch_invariant=False), cell("combine", "gather_sum"))
    assert (silent.status, silent.could_say_invariant) == ("passed", False)


def test_who_refuses_some_batches_breaks_the_promise() -> None:
    honest = get_op("combine").get("gather_sum")
    picky = replace(honest, unsupported=lambda y, g, plan: "too few" if plan.num_tokens < 3 else None)
    outcome = check_implementation(picky, cell("combine", "gather_sum"))
    assert "too few" in outcome.sentences[0]


def test_who_holds_and_is_silent_is_told() -> None:
    honest = get_op("combine").get("gather_sum")
    outcome = check_implementation(replace(honest, batch_invariant=False), cell("combine", "gather_sum"))
    assert (outcome.status, outcome.could_say_invariant) == ("passed", True)
    assert check_implementation(honest, cell("combine", "gather_sum")).could_say_invariant is None

    row = Row(op="combine", spec="quiet")
    for could_say in (None, True, True):
        row.take(CaseOutcome(case="", layout="", dtype="", status="passed", could_say_invariant=could_say))
    assert row.note is not None and "BATCH_INVARIANT = True" in row.note
    row.take(CaseOutcome(case="", layout="", dtype="", status="passed", could_say_invariant=False))
    assert row.note is None


def test_plain_products_depend_on_the_batch() -> None:
    """The reason for the flag: a matrix product of one row is another sum than that of many."""
    outcome = check_implementation(
        get_op("grouped_gemm").get("expert_loop"), cell("grouped_gemm", "expert_loop")
    )
    assert (outcome.status, outcome.could_say_invariant) == ("passed", False)


@pytest.mark.parametrize(
    "case", ["any_batch", "any_batch_odd", "any_batch_wide", "any_batch_silu", "any_batch_sigmoid"]
)
@pytest.mark.parametrize(
    "op,spec",
    [("combine", "native"), ("expert_ffn", "native(batch_invariant=True)"), ("score_topk", "eager")],
)
def test_who_says_so_holds_it(op: str, spec: str, case: str) -> None:
    promised = get_op(op).get(spec)
    assert promised.batch_invariant
    for one in (one for one in cells_of(op, spec, ("float32",)) if one.case.name == case):
        outcome = check_implementation(promised, one)
        assert outcome.status in ("passed", "unsupported"), outcome.sentences


def test_exact_results_are_the_same_in_every_batch() -> None:
    for op in map(get_op, ("topk", "make_plan", "dispatch")):
        for name in op.names():
            # kernels for GPUs may be absent; of equal scores torch.topk may take any
            if not name.startswith(("triton_", "cute_")):
                assert op.get(name).batch_invariant == (name != "torch_topk"), f"{op.name}.{name}"


def test_a_composition_promises_what_all_its_parts_do() -> None:
    staged = get_op("expert_ffn").get
    assert not staged("staged").batch_invariant
    parts = "dispatch=native,grouped_gemm=native,combine=native"
    assert staged(f"staged({parts},batch_invariant=True)").batch_invariant
    assert not staged(f"staged({parts})").batch_invariant
    assert not staged("staged(grouped_gemm=native,combine=one_hot_matmul)").batch_invariant
