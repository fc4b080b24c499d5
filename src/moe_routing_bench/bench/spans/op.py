"""A single operation, as its op.py defines it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.bench.spans.span import (
    PACKAGE,
    PACKED_ONCE,
    Computation,
    Load,
    Span,
    Stage,
    packed_once,
    stand_ins,
    why_not_one_of,
)
from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.experts import activate
from moe_routing_bench.formats.named import INT8_ROWS
from moe_routing_bench.ops.registry import Op, all_ops
from moe_routing_bench.workloads.experiment import ATTENTION, Experiment, ImplementationRef

STAGED = ("dispatch", "grouped_gemm", "combine")


class OpSpan(Span):
    def __init__(self, op: Op):
        self.op, self.name = op, op.name
        self.ops = self.included = (op.name,)
        self.decides = op.name
        self.weights, self.differentiable, self.exact = bool(op.weights), op.differentiable, op.exact
        self.widens = op.widens

    @property
    def summary(self) -> str:
        return self.op.summary

    def stored_names(self, case: Experiment) -> list[str]:
        stored = f"native(store={case.store})"
        source = stand_ins(ImplementationRef(name=stored, layout=case.layout), case)
        asked, names = self.op.arguments(source).values(), ["native"]
        rows = f"(store={case.store}{INT8_ROWS})"
        for name in (f"native{rows}", stored, f"llama_cpp{rows}", "vllm_cpu"):
            try:
                names += [name] if name == stored or self.op.get(name).why_not(*asked) is None else []
            except NotImplementedError:  # a library is absent
                continue
        return names

    def arguments(self, call: Call) -> dict[str, Any]:
        return self.op.arguments(call)

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        one, name = self.op.get(implementation.name), self.op.weights
        if name == "weights":
            plain: Any = inputs.weights
            weights: Any = inputs.frozen(one, implementation.frozen)
            how = packed_once(weights)
        else:
            plain = weights = getattr(inputs.at(0, 0, implementation.layout), name) if name else None
            if name and (freeze := inputs.freeze_of(one, implementation.frozen)) is not None:
                weights = freeze(plain.detach())
            how = PACKED_ONCE
        if weights is plain:
            return Computation(run=one.run)
        place = self.op.parameters().index(name)

        def run(*args: Any) -> Any:
            return one.run(*args[:place], weights, *args[place + 1 :])

        return Computation(run=run, runs=f"{one.label}{how}")

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        asked = {self.op.name: tuple(args.values())}
        return why_not_one_of(self.parts(implementation.name), asked, inputs.experiment.store)

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        """Returns the parts of an implementation that is made of others."""
        config = self.op.get(implementation.name).config
        if set(STAGED) <= set(config):
            yield from staged_stages(config, args, {})
        elif self.op.weights == "weights":
            run = self.built(implementation, inputs).run
            yield implementation.name, lambda: run(*args.values())

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        narrow = implementation.int8_rows and dtype == inputs.dtype
        return Computation(run=(narrow and self.op.int8_rows) or self.op.reference)

    def judge(self, out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
        return self.op.judge(out, expected, args)

    def judge_gradient(self, of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
        return self.op.judge_gradient(of, gradient, expected)

    def upstream(self, d_out: Tensor, args: Mapping[str, Any]) -> Tensor:
        return self.op.upstream(d_out, args)

    def meaningful(self, out: Any, args: Mapping[str, Any]) -> Any:
        return self.op.meaningful(out, args)

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        plan = inputs.plan(0, implementation.layout) if self.op.has_layout else None
        args = self.arguments(inputs.at(0, 0, implementation.layout))
        cost, case = self.op.cost(*args.values()), inputs.experiment
        if case.store:
            cost = replace(cost, weight_bytes=cost.weight_bytes * case.weight_bytes // case.drawn_bytes)
        return cost, inputs.workload(0).statistics(plan).to_dict()

    def sizes(self, case: Experiment) -> list[str]:
        """An operation that sees no routing has the letters of its arguments."""
        if self.op.routed or self.op.weights == "weights":
            return super().sizes(case)
        sizes = {letter: getattr(case, letter) for letter in "TDF"}
        if self.name != ATTENTION:
            letters = dict.fromkeys("".join(name.partition("_")[2] for name in self.op.parameters()))
            return [" ".join(f"{letter}={sizes[letter]}" for letter in letters)]
        (B, H, N, A), (_, J, M, _) = case.query_shape, case.key_shape
        masks = ["causal" if case.causal else "no mask", f"window {case.window}" * bool(case.window)]
        return [
            f"B={B} H={H} J={J} N={N} M={M} A={A}",
            *filter(None, masks),
            *["rotary inside"] * case.rotary,
        ]

    def notes(self, case: Experiment) -> list[str]:
        if not case.store:
            return []
        return [
            f"Errors are root mean squares relative to the exact result with what {case.store} keeps of the "
            "weights; bytes are those of the format."
        ]

    def roots(self, implementation: ImplementationRef) -> list[Path]:
        return [PACKAGE / "bench" / "spans" / "op.py"]


def staged_stages(
    config: Mapping[str, Any], args: Mapping[str, Any], held: dict[str, Any]
) -> Iterator[Stage]:
    """Three stages: dispatch, both products with the activation between them, combine."""
    dispatch, gemm, combine = (all_ops()[name].get(str(config[name])).run for name in STAGED)
    plan, weights = args["plan"], args["weights"]
    yield "dispatch", lambda: held.update(x_RD=dispatch(args["x_TD"], plan))

    def both_products() -> None:
        h_RG = gemm(held["x_RD"], weights.w_in_EDG, plan, weights.b_in_EG)
        held["y_RD"] = gemm(activate(h_RG, weights.activation), weights.w_out_EFD, plan, weights.b_out_ED)

    yield "gemm", both_products
    yield "combine", lambda: combine(held["y_RD"], args["gate_TK"], plan)
