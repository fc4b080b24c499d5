"""The parent judges what a worker computed, on inputs the parent made itself.

The worker may run code from outside, so nothing it reports about its results is used. It writes its tensors
to a file; the parent compares them with a float64 oracle, by the same rules as everywhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moe_routing_bench.accuracy import Expected, GradientOf, Verdict
from moe_routing_bench.bench.calls import Caller, Result, named_tensors, result_from, value_of
from moe_routing_bench.bench.inputs import ROUTINGS, Inputs, fingerprint
from moe_routing_bench.bench.spans.span import Span
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.registry import all_ops

FEW_ELEMENTS = 512
# Soft-MoE with 4 slots: an honest kernel had a root mean square error over the bound in 1 of 200 calls
FEW_ROWS = 8
OTHER_DRAWS = 3_000_000  # call numbers from here on are never given to a worker
MOST_KEPT = 8  # expected results kept, since every subject needs the same ones for its gate calls
STATUS = {
    "structure": Status.WRONG_STRUCTURE,
    "shape": Status.WRONG_SHAPE,
    "dtype": Status.WRONG_DTYPE,
    "value": Status.WRONG_VALUE,
    "nonfinite": Status.NONFINITE,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding(status=Status.WRONG_VALUE, reason="largest error 0.5 at [3, 0] ...") or PASSED with numbers."""

    status: Status
    reason: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class _Right:
    """The reference's results in float64 and in the case's dtype, and the upstream gradient."""

    oracle: Result
    baseline: Result
    d_out: Tensor | None = None


Key = tuple[int, int, tuple[str, str, str]]  # number, step, question


class Judge:
    """Judges results of one cell's calls. Holds the inputs, and weights in float64."""

    def __init__(self, span: Span, inputs: Inputs):
        self.span, self.inputs = span, inputs
        self._right: OrderedDict[Key, _Right] = OrderedDict()
        self._callers: dict[tuple[tuple[str, str, str], torch.dtype], Caller] = {}
        self._others: dict[tuple[str, str, str], list[_Right]] = {}
        self._prints: dict[Key, str] = {}

    def input_print(self, number: int, step: int, subject: Subject) -> str:
        """The fingerprint the call's arguments must still have afterwards."""
        key = (number, step, subject.question)
        if key not in self._prints:
            self._prints[key] = fingerprint(activations(self._arguments(number, step, subject)))
        return self._prints[key]

    @cached_property
    def weights_print(self) -> str:
        return weights_print(self.span, self.inputs)

    def judge(
        self, path: Path, number: int, step: int, subject: Subject, ties: str = "lower id first"
    ) -> Finding:
        """Judge the file a worker wrote for call `number`."""
        right, args = self._expect(number, step, subject), self._arguments(number, step, subject)
        try:
            result = read_result(path, right.baseline)
        except ValueError as error:
            return Finding(status=Status.WRONG_STRUCTURE, reason=str(error))

        def others(n: int) -> list[tuple[Any, Any]]:
            return [(one.oracle.out, one.baseline.out) for one in self._more(subject, n)]

        expected = Expected(
            oracle=right.oracle.out,
            baseline=right.baseline.out,
            more=others,
            ties=ties,
            few_rows=self._few_rows(subject),
        )
        verdicts = self.span.judge(result.out, expected, args)
        if all(verdict.passed for verdict in verdicts):
            verdicts += self._judge_gradients(result, right, args, subject)
        wrong = [verdict for verdict in verdicts if not verdict.passed]
        if wrong:
            reason = "; ".join(verdict.sentence for verdict in wrong)
            return Finding(status=STATUS[wrong[0].fault], reason=reason, verdict=wrong[0])
        return Finding(status=Status.PASSED, verdict=verdicts[0] if verdicts else None)

    def _judge_gradients(
        self, result: Result, right: _Right, args: Mapping[str, Any], subject: Subject
    ) -> list[Verdict]:
        verdicts = []
        for name, gradient in result.gradients.items():
            oracle, baseline = right.oracle.gradients[name], right.baseline.gradients[name]
            if gradient is None or oracle is None or baseline is None:
                if oracle is not None and gradient is None and bool((oracle != 0).any()):
                    sentence = f"no gradient reaches {name}"
                    verdicts.append(Verdict(passed=False, fault="value", sentence=sentence))
                continue

            def others(n: int, name: str = name) -> list[tuple[Any, Any]]:
                more = self._more(subject, n)
                return [(one.oracle.gradients[name], one.baseline.gradients[name]) for one in more]

            assert right.d_out is not None
            of = GradientOf(name=name, args=args, out=result.out, d_out=right.d_out)
            few_rows = self._few_rows(subject)
            expected = Expected(oracle=oracle, baseline=baseline, more=others, few_rows=few_rows)
            judged = self.span.judge_gradient(of, gradient, expected)
            verdicts += [verdict.of(f"gradient of {name}") for verdict in judged]
        return verdicts

    def same_bits(self, one: Path, other: Path, *, number: int, step: int, subject: Subject) -> bool:
        """Do two judged results of the same call agree in all bits that mean something?"""
        right, args = self._expect(number, step, subject), self._arguments(number, step, subject)
        tensors = []
        for path in (one, other):
            result = read_result(path, right.baseline)
            meaningful = self.span.meaningful(result.out, args)
            tensors.append(named_tensors(Result(out=meaningful, gradients=result.gradients)))
        return all(
            torch.equal(_bits(a), _bits(b)) for a, b in zip(*(t.values() for t in tensors), strict=True)
        )

    def _arguments(self, number: int, step: int, subject: Subject) -> dict[str, Any]:
        return self.span.arguments(self.span.call(subject, self.inputs, number, step))

    def _few_rows(self, subject: Subject) -> bool:
        """Are there fewer rows than pairs, as in Soft-MoE, and so few that their mean error is luck?"""
        s = self.inputs.case.shape
        return self.span.rows(subject, self.inputs) < min(FEW_ROWS, s.num_pairs)

    def _more(self, subject: Subject, n: int) -> list[_Right]:
        """Results on other data, to know plain torch's usual error when a result has few elements."""
        telling = min(n, 8 * self.span.rows(subject, self.inputs))
        draws = min(16, -(-FEW_ELEMENTS // telling)) if 0 < telling < FEW_ELEMENTS else 0
        ready = self._others.setdefault(subject.question, [])
        while len(ready) < draws:
            ready.append(self._compute(OTHER_DRAWS + len(ready), len(ready) % ROUTINGS, subject))
        return ready[:draws]

    def _expect(self, number: int, step: int, subject: Subject) -> _Right:
        key = (number, step, subject.question)
        if key not in self._right:
            self._right[key] = self._compute(number, step, subject)
            if len(self._right) > MOST_KEPT:
                self._right.popitem(last=False)
        return self._right[key]

    @torch.no_grad()
    def _compute(self, number: int, step: int, subject: Subject) -> _Right:
        call = self.span.call(subject, self.inputs, number, step)
        args = self.span.arguments(call)
        results: list[Result] = []
        forward = self.inputs.case.direction == "forward"
        for dtype in (self.inputs.dtype, torch.float64):
            if results and self.span.exact and forward:
                return _Right(oracle=results[0], baseline=results[0])
            caller = self._caller(subject, dtype)
            given = args if dtype == self.inputs.dtype else {n: self._wide(v) for n, v in args.items()}
            results.append(caller.result(caller.ready(call, given)(), given))
        d_out = None
        if not forward:
            shape = value_of(results[0].out).shape
            d_out = self.span.upstream(call.upstream(shape), args).double()
        return _Right(oracle=results[1], baseline=results[0], d_out=d_out)

    def _caller(self, subject: Subject, dtype: torch.dtype) -> Caller:
        key = (subject.question, dtype)
        if key not in self._callers:
            plain = self.span.plain(subject, self.inputs, dtype)
            # gradients need the forward pass too, so the oracle trains
            direction = "forward" if self.inputs.case.direction == "forward" else "train"
            self._callers[key] = Caller(self.span, plain, direction)
        return self._callers[key]

    def _wide(self, value: Any) -> Any:
        if value is self.inputs.weights:
            return self._wide_weights
        if isinstance(value, Tensor) and value.is_floating_point():
            if value is self.inputs.weights.w_in_EDG:
                return self._wide_weights.w_in_EDG
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    @cached_property
    def _wide_weights(self) -> ExpertWeights:
        wide = self.inputs.weights.to(dtype=torch.float64)
        wanted = self.inputs.case.direction != "forward"
        leaves: Any = {n: t.detach().requires_grad_(wanted) for n, t in wide.tensors().items()}
        return replace(wide, **leaves)


def activations(args: Mapping[str, Any]) -> list[Any]:
    """Arguments of a call without the experts' weights, which are large and the same for every call."""
    heavy = {op.weights for op in all_ops().values() if op.weights}
    return [value for name, value in args.items() if name not in heavy]


def weights_print(span: Span, inputs: Inputs) -> str:
    if not span.weights:
        return ""
    shared = () if inputs.shared is None else inputs.shared
    router = inputs.router_DE if span.routed and inputs.checkpoint is None else ()
    return fingerprint(inputs.weights, shared, router)


def read_result(path: Path, expected: Result) -> Result:
    """The result a worker wrote to a file; ValueError if it is not of the expected type."""
    sizes = [t.numel() for t in tensors_in((expected.out, dict(expected.gradients)))]
    room = 8 * sum(sizes) + 2**20
    if not path.exists():
        raise ValueError("no result was handed over")
    if path.stat().st_size > room:
        raise ValueError(f"the result is {path.stat().st_size} bytes, far more than expected")
    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"the result cannot be read: {error}") from None
    return result_from(tensors, expected)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
