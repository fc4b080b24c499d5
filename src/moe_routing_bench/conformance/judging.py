"""Compares results and gradients of an operation with its oracle's. Everything here is on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.conformance.arguments import fresh_arguments, leaves_of, upstream
from moe_routing_bench.conformance.cases import Case, KitCell
from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict
from moe_routing_bench.ops.implementation import Implementation, tensors_in
from moe_routing_bench.ops.registry import get_op


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference's results for one case: in float64 (oracle) and in the case's dtype (baseline)."""

    oracle: Any
    baseline: Any
    oracle_grads: Mapping[str, Tensor]
    baseline_grads: Mapping[str, Tensor]


def differentiable(op: str, case: Case) -> bool:
    return get_op(op).differentiable and not case.beyond_int32


def asks_for_gradients(op: str, case: Case) -> bool:
    """Cases about batches compare only the bits of results, without gradients."""
    return differentiable(op, case) and not case.batches


def reference_of(cell: KitCell, seed: int = 0, implementation: Implementation | None = None) -> Reference:
    """Returns the reference, computed once for all implementations and devices. An implementation that stores
    weights in a format has its own, computed with the stored weights."""
    if implementation is None or implementation.stored is None:
        return _reference(cell.op, cell.case, cell.layout, cell.dtype, seed)
    plain = fresh_arguments(cell.op, cell.case, cell.layout, cell.dtype, seed=seed)
    exact = fresh_arguments(cell.op, cell.case, cell.layout, cell.dtype, seed=seed, double=True)
    op = get_op(cell.op)
    kept = implementation.stored(plain[op.weights])
    plain[op.weights] = kept.to(dtype=next(tensors_in(plain[op.weights])).dtype)
    exact[op.weights] = kept.to(dtype=torch.float64)
    with torch.no_grad():
        oracle = op.reference(*exact.values())
        baseline = (implementation.plain or op.reference)(*plain.values())
    return Reference(oracle=oracle, baseline=baseline, oracle_grads={}, baseline_grads={})


@lru_cache(maxsize=8192)
def _reference(op: str, case: Case, layout: str, dtype: str, seed: int) -> Reference:
    with_grad = asks_for_gradients(op, case)
    reference = get_op(op).reference
    with torch.set_grad_enabled(with_grad):
        plain = fresh_arguments(op, case, layout, dtype, seed=seed, with_grad=with_grad)
        oracle = baseline = reference(*plain.values())
        if differentiable(op, case):
            exact = fresh_arguments(op, case, layout, dtype, seed=seed, with_grad=with_grad, double=True)
            oracle = reference(*exact.values())
    if not with_grad:
        return Reference(oracle=oracle, baseline=baseline, oracle_grads={}, baseline_grads={})
    d_out = upstream(op, case, differentiable_part(oracle).shape, plain)
    return Reference(
        oracle=oracle,
        baseline=baseline,
        oracle_grads=_reference_grads(oracle, d_out, exact),
        baseline_grads=_reference_grads(baseline, d_out, plain),
    )


def _reference_grads(result: Any, d_out: Tensor, args: Mapping[str, Any]) -> dict[str, Tensor]:
    values = differentiable_part(result)
    if values.requires_grad:
        values.backward(d_out.to(values.dtype))
    leaves = leaves_of(args)
    return {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}


def differentiable_part(out: Any) -> Tensor:
    """topk and score_topk return ids beside their values."""
    return out[0] if isinstance(out, tuple) else out


def judge_output(
    implementation: Implementation | None, cell: KitCell, out: Any, args: Mapping[str, Any], ties: str = ""
) -> list[str]:
    """implementation: None if it may not be loaded here; then ties are what it promises about equal scores"""
    right = reference_of(cell, implementation=implementation)

    def more(n: int) -> list[tuple[Any, Any]]:
        return [(other.oracle, other.baseline) for other in _others(cell, n, implementation)]

    ties = ties if implementation is None else implementation.ties
    expected = Expected(oracle=right.oracle, baseline=right.baseline, more=more, ties=ties)
    return _sentences(get_op(cell.op).judge(out, expected, args))


def judge_gradients(
    cell: KitCell, out: Any, grads: Mapping[str, Tensor | None], args: Mapping[str, Any]
) -> list[str]:
    right, op = reference_of(cell), get_op(cell.op)
    d_out = upstream(cell.op, cell.case, differentiable_part(out).shape, args)
    wrong = []
    for name, got in grads.items():
        oracle, baseline = right.oracle_grads[name], right.baseline_grads[name]
        if got is None:
            if bool((oracle != 0).any()):
                wrong.append(f"no gradient reaches {name}")
            continue

        def more(n: int, name: str = name) -> list[tuple[Any, Any]]:
            return [(other.oracle_grads[name], other.baseline_grads[name]) for other in _others(cell, n)]

        of = GradientOf(name=name, args=args, out=out, d_out=d_out)
        verdicts = op.judge_gradient(of, got, Expected(oracle=oracle, baseline=baseline, more=more))
        wrong += _sentences([verdict.of(f"gradient of {name}") for verdict in verdicts])
    return wrong


def _others(cell: KitCell, n: int, implementation: Implementation | None = None) -> list[Reference]:
    """Returns references of the same case on other data: with few elements the baseline's error is luck."""
    # the largest of 128 errors is about 2.7 standard deviations; chance exceeds twice that once in 10^7. With
    # 18 numbers, honest implementations were rejected in 14 of 31,057 cells. Errors within a pair are
    # correlated, so a gradient of many numbers from one token is luck as well
    independent = min(n, 8 * cell.case.rows(cell.op))
    enough = min(63, 128 // independent) if independent else 0
    return [reference_of(cell, seed, implementation) for seed in range(1, 1 + enough)]


def _sentences(verdicts: list[Verdict]) -> list[str]:
    return [verdict.sentence for verdict in verdicts if not verdict.passed]
