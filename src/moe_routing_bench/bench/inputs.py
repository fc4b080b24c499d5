"""The arguments of every call of a cell: call number n is a pure function of case, workload, seed and n.

`Inputs` holds what all calls share. `Call` makes the arguments of one call, by the names of the operations'
parameters. Parent and worker make the same bits independently, so a worker cannot choose what it is judged
on. No two calls have the same content, so no call can reuse results of another. Values are normally
distributed, with full entropy: zeros and round numbers run faster on some hardware.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.decoded_weights import Kept, kept_of
from moe_routing_bench.bench.device import placed
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.experts import GATED, ExpertWeights, QuantisedExperts
from moe_routing_bench.core.machine import torch_threads
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.models.checkpoint import CheckpointLayer, read_layer
from moe_routing_bench.ops.attention.op import Rotary
from moe_routing_bench.ops.implementation import Implementation, tensors_in
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.score_topk.op import PLAIN, ScoreRule
from moe_routing_bench.parallel.traffic import Traffic
from moe_routing_bench.workloads.axes import defaults_of
from moe_routing_bench.workloads.experiment import Experiment
from moe_routing_bench.workloads.workload import Workload, make_workload

# values are drawn once, and each call reads them from another place; a prime, so that no two rows are equal
PERIOD = 1_048_573
STRIDE = 611_953  # from one call to the next; prime too, so places repeat after PERIOD calls
ROUTINGS = 4  # steps of the workload that calls take in turn


class Inputs:
    """Inputs(experiment).at(7, 0, "compact").x_TD: the tokens of the eighth call.

    They are made on the CPU, so their bits do not depend on the device they are `put` on.
    """

    def __init__(self, experiment: Experiment, *, put: str = "cpu"):
        self.experiment, self.seed, self.put = experiment, experiment.seed, put
        self.dtype = DTYPES[experiment.dtype]
        self._workloads: dict[tuple[int, int], Workload] = {}
        self._frozen: dict[Any, ExpertWeights] = {}
        self._plans: dict[tuple[int, str, int], RoutingPlan] = {}
        self.made: dict[Any, Any] = {}  # what a span makes of them once, by its own key

    def take_weights(self, other: Inputs) -> None:
        """Takes the weights, and all forms made of them, from inputs that differ only in tokens and
        routing."""
        if other.weights_key == self.weights_key:
            made = ("checkpoint", "weights", "exact", "drawn", "_stored", "_kept", "shared", "_values")
            self.__dict__ |= {name: other.__dict__[name] for name in made if name in other.__dict__}
            self._frozen = other._frozen

    @property
    def weights_key(self) -> tuple[object, ...]:
        """Two inputs with the same key have the same weights."""
        others = defaults_of(Experiment, "how") | {"case": "", "T": 1, "W": 1, "workload": "", "layout": ""}
        others |= {"sequences": 1, "scaled_from": "", "implementations": (), "include": ()}
        return replace(self.experiment, **others), self.put

    def at(self, number: int, step: int, layout: str, K: int | None = None) -> Call:
        """Returns what call `number` reads; `step` selects the routing."""
        return Call(self, number, step, layout, K or self.experiment.K)

    def workload(self, step: int, K: int | None = None) -> Workload:
        one, K = self.experiment, K or self.experiment.K
        if (step, K) not in self._workloads:
            if self.checkpoint is not None and not one.workload:
                self._workloads[step, K] = self._by_own_router(step)
            else:
                self._workloads[step, K] = make_workload(
                    one.workload, T=one.T, E=one.E, K=K, W=one.W, seed=self.seed, step=step
                )
        return self._workloads[step, K]

    def _by_own_router(self, step: int) -> Workload:
        """Returns what the checkpoint's router chooses for random tokens, which are scaled like an RMSNorm's
        output."""
        assert self.checkpoint is not None
        s = self.experiment.shape
        x_TD = self.normal(s.T, s.D, place=step * STRIDE, dtype=torch.float32)
        routing = replace(self.checkpoint.route(x_TD), logits_TE=None)
        return Workload(
            name="own router", seed=self.seed, step=step, T=s.T, E=s.E, K=s.K, W=self.experiment.W,
            routing=routing, tokens_W=(s.T,),
        )  # fmt: skip

    def plan(self, step: int, layout: str, K: int | None = None) -> RoutingPlan:
        key = (step, layout, K or self.experiment.K)
        if key not in self._plans:
            routing = self.workload(step, K).routing
            self._plans[key] = make_plan(routing, Layout.parse(layout), impl="counting")
        return self._plans[key]

    @cached_property
    def checkpoint(self) -> CheckpointLayer | None:
        """The layer of a saved model that gives the weights."""
        one = self.experiment
        return read_layer(one.checkpoint, one.checkpoint_layer) if one.checkpoint else None

    @cached_property
    def weights(self) -> ExpertWeights:
        """The weights passed to each call. In a stored case these are the drawn weights after storing, in the
        case's dtype."""
        if self.checkpoint is not None:
            return self.placed_weights(self.checkpoint.weights.to(dtype=self.dtype))
        if self._stored is None:
            return self.placed_weights(self._drawn())
        with torch_threads(1):
            return self.placed_weights(self._stored.dequantised(self.dtype))

    @cached_property
    def exact(self) -> ExpertWeights:
        """The weights of a stored case, exact in float64. Only references use them."""
        kept: Any = self._kept
        return replace(self.weights, **kept)

    @cached_property
    def drawn(self) -> ExpertWeights | None:
        """The weights of a stored case before storing, for implementations that store them themselves."""
        return self.placed_weights(self._drawn()) if self.experiment.store else None

    @cached_property
    def _stored(self) -> QuantisedExperts | None:
        if not self.experiment.store:
            return None
        given = self.__dict__.get("drawn")  # code from outside is given weights, and draws none
        with torch_threads(1):  # parent and worker do it at once, and threads that wait for a core cost more
            return QuantisedExperts.of(self._drawn() if given is None else given, self.experiment.store)

    @cached_property
    def _kept(self) -> dict[str, Kept]:
        return {} if self._stored is None else kept_of(self._stored)

    def _drawn(self) -> ExpertWeights:
        return self._expert_weights(self.experiment.E, self.experiment.F, place=11)

    def frozen(self, implementation: Implementation, asked: bool = False) -> ExpertWeights:
        """Packs the weights in the form this implementation prefers. This happens once, because a cell never
        changes its weights. They stay as they are if the implementation prefers that, if they are trained, or
        if it also reads plain weights and nobody asked for packed ones. An implementation that stores weights
        gets the stored ones, or stores the drawn ones itself."""
        if implementation.freeze_stored is not None and self._stored is not None:
            return self._frozen_once(implementation.freeze_stored, self._stored, self.dtype)
        given = self.weights
        if implementation.stored is not None and self.drawn is not None:
            given = self.drawn
        freeze = self.freeze_of(implementation, asked)
        return given if freeze is None else self._frozen_once(freeze, given)

    def freeze_of(self, implementation: Implementation, asked: bool) -> Callable[..., ExpertWeights] | None:
        """Returns the function that packs weights for it; None if it reads them as they are."""
        plain = implementation.reads_plain and implementation.stored is None and not asked
        return None if plain or self.experiment.direction != "forward" else implementation.freeze

    def _frozen_once(self, freeze: Callable[..., ExpertWeights], *given: Any) -> ExpertWeights:
        if freeze not in self._frozen:
            self._frozen[freeze] = freeze(*given)
        return self._frozen[freeze]

    @cached_property
    def shared(self) -> ExpertWeights | None:
        if self.checkpoint is not None:
            shared = self.checkpoint.shared
            return None if shared is None else self.placed_weights(shared.to(dtype=self.dtype))
        if not self.experiment.shared_F:
            return None
        return self.placed_weights(self._expert_weights(1, self.experiment.shared_F, place=17))

    def placed_weights(self, weights: ExpertWeights) -> ExpertWeights:
        weights = placed(weights, self.put)
        if self.experiment.direction != "forward":
            for tensor in weights.tensors().values():
                tensor.requires_grad_()
        return weights

    @cached_property
    def router_DE(self) -> Tensor:
        """Each expert's logit is one column of x, so x can hold any logits, exactly and in any dtype."""
        s = self.experiment.shape
        router_DE = torch.zeros(s.D, s.E)
        router_DE[self.logit_columns, torch.arange(s.E)] = 1.0
        return router_DE.to(self.put)

    @property
    def logit_columns(self) -> Tensor:
        s = self.experiment.shape
        if s.D < s.E:
            raise NotImplementedError(
                f"D={s.D} below E={s.E}: a router this narrow cannot be made to follow a given workload; "
                "measure expert_ffn instead"
            )
        return torch.arange(s.E) * (s.D // s.E)

    def _expert_weights(self, E: int, F: int, place: int) -> ExpertWeights:
        D, case = self.experiment.D, self.experiment
        G = 2 * F if case.activation in GATED else F

        def matrix(depth: int, columns: int, place: int) -> Tensor:
            if case.store:  # formats are output first, so nothing has to be transposed
                return self.normal(E, columns, depth, place=place, scale=depth**-0.5).transpose(1, 2)
            return self.normal(E, depth, columns, place=place, scale=depth**-0.5)

        return ExpertWeights(
            w_in_EDG=matrix(D, G, place),
            w_out_EFD=matrix(F, D, place + 1),
            b_in_EG=self.normal(E, G, place=place + 2) if case.bias else None,
            b_out_ED=self.normal(E, D, place=place + 3) if case.bias else None,
            activation=case.activation,
        )

    @cached_property
    def _values(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(PERIOD, generator=generator).to(self.dtype)

    def normal(
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


class Call:
    """What one call reads, by name; each attribute is made anew. inputs.at(7, 0, "compact").score_TE"""

    def __init__(self, inputs: Inputs, number: int, step: int, layout: str, K: int):
        self.inputs, self.number, self.step, self.K, self._layout = inputs, number, step, K, layout

    @property
    def layout(self) -> Layout:
        return Layout.parse(self._layout)

    @property
    def rule(self) -> ScoreRule:
        return PLAIN

    @property
    def x_TD(self) -> Tensor:
        return self._put(self._x())

    @property
    def score_TE(self) -> Tensor:
        return self._put(self._scores(self.inputs.dtype))

    @property
    def logits_TE(self) -> Tensor:
        return self._put(self._scores(torch.float32))

    @property
    def bias_E(self) -> None:
        return None

    @property
    def planted_TD(self) -> Tensor:
        """x with x @ router_DE = the scores, so that the router itself chooses what the workload says."""
        x_TD = self._x()
        x_TD[:, self.inputs.logit_columns] = self._scores(self.inputs.dtype)
        return self._put(x_TD)

    @property
    def token_id_T(self) -> Tensor:
        """Ids from a vocabulary of 2^16, for routers that read ids."""
        bits = self._normal(self._shape.T, place=self.number * STRIDE + 7, dtype=torch.float32)
        return (bits.abs() * 2**20).long().remainder_(2**16).to(self.inputs.put)

    @property
    def routing(self) -> Routing:
        """The workload's choices moved to other tokens, with other gates: each expert's load is unchanged."""
        routing = self._workload.routing
        expert_TK = routing.expert_TK.roll(self.number // ROUTINGS * 7919, 0)
        return placed(replace(routing, expert_TK=expert_TK, gate_TK=self._gates()), self.inputs.put)

    @property
    def gate_TK(self) -> Tensor:
        return self._put(self._gates())

    @property
    def plan(self) -> RoutingPlan:
        return placed(_copied(self._plan), self.inputs.put)

    @property
    def x_RD(self) -> Tensor:
        """The rows as dispatch writes them, with zeros in rows without a pair."""
        return self._put(self._rows(0.0))

    @property
    def y_RD(self) -> Tensor:
        """The rows as the experts write them, with NaN in rows without a pair, which nobody may read."""
        return self._put(self._rows(float("nan")))

    @property
    def y_QD(self) -> Tensor:
        return self.y_RD

    @property
    def traffic(self) -> Traffic:
        return placed(Traffic.alone(self._plan), self.inputs.put)

    @property
    def weights(self) -> ExpertWeights:
        return self.inputs.weights

    @property
    def w_EDF(self) -> Tensor:
        return self.inputs.weights.w_in_EDG

    @property
    def b_EF(self) -> Tensor | None:
        return self.inputs.weights.b_in_EG

    # of the layers around the experts

    @property
    def norm_D(self) -> Tensor:
        scale_D = self._normal(self._shape.D, place=29, dtype=torch.float32)
        return self._put((1 + 0.1 * scale_D).to(self.inputs.dtype))

    @property
    def eps(self) -> float:
        return 1e-6

    @property
    def w_FD(self) -> Tensor:
        """The second matrix of the first expert: F outputs of D inputs side by side, as in nn.Linear."""
        return self.inputs.weights.w_out_EFD[0]

    @property
    def b_F(self) -> Tensor | None:
        b_EG = self.inputs.weights.b_in_EG
        return None if b_EG is None else b_EG[0, : self._shape.F]

    @property
    def q_BHNA(self) -> Tensor:
        return self._heads(self.inputs.experiment.query_shape, 0)

    @property
    def k_BJMA(self) -> Tensor:
        return self._heads(self.inputs.experiment.key_shape, 37)

    @property
    def v_BJMA(self) -> Tensor:
        return self._heads(self.inputs.experiment.key_shape, 41)

    def _heads(self, shape: tuple[int, ...], place: int) -> Tensor:
        return self._put(self._normal(*shape, place=self.number * STRIDE + place))

    @property
    def causal(self) -> bool:
        return self.inputs.experiment.causal

    @property
    def window(self) -> int:
        return self.inputs.experiment.window

    @property
    def rotary(self) -> Rotary | None:
        if not self.inputs.experiment.rotary:
            return None
        _, _, M, A = self.inputs.experiment.key_shape
        angle_MC = torch.arange(M).unsqueeze(1) * 1e4 ** -(torch.arange(A // 2) * 2 / A)
        return placed(Rotary(cos_MC=angle_MC.cos(), sin_MC=angle_MC.sin()), self.inputs.put)

    def upstream(self, shape: torch.Size) -> Tensor:
        """The upstream gradient for a result of this shape."""
        return self._normal(*shape, place=self.number * STRIDE + 13).to(self.inputs.put)

    @property
    def _shape(self) -> MoEShape:
        return self.inputs.experiment.shape

    @property
    def _workload(self) -> Workload:
        return self.inputs.workload(self.step, self.K)

    @property
    def _plan(self) -> RoutingPlan:
        return self.inputs.plan(self.step, self._layout, self.K)

    def _put(self, values: Tensor) -> Tensor:
        values = values.to(self.inputs.put)
        return values.requires_grad_() if self.inputs.experiment.direction != "forward" else values

    def _normal(self, *shape: int, place: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.inputs.normal(*shape, place=place, dtype=dtype)

    def _gates(self) -> Tensor:
        """Returns gates of either sign and any sum, as the contract allows: a router may scale them and need
        not normalise them."""
        shape = self._workload.routing.gate_TK.shape
        return self._normal(*shape, place=self.number * STRIDE + 3, dtype=torch.float32)

    def _x(self) -> Tensor:
        return self._normal(self._shape.T, self._shape.D, place=self.number * STRIDE)

    def _scores(self, dtype: torch.dtype) -> Tensor:
        """Scores whose K highest are the workload's choices, in its order and well above the others."""
        s, K = self._shape, self.K
        place = self.number * STRIDE + 5
        score_TE = self._normal(s.T, s.E, place=place, dtype=torch.float32).clamp_(-5, 5)
        chosen_TK = self._workload.routing.expert_TK
        # chosen: from 6 down to 4, spaced 2 / K, with a twentieth of that as noise; others within 2.5
        level_K = 6 - 2 / K * torch.arange(K)
        value_TK = level_K + score_TE.gather(1, chosen_TK) * (0.1 / K / 5)
        return score_TE.mul_(0.5).scatter_(1, chosen_TK, value_TK).to(dtype)

    def _rows(self, nothing: float) -> Tensor:
        plan = self._plan
        rows_RD = self._normal(plan.num_rows, self._shape.D, place=self.number * STRIDE)
        if not plan.filled:
            rows_RD.masked_fill_((plan.pair_R < 0).unsqueeze(1), nothing)
        return rows_RD


def fingerprint(*values: Any) -> str:
    """Returns sha256 over all tensors inside, to show whether a call wrote to its inputs."""
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
