"""Secret inputs for isolated workers: the parent draws them, and a worker sees them only when it is timed."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.calls import Result, value_of
from moe_routing_bench.bench.hosts.checking import Checker
from moe_routing_bench.bench.hosts.isolated_child import IsolatedChild
from moe_routing_bench.bench.hosts.memory import Place, SharedMemory, places_for, places_to_json
from moe_routing_bench.bench.hosts.secret_inputs import SecretInputs, use_weights, weights_of
from moe_routing_bench.bench.judging import ExpectedOutput, Judge, activations
from moe_routing_bench.bench.setup import Setup
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.workloads.experiment import ImplementationRef, Question

EMPTY_TURNS = 9
MORE_CORES = 1.15  # CPU time over wall time times threads
CPU_SECONDS = 5e-4  # and this much more, since the system counts in steps
TOO_OFTEN = 3


@dataclass(kw_only=True)
class Drawn:
    """The inputs of one round for one question: `held` is what the slots must still hold afterwards."""

    args: list[dict[str, Any]]
    held: Tensor

    def first(self, calls: int, slot_bytes: int) -> Drawn:
        """Those of the hot call and of so many timed ones."""
        return Drawn(args=self.args[: 1 + calls], held=self.held[: slot_bytes * (1 + calls)])


class Secret:
    """What only the parent knows: the inputs, and the weights that all processes of the protocol read."""

    def __init__(self, setup: Setup):
        self.setup, self.experiment, self.span = setup, setup.experiment, span_named(setup.experiment.span)
        self.inputs = SecretInputs(setup.judge.inputs, secrets.token_bytes(32))
        self.random = random.SystemRandom()
        self.weights: SharedMemory | None = None
        self.weight_places: list[Place] = []
        if self.span.weights:
            self._share_weights()
        self.judge = Judge(self.span, self.inputs)
        self._next = 100
        self._rights: dict[Question, ExpectedOutput] = {}

    def numbers(self, calls: int) -> range:
        """Returns call numbers that were never used before."""
        first, self._next = self._next, self._next + calls
        return range(first, self._next)

    def right(self, implementation: ImplementationRef) -> ExpectedOutput:
        """Returns the right result of one call, which shows sizes and errors."""
        if implementation.question not in self._rights:
            self._rights[implementation.question] = self.judge.right(self.numbers(1)[0], 0, implementation)
        return self._rights[implementation.question]

    def arguments(
        self, implementation: ImplementationRef, number: int, step: int
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """A call's arguments, and all tensors that go into a slot: theirs, then the upstream gradient."""
        call = self.span.call(implementation, self.inputs, number, step)
        args = self.span.arguments(call)
        tensors = list(tensors_in(activations(args)))
        if self.experiment.direction != "forward":
            shape = value_of(self.right(implementation).baseline.out).shape
            tensors.append(self.span.upstream(call.upstream(shape), args))
        return args, tensors

    def close(self) -> None:
        if self.weights is not None:
            self.weights.close()

    def plan(self) -> dict[str, Any]:
        """Where the weights lie, for a child."""
        if self.weights is None:
            return {"weights": ""}
        return {
            "weights": self.weights.path,
            "weights_bytes": self.weights.num_bytes,
            "weights_places": places_to_json(self.weight_places),
            "weights_names": list(weights_of(self.inputs)),
            "activation": self.inputs.weights.activation,
        }

    def _share_weights(self) -> None:
        """Write the weights into shared memory once; from there the parent reads them too."""
        own, activation = weights_of(self.inputs), self.inputs.weights.activation
        self.weight_places, num_bytes = places_for(list(own.values()))
        self.weights = SharedMemory.new("weights", num_bytes)
        tensors = {
            name: self.weights.tensor(place) for name, place in zip(own, self.weight_places, strict=True)
        }
        for name, tensor in tensors.items():
            tensor.copy_(own[name].detach())
        self.weights.keep_others_from_writing()
        use_weights(self.inputs, tensors, activation)


class Seat:
    """One process of a pair, and its slots: memory for the inputs of one hot call and of the timed ones."""

    def __init__(self, secret: Secret, implementation: ImplementationRef, most_bytes: int, most_calls: int):
        self.secret, self.implementation = secret, implementation
        tensors = secret.arguments(implementation, secret.numbers(1)[0], 0)[1]
        self.places, self.slot_bytes = places_for(tensors)
        self.most_calls = max(1, min(most_calls, most_bytes // self.slot_bytes))
        self.slots = SharedMemory.new("inputs", self.slot_bytes * (1 + self.most_calls))
        self._slots = self.slots.bytes()
        plan: dict[str, Any] = {
            **secret.plan(),
            "fds": [],
            "slots": self.slots.path,
            "slots_bytes": self.slots.num_bytes,
            "slot_bytes": self.slot_bytes,
            "places": places_to_json(self.places),
        }
        fds = [shared.fd for shared in (self.slots, secret.weights) if shared is not None]
        if (
            secret.experiment.sandbox
        ):  # other processes are out of sight, so it gets the open files themselves
            plan |= {"slots": f"/proc/self/fd/{self.slots.fd}", "fds": fds}
            plan |= {"weights": f"/proc/self/fd/{secret.weights.fd}"} if secret.weights else {}
        experiment = replace(secret.experiment, implementations=(implementation,))
        self.child = IsolatedChild(experiment, secret.setup.cores, json.dumps(plan), fds)
        self.child.limit, self.held = secret.setup.limit, self.child.held
        self.too_many: list[float] = []  # cores used, in samples that used more than allowed
        self.checker = Checker(secret.judge, secret.right(implementation))
        self.calls, self.judged = 1, 0  # in a sample; in full
        self.cost = self.taken_off = 0.0  # seconds of waking and freezing in a sample
        self.seconds: list[float] = []  # of each sample
        self.results: list[Result] = []  # of the calls of this round

    def draw(self, numbers: Sequence[int], steps: Sequence[int]) -> Drawn:
        """The arguments of calls, and the bytes of their slots."""
        held, all_args = torch.zeros(self.slot_bytes * len(numbers), dtype=torch.uint8), []
        for slot, (number, step) in enumerate(zip(numbers, steps, strict=True)):
            args, tensors = self.secret.arguments(self.implementation, number, step)
            all_args.append(args)
            for place, tensor in zip(self.places, tensors, strict=True):
                start = slot * self.slot_bytes + place.start
                if place.num_bytes:
                    flat = held[start : start + place.num_bytes].view(tensor.dtype)
                    flat.as_strided(place.shape, place.stride).copy_(tensor.detach())
        return Drawn(args=all_args, held=held)

    def sample(self, drawn: Drawn) -> tuple[float, list[dict[str, Tensor]]]:
        """Seconds of the calls by the parent's clock, and their results from the memory of the process."""
        self.child.limit = self.secret.setup.limit
        calls, slots = len(drawn.args) - 1, self._slots[: drawn.held.numel()]
        slots[: self.slot_bytes] = drawn.held[: self.slot_bytes]
        if self.secret.experiment.direction == "backward":
            self._write_without_upstream(drawn)
        self.child.prepare(calls=calls, hot=True)
        slots.copy_(drawn.held)
        timed = self.child.go()
        self._hold_to_cores(timed.seconds, timed.cpu_seconds)
        if not torch.equal(slots, drawn.held):
            raise ImplementationError(Status.MUTATED_INPUT, "its inputs were not the same after the call")
        if len(timed.results) != calls:
            raise ImplementationError(Status.SUSPECT, f"{len(timed.results)} results of {calls} calls")
        right = self.secret.right(self.implementation).baseline
        most = sum(t.numel() * 8 for t in tensors_in((right.out, dict(right.gradients))))
        self.seconds.append(timed.seconds)
        return timed.seconds, self.child.read(timed.results, most)

    def empty(self, calls: int) -> list[float]:
        """Returns the seconds of turns whose calls do nothing."""
        turns = []
        for _ in range(EMPTY_TURNS):
            self.child.prepare(calls=calls, hot=False, empty=True)
            turns.append(self.child.go().seconds)
        return turns

    def close(self) -> None:
        self.child.close()
        self.slots.close()

    def _write_without_upstream(self, drawn: Drawn) -> None:
        """The forward pass before a timed backward reads its inputs; the upstream gradient stays secret."""
        upstream = self.places[-1].start
        for slot in range(len(drawn.args)):
            part = slice(slot * self.slot_bytes, slot * self.slot_bytes + upstream)
            self._slots[part] = drawn.held[part]

    def _hold_to_cores(self, wall: float, cpu: float) -> None:
        threads = self.secret.experiment.threads
        if cpu > MORE_CORES * threads * wall + CPU_SECONDS:
            self.too_many.append(cpu / wall)
        if len(self.too_many) >= TOO_OFTEN:
            used = max(self.too_many)
            raise ImplementationError(
                Status.SUSPECT, f"it used {used:.1f} cores where --threads is {threads}"
            )
