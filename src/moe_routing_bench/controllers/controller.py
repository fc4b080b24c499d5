"""Controller: moves a router's balance state between steps; and how controllers are found.

A controller is a file `controllers/<name>.py` that defines one subclass of Controller. It is called once per
optimiser step, never by forward:

    controller = controller_for(router)
    counts = Counts.of(routing)  # for more micro-batches: counts = counts + Counts.of(routing)
    controller.step(counts)

On several ranks every rank calls step with its own counts and `reduce=all_reduce_sum()`. Then all move
equally.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_routing_bench.core.names import no_such
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.routers.router import Router, all_routers, modules_beside, only_subclass

# the sum over all ranks of a tensor, as a new tensor or the same one overwritten
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a controller knows about a batch. T=3, K=2, E=4, expert_TK = [[0, 2], [2, -1], [-1, -1]], and the
    last token is masked:
      count_E    = [1, 0, 2, 0]   tokens that chose each expert
      num_tokens = 2              tokens that exist, whether they chose an expert or not

    Both are int64 on the routing's device. `+` adds the counts of two micro-batches.
    """

    count_E: Tensor
    num_tokens: Tensor

    @staticmethod
    def of(routing: Routing, mask_T: Tensor | None = None) -> Counts:
        """Does not wait for the device. mask_T: False where there is no token, as in TokenInfo."""
        device = routing.expert_TK.device
        num_tokens = (
            torch.full((), routing.num_tokens, dtype=torch.int64, device=device)
            if mask_T is None
            else mask_T.bool().sum()
        )
        return Counts(count_E=routing.masked(mask_T).load_E(), num_tokens=num_tokens)

    def __add__(self, other: Counts) -> Counts:
        return Counts(count_E=self.count_E + other.count_E, num_tokens=self.num_tokens + other.num_tokens)


class Controller:
    """Moves buffers of one router that is already on its device. Subclasses name them in `moves` and define
    `update`.

    The router saves these buffers. The controller's own state (the integral of a PI controller) is in
    `memory`; state_dict and load_state_dict save it.
    """

    moves: ClassVar[tuple[str, ...]]  # buffers of the router; they must exist
    source: ClassVar[str]  # paper or code it is taken from

    def __init__(self, router: Router, *, reduce: Reduce | None = None):
        buffers = dict(router.named_buffers())
        if missing := [name for name in self.moves if name not in buffers]:
            raise ValueError(
                f"{name_of(type(self))} moves {', '.join(missing)}, which {type(router).__name__} does not "
                f"have; {_who_has(missing)}"
            )
        self.router = router
        self.reduce = reduce
        self.memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, counts: Counts) -> None:
        """Call it once per optimiser step, with the counts of all micro-batches. It does not wait for the
        device."""
        if counts.count_E.shape != (self.router.E,):
            raise ValueError(
                f"counts of {counts.count_E.numel()} experts for a router with E={self.router.E}; "
                "count the routing of this router"
            )
        for name in self.moves:
            if (dtype := self.router.get_buffer(name).dtype) not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} is {dtype}, which loses small steps; after casting a model, convert the buffers "
                    "of its routers back to float32"
                )
        self.update(counts)

    def update(self, counts: Counts) -> None:
        """Called without gradients. counts are those of this rank; use `total` to sum over ranks."""
        raise NotImplementedError

    def total(self, *tensors: Tensor) -> list[Tensor]:
        """The sums over all ranks, in one reduction; without `reduce` the tensors unchanged."""
        if self.reduce is None:
            return list(tensors)
        # cat copies, so reduce may overwrite its input
        sums = self.reduce(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = sums.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def total_counts(self, counts: Counts) -> Counts:
        count_E, num_tokens = self.total(counts.count_E, counts.num_tokens)
        return Counts(count_E=count_E, num_tokens=num_tokens)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.memory.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if set(state) != set(self.memory):
            raise ValueError(
                f"{name_of(type(self))} remembers {', '.join(sorted(self.memory)) or 'nothing'}, but this "
                f"state has {', '.join(sorted(state)) or 'nothing'}; load the state of the same controller"
            )
        for name, value in state.items():
            self.memory[name].copy_(value)


class BiasController(Controller):
    """Moves a router's bias_E by `rate` per step."""

    moves = ("bias_E",)

    def __init__(self, router: Router, *, rate: float = 1e-3, **options: Any):
        super().__init__(router, **options)
        if not rate > 0:
            raise ValueError(f"rate is how far a bias moves per step; it must be above 0, not {rate}")
        self.rate = rate

    def towards_mean_E(self, counts: Counts) -> Tensor:
        """rate for an expert below the mean load, -rate for an expert above it, in the dtype of the bias."""
        count_E = self.total_counts(counts).count_E
        # whole numbers, because a float32 mean would lose the sign of small gaps above 2^24 tokens
        gap_E = count_E.sum() - self.router.E * count_E
        return self.rate * torch.sign(gap_E).to(self.router.get_buffer("bias_E").dtype)


def all_reduce_sum(group: Any = None) -> Reduce:
    """The sum over a torch.distributed process group (None: all ranks), for Controller(reduce=...)."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("there is no process group; call torch.distributed.init_process_group first")

    def reduce(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor

    return reduce


def all_controllers() -> dict[str, type[Controller]]:
    """Every controller by name: the files of this folder."""
    package = __name__.rpartition(".")[0]
    return {
        name: only_subclass(importlib.import_module(f"{package}.{name}"), Controller)
        for name in modules_beside(__file__, {"controller"})
    }


def controller_for(router: Router, name: str | None = None, **options: Any) -> Controller:
    """Builds the controller `name`, by default the one that was published with the router.

    controller_for(router, "sign_bias", rate=1e-3, reduce=all_reduce_sum())

    >>> router = mrb.router_for("deepseek-v3", D=8, E=16, K=2)
    >>> controller = mrb.controller_for(router)
    >>> controller.router is router
    True
    """
    controllers = all_controllers()
    if name is None:
        name = router.controller
    if name is None:
        raise ValueError(
            f"{type(router).__name__} was published without a balance controller; name one of "
            f"{', '.join(sorted(controllers))}"
        )
    if name not in controllers:
        raise no_such("controller", name, sorted(controllers))
    return controllers[name](router, **options)


def name_of(controller: type[Controller]) -> str:
    return controller.__module__.rpartition(".")[2]


def _who_has(buffers: list[str]) -> str:
    """The routers whose own controller moves one of these buffers; no router is built."""
    movers = {name for name, controller in all_controllers().items() if set(controller.moves) & set(buffers)}
    routers = sorted(name for name, rule in all_routers().items() if rule.controller in movers)
    if not routers:
        return "no router here has it"
    return f"{' and '.join(routers)} {'has' if len(routers) == 1 else 'have'} it"
