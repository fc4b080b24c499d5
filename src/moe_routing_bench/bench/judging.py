"""The parent judges what a worker computed, on inputs the parent made itself.

The worker may run code from outside, so nothing it reports about its results is used. It writes its tensors
to a file; the parent compares them with a float64 oracle, by the same rules as everywhere else.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from moe_routing_bench.bench.calls import Caller, Result, Wanted, named_tensors, result_from, value_of
from moe_routing_bench.bench.inputs import ROUTINGS, Inputs, fingerprint
from moe_routing_bench.bench.spans.span import Span
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.untrusted import read_file
from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.workloads.experiment import ImplementationRef, Question

FEW_ELEMENTS = 512
MAX_DRAWS = 16  # of other data, for a result with few elements
# Soft-MoE with 4 slots: an honest kernel had a root mean square error over the bound in 1 of 200 calls
FEW_ROWS = 8
OTHER_DRAWS = 3_000_000  # call numbers from here on are never given to a worker
MAX_KEPT = 8  # expected results kept, since every implementation needs the same ones for its gate calls
MAX_KEPT_BYTES = 2 << 30  # of them; two are kept in any case
MAX_GRADIENT = 1 << 22  # elements of a gradient judged at once: of larger ones, random experts
STATUS = {
    "structure": Status.WRONG_STRUCTURE,
    "shape": Status.WRONG_SHAPE,
    "dtype": Status.WRONG_DTYPE,
    "value": Status.WRONG_VALUE,
    "nonfinite": Status.NONFINITE,
}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Judgement(status=Status.WRONG_VALUE, reason="largest error 0.5 at [3, 0] ..."), or PASSED with
    numbers."""

    status: Status
    reason: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class ExpectedOutput:
    """The reference's results in float64 and in the case's dtype, and the upstream gradient."""

    oracle: Result
    baseline: Result
    d_out: Tensor | None = None


Key = tuple[int, int, Question]  # number and step of a call


class Judge:
    """Judges results of one cell's calls. Holds the inputs, and weights in float64."""

    def __init__(self, span: Span, inputs: Inputs):
        self.span, self.inputs = span, inputs
        self._right: OrderedDict[Key, ExpectedOutput] = OrderedDict()
        self._callers: dict[tuple[Question, torch.dtype], Caller] = {}
        self._others: dict[Question, list[ExpectedOutput]] = {}
        self._prints: dict[Key, str] = {}
        self.oracle_seconds = 0.0  # of the last one that was computed

    def input_print(self, number: int, step: int, implementation: ImplementationRef) -> str:
        """Returns the fingerprint that the call's arguments must still have afterwards."""
        key = (number, step, implementation.question)
        if key not in self._prints:
            self._prints[key] = fingerprint(activations(self.arguments(number, step, implementation)))
        return self._prints[key]

    @cached_property
    def weights_print(self) -> str:
        return weights_print(self.span, self.inputs)

    def judge(
        self,
        path: Path,
        number: int,
        step: int,
        implementation: ImplementationRef,
        ties: str = "lower id first",
    ) -> Judgement:
        """Judges the file that a worker wrote for call `number`."""
        try:
            result = read_result(path, self.right(number, step, implementation).baseline)
        except ValueError as error:
            return Judgement(status=Status.WRONG_STRUCTURE, reason=str(error))
        return self.judge_result(result, number, step, implementation, ties)

    def judge_result(
        self,
        result: Result,
        number: int,
        step: int,
        implementation: ImplementationRef,
        ties: str = "lower id first",
    ) -> Judgement:
        right, args = self.right(number, step, implementation), self.arguments(number, step, implementation)

        def others(n: int) -> list[tuple[Any, Any]]:
            return [(one.oracle.out, one.baseline.out) for one in self._more(implementation, n)]

        expected = Expected(
            oracle=right.oracle.out,
            baseline=right.baseline.out,
            more=others,
            ties=ties,
            few_rows=self._few_rows(implementation),
        )
        verdicts = self.span.judge(result.out, expected, args)
        if all(verdict.passed for verdict in verdicts):
            verdicts += self._judge_gradients(result, right, args, implementation)
        wrong = [verdict for verdict in verdicts if not verdict.passed]
        if wrong:
            reason = "; ".join(verdict.sentence for verdict in wrong)
            return Judgement(status=STATUS[wrong[0].fault], reason=reason, verdict=wrong[0])
        return Judgement(status=Status.PASSED, verdict=verdicts[0] if verdicts else None)

    def _judge_gradients(
        self,
        result: Result,
        right: ExpectedOutput,
        args: Mapping[str, Any],
        implementation: ImplementationRef,
    ) -> list[Verdict]:
        verdicts = []
        for name, gradient in result.gradients.items():
            oracle, baseline = right.oracle.gradients[name], right.baseline.gradients[name]
            if gradient is None or oracle is None or baseline is None:
                if oracle is not None and gradient is None and bool((oracle != 0).any()):
                    sentence = f"no gradient reaches {name}"
                    verdicts.append(Verdict(passed=False, fault="value", sentence=sentence))
                continue

            def others(n: int, name: str = name, size: int = oracle.numel()) -> list[tuple[Any, Any]]:
                more = self._more(implementation, size)  # n may be wrong
                return [(one.oracle.gradients[name], one.baseline.gradients[name]) for one in more]

            if gradient.shape == baseline.shape:
                gradient, oracle, baseline = _some_experts(gradient, oracle, baseline)
            assert right.d_out is not None
            of = GradientOf(name=name, args=args, out=result.out, d_out=right.d_out)
            few_rows = self._few_rows(implementation)
            expected = Expected(oracle=oracle, baseline=baseline, more=others, few_rows=few_rows)
            judged = self.span.judge_gradient(of, gradient, expected)
            verdicts += [verdict.of(f"gradient of {name}") for verdict in judged]
        return verdicts

    def same_bits(
        self, one: Path, other: Path, *, number: int, step: int, implementation: ImplementationRef
    ) -> bool:
        """Do two judged results of the same call agree in all bits that mean something?"""
        right, args = self.right(number, step, implementation), self.arguments(number, step, implementation)
        tensors = []
        for path in (one, other):
            result = read_result(path, right.baseline)
            meaningful = self.span.meaningful(result.out, args)
            tensors.append(named_tensors(Result(out=meaningful, gradients=result.gradients)))
        return all(
            torch.equal(_bits(a), _bits(b)) for a, b in zip(*(t.values() for t in tensors), strict=True)
        )

    def arguments(self, number: int, step: int, implementation: ImplementationRef) -> dict[str, Any]:
        return self.span.arguments(self.span.call(implementation, self.inputs, number, step))

    def _few_rows(self, implementation: ImplementationRef) -> bool:
        """True if there are fewer rows than pairs, as in Soft-MoE, and so few that their mean error depends
        on luck."""
        s = self.inputs.experiment.shape
        return self.span.rows(implementation, self.inputs) < min(FEW_ROWS, s.num_pairs)

    def _more(self, implementation: ImplementationRef, n: int) -> list[ExpectedOutput]:
        """Returns results on other data. They show the usual error of plain torch when a result has few
        elements."""
        draws = self._draws(implementation, n)
        ready = self._others.setdefault(implementation.question, [])
        while (place := len(ready)) < draws:
            # gradients of large weights need few draws, and 16 of them would be gigabytes
            wanted = partial(self._wants_draw, implementation, place)
            ready.append(self._compute(OTHER_DRAWS + place, place % ROUTINGS, implementation, wanted))
        return ready[:draws]

    def _draws(self, implementation: ImplementationRef, n: int) -> int:
        telling = min(n, 8 * self.span.rows(implementation, self.inputs))
        return min(MAX_DRAWS, -(-FEW_ELEMENTS // telling)) if 0 < telling < FEW_ELEMENTS else 0

    def _wants_draw(self, implementation: ImplementationRef, place: int, tensor: Tensor) -> bool:
        return place < self._draws(implementation, tensor.numel())

    def right(self, number: int, step: int, implementation: ImplementationRef) -> ExpectedOutput:
        """Returns what the reference computes for a call."""
        key = (number, step, implementation.question)
        if key not in self._right:
            self._right[key] = self._compute(number, step, implementation)
            while len(self._right) > 2 and (
                len(self._right) > MAX_KEPT or self._kept_bytes() > MAX_KEPT_BYTES
            ):
                self._right.popitem(last=False)
        return self._right[key]

    def knows(self, number: int, step: int, implementation: ImplementationRef) -> bool:
        return (number, step, implementation.question) in self._right

    def foresee(self, calls: Iterable[tuple[int, int]], implementation: ImplementationRef) -> None:
        """Computes reference results in advance. If that fails, judging the call reports the error."""
        with suppress(Exception):
            for number, step in calls:
                self.right(number, step, implementation)

    def _kept_bytes(self) -> int:
        results = [result for right in self._right.values() for result in (right.oracle, right.baseline)]
        return sum(tensor.nbytes for result in results for tensor in named_tensors(result).values())

    @torch.no_grad()
    def _compute(
        self, number: int, step: int, implementation: ImplementationRef, only: Wanted | None = None
    ) -> ExpectedOutput:
        began = time.perf_counter()
        call = self.span.call(implementation, self.inputs, number, step)
        args = self.span.arguments(call)
        results: list[Result] = []
        forward = self.inputs.experiment.direction == "forward"
        for dtype in (self.inputs.dtype, torch.float64):
            if results and self.span.exact and forward:
                return ExpectedOutput(oracle=results[0], baseline=results[0])
            if results and (known := self._known(number, step, implementation)) is not None:
                return ExpectedOutput(oracle=known.oracle, baseline=results[0], d_out=known.d_out)
            caller = self._caller(implementation, dtype)
            given = args if dtype == self.inputs.dtype else {n: self._wide(v) for n, v in args.items()}
            results.append(caller.result(caller.ready(call, given, only)(), given, only))
        d_out = None
        if not forward:
            shape = value_of(results[0].out).shape
            d_out = self.span.upstream(call.upstream(shape), args).double()
        self.oracle_seconds = time.perf_counter() - began
        return ExpectedOutput(oracle=results[1], baseline=results[0], d_out=d_out)

    def _known(self, number: int, step: int, implementation: ImplementationRef) -> ExpectedOutput | None:
        """Returns the result of the same call for an implementation with another tolerance, because the
        oracle is the same."""
        asked = (number, step, implementation.question[:3])
        return next((right for (n, s, q), right in self._right.items() if (n, s, q[:3]) == asked), None)

    def _caller(self, implementation: ImplementationRef, dtype: torch.dtype) -> Caller:
        key = (implementation.question, dtype)
        if key not in self._callers:
            plain = self.span.plain(implementation, self.inputs, dtype)
            # gradients need the forward pass too, so the oracle trains
            direction = "forward" if self.inputs.experiment.direction == "forward" else "train"
            self._callers[key] = Caller(self.span, plain, direction)
        return self._callers[key]

    def _wide(self, value: Any) -> Any:
        if value is self.inputs.weights:
            if self.inputs.experiment.store:
                return self.inputs.exact
            narrow = self.span.widens and self.inputs.experiment.direction == "forward"
            return value if narrow else self._wide_weights
        if isinstance(value, Tensor) and value.is_floating_point():
            if value is self.inputs.weights.w_in_EDG:
                return self._wide_weights.w_in_EDG
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    @cached_property
    def _wide_weights(self) -> ExpertWeights:
        wide = self.inputs.weights.to(dtype=torch.float64)
        wanted = self.inputs.experiment.direction != "forward"
        leaves: Any = {n: t.detach().requires_grad_(wanted) for n, t in wide.tensors().items()}
        return replace(wide, **leaves)


def _some_experts(*gradients: Tensor) -> tuple[Tensor, ...]:
    """Selects the same random experts of each gradient if the gradient is too large. The gradient of a
    model's experts has 10^8 elements, and comparing all of them took longer than all calls together."""
    elements = gradients[0].numel()
    if gradients[0].ndim != 3 or elements <= MAX_GRADIENT:
        return gradients
    E = gradients[0].shape[0]
    count = max(1, MAX_GRADIENT * E // elements)
    chosen = torch.tensor(sorted(random.SystemRandom().sample(range(E), count)))
    return tuple(gradient[chosen] for gradient in gradients)


def activations(args: Mapping[str, Any]) -> list[Any]:
    """Arguments of a call without the experts' weights, which are large and the same for every call."""
    return [value for name, value in args.items() if name not in heavy()]


@cache
def heavy() -> frozenset[str]:
    """Parameters of operations that hold weights."""
    return frozenset(op.weights for op in all_ops().values() if op.weights)


def weights_print(span: Span, inputs: Inputs) -> str:
    if not span.weights:
        return ""
    shared = () if inputs.shared is None else inputs.shared
    router = inputs.router_DE if span.routed and inputs.checkpoint is None else ()
    return "".join(_sums_print(tensor) for tensor in tensors_in((inputs.weights, shared, router)))


def _sums_print(tensor: Tensor) -> str:
    """Hashes sums of the bits over rows and over columns, for gigabytes. It detects accidental writes,
    including swapped values, but not a deliberate collision. sha256 of everything takes ten times as long."""
    if tensor.ndim > 1 and tensor.mT.is_contiguous():  # as it lies in memory: to transpose it takes longest
        tensor = tensor.mT
    words = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    whole = words.numel() // 8192 * 8192
    table = words[:whole].view(torch.int64).view(-1, 1024)
    return fingerprint(table.sum(0), table.sum(1), words[whole:])


def read_result(path: Path, expected: Result) -> Result:
    """The result a worker wrote to a file; ValueError if it is not of the expected type."""
    sizes = [t.numel() for t in tensors_in((expected.out, dict(expected.gradients)))]
    room = 8 * sum(sizes) + 2**20
    try:
        tensors = load(read_file(path, room))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"the result cannot be read: {error}") from None
    return result_from(tensors, expected)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
