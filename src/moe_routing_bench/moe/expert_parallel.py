"""ParallelMoE: the layer MoE with its experts on several ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing, SoftRouting
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.ep_combine.op import op as ep_combine_op
from moe_routing_bench.ops.ep_dispatch.op import op as ep_dispatch_op
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.parallel.faults import differing, watched
from moe_routing_bench.parallel.ranks import Ranks
from moe_routing_bench.parallel.traffic import Traffic, on_host, settle, tie

Event = torch.cuda.Event
EXPERTS = "experts."  # the prefix of sharded weights in a state_dict


@dataclass(kw_only=True)
class Part:
    """Some of a rank's tokens, with the plan and the traffic that are made for them."""

    x_TD: Tensor
    routing: Routing
    sent: RoutingPlan = field(init=False)
    traffic: Traffic = field(init=False)


Step = Callable[[Part, Tensor], Tensor]


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

    state_dict has MoE's keys with this rank's experts; full_state_dict() is that of MoE.
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

    def held_experts(self, E: int) -> Sequence[int]:
        return self.ranks.experts

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
        experts = {name: (p.dtype, p.shape[1:]) for name, p in self.experts.named_parameters()}
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
        state = self.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if not name.startswith(EXPERTS)}

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

        with ThreadPoolExecutor(1) as exchanges:

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
        here = Routing(
            expert_TK=part.traffic.place_Q.unsqueeze(1),
            gate_TK=x_QD.new_ones(x_QD.shape[0], 1, dtype=part.routing.gate_TK.dtype),
            num_experts=len(self.ranks.experts),
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
        return super().compute(x_TD, routing, plan)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sums gradients over ranks: of common weights, of experts with copies, and of all over replicas.
        Every rank calls it after backward."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None and self.ranks.groups:
                parameter.grad = torch.zeros_like(parameter)
        if self.ranks.group is not None:
            with watched(self.ranks, "summing gradients", self.split_WW):
                self._reduce_over_ranks()
        if self.ranks.replicas is not None:
            with watched(self.ranks, "summing gradients", self.split_WW, replicas=True):
                for parameter in self.parameters():
                    if parameter.requires_grad:
                        dist.all_reduce(parameter.grad, group=self.ranks.replicas)

    def _reduce_over_ranks(self) -> None:
        for parameter in self._common().values():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad, group=self.ranks.group)
        copied = [expert for expert, held in enumerate(self.ranks.placement.ranks_E) if len(held) > 1]
        row_of = {expert: row for row, expert in enumerate(copied)}
        mine = [(row_of[e], place) for place, e in enumerate(self.ranks.experts) if e in row_of]
        for parameter in self.experts.parameters():
            if not copied or not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            total = parameter.new_zeros(len(copied), *parameter.shape[1:])
            for row, place in mine:
                total[row] += parameter.grad[place]
            dist.all_reduce(total, group=self.ranks.group)
            for row, place in mine:
                parameter.grad[place] = total[row]

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
        state = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        placement = self.ranks.placement
        if self.ranks.group is None:
            return state
        for name in [name for name in state if name.startswith(EXPERTS)]:
            mine = state[name]
            padded = mine.new_zeros(placement.places, *mine.shape[1:])
            padded[: mine.shape[0]] = mine
            all_WP = [torch.empty_like(padded) for _ in range(placement.num_ranks)]
            with watched(self.ranks, "gathering the experts"):
                dist.all_gather(all_WP, padded, group=self.ranks.group)
            first = [
                (ranks[0], placement.experts_W[ranks[0]].index(e))
                for e, ranks in enumerate(placement.ranks_E)
            ]
            state[name] = torch.stack([all_WP[rank][place] for rank, place in first])
        return state

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads this rank's part of a whole layer's state_dict, made with any number of ranks."""
        held = list(self.ranks.experts)
        E = self.ranks.placement.num_experts
        mine = dict(state)
        for name in [name for name in state if name.startswith(EXPERTS)]:
            if state[name].shape[0] != E:
                raise ValueError(f"{name} is of {state[name].shape[0]} experts, the layer has {E}")
            mine[name] = state[name][held]
        self.load_state_dict(mine)
