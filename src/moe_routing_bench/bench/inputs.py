"""The arguments of every call of a cell: call number n is a pure function of case, workload, seed and n.

Parent and worker make them independently, to the same bits, so a worker cannot choose what it is judged on.
No two calls have the same content, so nothing can be remembered from one to the next. Values are normally
distributed, full entropy: zeros and round numbers run faster on some hardware.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.device import placed
from moe_routing_bench.bench.roofs import DTYPES
from moe_routing_bench.experts import GATED, ExpertWeights
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.registry import tensors_in
from moe_routing_bench.ops.score_topk.op import PLAIN
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing
from moe_routing_bench.workloads.cases import BenchCase
from moe_routing_bench.workloads.workload import Workload, make_workload

# values are drawn once and read from a different place for every call; a prime, so that no two rows are alike
PERIOD = 1_048_573
STRIDE = 611_953  # from one call to the next; prime too, so places repeat after PERIOD calls
ROUTINGS = 4  # steps of the workload that calls take in turn


class Inputs:
    """Inputs(case, "zipf(1.2)", seed=0).call(7, "compact") gives the eighth call's arguments.

    They are made on the CPU, to the same bits wherever they are `put`.
    """

    def __init__(self, case: BenchCase, workload: str, *, seed: int = 0, W: int = 1, put: str = "cpu"):
        self.case, self.workload_name, self.seed, self.W, self.put = case, workload, seed, W, put
        self.dtype = DTYPES[case.dtype]
        self._workloads: dict[int, Workload] = {}
        self._plans: dict[tuple[int, str], RoutingPlan] = {}
        if case.span == "layer" and case.shape.D < case.shape.E:
            raise NotImplementedError(
                f"layer with D={case.shape.D} below E={case.shape.E}: a router this narrow cannot be made "
                "to follow a given workload; measure expert_ffn instead"
            )

    @staticmethod
    def of(cell: Cell, put: str = "cpu") -> Inputs:
        return Inputs(cell.case, cell.workload, seed=cell.seed, W=cell.W, put=put)

    def workload(self, step: int) -> Workload:
        if step not in self._workloads:
            s = self.case.shape
            self._workloads[step] = make_workload(
                self.workload_name, T=s.T, E=s.E, K=s.K, W=self.W, seed=self.seed, step=step
            )
        return self._workloads[step]

    def routing(self, step: int) -> Routing:
        return placed(self.workload(step).routing, self.put)

    def plan(self, step: int, layout: str) -> RoutingPlan:
        return placed(self._plan(step, layout), self.put)

    def _plan(self, step: int, layout: str) -> RoutingPlan:
        if (step, layout) not in self._plans:
            routing = self.workload(step).routing
            self._plans[step, layout] = make_plan(routing, Layout.parse(layout), impl="counting")
        return self._plans[step, layout]

    @cached_property
    def weights(self) -> ExpertWeights:
        s = self.case.shape
        return placed(self._expert_weights(s.E, s.F, place=11), self.put)

    @cached_property
    def shared(self) -> ExpertWeights | None:
        if not self.case.shared_F:
            return None
        return placed(self._expert_weights(1, self.case.shared_F, place=17), self.put)

    @cached_property
    def router_DE(self) -> Tensor:
        """Each expert's logit is one column of x: x can be given any logits, exactly and in any dtype."""
        s = self.case.shape
        router_DE = torch.zeros(s.D, s.E)
        router_DE[self._logit_columns(), torch.arange(s.E)] = 1.0
        return router_DE.to(self.put)

    def _logit_columns(self) -> Tensor:
        return torch.arange(self.case.shape.E) * (self.case.shape.D // self.case.shape.E)

    def call(self, number: int, layout: str, step: int | None = None) -> tuple[Any, ...]:
        """The arguments of the span for call `number`; `step` says which of the routings it uses."""
        return placed(self._call(number, layout, step), self.put)

    def _call(self, number: int, layout: str, step: int | None) -> tuple[Any, ...]:
        s, span = self.case.shape, self.case.span
        step = number % ROUTINGS if step is None else step
        if span == "topk":
            return self._scores(number, step, self.dtype), s.K
        if span == "score_topk":
            return self._scores(number, step, torch.float32), None, s.K, PLAIN
        if span == "routing":
            return self._scores(number, step, torch.float32), self._x(number), Layout.parse(layout), s.K
        if span == "layer":
            return (self._planted(number, step),)
        routing = self.workload(step).routing
        if span == "make_plan":
            return self._turned(routing, number), Layout.parse(layout)
        plan = _copied(self._plan(step, layout))
        gate_TK = routing.gate_TK.clone()
        if span == "dispatch":
            return self._x(number), plan
        if span == "pack":
            return self._x(number), gate_TK, plan
        if span == "expert_ffn":
            return self._x(number), gate_TK, plan, self.weights
        rows_RD = self._normal(plan.num_rows, s.D, place=number * STRIDE)
        if not plan.filled:
            # nobody may read what combine gets in rows without a pair; dispatch writes zeros there
            nothing = float("nan") if span == "combine" else 0.0
            rows_RD.masked_fill_((plan.pair_R < 0).unsqueeze(1), nothing)
        if span == "combine":
            return rows_RD, gate_TK, plan
        assert span == "grouped_gemm", span
        return rows_RD, self.weights.w_in_EDG, plan, self.weights.b_in_EG

    def _x(self, number: int) -> Tensor:
        return self._normal(self.case.shape.T, self.case.shape.D, place=number * STRIDE)

    def _scores(self, number: int, step: int, dtype: torch.dtype) -> Tensor:
        """Scores whose K highest are the workload's choices, in its order and clear of the others."""
        s = self.case.shape
        score_TE = self._normal(s.T, s.E, place=number * STRIDE + 5, dtype=torch.float32).clamp_(-5, 5)
        chosen_TK = self.workload(step).routing.expert_TK
        # chosen: from 6 down to 4, spaced 2 / K, with a twentieth of that as noise; others within 2.5
        level_K = 6 - 2 / s.K * torch.arange(s.K)
        value_TK = level_K + score_TE.gather(1, chosen_TK) * (0.1 / s.K / 5)
        return score_TE.mul_(0.5).scatter_(1, chosen_TK, value_TK).to(dtype)

    def _planted(self, number: int, step: int) -> Tensor:
        """x with x @ router_DE = the scores: the real router, on real data, chooses as the workload says."""
        x_TD = self._x(number)
        x_TD[:, self._logit_columns()] = self._scores(number, step, self.dtype)
        return x_TD

    def _turned(self, routing: Routing, number: int) -> Routing:
        """The same choices by other tokens, with other gates: every load stays what it was."""
        turn = number // ROUTINGS * 7919
        gate_TK = self._normal(*routing.gate_TK.shape, place=number * STRIDE, dtype=torch.float32)
        return replace(routing, expert_TK=routing.expert_TK.roll(turn, 0), gate_TK=gate_TK.softmax(-1))

    def _expert_weights(self, E: int, F: int, place: int) -> ExpertWeights:
        D, case = self.case.shape.D, self.case
        G = 2 * F if case.activation in GATED else F
        return ExpertWeights(
            w_in_EDG=self._normal(E, D, G, place=place, scale=D**-0.5),
            w_out_EFD=self._normal(E, F, D, place=place + 1, scale=F**-0.5),
            b_in_EG=self._normal(E, G, place=place + 2) if case.bias else None,
            b_out_ED=self._normal(E, D, place=place + 3) if case.bias else None,
            activation=case.activation,
        )

    @cached_property
    def _values(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(PERIOD, generator=generator).to(self.dtype)

    def _normal(
        self, *shape: int, place: int, dtype: torch.dtype | None = None, scale: float | None = None
    ) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype)
        values = self._values if scale is None else self._values * scale
        flat, at, done = out.view(-1), place % PERIOD, 0
        while done < flat.numel():
            n = min(flat.numel() - done, PERIOD - at)
            flat[done : done + n] = values[at : at + n]
            at, done = 0, done + n
        return out


def fingerprint(*values: Any) -> str:
    """sha256 over all tensors inside: shows whether a call wrote to its inputs."""
    digest = hashlib.sha256()
    for tensor in tensors_in(values):
        digest.update(str((tuple(tensor.shape), str(tensor.dtype))).encode())
        data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()


def touch(values: Sequence[Any], weights: ExpertWeights | None) -> None:
    """Bring activations, but not weights, into the caches."""
    apart = {t.data_ptr() for t in weights.tensors().values()} if weights is not None else set()
    for tensor in tensors_in(values):
        if tensor.data_ptr() not in apart:
            tensor.max()


def _copied(plan: RoutingPlan) -> RoutingPlan:
    return replace(
        plan,
        row_TK=plan.row_TK.clone(),
        pair_R=plan.pair_R.clone(),
        offset_E1=plan.offset_E1.clone(),
        count_E=plan.count_E.clone(),
        dropped_E=plan.dropped_E.clone(),
    )
