"""ParallelMoE: the layer MoE with its experts on several ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.ep_combine.op import op as ep_combine_op
from moe_routing_bench.ops.ep_dispatch.op import op as ep_dispatch_op
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.parallel.faults import differing, watched
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.spread import WithGradients, local_part, locally, spread_like, summed, whole
from moe_routing_bench.parallel.traffic import Part, on_host, settle, tie
from moe_routing_bench.routers.router import Router

Event = torch.cuda.Event
Step = Callable[[Part, Tensor], Tensor]
EXPERTS = "experts."  # the prefix of sharded weights in a state_dict
SUMMED = "summed_over_ranks"  # an attribute of gradients


@cache
def _stream_of_exchanges(device: torch.device) -> torch.cuda.Stream:
    """One for all layers, because the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)


def _hand_over(stream: torch.cuda.Stream | None, ready: Event | None, *tensors: Tensor) -> None:
    """Makes a stream wait for tensors of another one, which may be freed only after it has used them."""
    if stream is not None and ready is not None:
        stream.wait_event(ready)
        for tensor in tensors:
            tensor.record_stream(stream)


class ParallelMoE(MoE):
    """One rank's part of a layer:  y, routing = ParallelMoE(D=64, F=128, E=8, K=2, ranks=ranks)(x).

    Every rank passes its own tokens, even if it has none, and gets their results. The router, shared experts
    and free experts are on every rank. Of the E experts a rank holds those that `ranks` places on it, stacked
    in ascending order. The options are those of MoE. The layout is for the experts' own computation; a
    capacity factor counts the tokens that arrive.

    send_layout   compact: exactly the rows that are needed; the host waits for their numbers.
                  padded(capacity_factor=2): the same number for each expert from each rank; the host does not
                  wait, and pairs above it are dropped (`dropped`)
    dispatch_impl, combine_impl   implementations of ep_dispatch and ep_combine
    chunks        divide the tokens into this many parts; in the forward pass the rows of one part are sent
                  while the experts compute another. Results do not change, so layouts that drop are refused
    check_finite  raise RankError on every rank if one has a token with NaN or infinity; the host waits

    Parameters are DTensors on the mesh of the experts: those of experts are Shard(0) with a row for each
    place, also for a place that is empty, and all others Replicate. state_dict() is for
    torch.distributed.checkpoint, whose files fit every placement. full_state_dict() is that of MoE.
    """

    def __init__(
        self, D: int, F: int, E: int, K: int, *, ranks: Ranks, send_layout: str | Layout = "compact",
        dispatch_impl: str = "auto", combine_impl: str = "auto", chunks: int = 1,
        check_finite: bool = False, **options: Any,
    ):  # fmt: skip
        if ranks.placement.num_experts != E:
            raise ValueError(f"{E} experts, but the placement is of {ranks.placement.num_experts}")
        self.ranks = ranks  # first, because the rest needs the experts of this rank
        super().__init__(D, F, E, K, **options)
        self.ep_dispatch = resolve(ep_dispatch_op, dispatch_impl)
        self.ep_combine = resolve(ep_combine_op, combine_impl)
        self.send_layout = Layout.parse(send_layout) if isinstance(send_layout, str) else send_layout
        self.chunks, self.check_finite = chunks, check_finite
        if chunks < 1 or (chunks > 1 and "padded" in (self.layout.kind, self.send_layout.kind)):
            raise ValueError(
                f"chunks={chunks}: at least 1, and more than 1 only if nothing is dropped, because "
                "each chunk would have its own capacity; use compact or block"
            )
        self.dropped: Tensor | None = None  # pairs of this rank's last call that were dropped when sent
        self.split_WW: Tensor | None = None  # rows from each rank to each rank in the last chunk
        self._begin_alike()
        self._mesh = ranks.mesh
        if ranks.group is not None:
            if ranks.mesh is None:
                kind = self.like.device.type
                self._mesh = DeviceMesh.from_group(ranks.group, kind, mesh_dim_names=("ep",))
            self.experts.E = E  # of weights that are loaded; _by_slot takes this rank's
            self.experts.register_state_dict_post_hook(partial(_by_expert, self))
            for module in self.modules():
                module.register_load_state_dict_pre_hook(partial(_by_slot, self))
        self._distribute()

    def held_experts(self, E: int) -> Sequence[int]:
        return range(self.ranks.places)

    @torch.no_grad()
    def _begin_alike(self) -> None:
        """Copies common weights from rank 0. An expert's first weights depend on its number."""
        self._fit_together()
        seed = torch.randint(2**62, (1,), device=self.like.device)
        for replicas, group in ((False, self.ranks.group), (True, self.ranks.replicas)):
            with watched(self.ranks, "sending the first weights", replicas=replicas):
                for tensor in (seed, *self._common().values()) if group is not None else ():
                    dist.broadcast(tensor, group=group, group_src=0)
        if self.ranks.groups:
            first = on_host(seed)[0]
            self.experts.reset_parameters([first + expert for expert in self.ranks.experts])

    def _fit_together(self) -> None:
        """Raises RankError on every rank if their layers differ, because rows would go to wrong places."""
        if self.ranks.group is None:
            return
        experts = {name: (p.dtype, p.shape) for name, p in self.experts.named_parameters()}
        common = {name: (p.dtype, p.shape) for name, p in self._common().items()}
        alike = {
            "the placement": self.ranks.placement.to_json(),
            "the sizes of weights": f"{experts} {common} {self.router.K}",
            "the way rows are sent": f"{self.send_layout} {self.chunks} {self.check_finite} "
            f"{self.ep_dispatch.label} {self.ep_combine.label}",
        }
        sums = [zlib.crc32(text.encode()) for text in alike.values()]
        mine = torch.tensor(sums, device=self.like.device)
        all_W = [torch.empty_like(mine) for _ in range(self.ranks.num_ranks)]
        with watched(self.ranks, "comparing layers"):
            dist.all_gather(all_W, mine, group=self.ranks.group)
        for (what, text), value_W in zip(alike.items(), on_host(torch.stack(all_W).T), strict=True):
            advice = f"here, on rank {self.ranks.rank}, it is {text[:200]} (numbers are checksums)"
            if (error := differing(what, value_W, advice)) is not None:
                raise error

    def _common(self) -> dict[str, Tensor]:
        """Parameters and buffers that every rank has."""
        state: dict[str, Tensor] = {}
        self._save_to_state_dict(state, "", True)
        for name, child in self.named_children():
            if child is not self.experts:
                child.state_dict(destination=state, prefix=f"{name}.", keep_vars=True)
        return state

    def _distribute(self) -> None:
        """Makes DTensors of the parameters."""
        if self._mesh is None:
            return
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                spread = Shard(0) if module is self.experts else Replicate()
                made = DTensor.from_local(parameter.detach(), self._mesh, [spread], run_check=False)
                setattr(module, name, nn.Parameter(made, parameter.requires_grad))

    def _is_sharded(self) -> bool:
        """True if fully_shard has divided these parameters further, here or in a model around the layer."""
        return any(isinstance(p, DTensor) and p.device_mesh != self._mesh for p in self.parameters())

    def _is_managed(self) -> bool:
        """The same during a call, for which fully_shard makes the parameters look as before."""
        return any(getattr(module, "_is_fsdp_managed_module", False) for module in self.modules())

    def forward(self, x: Tensor, info: TokenInfo = TokenInfo()) -> tuple[Tensor, Routing | SoftRouting]:
        y, routing = super().forward(x, info)
        if self._is_managed():
            with locally(self):
                y = WithGradients.apply(y, *self.parameters())
        return y, routing

    def route(self, router: Router, x_TD: Tensor, info: TokenInfo) -> Routing | SoftRouting:
        with locally(self):
            return super().route(router, x_TD, info)

    def chosen_computed(self, x_TD: Tensor, routing: Routing, plan: RoutingPlan | None) -> Tensor:
        if plan is not None:
            raise ValueError("one rank cannot use a plan over all experts; leave it out")
        routing = routing if self.free is None else self.free.for_kernels(routing)
        parts = [
            Part(
                x_TD=x_td,
                routing=Routing(
                    expert_TK=expert_tk,
                    gate_TK=gate_tk,
                    num_experts=routing.num_experts,
                    ragged=routing.ragged,
                ),
            )
            for x_td, expert_tk, gate_tk in zip(
                *(tensor.tensor_split(self.chunks) for tensor in (x_TD, routing.expert_TK, routing.gate_TK)),
                strict=True,
            )
        ]
        y_TD = self._computed(parts[0]) if self.chunks == 1 else self._overlapped(parts)
        self.dropped = torch.stack([part.sent.dropped_E.sum() for part in parts]).sum()
        self.split_WW = parts[-1].traffic.split_WW
        return y_TD

    def _computed(self, part: Part) -> Tensor:
        return self.given_back(part, self.experts_computed(part, self._there(part, part.x_TD)))

    def _overlapped(self, parts: list[Part]) -> Tensor:
        """One other thread makes all exchanges, in the same order on every rank:  there 0, there 1, back 0,
        there 2, back 1, ...  `tie` makes the backward pass use the reverse order. On a GPU the thread has a
        stream of its own."""
        device, grad, last = parts[0].x_TD.device, torch.is_grad_enabled(), None
        side = _stream_of_exchanges(device) if device.type == "cuda" else None
        main = None if side is None else torch.cuda.current_stream(device)

        def in_turn(step: Step, part: Part, rows: Tensor, ready: Event | None) -> tuple[Tensor, Event | None]:
            nonlocal last
            with torch.set_grad_enabled(grad), torch.cuda.stream(side):
                _hand_over(side, ready, rows, part.routing.expert_TK, part.routing.gate_TK)
                last = step(part, rows if last is None else tie(rows, last))
                return last, None if side is None else side.record_event()

        # a new thread is on GPU 0, where this process has nothing
        on_device = None if side is None else partial(torch.cuda.set_device, device)
        with ThreadPoolExecutor(1, initializer=on_device) as exchanges:

            def begin(step: Step, part: Part, rows: Tensor) -> Future[tuple[Tensor, Event | None]]:
                ready = None if main is None else main.record_event()
                return exchanges.submit(in_turn, step, part, rows, ready)

            there, back = begin(self._there, parts[0], parts[0].x_TD), []
            for part, after in zip_longest(parts, parts[1:]):
                x_QD, arrived = there.result()
                _hand_over(main, arrived, x_QD, part.traffic.place_Q, part.sent.dropped_E)
                if after is not None:
                    there = begin(self._there, after, after.x_TD)
                back.append(begin(self.given_back, part, self.experts_computed(part, x_QD)))
            y = [one.result() for one in back]
            for y_TD, returned in y:
                _hand_over(main, returned, y_TD)
            return torch.cat([y_TD for y_TD, _ in y])

    def _there(self, part: Part, x_TD: Tensor) -> Tensor:
        self.settle(part, x_TD)
        return self.send(part, x_TD)

    # the stages of a call, which `mrb bench parallel` times one by one

    def settle(self, part: Part, x_TD: Tensor) -> None:
        """Finds out how many rows each rank sends to each rank."""
        part.sent = make_plan(self.ranks.to_slots(part.routing), self.send_layout)
        part.traffic = settle(part.sent, self.ranks, x_TD, check_finite=self.check_finite)

    def send(self, part: Part, x_TD: Tensor) -> Tensor:
        return self.ep_dispatch(x_TD, part.sent, part.traffic)

    def experts_computed(self, part: Part, x_QD: Tensor) -> Tensor:
        with locally(self):
            here = Routing(
                expert_TK=part.traffic.place_Q.unsqueeze(1),
                gate_TK=x_QD.new_ones(x_QD.shape[0], 1, dtype=part.routing.gate_TK.dtype),
                num_experts=self.like.shape[0],
                ragged=self.send_layout.kind == "padded",
            )
            plan_here = self.make_plan(here, self.layout)
            return tie(self.expert_ffn(x_QD, here.gate_TK, plan_here, self.experts.weights()), x_QD)

    def given_back(self, part: Part, y_QD: Tensor) -> Tensor:
        return self.ep_combine(y_QD, part.routing.gate_TK, part.sent, part.traffic)

    def compute(
        self, x_TD: Tensor, routing: Routing | SoftRouting, plan: RoutingPlan | None = None
    ) -> Tensor:
        if isinstance(routing, SoftRouting):
            raise NotImplementedError("Soft-MoE mixes the slots of all experts and has no rows to send")
        self._refuse_sharded()
        if self._is_sharded():
            raise ValueError(
                "fully_shard has divided these weights and gathers them when the module that it was given is "
                "called: give it the whole layer, or a module around it, and call that"
            )
        with locally(self):
            return super().compute(x_TD, routing, plan)

    def _refuse_sharded(self) -> None:
        if (self._is_managed() or self._is_sharded()) and not self.ranks.in_order:
            raise NotImplementedError(
                "fully_shard needs slots in the order of experts, for its gradients and checkpoints: use "
                "contiguous(), with a number of ranks that divides the number of experts"
            )

    def freeze(self, impl: str | PackedFiles | None = None, kept: PackedFiles | None = None) -> MoE:
        """As in MoE. While the layer is frozen, its parameters are plain tensors."""
        if self._is_sharded():
            raise ValueError("fully_shard has divided the weights; freeze a layer that it does not have")
        self._make_plain()
        try:
            return super().freeze(impl, kept)
        finally:
            if self.frozen is None:
                self._distribute()

    def thaw(self) -> MoE:
        if self.frozen is not None:
            super().thaw()
            self._distribute()
        return self

    def _make_plain(self) -> None:  # a function of its own: no variable may keep a parameter that is frozen
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    setattr(
                        module, name, nn.Parameter(local_part(parameter.detach()), parameter.requires_grad)
                    )

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sums gradients over ranks: of common weights, of experts with copies, and of all over replicas.
        Every rank calls it once, after the last backward, unless fully_shard has done it."""
        if self._is_sharded():
            raise ValueError("fully_shard sums the gradients itself; leave reduce_gradients out")
        if any(hasattr(parameter.grad, SUMMED) for parameter in self.parameters()):
            raise ValueError(
                "these gradients were already summed over ranks, and a second sum would count them again: "
                "call reduce_gradients() once, after the last backward pass, then optimizer.zero_grad() with "
                "set_to_none=True"
            )
        if not self.ranks.groups:
            return
        grads = {
            parameter: torch.zeros_like(local_part(parameter))
            if parameter.grad is None
            else local_part(parameter.grad)
            for parameter in self.parameters()
            if parameter.requires_grad
        }
        if self.ranks.group is not None:
            own = set(self.experts.parameters())
            held = [parameter for parameter in grads if parameter in own]
            common = [parameter for parameter in grads if parameter not in own]
            copied = [expert for expert, ranks in enumerate(self.ranks.placement.ranks_E) if len(ranks) > 1]
            row_of = {expert: row for row, expert in enumerate(copied)}
            mine = [(row_of[e], place) for place, e in enumerate(self.ranks.experts) if e in row_of]
            rows = [grads[p].new_zeros(len(copied), *grads[p].shape[1:]) for p in held]
            for parameter, total in zip(held, rows, strict=True):
                for row, place in mine:
                    total[row] += grads[parameter][place]
            with watched(self.ranks, "summing gradients", self.split_WW):
                sums = summed([*(grads[parameter] for parameter in common), *rows], self.ranks.group)
            grads.update(zip(common, sums, strict=False))
            for parameter, total in zip(held, sums[len(common) :], strict=True):
                for row, place in mine:
                    grads[parameter][place] = total[row]
        if self.ranks.replicas is not None:
            with watched(self.ranks, "summing gradients", self.split_WW, replicas=True):
                grads = dict(zip(grads, summed([*grads.values()], self.ranks.replicas), strict=True))
        for parameter, grad in grads.items():
            parameter.grad = spread_like(grad, parameter)
            setattr(parameter.grad, SUMMED, True)

    def gradients_here(self) -> dict[str, Tensor]:
        """What this rank has of each gradient, by the name of its parameter."""
        grads = {name: parameter.grad for name, parameter in self.named_parameters()}
        return {name: local_part(grad) for name, grad in grads.items() if grad is not None}

    def total(self, tensor: Tensor) -> Tensor:
        """Sums over ranks and replicas, in place: controller_for(layer.router, reduce=layer.total)."""
        for replicas, group in ((False, self.ranks.group), (True, self.ranks.replicas)):
            if group is not None:
                with watched(self.ranks, "a sum over ranks", self.split_WW, replicas=replicas):
                    dist.all_reduce(tensor, group=group)
        return tensor

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The state_dict of the same layer on one rank. Every rank must call it, and every rank gets it."""
        with watched(self.ranks, "gathering the experts"):
            state = {name: whole(tensor).clone() for name, tensor in self._common().items()}
            for name, parameter in self.experts.named_parameters():
                state[EXPERTS + name] = whole(parameter)[self.ranks.slot_E]
        return state

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads this rank's part of a whole layer's state_dict, made with any number of ranks."""
        E = self.ranks.placement.num_experts
        for name in [name for name in state if name.startswith(EXPERTS)]:
            if state[name].shape[0] != E:
                raise ValueError(f"{name} is of {state[name].shape[0]} experts, the layer has {E}")
        self.load_state_dict(state)


def _by_expert(layer: ParallelMoE, experts: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """Names the rows of a state_dict by expert for torch.distributed.checkpoint; they are views."""
    layer._refuse_sharded()
    ranks = layer.ranks
    if any(isinstance(parameter, Frozen) for parameter in experts.parameters()):
        raise RuntimeError(
            "frozen experts have no state_dict, because each rank would have others under the same names; "
            "thaw() the layer"
        )
    if ranks.in_order:
        return
    if any(len(set(held)) < len(held) for held in ranks.placement.experts_W):
        raise NotImplementedError(
            "a rank with two copies of an expert has no state_dict, which has one row for each expert; use "
            "full_state_dict()"
        )
    for name, parameter in experts.named_parameters():
        if (key := prefix + name) in state and isinstance(parameter, DTensor):
            shape = torch.Size([ranks.placement.num_experts, *parameter.shape[1:]])
            rows = local_part(state[key].detach()).split(1)[: len(ranks.experts)]
            shards = LocalShardsWrapper(list(rows), [(e, *[0] * (len(shape) - 1)) for e in ranks.experts])
            # not from_local, which makes a view, and these have none
            meta = TensorMeta(shape, parameter.stride(), parameter.dtype)
            spec = DTensorSpec(parameter.device_mesh, (Shard(0),), meta)
            state[key] = DTensor(shards, spec, requires_grad=False)


def _by_slot(layer: ParallelMoE, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Reads what _by_expert wrote, and plain tensors of a whole layer."""
    for name, parameter in module.named_parameters(recurse=False):
        given, held = state.get(prefix + name), list(layer.ranks.experts)
        if given is None or not isinstance(parameter, DTensor):
            continue
        by_slot = layer.ranks.in_order or module is not layer.experts
        if by_slot and isinstance(given, DTensor) and not isinstance(given._local_tensor, LocalShardsWrapper):
            continue
        if layer._is_sharded():
            raise ValueError(
                "fully_shard has divided the weights, so whole ones do not fit: load them before it, or load "
                "a state_dict() with torch.distributed.checkpoint"
            )
        if module is layer.experts:
            mine = local_part(parameter.detach()).clone()
            mine[: len(held)] = _rows_of(given, held)
            given = mine
        state[prefix + name] = spread_like(given, parameter)


def _rows_of(given: Tensor, held: list[int]) -> Tensor:
    """The rows of these experts, in a tensor of all experts or in the part of it that this rank has."""
    if isinstance(given, DTensor) and isinstance(given._local_tensor, LocalShardsWrapper):
        shards = given._local_tensor
        row_of = dict(
            zip((offset[0] for offset in shards.local_offsets()), shards.local_shards(), strict=True)
        )
        if missing := [expert for expert in held if expert not in row_of]:
            raise ValueError(f"the experts {missing} are on another rank; take them from full_state_dict()")
        return torch.cat([row_of[expert] for expert in held])
    return whole(given)[held]
