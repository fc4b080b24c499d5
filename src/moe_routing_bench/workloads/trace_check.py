"""Finds faults of captured routes, as users of serving engines reported them: check(requests, ...) -> Faults.

Capturing fails without an error: the text and the shape are right, and the ids are zeros, old rows, or rows
of another token. Some faults are certain, such as an id twice in one row. The others count as faults only if
chance would make them less than once in a million. Routing that is uneven, collapsed to 97 % or made by a
hash has no faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.models.tracing import some_numbers
from moe_routing_bench.workloads.serving import Request
from moe_routing_bench.workloads.trace import Trace
from moe_routing_bench.workloads.trace_shift import shifts

# how many equal rows are examined; a fault is reported if its probability is under CHANCE
RUN, CHANCE, PRIOR = 16, 1e-6, 30
# a layer may well send 97 % of its tokens to one expert
CONSTANT, CONSTANT_ONE_CHOICE = 32, 256


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault(kind="zero start", sentence="document 0: positions 0 to 30 are zeros in every layer: ...")"""

    kind: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Requests of one model; layers[i] is the number of the i-th layer in ids."""

    requests: Sequence[Request]
    layers: Sequence[int]
    num_experts: int

    @staticmethod
    def of_trace(trace: Trace) -> Recording:
        """Returns a trace file as requests, one for each document. Raises ValueError as by_layer does."""
        model = trace.by_layer()
        # layers is the middle dimension, as engines send it
        ids = np.stack([model.expert_TK[layer].numpy() for layer in model.names], axis=1)
        document_T, position_T = model.document_T.numpy(), model.position_T.numpy()
        requests = []
        for document in np.unique(document_T).tolist():
            row = np.flatnonzero(document_T == document)
            position = position_T[row]
            step = np.diff(position)
            where = f"document {document}"
            if (step != 1).any():
                t = int(np.flatnonzero(step != 1)[0])
                what = "twice" if step[t] == 0 else f"followed by {position[t + 1]}"
                raise ValueError(
                    f"{where}: position {position[t]} comes {what}; rows must be in the order of the tokens"
                )
            requests.append(Request(name=where, ids=ids[row], start=int(position[0])))
        return Recording(requests=requests, layers=[*model.names], num_experts=model.num_experts)


def check(recording: Recording) -> list[Fault]:
    """Returns every fault, the certain ones first. If there are certain ones, it looks for no others."""
    if not any(request.ids.shape[0] for request in recording.requests):
        return [Fault(kind="empty", sentence="no request has a row: nothing was captured")]
    faults = [*_lengths(recording), *_zeros(recording)]
    if any(fault.kind == "nothing captured" for fault in faults):
        return faults
    faults += [*_narrow(recording), *_wrong_ids(recording)]
    if faults:
        return faults
    moved = shifts(recording.requests, recording.layers)
    return [
        *_constant_layers(recording), *_old_rows(recording), *_twins(recording), *_copies(recording),
        *(Fault(kind="shifted", sentence=sentence) for sentence in moved),
    ]  # fmt: skip


def _lengths(recording: Recording) -> Iterator[Fault]:
    for request in recording.requests:
        if request.tokens is None:
            continue
        rows, run = request.ids.shape[0], request.tokens - request.start
        # the token sampled last was not run; a prompt alone was run whole
        if rows in (run, run - 1):
            continue
        exchanged = request.ids.shape[1] in (run, run - 1)
        yield Fault(
            kind="exchanged" if exchanged else "length",
            sentence=f"{request.name}: {rows:,} rows for {request.tokens:,} tokens from position "
            f"{request.start} on; "
            + (
                f"but {request.ids.shape[1]:,} layers: tokens and layers are exchanged"
                if exchanged
                else f"there must be {run - 1:,}, because the token sampled last has none"
            ),
        )


def _zeros(recording: Recording) -> Iterator[Fault]:
    """Memory that was never written. With one choice, zeros may be expert 0, so they are not certain."""
    if recording.requests[0].ids.shape[2] < 2:
        return
    zero: list[NDArray[np.bool_]] = [(request.ids == 0).all(axis=2) for request in recording.requests]
    dead = np.logical_and.reduce([blank.all(axis=0) for blank in zero])
    if dead.all():
        yield Fault(
            kind="nothing captured",
            sentence="every id is 0, in all layers and requests: the engine captured nothing (a kernel that "
            "routes inside itself, or a capture that was never bound)",
        )
        return
    if dead.any():
        yield Fault(
            kind="zero layer",
            sentence=f"{_layers(recording, np.flatnonzero(dead))} only zeros in all requests: without "
            "experts in the model (leave out by --layers), or never captured",
        )
    for request, blank in zip(recording.requests, zero, strict=True):
        row: NDArray[np.bool_] = np.all(blank[:, ~dead], axis=1)
        for first, last in _runs(row):
            at_start, at_end = first == 0, last == len(row) - 1
            kind = "zero start" if at_start else "zero end" if at_end else "zero rows"
            why = {
                "zero start": "the prompt was not run here (prefix cache, or prefill elsewhere)",
                "zero end": "filled up to the length, because the token sampled last has no row; cut it off",
                "zero rows": "these tokens were not captured",
            }[kind]
            yield Fault(kind=kind, sentence=f"{_rows(request, first, last)} zeros in every layer: {why}")


def _narrow(recording: Recording) -> Iterator[Fault]:
    E, kind = recording.num_experts, recording.requests[0].ids.dtype
    ids = np.concatenate([request.ids.reshape(-1) for request in recording.requests])
    beyond = E - 1 - np.iinfo(kind).max
    # few ids may all be small and fit a small type; among many ids some are too large for it
    if ids.size * beyond > 50 * E:
        yield Fault(
            kind="narrow",
            sentence=f"ids are kept as {kind}, which cannot hold {E - 1}, the last of {E} experts",
        )
        return
    used = np.unique(ids)
    # no id above 255 and nearly all below: they were cut to eight bits
    if E > 320 and used.max() < 256 and used.size > 230 and ids.size > 50 * E:
        yield Fault(
            kind="narrow",
            sentence=f"no id is above 255 in {ids.size:,} choices of {E} experts: they were cut to a byte",
        )


def _wrong_ids(recording: Recording) -> Iterator[Fault]:
    E, K = recording.num_experts, recording.requests[0].ids.shape[2]
    for request in recording.requests:
        ids = request.ids.astype(np.int64)
        absent = (ids == -1).all(axis=2).all(axis=1)
        for first, last in _runs(absent):
            yield Fault(
                kind="absent rows",
                sentence=f"{_rows(request, first, last)} -1 in every layer, the mark of padding: they "
                "belong to no token",
            )
        outside = ((ids < 0) | (ids >= E)) & ~absent[:, None, None]
        if outside.any():
            t, at, k = np.argwhere(outside)[0]
            worst = ids[outside].max()
            copies = f"ids go up to {worst}: of copies of experts (EPLB), or a wrong number of experts"
            hint = copies if worst >= E else "a place that was not written"
            yield Fault(
                kind="outside",
                sentence=f"{_place(recording, request, t, at)}: expert {ids[t, at, k]}, outside 0 to "
                f"{E - 1}; {_many(outside.sum(), 'such id')}; {hint}",
            )
        ordered = np.sort(ids, axis=2)
        twice = (
            (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) & ~outside.any(axis=2) & ~absent[:, None]
        )
        # whole rows and layers of zeros were reported already
        blank: NDArray[np.bool_] = (ids == 0).all(axis=2)
        twice &= ~(blank & (blank.all(axis=0) | blank.all(axis=1, keepdims=True)))
        if K > 1 and twice.any():
            t, at = np.argwhere(twice)[0]
            row = ordered[t, at]
            yield Fault(
                kind="repeated",
                sentence=f"{_place(recording, request, t, at)}: expert {row[1:][row[1:] == row[:-1]][0]} "
                f"twice in one row; {_many(twice.sum(), 'such row')}; the experts of a token are distinct",
            )


def _constant_layers(recording: Recording) -> Iterator[Fault]:
    K, E = recording.requests[0].ids.shape[2], recording.num_experts
    rows = sum(len(request.ids) for request in recording.requests)
    if K == E or rows < (CONSTANT_ONE_CHOICE if K == 1 else CONSTANT):
        return
    first = next(request.ids[:1] for request in recording.requests if len(request.ids))
    same = np.logical_and.reduce([(request.ids == first).all(axis=(0, 2)) for request in recording.requests])
    for at in np.flatnonzero(same).tolist():
        yield Fault(
            kind="constant layer",
            sentence=f"layer {recording.layers[at]}: all {rows:,} tokens have the same row "
            f"{first[0, at].tolist()}: not written again, or a router that sends all tokens one way",
        )


def _old_rows(recording: Recording) -> Iterator[Fault]:
    """The same row in all layers for many tokens in a row: a buffer that was not written again."""
    if recording.requests[0].ids.shape[2] == recording.num_experts:
        return
    same: list[NDArray[np.bool_]] = [
        (request.ids[1:] == request.ids[:-1]).all(axis=(1, 2)) for request in recording.requests
    ]
    pairs, equal = sum(map(len, same)), sum(int(repeats.sum()) for repeats in same)
    for request, repeats in zip(recording.requests, same, strict=True):
        for first, last in _runs(repeats):
            length = last - first + 1
            if length + 1 < RUN or _one_token(request, first, last + 1):
                continue
            # how often rows are equal elsewhere, with PRIOR more equal pairs added for caution
            share = (equal - length + PRIOR) / (pairs - length + PRIOR)
            if pairs * share**length < CHANCE:
                yield Fault(
                    kind="old rows",
                    sentence=f"{_rows(request, first, last + 1)} one row, the same in every layer "
                    f"{length + 1} times: an old row that was not written again",
                )


def _one_token(request: Request, first: int, last: int) -> bool:
    """Returns whether the text repeats one token here."""
    if request.token_ids is None:
        return False
    return len(set(request.token_ids[request.start + first : request.start + last + 1])) == 1


def _twins(recording: Recording) -> Iterator[Fault]:
    rows = sum(len(request.ids) for request in recording.requests)
    if rows < CONSTANT or recording.requests[0].ids.shape[2] == recording.num_experts:
        return
    seen: dict[bytes, int] = {}
    for at, layer in enumerate(recording.layers):
        column = np.concatenate([request.ids[:, at] for request in recording.requests])
        if (column == column[:1]).all():
            continue  # a constant layer, reported already
        other = seen.setdefault(column.tobytes(), layer)
        if other != layer:
            yield Fault(
                kind="twin layers",
                sentence=f"layers {other} and {layer} have the same choices for all {rows:,} tokens: one "
                "was written over the other",
            )


def _copies(recording: Recording) -> Iterator[Fault]:
    """Requests with the same rows for other tokens: the rows of one were returned for the other."""
    seen: dict[bytes, Request] = {}
    for request in recording.requests:
        if request.token_ids is None or len(request.ids) < RUN:
            continue
        other = seen.setdefault(request.ids.tobytes(), request)
        if other.token_ids != request.token_ids and other.ids.shape == request.ids.shape:
            yield Fault(
                kind="copied",
                sentence=f"{request.name} has the {len(request.ids):,} rows of {other.name}, but other "
                "tokens: rows of another request",
            )


def _runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of every run of True."""
    edge = np.diff(np.concatenate(([False], flags, [False])).astype(np.int8))
    yield from zip(np.flatnonzero(edge == 1).tolist(), (np.flatnonzero(edge == -1) - 1).tolist(), strict=True)


def _rows(request: Request, first: int, last: int) -> str:
    first, last = first + request.start, last + request.start
    return (
        f"{request.name}: position {first} is"
        if first == last
        else f"{request.name}: positions {first} to {last} are"
    )


def _place(recording: Recording, request: Request, t: Any, at: Any) -> str:
    return f"{request.name}, layer {recording.layers[at]}, position {request.start + t}"


def _layers(recording: Recording, at: NDArray[Any]) -> str:
    numbers = [recording.layers[place] for place in at]
    return f"layer {numbers[0]} has" if len(numbers) == 1 else f"layers {some_numbers(numbers)} have"


def _many(count: Any, what: str) -> str:
    return f"{count:,} {what}{'s' if count > 1 else ''} in this request"
