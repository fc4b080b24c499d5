"""MoE: route, plan, expert_ffn, shared experts. The layer people put into a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_routing_bench.experts import GATED, ExpertWeights, activate
from moe_routing_bench.free_experts import FreeExpertPart, FreeExperts
from moe_routing_bench.ops.auto import describe, resolve
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routers.router import Router, build
from moe_routing_bench.routing import Routing, SoftRouting, TokenInfo

TRAINABLE = ("router", "experts", "all")


@dataclass(frozen=True)
class Routings:
    """The choices of several routers of one layer, in the order in which they ran.

    Two routers, the first with aux_loss 0.01, the second with 0.02:
      len(routings) = 2,  routings[1].expert_TK is the second's choice,  routings.aux_loss = 0.03
    """

    each: tuple[Routing | SoftRouting, ...]

    @property
    def aux_loss(self) -> Tensor | None:
        """The sum over the routers that have one."""
        losses = [routing.aux_loss for routing in self.each if routing.aux_loss is not None]
        return torch.stack(losses).sum() if losses else None

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, index: int) -> Routing | SoftRouting:
        return self.each[index]

    def __iter__(self) -> Iterator[Routing | SoftRouting]:
        return iter(self.each)


class Experts(nn.Module):
    """The parameters of E experts; `weights()` is the value the operations take.

    state_dict: w_in_EDG, w_out_EFD, and b_in_EG, b_out_ED with bias=True. See ExpertWeights for the layout.
    """

    def __init__(
        self,
        D: int,
        F: int,
        E: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = activation
        G = 2 * F if activation in GATED else F
        options = {"device": device, "dtype": dtype}
        self.w_in_EDG = nn.Parameter(torch.empty(E, D, G, **options))  # type: ignore[arg-type]
        self.w_out_EFD = nn.Parameter(torch.empty(E, F, D, **options))  # type: ignore[arg-type]
        self.b_in_EG = nn.Parameter(torch.empty(E, G, **options)) if bias else None  # type: ignore[arg-type]
        self.b_out_ED = nn.Parameter(torch.empty(E, D, **options)) if bias else None  # type: ignore[arg-type]
        self.weights().validate()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # as nn.Linear: uniform within 1 / sqrt(inputs)
        for weight, bias in ((self.w_in_EDG, self.b_in_EG), (self.w_out_EFD, self.b_out_ED)):
            bound = 1 / math.sqrt(weight.shape[1])
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            w_in_EDG=self.w_in_EDG,
            w_out_EFD=self.w_out_EFD,
            b_in_EG=self.b_in_EG,
            b_out_ED=self.b_out_ED,
            activation=self.activation,
        )

    def on_every_token(self, x_TD: Tensor) -> Tensor:
        """A single expert as a plain feed-forward network: no routing, no gate."""
        assert self.w_in_EDG.shape[0] == 1
        h_TG = x_TD @ self.w_in_EDG[0]
        h_TF = activate(h_TG if self.b_in_EG is None else h_TG + self.b_in_EG[0], self.activation)
        y_TD = h_TF @ self.w_out_EFD[0]
        return y_TD if self.b_out_ED is None else y_TD + self.b_out_ED[0]

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Copy values in, for instance from experts.from_transformers(...)."""
        mine = self.weights()
        if weights.activation != mine.activation or weights.tensors().keys() != mine.tensors().keys():
            raise ValueError(
                f"these weights are {weights.activation} with {', '.join(weights.tensors())}; the layer is "
                f"{mine.activation} with {', '.join(mine.tensors())}"
            )
        for name, tensor in weights.tensors().items():
            if tensor.shape != getattr(self, name).shape:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, the layer's {tuple(getattr(self, name).shape)}"
                )
            getattr(self, name).copy_(tensor)


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer:  y, routing = MoE(D=64, F=128, E=8, K=2)(x).

    x is (..., D). `routing` is what the router chose, with its auxiliary losses (`routing.aux_loss`).

    router       a name (`mrb list routers`) or a Router; router_options go to the named router
    layout       compact (default), padded(capacity_factor=1.25), block(64), or a Layout
    impl         an implementation of expert_ffn (`mrb list ops`): a name, a name with options such as
                 "staged(grouped_gemm=padded_bmm)", or "auto": chosen at every call (ops/auto.py), so also
                 after .bfloat16() or .cuda(). `implementation` says what runs, and why. On a CPU it may be
                 `native`, which is compiled at the first call and keeps a second copy of the weights.
    plan_impl    the same for make_plan
    shared_F     hidden width of the expert that every token passes through (0: none); n shared experts of
                 width F are one of width n * F
    shared_gate  weigh the shared experts by sigmoid(x w), as Qwen2-MoE and Qwen3-Next do
    free_experts zero, copy and constant experts (see FreeExperts); the router chooses among E and these
    dtype        of the experts; a router stores and computes in float32 unless its own dtype option differs

    state_dict: router.* (the router's own), experts.* and shared.* (see Experts; shared has E = 1),
    shared_gate_D1, free.* (see FreeExpertPart).
    """

    def __init__(
        self,
        D: int,
        F: int,
        E: int,
        K: int,
        *,
        router: str | Router = "softmax_topk",
        router_options: dict | None = None,
        layout: str | Layout = "compact",
        activation: str = "swiglu",
        bias: bool = False,
        shared_F: int = 0,
        shared_gate: bool = False,
        free_experts: FreeExperts | None = None,
        impl: str = "auto",
        plan_impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.D = D
        routed_E = E + (free_experts.total if free_experts else 0)
        if isinstance(router, str):
            router = build(router, D, routed_E, K, **(router_options or {}))
        elif router_options:
            raise ValueError("router_options are for a router given by name; set them on the Router itself")
        if router.E != routed_E or router.D != D:
            raise ValueError(
                f"the router is for D={router.D}, E={router.E}; the layer for D={D}, E={routed_E}"
            )
        self.router = router if device is None else router.to(device)
        self.layout = Layout.parse(layout) if isinstance(layout, str) else layout
        self.experts = Experts(D, F, E, activation=activation, bias=bias, device=device, dtype=dtype)
        self.shared = None
        if shared_F:
            self.shared = Experts(
                D, shared_F, 1, activation=activation, bias=bias, device=device, dtype=dtype
            )
        elif shared_gate:
            raise ValueError("shared_gate weighs the shared experts; give their width with shared_F")
        self.shared_gate_D1 = None
        if shared_gate:
            self.shared_gate_D1 = nn.Parameter(torch.empty(D, 1, device=device, dtype=dtype))
            nn.init.uniform_(self.shared_gate_D1, -(D**-0.5), D**-0.5)  # as nn.Linear
        self.free = None
        if free_experts:
            self.free = FreeExpertPart(D, E, free_experts, device=device, dtype=dtype)
        self.make_plan = resolve(make_plan_op, plan_impl, self.experts.weights)
        self.expert_ffn = resolve(expert_ffn_op, impl)

    @property
    def implementation(self) -> str:
        """What runs now, with the present dtype, device and grad mode; for "auto" also why.

        "make_plan.native (auto: preferred on amx (decisions are off): ...) + expert_ffn.staged(...)"
        """
        sizes = self.experts.weights(), self.router.K, self.layout
        return " + ".join(describe(part, *sizes) for part in (self.make_plan, self.expert_ffn))

    @property
    def causal(self) -> bool:
        """False if a token's result can depend on later tokens, through the router or dropped pairs."""
        return self.router.causal and self.layout.causal

    @property
    def batch_dependent(self) -> bool:
        """True if a token's result can depend on any other token."""
        return self.router.batch_dependent or self.layout.batch_dependent

    def train_only(self, part: str) -> MoE:
        """Freeze the rest: "router" trains only the router, "experts" everything but the router.

        No implementation computes gradients of frozen parameters. "all" trains everything again.
        """
        if part not in TRAINABLE:
            raise ValueError(f"train_only takes {', '.join(TRAINABLE)}, not {part!r}")
        for name, parameter in self.named_parameters():
            owner = "router" if name.startswith("router.") else "experts"
            parameter.requires_grad_(part in (owner, "all"))
        return self

    def forward(self, x: Tensor, info: TokenInfo = TokenInfo()) -> tuple[Tensor, Routing | SoftRouting]:
        x_TD = self.tokens(x)
        routing = self.route(self.router, x_TD, info)
        return self.compute(x_TD, routing).view(x.shape), routing

    def tokens(self, x: Tensor) -> Tensor:
        """x of shape (..., D) as x_TD, checked."""
        if x.shape[-1] != self.D:
            raise ValueError(f"x has width {x.shape[-1]}, the layer {self.D}")
        dtype = self.experts.w_in_EDG.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the experts {dtype}; convert one, or use torch.autocast")
        return x.reshape(-1, self.D)

    def route(self, router: Router, x_TD: Tensor, info: TokenInfo) -> Routing | SoftRouting:
        """The routing by `router`, which is this layer's or another of the same sizes."""
        routing = router(x_TD, info)
        if self.free is None:
            return routing
        if isinstance(routing, SoftRouting):
            raise ValueError("free experts need a router that chooses; Soft-MoE mixes all experts")
        return self.free.settle(routing, info.mask_T)

    def plan(self, routing: Routing) -> RoutingPlan:
        """The rows of all pairs of the E experts; free experts have no rows."""
        return self.make_plan(routing if self.free is None else self.free.for_kernels(routing), self.layout)

    def compute(
        self, x_TD: Tensor, routing: Routing | SoftRouting, plan: RoutingPlan | None = None
    ) -> Tensor:
        """The layer's result for a routing; `plan` is plan(routing), if it exists already."""
        if isinstance(routing, SoftRouting):
            y_TD = self._mix_slots(x_TD, routing)
        else:
            plan = self.plan(routing) if plan is None else plan
            y_TD = self.expert_ffn(x_TD, routing.gate_TK, plan, self.experts.weights())
            if self.free is not None:
                y_TD = y_TD + self.free(x_TD, routing).to(y_TD.dtype)
        if self.shared is not None:
            shared_TD = self.shared.on_every_token(x_TD)
            if self.shared_gate_D1 is not None:
                shared_TD = (x_TD @ self.shared_gate_D1).sigmoid() * shared_TD
            y_TD = y_TD + shared_TD
        return y_TD

    def slots(self, routing: SoftRouting) -> tuple[Routing, Layout]:
        """Soft-MoE's slots as tokens with one choice each, by expert, in a layout that drops none of them."""
        E, rows = routing.num_experts, routing.dispatch_BNS.shape[0] * routing.slots_per_expert
        one_each = Routing(
            expert_TK=torch.arange(E, device=routing.combine_BNS.device).repeat_interleave(rows).unsqueeze(1),
            gate_TK=routing.combine_BNS.new_ones(E * rows, 1),
            num_experts=E,
            ragged=False,
        )
        # a capacity chosen for routed tokens must not drop slots
        return one_each, Layout.padded(capacity=rows) if self.layout.kind == "padded" else self.layout

    def _mix_slots(self, x_TD: Tensor, routing: SoftRouting) -> Tensor:
        """Slots are computed as tokens with one choice each; every expert gets equally many."""
        B, N, S = routing.dispatch_BNS.shape
        E, s = routing.num_experts, routing.slots_per_expert
        slot_BSD = routing.dispatch_BNS.transpose(1, 2).to(x_TD.dtype) @ x_TD.view(B, N, self.D)
        slot_TD = slot_BSD.view(B, E, s, self.D).transpose(0, 1).reshape(E * B * s, self.D)
        one_each, layout = self.slots(routing)
        plan = self.make_plan(one_each, layout)
        y_TD = self.expert_ffn(slot_TD, one_each.gate_TK, plan, self.experts.weights())
        y_BSD = y_TD.view(E, B, s, self.D).transpose(0, 1).reshape(B, S, self.D)
        return (routing.combine_BNS.to(x_TD.dtype) @ y_BSD).view(-1, self.D)

    def extra_repr(self) -> str:
        # not `implementation`, which may have to compile to say why
        return f"layout={self.layout}, make_plan={self.make_plan.label}, expert_ffn={self.expert_ffn.label}"
