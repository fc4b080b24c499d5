"""Checks that every timed result is right. Each is compared with the trusted baseline's result for the same
inputs, and calls drawn by lot are judged in full. If the comparison doubts a result, the float64 oracle
decides, so no honest kernel is blamed for differing from the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.calls import Result, result_from, tensors_by_name
from moe_routing_bench.bench.judging import ExpectedOutput, Judge
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.core.accuracy import FACTOR, FLOOR_MAX, FLOOR_RMS
from moe_routing_bench.workloads.experiment import ImplementationRef


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far two right results may be apart: each within the judge's bound of the oracle."""

    largest: float
    rms: float


class Checker:
    """Checks results of calls on secret inputs. `right` is any call of the same question."""

    def __init__(self, judge: Judge, right: ExpectedOutput):
        self.judge, self.right = judge, right
        oracle, plain = tensors_by_name(right.oracle), tensors_by_name(right.baseline)
        self.bounds = {name: _bound(plain[name], oracle[name]) for name in oracle if name in plain}

    def result(self, tensors: Mapping[str, Tensor]) -> Result:
        try:
            return result_from(tensors, self.right.baseline)
        except ValueError as error:
            raise ImplementationError(Status.WRONG_STRUCTURE, str(error)) from None

    def alike(self, one: Result, other: Result, args: Mapping[str, Any]) -> bool:
        """True if two results of the same call are as near as two right ones."""
        a, b = (self._telling(result, args) for result in (one, other))
        return a.keys() == b.keys() and all(
            _near(a[name], b[name], self.bounds.get(name, Bound(largest=0.0, rms=0.0))) for name in a
        )

    def judge_in_full(
        self, result: Result, number: int, step: int, implementation: ImplementationRef, ties: str
    ) -> None:
        finding = self.judge.judge_result(result, number, step, implementation, ties)
        if finding.status is not Status.PASSED:
            raise ImplementationError(finding.status, finding.reason)

    def _telling(self, result: Result, args: Mapping[str, Any]) -> dict[str, Tensor]:
        out = self.judge.span.meaningful(result.out, args)
        return tensors_by_name(Result(out=out, gradients=result.gradients))


def _bound(plain: Tensor, oracle: Tensor) -> Bound:
    if not plain.is_floating_point() or not plain.numel():
        return Bound(largest=0.0, rms=0.0)
    true = oracle.detach().double().nan_to_num(0.0, 0.0, 0.0)
    error = (plain.detach().double().nan_to_num(0.0, 0.0, 0.0) - true).abs()
    eps = torch.finfo(plain.dtype).eps
    largest = FACTOR * error.max() + FLOOR_MAX * eps * true.abs().max()
    rms = FACTOR * error.square().mean().sqrt() + FLOOR_RMS * eps * true.square().mean().sqrt()
    return Bound(largest=2 * largest.item(), rms=2 * rms.item())


def _near(a: Tensor, b: Tensor, bound: Bound) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() or not a.numel():
        return False
    apart = (a.detach() - b.detach()).float()  # NaN fails both comparisons, and the oracle decides
    return bool(apart.abs().max() <= bound.largest) and bool(apart.square().mean().sqrt() <= bound.rms)
