"""Finds rows that belong to another token: shifts(requests, layers) -> sentences.

Choices depend on the token, so they fit the token ids and the choices of the layer before best without a
shift. The fit is the sum of squares of how often a label meets an expert, taken at shifts of a few rows. Far
shifts show what chance gives; a fit counts from 8 standard deviations on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.workloads.serving import Request

NEAR = range(-3, 4)
FAR = (*range(-40, -9, 3), *range(10, 41, 3))
EDGE, ENOUGH, MOST = 40, 96, 1 << 15
BELIEVED, CLEARER = 8.0, 6.0


def shifts(requests: Sequence[Request], layers: Sequence[int]) -> Iterator[str]:
    """Yields a sentence where choices fit the tokens, or two layers each other, better at a shift."""
    with_tokens = [
        (np.array(request.token_ids[request.start :][: len(request.ids)])[:, None], request.ids[:, 0])
        for request in requests
        if request.token_ids is not None and request.start + len(request.ids) <= len(request.token_ids)
    ]
    if moved := _best_shift(with_tokens):
        yield (
            f"the choices of layer {layers[0]} fit the tokens best {_shift_in_words(moved)}: rows and tokens "
            "are shifted against each other"
        )
    for at in range(1, len(layers)):
        pairs = [(request.ids[:, at - 1], request.ids[:, at]) for request in requests]
        if moved := _best_shift(pairs):
            yield (
                f"the choices of layer {layers[at]} fit those of layer {layers[at - 1]} best "
                f"{_shift_in_words(moved)}: the two layers are shifted against each other"
            )


def _shift_in_words(moved: int) -> str:
    rows = "1 row" if abs(moved) == 1 else f"{abs(moved)} rows"
    return f"{rows} {'later' if moved > 0 else 'earlier'}"


def _best_shift(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> int:
    """Returns by how many rows the second of each pair fits the first best; 0 if no shift is clearly
    better."""
    long = [(label, ids) for label, ids in pairs if len(ids) > 2 * EDGE]
    left, used = MOST, []
    for label, ids in long:
        take = min(len(ids), left // (label.shape[1] * ids.shape[1]) + 2 * EDGE)
        if take > 2 * EDGE:
            used.append((label[:take].astype(np.int64), ids[:take].astype(np.int64)))
            left -= (take - 2 * EDGE) * label.shape[1] * ids.shape[1]
    if sum(len(ids) - 2 * EDGE for _, ids in used) < ENOUGH:
        return 0
    far = np.array([_fit(used, shift) for shift in FAR])
    deviation = far.std(ddof=1)
    if deviation == 0:
        return 0
    near = {shift: (_fit(used, shift) - far.mean()) / deviation for shift in NEAR}
    best = max(near, key=lambda shift: near[shift])
    return best if near[best] > BELIEVED and near[best] > 2 * max(near[0], 0.0) + CLEARER else 0


def _fit(pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], shift: int) -> float:
    meetings = []
    for label, ids in pairs:
        rows = len(ids) - 2 * EDGE
        first, second = label[EDGE : EDGE + rows], ids[EDGE + shift : EDGE + shift + rows]
        meetings.append(((first[:, :, None] << 24) + second[:, None, :]).reshape(-1))
    counts = np.unique(np.concatenate(meetings), return_counts=True)[1]
    return float((counts.astype(np.float64) ** 2).sum())
