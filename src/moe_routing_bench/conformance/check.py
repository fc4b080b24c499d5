"""Runs one implementation on one hard case and says in sentences what is wrong with it.

It compares results and gradients with the oracle's (accuracy.judge). It also checks that inputs are
unchanged, that two runs give the same bits and that earlier results stay intact, with memory from torch.empty
full of NaN.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from moe_routing_bench.conformance.arguments import fresh_arguments, leaves_of, memory_of, upstream
from moe_routing_bench.conformance.batches import batch_dependence
from moe_routing_bench.conformance.cases import KitCell, cases_for, layouts_for
from moe_routing_bench.conformance.judging import (
    asks_for_gradients,
    differentiable_part,
    judge_gradients,
    judge_output,
)
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.names import base_name
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.catalog import find, find_all
from moe_routing_bench.ops.implementation import Implementation, tensors_in
from moe_routing_bench.ops.registry import all_ops, get_op


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """passed, failed (sentences say how) or unsupported (one sentence says why)."""

    cell: KitCell
    status: Literal["passed", "failed", "unsupported"]
    sentences: tuple[str, ...] = ()
    # if it does not declare BATCH_INVARIANT: could it, as far as this cell shows? None: not checked
    could_say_invariant: bool | None = None


def cells(
    ops: str = "*", specs: str = "*", dtypes: Sequence[str] = tuple(DTYPES), device: str = "cpu"
) -> list[KitCell]:
    """Returns all cells whose op and implementation match; patterns are those of a shell. Configurations that
    a tuner may try count as implementations."""
    return [
        cell
        for op in all_ops().values()
        if fnmatchcase(op.name, ops)
        for listed in find_all(op, configs=True)
        if matches(listed.spec, specs)
        for cell in cells_of(op.name, listed.spec, dtypes, device)
    ]


def cells_of(op: str, spec: str, dtypes: Sequence[str] = tuple(DTYPES), device: str = "cpu") -> list[KitCell]:
    return [
        KitCell(op=op, spec=spec, case=case, layout=layout, dtype=dtype, device=device)
        for case in cases_for(get_op(op))
        for layout in layouts_for(get_op(op), case)
        for dtype in dtypes
        if dtype in case.dtypes
    ]


def matches(spec: str, pattern: str) -> bool:
    """Returns whether the pattern matches the whole spec, or the name without its options."""
    return fnmatchcase(spec, pattern) or fnmatchcase(base_name(spec), pattern)


def check(cell: KitCell) -> Outcome:
    listed = find(get_op(cell.op), cell.spec)
    if listed.implementation is None:
        status: Literal["failed", "unsupported"] = "failed" if listed.state == "broken" else "unsupported"
        return Outcome(cell=cell, status=status, sentences=(listed.reason,))
    return check_implementation(listed.implementation, cell)


def check_implementation(implementation: Implementation, cell: KitCell) -> Outcome:
    """Does the same as check() for an implementation that need not be registered."""
    could_say: bool | None = None
    try:
        with_grad = asks_for_gradients(cell.op, cell.case) and not implementation.forward_only
        args = _fresh(cell, with_grad=with_grad)
        if (reason := implementation.why_not(*args.values())) is not None:
            return Outcome(cell=cell, status="unsupported", sentences=(reason,))
        if cell.case.nan_token and implementation.spreads_nan:
            return Outcome(cell=cell, status="unsupported", sentences=(implementation.spreads_nan,))
        with _right_interpreter():
            wrong = _whats_wrong(implementation, cell, args)
            if not wrong and _asks_for_batches(implementation, cell):
                dependence = batch_dependence(implementation, cell)
                if not implementation.batch_invariant:
                    could_say = dependence is None
                elif dependence is not None:
                    wrong = [f"it says BATCH_INVARIANT, but {dependence}"]
    except Exception as error:
        wrong = [f"raised {type(error).__name__}: {error}"]
    if wrong:
        sentences = tuple(f"{sentence}. Must hold: {cell.case.guards}" for sentence in wrong)
        return Outcome(cell=cell, status="failed", sentences=sentences)
    return Outcome(cell=cell, status="passed", could_say_invariant=could_say)


def result_of(cell: KitCell) -> Any:
    """What an implementation returns for a cell, for a judge elsewhere; None if it does not support it."""
    implementation, args = find(get_op(cell.op), cell.spec).implementation, _fresh(cell)
    if implementation is None or (cell.case.nan_token and implementation.spreads_nan):
        return None
    with _right_interpreter(), poisoned_memory(), torch.no_grad():
        if implementation.why_not(*args.values()) is not None:
            return None
        return _on_host(implementation.run(*args.values()))


def _asks_for_batches(implementation: Implementation, cell: KitCell) -> bool:
    """In the interpreter only implementations that promise it are checked: a hundred calls take minutes."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return cell.case.batches and (implementation.batch_invariant or not interpreted)


def _right_interpreter() -> AbstractContextManager[None]:
    """Repairs the mistakes of Triton's interpreter while it is in use."""
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton" not in sys.modules:
        return nullcontext()
    from moe_routing_bench.conformance.interpreting import repaired

    return repaired()


def _whats_wrong(implementation: Implementation, cell: KitCell, args: Mapping[str, Any]) -> list[str]:
    host_args = fresh_arguments(cell.op, cell.case, cell.layout, cell.dtype)
    before = [memory_of(tensor).clone() for tensor in tensors_in(args)]
    with poisoned_memory():
        out = implementation.run(*args.values())
    kept = _on_host(out)
    wrong = judge_output(implementation, cell, kept, host_args)

    wants_grad = asks_for_gradients(cell.op, cell.case) and not implementation.forward_only
    if not wrong and wants_grad:
        result = differentiable_part(out)
        if result.requires_grad:
            d_out = upstream(cell.op, cell.case, result.shape, host_args)
            with poisoned_memory():
                result.backward(d_out.to(result.device, result.dtype))
        grads = {n: None if leaf.grad is None else leaf.grad.cpu() for n, leaf in leaves_of(args).items()}
        wrong += judge_gradients(cell, kept, grads, host_args)

    after = (memory_of(tensor) for tensor in tensors_in(args))
    names = _names_of_tensors(args)
    changed = [n for n, old, new in zip(names, before, after, strict=True) if not _same_bits(old, new)]
    wrong += [f"changed its input {name}" for name in changed]
    if wrong:
        return wrong

    def run_again(*, with_grad: bool, seed: int = 0) -> Any:
        with poisoned_memory(), nullcontext() if with_grad else torch.no_grad():
            return _on_host(implementation.run(*_fresh(cell, with_grad=with_grad, seed=seed).values()))

    other_bits = "a second run on the same input gave other bits; say DETERMINISTIC = False?"
    if implementation.deterministic and not _all_same_bits(kept, run_again(with_grad=wants_grad)):
        wrong.append(other_bits)
    # an implementation may take another path without gradients, so that is judged too
    plain = run_again(with_grad=False) if wants_grad else kept
    if wants_grad and not _all_same_bits(kept, plain):
        wrong += judge_output(implementation, cell, plain, host_args)
        if implementation.deterministic and not _all_same_bits(plain, run_again(with_grad=False)):
            wrong.append(other_bits)
    if implementation.freeze is not None:
        frozen = _fresh(cell)
        weights = all_ops()[cell.op].weights
        frozen[weights] = implementation.freeze(frozen[weights])
        with poisoned_memory(), torch.no_grad():
            out_of_frozen = _on_host(implementation.run(*frozen.values()))
        sentences = judge_output(implementation, cell, out_of_frozen, host_args)
        wrong += [f"with frozen weights: {sentence}" for sentence in sentences]
    if not implementation.reuses_output and cell.case.name == "plain":
        run_again(with_grad=False, seed=1)
        if not _all_same_bits(kept, _on_host(out)):
            wrong.append("the next call overwrote an earlier result; say REUSES_OUTPUT = True?")
    return wrong


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch fills uninitialised memory with NaN, and integers with their maximum."""
    # use_deterministic_algorithms does the same, but imports all of torch.compile: 1 to 3 s in every worker
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _fresh(cell: KitCell, *, with_grad: bool = False, seed: int = 0) -> dict[str, Any]:
    return fresh_arguments(
        cell.op, cell.case, cell.layout, cell.dtype, with_grad=with_grad, seed=seed, device=cell.device
    )


def _on_host(out: Any) -> Any:
    """Copies the values to the host. Anything that is not a result stays as it is, for the judge."""
    if isinstance(out, Tensor):
        return out.detach().to("cpu", copy=True)
    if isinstance(out, tuple):
        return tuple(_on_host(part) for part in out)
    return out.to("cpu") if isinstance(out, RoutingPlan) else out


def _names_of_tensors(args: Mapping[str, Any]) -> list[str]:
    names = []
    for name, value in args.items():
        if isinstance(value, Tensor):
            names.append(name)
        elif is_dataclass(value):
            inner = [f.name for f in fields(value) if isinstance(getattr(value, f.name), Tensor)]
            names += [f"{name}.{inner_name}" for inner_name in inner]
    return names


def _all_same_bits(first: Any, second: Any) -> bool:
    return all(_same_bits(a, b) for a, b in zip(tensors_in(first), tensors_in(second), strict=True))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
