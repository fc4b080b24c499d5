"""Replays routing: a Transformers model takes recorded choices, and its own router still makes the gates.

    with replay(model, trace):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()                              # reaches the router through the gates

The choices replace those of torch.topk (choosing.py). Every call checks that they arrived at the experts, so
a router that chooses in another way is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.models.choosing import Chosen, at_topk
from moe_routing_bench.models.tracing import ModelTrace, listening, moe_layers, some_numbers
from moe_routing_bench.routers.router import Router

Missing = Literal["error", "live"]
LIVE = -1  # stands for the router's own choice


class Recorded(Protocol):
    """A trace that was read from a file (workloads.trace.Trace)."""

    def by_layer(self) -> ModelTrace: ...


@contextmanager
def replay(
    model: nn.Module,
    trace: ModelTrace | Recorded,
    *,
    documents: Sequence[int] | None = None,
    missing: Missing = "error",
) -> Iterator[None]:
    """Inside `with`, the MoE layers choose what the trace says, call after call.

    documents  None: a call takes as many rows as it has tokens, in the order of the trace. That fits the
               recorded batches, or one sequence, whole or step by step in generation. [4, 0]: a call has two
               sequences, documents 4 and 0 from position 0 on, and the next call continues them. Padding on
               the right counts as tokens
    missing    what a token without a row gets. "error": ValueError. "live": the router's own choice, for the
               last sampled token (engines record no row for it), for padding, or for a prompt left out

    Raises ValueError if trace and model differ in layers, experts, choices or number of tokens, and at the
    end of `with` if recorded rows are left. With gradient checkpointing, call backward() inside `with`.
    """
    recorded = trace if isinstance(trace, ModelTrace) else trace.by_layer()
    if missing not in ("error", "live"):
        raise ValueError(f'missing is {missing!r}; it must be "error" or "live"')
    if hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in model.modules()):
        raise NotImplementedError("a compiled model keeps its own choices; replay before torch.compile")
    layers = moe_layers(model)
    _check_layers(recorded, layers)
    rows = _Rows.of(recorded, documents, missing)
    again = model.training and _checkpoints(model)
    feeds = {
        layer: _Feed(name=name, ids=ids, rows=rows, again=again)
        for (layer, (name, _)), ids in zip(sorted(layers.items()), rows.tables(recorded), strict=True)
    }

    def on_topk(layer: int, scores: Tensor, k: int, topk: Callable[[], Any]) -> Any:
        ids = feeds[layer].choices(scores, k, topk)
        return topk() if ids is None else Chosen(scores.gather(-1, ids), ids)

    with ExitStack() as stack:
        stack.enter_context(at_topk(model, layers, on_topk, lambda layer: feeds[layer].begin()))
        stack.enter_context(listening(model, lambda layer, routing: feeds[layer].arrived(routing)))
        yield
    for feed in feeds.values():
        feed.end()


def _checkpoints(model: nn.Module) -> bool:
    """Returns whether layers run again in the backward pass. Transformers 5.23 has a new name for it and
    warns about the old one."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(type(model), name)), False))


def _check_layers(trace: ModelTrace, layers: dict[int, tuple[str, nn.Module]]) -> None:
    ours = [name for name, module in layers.values() if isinstance(module, Router)]
    if ours:
        raise NotImplementedError(
            f"{ours[0]} is a router of this library; replay is for models of Transformers"
        )
    if set(trace.names) != set(layers):
        raise ValueError(
            f"the trace has the layers {some_numbers(trace.names)}, the model MoE layers "
            f"{some_numbers(layers)}; record all of them, or number them as the model does "
            "(mrb model trace import --first-layer)"
        )
    for name, module in layers.values():
        if module.num_experts != trace.num_experts:
            raise ValueError(
                f"{name} has {module.num_experts} experts, the trace {trace.num_experts}: "
                "it is of another model"
            )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Which rows of the trace a call takes: place_BN is the row of each sequence and position, or LIVE.

    Without documents it is one sequence of all rows.
    """

    place_BN: Tensor
    missing: Missing
    what: str

    @staticmethod
    def of(trace: ModelTrace, documents: Sequence[int] | None, missing: Missing) -> _Rows:
        if documents is None:
            return _Rows(
                place_BN=torch.arange(trace.num_tokens).unsqueeze(0), missing=missing, what="the trace"
            )
        known = set(trace.document_T.tolist())
        if not documents:
            raise ValueError("documents is empty; name one for each sequence of a batch")
        if unknown := [document for document in documents if document not in known]:
            raise ValueError(f"the trace has no document {unknown[0]}; it has {some_numbers(known)}")
        longest = max(int(trace.position_T[trace.document_T == d].max()) for d in documents) + 1
        if longest > 1 << 24:
            raise ValueError(f"positions go up to {longest - 1:,}; at most {1 << 24:,} are replayed")
        place_BN = torch.full((len(documents), longest), LIVE)
        for b, document in enumerate(documents):
            row = (trace.document_T == document).nonzero().squeeze(1)
            place_BN[b, trace.position_T[row]] = row
        return _Rows(
            place_BN=place_BN, missing=missing, what=f"the documents {', '.join(map(str, documents))}"
        )

    def tables(self, trace: ModelTrace) -> Iterator[Tensor]:
        """Yields the ids of each layer, and after them a row for tokens without recorded ids."""
        for ids in (trace.expert_TK[layer] for layer in sorted(trace.names)):
            yield torch.cat((ids.long(), torch.full((1, ids.shape[1]), LIVE)))


@dataclass(kw_only=True)
class _Feed:
    """Hands out the rows of one layer, call by call."""

    name: str
    ids: Tensor
    rows: _Rows
    again: bool  # gradient checkpointing runs a block once more in backward
    done: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    now: Tensor | None = None
    expected: Tensor | None = None
    ruled_out: Tensor | None = None
    repeating: bool = False

    def begin(self) -> None:
        self.now = self.expected = None
        self.repeating = torch._C._current_graph_task_id() != -1

    def choices(self, scores: Tensor, k: int, topk: Callable[[], Any]) -> Tensor | None:
        """Returns the recorded ids for these scores; None if this topk does not choose experts."""
        K = self.ids.shape[1]
        if k != K:
            return None
        if self.now is None:
            self.now = self._repeat() if self.repeating else self._next(scores.numel() // scores.shape[-1])
        ids = self.now.to(scores.device)
        if ids.numel() != scores.numel() // scores.shape[-1] * K:
            raise ValueError(
                f"{self.name} was called with {scores.numel() // scores.shape[-1]} tokens where {len(ids)} "
                "were replayed"
            )
        ids = ids.view(*scores.shape[:-1], K)
        if bool((ids == LIVE).any()):
            ids = torch.where(ids == LIVE, topk()[1], ids)
        self.expected = ids.reshape(-1, K)
        score = scores.detach().gather(-1, ids).view(-1, K)
        self.ruled_out = (score == 0) | (score == -torch.inf)
        return ids

    def _next(self, tokens: int) -> Tensor:
        B, N = self.rows.place_BN.shape
        if tokens % B:
            raise ValueError(
                f"{self.name} was called with {tokens} tokens for {B} documents; give each sequence of the "
                "batch a document, and all the same length"
            )
        first, self.done = self.done, self.done + tokens // B
        place = self.rows.place_BN[:, first : self.done]
        if self.done > N:
            place = torch.cat((place, place.new_full((B, self.done - max(first, N)), LIVE)), dim=1)
        if self.rows.missing == "error" and bool((place == LIVE).any()):
            b, n = (place == LIVE).nonzero()[0].tolist()
            raise ValueError(
                f"{self.name} was called with {tokens // B} tokens from place {first} on, but "
                f"{self.rows.what} has no row for place {first + n}{f' of sequence {b}' if B > 1 else ''}; "
                'call the model with the recorded tokens, or pass missing="live" for the router\'s own choice'
            )
        ids = self.ids[place.flatten()]  # LIVE is the last row, which has no ids
        if self.again:
            self.waiting.append(ids)
        return ids

    def _repeat(self) -> Tensor:
        if len(self.waiting) != 1:
            raise NotImplementedError(
                f"{self.name} runs again in backward (gradient checkpointing) after {len(self.waiting)} "
                "calls; call the model once before each backward(), in training mode"
            )
        return self.waiting.pop()

    def arrived(self, routing: Routing) -> None:
        if routing.num_choices != self.ids.shape[1]:
            raise ValueError(
                f"{self.name} takes {routing.num_choices} experts for each token, the trace has "
                f"{self.ids.shape[1]}: it is of another model"
            )
        if self.expected is None or not torch.equal(routing.expert_TK.long(), self.expected):
            raise NotImplementedError(
                f"the router before {self.name} does not choose by torch.topk over all experts, so its "
                "choices cannot be replaced"
            )
        assert self.ruled_out is not None
        gate_TK = routing.gate_TK.detach()
        if bool((self.ruled_out & ((gate_TK == 0) | ~gate_TK.isfinite())).any()):
            raise NotImplementedError(
                f"the router before {self.name} rules out groups of experts and makes its gates of the rest, "
                "so an expert that was recorded and is now ruled out has no gate"
            )

    def end(self) -> None:
        N = self.rows.place_BN.shape[1]
        if self.done < N:
            raise ValueError(
                f"{self.name} was called with {self.done} tokens, but {N} were recorded for "
                f"{self.rows.what}; replay all of them, or only that part of the trace"
            )
        if self.waiting:
            raise ValueError(
                "gradient checkpointing runs the layers again in backward, where they would choose again; "
                "call backward() inside `with replay(...)`"
            )
