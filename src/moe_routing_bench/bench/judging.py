"""Is what a worker computed right? Asked in the parent, on inputs the parent made itself.

The worker runs code from outside; whatever it says about its own results counts for nothing here. It hands
over tensors in a file, and they are held against a float64 oracle with the same judge as everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moe_routing_bench.accuracy import Verdict, judge, judge_exact
from moe_routing_bench.bench.inputs import ROUTINGS, Inputs, fingerprint
from moe_routing_bench.bench.spans import Span
from moe_routing_bench.bench.status import Status
from moe_routing_bench.conformance.judging import judge_choices, judge_plan, judge_topk, true_gates
from moe_routing_bench.experts import ExpertWeights, activate
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.registry import all_ops, tensors_in
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

FEW_ELEMENTS = 512
OTHER_DRAWS = 3_000_000  # call numbers no worker is asked for
MOST_KEPT = 8  # expected results held at once; a gate call's is asked for by every subject in turn


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding(status=Status.WRONG_VALUE, reason="largest error 0.5 at [3, 0] ...") or PASSED with numbers."""

    status: Status
    reason: str = ""
    verdict: Verdict | None = None


PASSED = Finding(status=Status.PASSED)


@dataclass(frozen=True, kw_only=True)
class _Expected:
    oracle: Any
    baseline: Any


class Judge:
    """Judges results of one cell's calls. Holds the inputs, and weights in float64."""

    def __init__(self, span: Span, inputs: Inputs):
        self.span, self.inputs = span, inputs
        self._expected: OrderedDict[tuple[int, int, str], _Expected] = OrderedDict()
        self._others: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._prints: dict[tuple[int, int, str], str] = {}

    def input_print(self, number: int, step: int, layout: str) -> str:
        """The fingerprint the call's arguments must still have afterwards."""
        key = (number, step, layout)
        if key not in self._prints:
            self._prints[key] = fingerprint(self.activations(number, step, layout))
        return self._prints[key]

    def activations(self, number: int, step: int, layout: str) -> tuple[Any, ...]:
        """The arguments without weights, which are the same for every call and have a print of their own."""
        return activations_of(self.span, self.inputs.call(number, layout, step))

    @cached_property
    def weights_print(self) -> str:
        return weights_print(self.span, self.inputs)

    def judge(self, path: Path, number: int, step: int, layout: str, ties: str = "lower id first") -> Finding:
        """The file a worker wrote for call `number`."""
        expected = self._expect(number, step, layout)
        try:
            out = read_output(path, expected.baseline, Layout.parse(layout))
        except ValueError as error:
            return Finding(status=Status.WRONG_STRUCTURE, reason=str(error))
        if self.span.name == "make_plan":
            return _structure(judge_plan(out, expected.oracle))
        if self.span.name == "topk":
            args = {"score_TE": self.inputs.call(number, layout, step)[0]}
            return _structure(judge_topk(ties, out, expected.baseline, args))
        if self.span.name == "score_topk":
            logits_TE, bias_E, _, rule = self.inputs.call(number, layout, step)
            out, expert_TK = out
            if wrong := judge_choices(expert_TK, expected.oracle[1], logits_TE, bias_E, rule):
                return _structure(wrong)
            oracle, baseline = true_gates(logits_TE, expert_TK, rule)
            expected = _Expected(oracle=oracle, baseline=baseline)
        if out.shape != expected.baseline.shape:
            told = f"shape {tuple(out.shape)}, expected {tuple(expected.baseline.shape)}"
            return Finding(status=Status.WRONG_SHAPE, reason=told)
        if out.dtype != expected.baseline.dtype:
            told = f"dtype {out.dtype}, expected {expected.baseline.dtype}"
            return Finding(status=Status.WRONG_DTYPE, reason=told)
        if self.span.name == "dispatch":
            return _value(judge_exact(out, expected.baseline), out)
        oracle, baseline = expected.oracle, expected.baseline
        if self.span.name == "grouped_gemm":
            plan = self.inputs.plan(step, layout)
            holds_R, owned_R = plan.pair_R >= 0, plan.expert_R() < plan.num_experts
            if not bool(out[owned_R].isfinite().all()):
                return Finding(status=Status.NONFINITE, reason="padding rows inside a span are not finite")
            out, oracle, baseline = out[holds_R], oracle[holds_R], baseline[holds_R]
        return _value(judge(out, oracle, baseline, self._more(layout, out)), out)

    def same_bits(self, one: Path, other: Path, *, step: int, layout: str) -> bool:
        """Two results of the same call, already judged, wherever their values mean something."""
        if self.span.name != "grouped_gemm":
            return one.read_bytes() == other.read_bytes()
        holds_R = self.inputs.plan(step, layout).pair_R >= 0
        a, b = (load_file(path)["0"][holds_R].contiguous() for path in (one, other))
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    def _more(self, layout: str, out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For results of few elements: what plain torch errs on other data."""
        if not 0 < out.numel() < FEW_ELEMENTS:
            return []
        if layout not in self._others:
            with torch.no_grad():
                draws = range(min(16, -(-FEW_ELEMENTS // out.numel())))
                others = [self._compute(OTHER_DRAWS + i, i % ROUTINGS, layout) for i in draws]
            pairs = [(other.oracle, other.baseline) for other in others]
            if self.span.name == "score_topk":  # of its result the gates
                pairs = [(oracle[0], baseline[0]) for oracle, baseline in pairs]
            self._others[layout] = pairs
        return self._others[layout]

    def _expect(self, number: int, step: int, layout: str) -> _Expected:
        key = (number, step, layout)
        if key not in self._expected:
            with torch.no_grad():
                self._expected[key] = self._compute(number, step, layout)
            if len(self._expected) > MOST_KEPT:
                self._expected.popitem(last=False)
        return self._expected[key]

    def _compute(self, number: int, step: int, layout: str) -> _Expected:
        args = self.inputs.call(number, layout, step)
        name = self.span.name
        if name in ("topk", "make_plan", "dispatch"):
            result = all_ops()[name].reference(*args)
            return _Expected(oracle=result, baseline=result)
        if name in ("pack", "routing", "layer"):
            return _Expected(
                oracle=self._chain(args, layout, torch.float64),
                baseline=self._chain(args, layout, self.inputs.dtype),
            )
        reference = all_ops()[name].reference
        wide = [self._wide(arg) for arg in args]
        return _Expected(oracle=reference(*wide), baseline=reference(*args))

    def _chain(self, args: tuple[Any, ...], layout: str, dtype: torch.dtype) -> Tensor:
        """Spans of several ops, in plain torch. Routers compute in float32 at least."""
        ops = all_ops()
        wide = torch.promote_types(dtype, torch.float32)
        if self.span.name == "pack":
            x_TD, gate_TK, plan = args
            gate_TK = gate_TK.to(wide)
        elif self.span.name == "routing":
            score_TE, x_TD, rule, K = args
            value_TK, expert_TK = ops["topk"].reference(score_TE, K)
            gate_TK = value_TK.to(wide).softmax(-1)
            plan = _plan(expert_TK, value_TK.softmax(-1), score_TE.shape[1], rule)
        else:
            (x_TD,) = args
            K, E = self.inputs.case.shape.K, self.inputs.case.shape.E
            value_TK, expert_TK = ops["topk"].reference(x_TD.to(wide) @ self.inputs.router_DE.to(wide), K)
            gate_TK = value_TK.softmax(-1)
            plan = _plan(expert_TK, gate_TK, E, Layout.parse(layout))
        x_TD = x_TD.to(dtype)
        if self.span.name != "layer":
            return ops["combine"].reference(ops["dispatch"].reference(x_TD, plan), gate_TK, plan)
        weights = self._wide_weights if dtype == torch.float64 else self.inputs.weights
        y_TD = ops["expert_ffn"].reference(x_TD, gate_TK, plan, weights)
        shared = self.inputs.shared
        if shared is None:
            return y_TD
        return y_TD + _feed_forward(x_TD, shared.to(dtype=dtype))

    def _wide(self, value: Any) -> Any:
        if value is self.inputs.weights:
            return self._wide_weights
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return value

    @cached_property
    def _wide_weights(self) -> ExpertWeights:
        return self.inputs.weights.to(dtype=torch.float64)


def activations_of(span: Span, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a call without the experts' weights, which are large and the same for every call."""
    return args[:3] if span.name == "expert_ffn" else args


def weights_print(span: Span, inputs: Inputs) -> str:
    if span.name in ("expert_ffn", "layer"):
        shared = () if inputs.shared is None else inputs.shared
        router = inputs.router_DE if span.name == "layer" else ()
        return fingerprint(inputs.weights, shared, router)
    return fingerprint(inputs.weights.w_in_EDG) if span.name == "grouped_gemm" else ""


def read_output(path: Path, expected: Any, layout: Layout) -> Any:
    """Tensors a worker wrote, put together as the span's result; ValueError if that is not what they are."""
    room = sum(t.numel() * 8 for t in tensors_in(expected)) + 2**20
    if not path.exists():
        raise ValueError("no result was handed over")
    if path.stat().st_size > room:
        raise ValueError(f"the result is {path.stat().st_size} bytes, far more than expected")
    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"the result cannot be read: {error}") from None
    if isinstance(expected, RoutingPlan):
        names = ("row_TK", "pair_R", "offset_E1", "count_E", "dropped_E")
        if not set(names) <= set(tensors):
            raise ValueError("the result is not a RoutingPlan")
        found = {name: tensors[name] for name in names}
        return RoutingPlan(**found, layout=layout, filled="filled" in tensors)
    if isinstance(expected, tuple):
        if {"0", "1"} != set(tensors):
            raise ValueError("the result is not a pair of tensors")
        return tensors["0"], tensors["1"]
    if set(tensors) != {"0"}:
        raise ValueError("the result is not one tensor")
    return tensors["0"]


def _structure(sentences: list[str]) -> Finding:
    if not sentences:
        return PASSED
    return Finding(status=Status.WRONG_STRUCTURE, reason="; ".join(sentences))


def _value(verdict: Verdict, out: Tensor) -> Finding:
    if verdict.passed:
        return Finding(status=Status.PASSED, verdict=verdict)
    finite = bool(out.isfinite().all())
    status = Status.WRONG_VALUE if finite else Status.NONFINITE
    return Finding(status=status, reason=verdict.sentence, verdict=verdict)


def _plan(expert_TK: Tensor, gate_TK: Tensor, E: int, layout: Layout) -> RoutingPlan:
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=False)
    return make_plan(routing, layout, impl="counting")


def _feed_forward(x_TD: Tensor, weights: ExpertWeights) -> Tensor:
    h_TG = x_TD @ weights.w_in_EDG[0]
    h_TF = activate(h_TG if weights.b_in_EG is None else h_TG + weights.b_in_EG[0], weights.activation)
    y_TD = h_TF @ weights.w_out_EFD[0]
    return y_TD if weights.b_out_ED is None else y_TD + weights.b_out_ED[0]
