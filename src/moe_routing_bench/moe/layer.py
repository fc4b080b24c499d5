"""MoE: route, plan, expert_ffn, shared experts. This is the layer for models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_routing_bench.core import position_invariant as steady
from moe_routing_bench.core.experts import GATED, ExpertWeights, activate
from moe_routing_bench.core.frozen import Freezing, freezing, take_place, thaw
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.formats.named import INT8_ROWS, NAMES, coding_of
from moe_routing_bench.moe.free_experts import FreeExpertPart, FreeExperts
from moe_routing_bench.ops.auto import Auto, describe, resolve
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.grouped_gemm.op import op as grouped_gemm_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.stand_ins import StandIns
from moe_routing_bench.routers.router import Router, build

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
        """The sum over the routers that have a loss."""
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

    >>> mrb.Experts(D=3, F=4, E=2).weights().w_in_EDG.shape
    torch.Size([2, 3, 8])
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
        self.activation, self.E = activation, E
        G = 2 * F if activation in GATED else F
        options = {"device": device, "dtype": dtype}
        self.w_in_EDG = nn.Parameter(torch.empty(E, D, G, **options))  # type: ignore[arg-type]
        self.w_out_EFD = nn.Parameter(torch.empty(E, F, D, **options))  # type: ignore[arg-type]
        self.b_in_EG = nn.Parameter(torch.empty(E, G, **options)) if bias else None  # type: ignore[arg-type]
        self.b_out_ED = nn.Parameter(torch.empty(E, D, **options)) if bias else None  # type: ignore[arg-type]
        self.weights().validate()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seeds: Sequence[int] = ()) -> None:
        """Draws weights as nn.Linear does: uniform within 1 / sqrt(inputs). With one seed per expert, the
        weights of an expert depend only on its seed."""
        dice = [torch.Generator(self.w_in_EDG.device).manual_seed(seed) for seed in seeds]
        for weight, bias in ((self.w_in_EDG, self.b_in_EG), (self.w_out_EFD, self.b_out_ED)):
            bound = 1 / math.sqrt(weight.shape[1])
            for tensor in (weight,) if bias is None else (weight, bias):
                if not dice:
                    tensor.uniform_(-bound, bound)
                for expert, own in zip(tensor, dice, strict=False):
                    expert.uniform_(-bound, bound, generator=own)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            w_in_EDG=self.w_in_EDG,
            w_out_EFD=self.w_out_EFD,
            b_in_EG=self.b_in_EG,
            b_out_ED=self.b_out_ED,
            activation=self.activation,
        )

    def on_every_token(self, x_TD: Tensor, ffn: Implementation | Auto | None = None) -> Tensor:
        """A single expert as a feed-forward network, in plain torch or with `ffn`: no routing, no gate."""
        assert self.w_in_EDG.shape[0] == 1
        if ffn is not None:
            gate_T1 = torch.ones(len(x_TD), 1, device=x_TD.device)
            return ffn(x_TD, gate_T1, _one_expert(x_TD), self.weights())
        h_TG = x_TD @ self.w_in_EDG[0]
        h_TF = activate(h_TG if self.b_in_EG is None else h_TG + self.b_in_EG[0], self.activation)
        y_TD = h_TF @ self.w_out_EFD[0]
        return y_TD if self.b_out_ED is None else y_TD + self.b_out_ED[0]

    def freeze(self, implementation: Implementation, kept: PackedFiles | None = None) -> None:
        """Replaces the matrices by the form that this implementation reads fastest; see MoE.freeze."""
        names = ("w_in_EDG", "w_out_EFD")
        if implementation.has_packed(*(getattr(self, name) for name in names)):
            return
        thaw(self)  # one of them may be frozen, or both for another implementation
        if implementation.freeze is None:
            return
        frozen = implementation.frozen(self.weights(), kept).tensors()
        take_place(self, {name: frozen[name] for name in names})

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Copies values into the parameters, for instance from experts.from_transformers(...)."""
        mine = self.weights()
        if weights.activation != mine.activation or weights.tensors().keys() != mine.tensors().keys():
            raise ValueError(
                f"these weights are {weights.activation} with {', '.join(weights.tensors())}; the layer is "
                f"{mine.activation} with {', '.join(mine.tensors())}"
            )
        for name, tensor in weights.tensors().items():
            shape = (self.E, *getattr(self, name).shape[1:])
            if tensor.shape != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, the layer's {shape}")
        self.load_state_dict(weights.tensors())


def with_format(impl: str, *, batch_invariant: bool = False) -> str:
    """The implementation that `impl` means for freezing. It is an implementation, or a format: "int8_a8"
    means "native(store=int8_a8)". Raises ValueError with all formats if it is neither."""
    if "(" in impl or impl in ("auto", *expert_ffn_op.names()):
        return impl
    if impl != "bfloat16":
        try:
            coding_of(impl.removesuffix(INT8_ROWS))
        except ValueError:
            raise ValueError(
                f"there is no format and no implementation of expert_ffn {impl!r}; formats are bfloat16, "
                f"{', '.join(NAMES)}, and these with {INT8_ROWS} at the end for rows of 8 bits; "
                f"implementations are {', '.join(expert_ffn_op.names())}"
            ) from None
    return f"native({'batch_invariant=True,' * batch_invariant}store={impl})"


def _one_expert(x_TD: Tensor) -> RoutingPlan:
    """The plan that gives every token to a single expert."""
    expert_T1 = torch.zeros(len(x_TD), 1, dtype=torch.int64, device=x_TD.device)
    gate_T1 = torch.ones(len(x_TD), 1, device=x_TD.device)
    routing = Routing(expert_TK=expert_T1, gate_TK=gate_T1, num_experts=1, ragged=False)
    return resolve(make_plan_op, "auto")(routing, Layout.parse("compact"))


def _invariant_product(x_TD: Tensor, w_DN: Tensor, b_N: Tensor | None = None) -> Tensor:
    """x w + b with the same bits for a token in every batch, which torch's product does not promise."""
    multiply = Auto(grouped_gemm_op, batch_invariant=True)
    b_1N = None if b_N is None else b_N.unsqueeze(0)
    return multiply(x_TD, w_DN.unsqueeze(0), _one_expert(x_TD), b_1N)


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer:  y, routing = MoE(D=64, F=128, E=8, K=2)(x).

    x is (..., D). `routing` is what the router chose, with its auxiliary losses (`routing.aux_loss`).

    router       a name (`mrb list routers`) or a Router; router_options go to the named router
    layout       compact (default), padded(capacity_factor=1.25), block(64), or a Layout
    impl         an implementation of expert_ffn (`mrb list ops`): a name, a name with options such as
                 "staged(grouped_gemm=padded_bmm)", or "auto": chosen at every call (ops/auto.py), so it is
                 right after .bfloat16() or .cuda(). `implementation` says what runs, and why. On a CPU it may
                 be `native`, which is compiled at the first call, and is faster after freeze().
    plan_impl    the same for make_plan
    shared_F     hidden width of the expert that every token passes through (0: none); n shared experts of
                 width F are one of width n * F
    shared_gate  multiply the shared experts by sigmoid(x w), as in Qwen2-MoE and Qwen3-Next
    free_experts zero, copy and constant experts (see FreeExperts); the router chooses among E and these
    batch_invariant   a token's result has the same bits in every batch: only implementations that promise
                 this run, also for the router's projection and the shared experts. ValueError for a rule or
                 a layout that depends on the batch, and for free experts
    dtype        of the experts; a router stores and computes in float32 unless its own dtype option differs

    state_dict: router.* (the router's own), experts.* and shared.* (see Experts; shared has E = 1),
    shared_gate_D1, free.* (see FreeExpertPart).

    >>> y, routing = mrb.MoE(D=64, F=128, E=8, K=2)(torch.randn(2, 16, 64))
    >>> y.shape, routing.expert_TK.shape
    (torch.Size([2, 16, 64]), torch.Size([32, 2]))
    """

    carries_input = False  # the result does not contain x: a block adds it

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
        batch_invariant: bool = False,
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
        held = len(self.held_experts(E))
        self.experts = Experts(D, F, held, activation=activation, bias=bias, device=device, dtype=dtype)
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
        self.expert_ffn = resolve(expert_ffn_op, impl, batch_invariant=batch_invariant)
        self.shared_ffn: Implementation | Auto | None = None  # None: plain torch
        if batch_invariant:
            self.make_batch_invariant()

    def make_batch_invariant(self) -> None:
        """Makes the router and the shared experts batch-invariant. The routed experts are so by their
        implementation."""
        if self.layout.batch_dependent:
            raise ValueError(
                f"layout {self.layout}: the dropped pairs depend on the batch; use compact or block"
            )
        if self.free is not None:
            raise ValueError("free experts use plain products, which are not batch-invariant; leave them out")
        self.router.make_batch_invariant(_invariant_product)
        self.shared_ffn = Auto(expert_ffn_op, batch_invariant=True)

    def held_experts(self, E: int) -> Sequence[int]:
        """The experts whose weights this layer has: all of them, unless it is one rank's part of a layer."""
        return range(E)

    @property
    def implementation(self) -> str:
        """Says what runs with the current dtype, device and grad mode; for "auto" also why.

        "make_plan.native (auto: preferred on amx (decisions are off): ...) + expert_ffn.staged(...)"
        """
        sizes = self.experts.weights(), self.router.K, self.layout
        return " + ".join(describe(part, *sizes) for part in (self.make_plan, self.expert_ffn))

    @property
    def like(self) -> Tensor:
        """A matrix of its experts; other parts of a model take their dtype and device from it."""
        return self.experts.w_in_EDG

    @property
    def causal(self) -> bool:
        """False if a token's result can depend on later tokens, through the router or dropped pairs."""
        return self.router.causal and self.layout.causal

    @property
    def batch_dependent(self) -> bool:
        """True if a token's result can depend on any other token."""
        return self.router.batch_dependent or self.layout.batch_dependent

    def train_only(self, part: str) -> MoE:
        """Trains only a part: "router", or "experts" for everything except the router, or "all".

        No implementation computes gradients of the other parameters.
        """
        if part not in TRAINABLE:
            raise ValueError(f"train_only takes {', '.join(TRAINABLE)}, not {part!r}")
        for name, parameter in self.named_parameters():
            owner = "router" if name.startswith("router.") else "experts"
            parameter.requires_grad_(part in (owner, "all"))
        return self

    @torch.no_grad()
    def freeze(self, impl: str | PackedFiles | None = None, kept: PackedFiles | None = None) -> MoE:
        """For inference: packs the experts' matrices once and replaces them by the packed form.

        impl: a format ("int8", "int4_g128_a8": docs/formats.md) or another implementation, which then runs;
        by default the layer's own. `frozen` says how many bytes this saved and what error to expect.

        No memory is used twice, and no other code can change the weights unnoticed: writing to a frozen
        parameter raises an error, and so does freezing a parameter that other code can write to. No parameter
        requires gradients afterwards. An implementation without a packed form leaves the weights unchanged.
        kept: see packed_files.py.
        """
        if isinstance(impl, PackedFiles):
            impl, kept = None, impl
        ffn = self.expert_ffn
        if impl is not None:
            steady = self.shared_ffn is not None
            spec = with_format(impl, batch_invariant=steady)
            ffn = resolve(expert_ffn_op, spec, batch_invariant=steady)
        implementation = ffn if isinstance(ffn, Implementation) else self._chosen(ffn)
        self.experts.freeze(implementation, kept)
        self.expert_ffn = ffn
        return self.requires_grad_(False)

    def _chosen(self, auto: Auto) -> Implementation:
        args = expert_ffn_op.arguments(StandIns(self.experts.weights(), self.router.K, self.layout, 1))
        return auto.choice(*args.values()).implementation

    @property
    def frozen(self) -> Freezing | None:
        """Returns what freeze() did: bytes before and after, and the expected error; None if nothing is
        frozen."""
        return freezing(self)

    def thaw(self) -> MoE:
        """Makes plain parameters again; train_only("all") makes them require gradients."""
        thaw(self)
        return self

    def forward(self, x: Tensor, info: TokenInfo = TokenInfo()) -> tuple[Tensor, Routing | SoftRouting]:
        x_TD = self.tokens(x)
        routing = self.route(self.router, x_TD, info)
        return self.compute(x_TD, routing).view(x.shape), routing

    def tokens(self, x: Tensor) -> Tensor:
        """x of shape (..., D) as x_TD. Raises ValueError for a wrong width or dtype."""
        if x.shape[-1] != self.D:
            raise ValueError(f"x has width {x.shape[-1]}, the layer {self.D}")
        dtype = self.experts.w_in_EDG.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype}, the experts {dtype}; convert one, or use torch.autocast")
        return x.reshape(-1, self.D)

    def route(self, router: Router, x_TD: Tensor, info: TokenInfo) -> Routing | SoftRouting:
        """The routing of `router`, which is this layer's router or another of the same sizes."""
        routing = router(x_TD, info)
        if self.free is None:
            return routing
        if isinstance(routing, SoftRouting):
            raise ValueError("free experts need a router that chooses; Soft-MoE mixes all experts")
        return self.free.settle(routing, info.mask_T)

    def plan(self, routing: Routing) -> RoutingPlan:
        """The plan for the pairs of the E experts; free experts have no rows."""
        return self.make_plan(routing if self.free is None else self.free.for_kernels(routing), self.layout)

    def compute(
        self, x_TD: Tensor, routing: Routing | SoftRouting, plan: RoutingPlan | None = None
    ) -> Tensor:
        """The layer's result for a routing; `plan` is plan(routing), if it was already made."""
        if isinstance(routing, SoftRouting):
            y_TD = self.written_back(self.slots_computed(self.mixed(x_TD, routing), routing), routing)
        else:
            y_TD = self.chosen_computed(x_TD, routing, plan)
            if self.free is not None:
                y_TD = y_TD + self.free(x_TD, routing).to(y_TD.dtype)
        if self.shared is not None:
            shared_TD = self.shared.on_every_token(x_TD, self.shared_ffn)
            if self.shared_gate_D1 is not None:
                product = torch.matmul if self.shared_ffn is None else _invariant_product
                gate_T1 = product(x_TD, self.shared_gate_D1)
                sigmoid = torch.sigmoid if self.shared_ffn is None else steady.sigmoid
                shared_TD = sigmoid(gate_T1) * shared_TD
            y_TD = y_TD + shared_TD
        return y_TD

    def chosen_computed(self, x_TD: Tensor, routing: Routing, plan: RoutingPlan | None) -> Tensor:
        """The result of the chosen experts."""
        plan = self.plan(routing) if plan is None else plan
        return self.expert_ffn(x_TD, routing.gate_TK, plan, self.experts.weights())

    def slots(self, routing: SoftRouting) -> tuple[Routing, Layout]:
        """Soft-MoE's slots as tokens with one choice each, sorted by expert, and a layout that drops none."""
        E, rows = routing.num_experts, routing.dispatch_BNS.shape[0] * routing.slots_per_expert
        one_each = Routing(
            expert_TK=torch.arange(E, device=routing.combine_BNS.device).repeat_interleave(rows).unsqueeze(1),
            gate_TK=routing.combine_BNS.new_ones(E * rows, 1),
            num_experts=E,
            ragged=False,
        )
        # a capacity chosen for routed tokens must not drop slots
        return one_each, Layout.padded(capacity=rows) if self.layout.kind == "padded" else self.layout

    def mixed(self, x_TD: Tensor, routing: SoftRouting) -> Tensor:
        """The slots as rows, sorted by expert: each is a weighted mean of the tokens of its sequence."""
        B, N, _ = routing.dispatch_BNS.shape
        E, s = routing.num_experts, routing.slots_per_expert
        slot_BSD = routing.dispatch_BNS.transpose(1, 2).to(x_TD.dtype) @ x_TD.view(B, N, self.D)
        return slot_BSD.view(B, E, s, self.D).transpose(0, 1).reshape(E * B * s, self.D)

    def slots_computed(self, slot_TD: Tensor, routing: SoftRouting) -> Tensor:
        """The result of the experts for the slots, which are tokens with one choice each."""
        one_each, layout = self.slots(routing)
        plan = self.make_plan(one_each, layout)
        return self.expert_ffn(slot_TD, one_each.gate_TK, plan, self.experts.weights())

    def written_back(self, slot_TD: Tensor, routing: SoftRouting) -> Tensor:
        """The tokens: each is a weighted mean of the slots of its sequence."""
        B, _, S = routing.combine_BNS.shape
        E, s = routing.num_experts, routing.slots_per_expert
        y_BSD = slot_TD.view(E, B, s, self.D).transpose(0, 1).reshape(B, S, self.D)
        return (routing.combine_BNS.to(slot_TD.dtype) @ y_BSD).view(-1, self.D)

    def extra_repr(self) -> str:
        # not `implementation`, which may compile C++ to find out what runs
        parts = f"layout={self.layout}, make_plan={self.make_plan.label}, expert_ffn={self.expert_ffn.label}"
        return parts if self.frozen is None else f"{parts}\n{self.frozen}"
