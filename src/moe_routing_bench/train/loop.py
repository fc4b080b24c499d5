"""One training run, top to bottom. It yields events and writes no files; train/records.py does.

    for event in train(run, corpus):            from the first step
    for event in train(run, corpus, state):     from a state that was yielded before

A run that is stopped after any state and continued from it has the same losses to the bit, on the same
machine with the same number of threads.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.controllers.controller import Controller, Counts, controller_for
from moe_routing_bench.core.routing import Routing, SoftRouting
from moe_routing_bench.models.feed_forward import routings_of
from moe_routing_bench.moe.layer import Routings
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.text import Corpus
from moe_routing_bench.train.watching import Knowledge, LayerLoad, Probe, loads

PARTS = ("data", "forward", "backward", "optimise")


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One optimiser step. `loss` is in nats per token, without the routers' losses, which are in `aux`."""

    step: int
    loss: float
    aux: float
    norm: float  # of the gradient, before clipping
    learning_rate: float
    pairs_per_token: float  # experts of a token, mean over layers
    seconds: dict[str, float]  # by PARTS


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The state after `step` steps. `losses`: held-out nats per byte by source; the first is the run's
    loss."""

    step: int
    losses: dict[str, float]
    layers: dict[str, LayerLoad]  # of the last training batch; empty before the first step
    knowledge: dict[str, Knowledge]
    collapsed: dict[str, str]  # layer -> in what way
    train_seconds: float  # of all steps so far, without evaluations


@dataclass(frozen=True, kw_only=True)
class State:
    """All that a run needs to continue: model, optimiser, controllers, random numbers, the probe's
    choices."""

    step: int
    train_seconds: float
    tensors: dict[str, Tensor] = field(repr=False)

    def part(self, start: str) -> dict[str, Tensor]:
        """Returns the tensors whose names begin with `start`, by the rest: part("model:") is a state_dict."""
        return {name[len(start) :]: value for name, value in self.tensors.items() if name.startswith(start)}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of the run. `peak_bytes`: memory above what the process used before the model was made."""

    step: int
    peak_bytes: int
    model: Decoder = field(repr=False)


Event = Stepped | Evaluated | State | Ended


class DivergedError(ValueError):
    """A gradient is infinite or not a number. The run cannot go on."""


def train(
    run: Run,
    corpus: Corpus,
    state: State | None = None,
    *,
    due: Callable[[int, float], bool] = lambda step, seconds: False,
    weights: State | None = None,
) -> Iterator[Event]:
    """due(step, seconds) says whether to yield a State after this step; at the end there is always one.
    weights: start with the model of this state, where names and shapes are equal."""
    memory = _peak()
    torch.manual_seed(run.seed)
    model = Decoder(run)
    if weights is not None:
        take_weights(model, weights)
    optimizer = _optimizer(model, run)
    controllers = _controllers(model, run)
    probe = Probe.of(corpus, sequence=run.size.sequence, pieces=min(8, run.pieces))
    step, seconds, choices = 0, 0.0, dict[str, Tensor]()
    if state is not None:
        step, seconds = state.step, state.train_seconds
        choices = restore(state, model, optimizer, controllers)
    if step == 0:
        losses = evaluate(model, corpus, run)
        knowledge, choices = probe.ask(model, choices)
        yield Evaluated(
            step=0, losses=losses, layers={}, knowledge=knowledge, collapsed={}, train_seconds=0.0
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    while step < run.steps:
        clock = [time.perf_counter()]
        token_BN = corpus.batch(seed=run.data_seed, step=step, batch=run.batch, sequence=run.size.sequence)
        clock.append(time.perf_counter())

        with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
            logits_BNV, chosen = model(token_BN[:, :-1])
        loss = F.cross_entropy(logits_BNV.float().flatten(0, 1), token_BN[:, 1:].flatten())
        each = [routing for layer in chosen for routing in routings_of(layer)]
        aux = Routings(tuple(each)).aux_loss
        clock.append(time.perf_counter())

        (loss if aux is None else loss + aux).backward()
        clock.append(time.perf_counter())

        norm = clip(trained, run.clip)
        if not math.isfinite(norm):
            raise DivergedError(
                f"{run.rule.name} diverged at step {step + 1}: the gradient's norm is {norm}; "
                f"a learning rate below {run.learning_rate:g} may help"
            )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for (_, controller), routing in zip(controllers, each, strict=False):
            assert isinstance(routing, Routing)
            controller.step(Counts.of(routing))
        clock.append(time.perf_counter())

        step += 1
        seconds += clock[-1] - clock[0]
        yield Stepped(
            step=step,
            loss=loss.item(),
            aux=0.0 if aux is None else aux.item(),
            norm=norm,
            learning_rate=learning_rate(run, step - 1),
            pairs_per_token=_pairs(each, len(model.blocks)),
            seconds={part: clock[i + 1] - clock[i] for i, part in enumerate(PARTS)},
        )
        if step in run.evaluated_at():
            layers = loads(model, chosen)
            knowledge, choices = probe.ask(model, choices)
            yield Evaluated(
                step=step,
                losses=evaluate(model, corpus, run),
                layers=layers,
                knowledge=knowledge,
                collapsed={name: why for name, load in layers.items() if (why := load.collapse())},
                train_seconds=seconds,
            )
        if step == run.steps or due(step, seconds):
            yield snapshot(step, seconds, model, optimizer, controllers, choices)
    yield Ended(step=step, peak_bytes=_peak() - memory, model=model)


def learning_rate(run: Run, step: int) -> float:
    """Returns the rate: it rises, stays, and falls to 0 in a line."""
    if step < run.warmup:
        return run.learning_rate * (step + 1) / run.warmup
    return run.learning_rate * min(1.0, (run.steps - step) / (run.steps - run.decays_at))


def clip(parameters: Sequence[Tensor], most: float) -> float:
    """Scales all gradients so that their norm is at most `most`. Returns the norm before.

    fsum is exact, so a parameter whose gradient is 0 changes nothing in any order.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(math.fsum(value.item() ** 2 for value in torch._foreach_norm(grads)))
    if norm > most:
        torch._foreach_mul_(grads, most / norm)
    return norm


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, run: Run) -> dict[str, float]:
    """Returns held-out nats per byte of each source."""
    model.eval()
    losses = {}
    for number, source in enumerate(corpus.sources):
        # runs are compared on the first source, so the others get fewer pieces
        pieces = run.pieces if number == 0 else max(1, run.pieces // 4)
        total = 0.0
        token_BN = corpus.held_out(number, pieces=pieces, sequence=run.size.sequence, part=run.part)
        # batches of the same form as in training, on which the choices of some rules depend
        for part in token_BN.split(run.batch):
            logits_BNV, _ = model(part[:, :-1])
            total += F.cross_entropy(
                logits_BNV.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
            ).item()
        losses[source.name] = total / int(corpus.bytes_V[token_BN[:, 1:]].sum())
    model.train()
    return losses


def _pairs(each: Sequence[Routing | SoftRouting], layers: int) -> float:
    """Returns experts per token in a layer; for Soft-MoE, slots per token."""
    total = 0.0
    for routing in each:
        if isinstance(routing, SoftRouting):
            total += routing.dispatch_BNS.shape[2] / routing.dispatch_BNS.shape[1]
        else:
            total += routing.load_E().sum().item() / routing.num_tokens
    return total / layers


def _optimizer(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """Decays matrices, but not vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": run.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), fused=True)


def _controllers(model: Decoder, run: Run) -> list[tuple[str, Controller]]:
    if run.rule.controller is None:
        return []
    return [(name, controller_for(router, run.rule.controller)) for name, router in model.routers().items()]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def snapshot(
    step: int, seconds: float, model: nn.Module, optimizer: torch.optim.Optimizer,
    controllers: Sequence[tuple[str, Controller]], choices: dict[str, Tensor],
) -> State:  # fmt: skip
    """Returns views, not copies; write them before the run continues."""
    tensors = {f"model:{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer:{name}:{key}"] = value
    for name, controller in controllers:
        for key, value in controller.state_dict().items():
            tensors[f"controller:{name}:{key}"] = value
    tensors |= {f"choice:{name}": value for name, value in choices.items()}
    tensors["random"] = torch.get_rng_state()
    return State(step=step, train_seconds=seconds, tensors=tensors)


def restore(
    state: State, model: nn.Module, optimizer: torch.optim.Optimizer,
    controllers: Sequence[tuple[str, Controller]],
) -> dict[str, Tensor]:  # fmt: skip
    """Restores everything and returns the choices of the probe."""
    model.load_state_dict(state.part("model:"))
    for name, parameter in model.named_parameters():
        if mine := state.part(f"optimizer:{name}:"):
            optimizer.state[parameter] = {key: value.clone() for key, value in mine.items()}
    for name, controller in controllers:
        controller.load_state_dict(state.part(f"controller:{name}:"))
    torch.set_rng_state(state.tensors["random"])
    return state.part("choice:")


def take_weights(model: nn.Module, state: State) -> None:
    """Copies the weights of another run where names and shapes are equal, also into experts under
    adapters."""
    mine = model.state_dict()
    for name, value in state.part("model:").items():
        for place in (name, name.replace("feed_forward.", "feed_forward.moe.")):
            if place in mine and mine[place].shape == value.shape:
                mine[place].copy_(value)
