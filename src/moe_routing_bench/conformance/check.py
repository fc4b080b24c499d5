"""Run one implementation on one hard case and say in words what is wrong with it.

Outputs against the oracle (accuracy.judge), gradients against those of the oracle, inputs unchanged, memory
from torch.empty filled with NaN, two runs with the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from moe_routing_bench.accuracy import Verdict, judge, judge_exact
from moe_routing_bench.conformance.cases import DTYPES, Case, arguments, cases_for, layouts_for, upstream
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.ops.catalog import find, find_all
from moe_routing_bench.ops.registry import Implementation, Op, all_ops, tensors_in
from moe_routing_bench.plan import RoutingPlan


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One implementation on one case: what a line of `mrb check` sums up.

    Cell(op="combine", spec="index_add", case=<plain>, layout="block(4)", dtype="bfloat16")
    """

    op: str
    spec: str
    case: Case
    layout: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}.{self.spec}-{self.case}-{self.layout}-{self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """passed, failed (sentences say how) or unsupported (one sentence says why)."""

    cell: Cell
    status: Literal["passed", "failed", "unsupported"]
    sentences: tuple[str, ...] = ()


def cells(ops: str = "*", specs: str = "*", dtypes: Sequence[str] = tuple(DTYPES)) -> list[Cell]:
    """All cells whose op and implementation match; the patterns are as in a shell. Configurations that a
    tuner may try are implementations too."""
    return [
        cell
        for op in all_ops().values()
        if fnmatchcase(op.name, ops)
        for found in find_all(op, configs=True)
        if matches(found.spec, specs)
        for cell in cells_of(op.name, found.spec, dtypes)
    ]


def cells_of(op: str, spec: str, dtypes: Sequence[str] = tuple(DTYPES)) -> list[Cell]:
    return [
        Cell(op=op, spec=spec, case=case, layout=layout, dtype=dtype)
        for case in cases_for(op)
        for layout in layouts_for(op, case)
        for dtype in dtypes
        if dtype in case.dtypes
    ]


def matches(spec: str, pattern: str) -> bool:
    """A pattern for the name alone also takes the name with any options."""
    return fnmatchcase(spec, pattern) or fnmatchcase(spec.partition("(")[0], pattern)


def check(cell: Cell) -> Outcome:
    op = all_ops()[cell.op]
    found = find(op, cell.spec)
    if found.implementation is None:
        status: Literal["failed", "unsupported"] = "failed" if found.state == "broken" else "unsupported"
        return Outcome(cell=cell, status=status, sentences=(found.reason,))
    return check_implementation(op, found.implementation, cell)


def check_implementation(op: Op, implementation: Implementation, cell: Cell) -> Outcome:
    """As check(), for an implementation that need not be installed."""
    case = cell.case
    differentiable = not (implementation.forward_only or op.name == "make_plan" or case.beyond_int32)
    args = _fresh(op.name, case, cell.layout, cell.dtype, with_grad=differentiable)
    wrong: list[str] = []
    before = _snapshot(args)
    try:
        if (reason := implementation.why_not(*args.values())) is not None:
            return Outcome(cell=cell, status="unsupported", sentences=(reason,))
        with poisoned_memory():
            out = implementation.run(*args.values())
        wrong += _judge_output(op.name, implementation, cell, out, args)
        if not wrong and differentiable:
            wrong += _judge_gradients(op.name, cell, out, args)
        wrong += _changes(before, args)
        if not wrong and implementation.deterministic:
            again = _fresh(op.name, case, cell.layout, cell.dtype, with_grad=False)
            kept = [t.clone() for t in tensors_in(out)]
            with poisoned_memory(), torch.no_grad():
                twice = implementation.run(*again.values())
            if not all(_same_bits(a, b) for a, b in zip(kept, tensors_in(twice), strict=True)):
                wrong.append("a second run on the same input gave other bits; say DETERMINISTIC = False?")
    except Exception as error:
        wrong.append(f"raised {type(error).__name__}: {error}")
    if wrong:
        told = tuple(f"{sentence}. Must hold: {case.guards}" for sentence in wrong)
        return Outcome(cell=cell, status="failed", sentences=told)
    return Outcome(cell=cell, status="passed")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch fills memory it allocates without values with NaN, integers with their maximum."""
    on = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(on, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class _Expected:
    oracle: Any
    baseline: Any
    oracle_grads: Mapping[str, Tensor]
    baseline_grads: Mapping[str, Tensor]


@lru_cache(maxsize=8192)
def _expected(op_name: str, case: Case, layout: str, dtype: str, seed: int = 0) -> _Expected:
    """The reference in float64 and in the dtype itself, with gradients; the same for every implementation."""
    op = all_ops()[op_name]
    differentiable = not (op_name == "make_plan" or case.beyond_int32)
    with torch.enable_grad():
        plain = _fresh(op_name, case, layout, dtype, seed=seed, with_grad=differentiable)
        baseline = op.reference(*plain.values())
        if not differentiable:
            return _Expected(oracle=baseline, baseline=baseline, oracle_grads={}, baseline_grads={})
        exact = _fresh(op_name, case, layout, dtype, seed=seed, with_grad=True, double=True)
        oracle = op.reference(*exact.values())
    d_out = upstream(op_name, case, _values(oracle), plain)
    for args, result in ((plain, baseline), (exact, oracle)):
        _backward(_values(result), d_out, args)
    return _Expected(
        oracle=oracle,
        baseline=baseline,
        oracle_grads={name: _grad(leaf) for name, leaf in _leaves(exact).items()},
        baseline_grads={name: _grad(leaf) for name, leaf in _leaves(plain).items()},
    )


def _judge_output(
    op_name: str, implementation: Implementation, cell: Cell, out: Any, args: Mapping[str, Any]
) -> list[str]:
    expected = _expected(op_name, cell.case, cell.layout, cell.dtype)
    if op_name == "make_plan":
        return _judge_plan(out, expected.oracle)
    if op_name == "topk":
        return _judge_topk(implementation, out, expected.baseline, args)
    if op_name == "dispatch":
        return _named("x_RD", judge_exact(out, expected.baseline))
    if not isinstance(out, Tensor) or out.shape != expected.baseline.shape:
        return _named("the result", judge(out, expected.oracle, expected.baseline))
    if op_name == "grouped_gemm":
        holds_R = args["plan"].pair_R >= 0
        owned_R = args["plan"].expert_R() < args["plan"].num_experts
        padding = out[owned_R & ~holds_R]
        if not bool(padding.isfinite().all()):
            return ["y_RF: padding rows inside a span are not finite, and would spoil the weights' gradient"]
        more = [(e.oracle, e.baseline) for e in _others(op_name, cell, out)]
        return _named("y_RF", judge(out[holds_R], expected.oracle[holds_R], expected.baseline[holds_R], more))
    more = [(e.oracle, e.baseline) for e in _others(op_name, cell, out)]
    wrong = _named("y_TD", judge(out, expected.oracle, expected.baseline, more))
    alone_T = (args["plan"].row_TK < 0).all(dim=1)
    if bool((out[alone_T] != 0).any()):
        alone = alone_T.nonzero().flatten().tolist()
        wrong.append(f"y_TD: tokens {alone} have no row but do not get exactly zero")
    return wrong


def _judge_plan(plan: Any, expected: RoutingPlan) -> list[str]:
    if not isinstance(plan, RoutingPlan):
        return [f"returned {type(plan).__name__} instead of a RoutingPlan"]
    wrong = []
    try:
        plan.validate()
    except ValueError as error:
        wrong.append(f"the plan contradicts itself: {error}")
    except IndexError as error:
        wrong.append(f"the plan points outside its tensors: {error}")
    for field in fields(plan):
        got, want = getattr(plan, field.name), getattr(expected, field.name)
        if isinstance(want, Tensor):
            wrong += _named(field.name, judge_exact(got, want))
        elif got != want:
            wrong.append(f"{field.name} is {got} instead of {want}")
    return wrong


def _judge_topk(
    implementation: Implementation,
    out: Any,
    expected: tuple[Tensor, Tensor],
    args: Mapping[str, Any],
) -> list[str]:
    if not isinstance(out, tuple) or len(out) != 2:
        return ["must return (value_TK, expert_TK)"]
    value_TK, expert_TK = out
    wrong = _named("value_TK", judge_exact(value_TK, expected[0]))
    if implementation.ties == "lower id first" or wrong:
        return wrong + _named("expert_TK", judge_exact(expert_TK, expected[1]))
    wrong += _named("score_TE at expert_TK", judge_exact(args["score_TE"].gather(1, expert_TK), expected[0]))
    if bool((expert_TK.sort(dim=1).values.diff(dim=1) == 0).any()):
        wrong.append("expert_TK: a token chose the same expert twice")
    return wrong


def _judge_gradients(op_name: str, cell: Cell, out: Any, args: Mapping[str, Any]) -> list[str]:
    expected = _expected(op_name, cell.case, cell.layout, cell.dtype)
    result = _values(out)
    if not result.requires_grad:
        if not any(bool((grad != 0).any()) for grad in expected.oracle_grads.values()):
            return []
        return ["the result is cut off from autograd: no gradient reaches any input"]
    with poisoned_memory():
        _backward(result, upstream(op_name, cell.case, result, args), args)
    wrong = []
    for name, leaf in _leaves(args).items():
        oracle, baseline = expected.oracle_grads[name], expected.baseline_grads[name]
        if leaf.grad is None:
            if bool((oracle != 0).any()):
                wrong.append(f"no gradient reaches {name}")
            continue
        got = leaf.grad
        if op_name == "topk":
            # held to its own ids, which were judged already: of equal scores it may have picked another
            d_out = upstream(op_name, cell.case, result, args)
            oracle = torch.zeros_like(oracle).scatter(1, out[1], d_out)
        if op_name in ("grouped_gemm", "combine") and name in ("x_RD", "y_RD"):
            holds_R = args["plan"].pair_R >= 0
            if op_name == "combine" and bool((got[~holds_R] != 0).any()):
                wrong.append(f"gradient of {name}: rows without a pair do not get exactly zero")
            got, oracle, baseline = got[holds_R], oracle[holds_R], baseline[holds_R]
        more = [(e.oracle_grads[name], e.baseline_grads[name]) for e in _others(op_name, cell, got)]
        wrong += _named(f"gradient of {name}", judge(got, oracle, baseline, more))
    return wrong


def _others(op_name: str, cell: Cell, out: Tensor) -> list[_Expected]:
    """The same case on other data, for results so small that the baseline's error is a matter of luck."""
    if out.numel() == 0 or cell.case.beyond_int32:
        return []
    enough = min(8, 100 // out.numel())
    return [_expected(op_name, cell.case, cell.layout, cell.dtype, seed) for seed in range(1, 1 + enough)]


def _named(what: str, verdict: Verdict) -> list[str]:
    return [] if verdict.passed else [f"{what}: {verdict.sentence}"]


def _values(out: Any) -> Tensor:
    """The differentiable part of a result: topk returns ids beside its values."""
    return out[0] if isinstance(out, tuple) else out


def _backward(result: Tensor, d_out: Tensor, args: Mapping[str, Any]) -> None:
    if result.requires_grad:
        result.backward(d_out.to(result.dtype))


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _fresh(
    op_name: str, case: Case, layout: str, dtype: str, *, with_grad: bool, double: bool = False, seed: int = 0
) -> dict[str, Any]:
    """The arguments anew; with_grad makes every floating tensor and weight a leaf that wants a gradient."""

    def leaf(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        tensor = tensor.double() if double else tensor
        return tensor.detach().requires_grad_(with_grad)

    found: dict[str, Any] = {}
    for name, value in arguments(op_name, case, layout, dtype, seed).items():
        if isinstance(value, Tensor):
            found[name] = leaf(value)
        elif isinstance(value, ExpertWeights):
            leaves: dict[str, Any] = {n: leaf(t) for n, t in value.tensors().items()}
            found[name] = replace(value, **leaves)
        else:
            found[name] = value
    return found


def _leaves(args: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in args.items():
        if isinstance(value, ExpertWeights):
            found.update(value.tensors())
        elif isinstance(value, Tensor) and value.is_floating_point():
            found[name] = value
    return found


def _memory(tensor: Tensor) -> Tensor:
    """All the memory behind a tensor, once: a view may repeat elements or leave gaps."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def _snapshot(args: Mapping[str, Any]) -> list[Tensor]:
    return [_memory(tensor).clone() for tensor in tensors_in(args)]


def _changes(before: list[Tensor], args: Mapping[str, Any]) -> list[str]:
    names = _tensor_names(args)
    return [
        f"changed its input {name}"
        for name, old, tensor in zip(names, before, tensors_in(args), strict=True)
        if not _same_bits(old, _memory(tensor))
    ]


def _tensor_names(args: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in args.items():
        if isinstance(value, Tensor):
            found.append(name)
        elif value is not None and not isinstance(value, int):
            inner = [f.name for f in fields(value) if isinstance(getattr(value, f.name), Tensor)]
            found += [f"{name}.{inner_name}" for inner_name in inner]
    return found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
