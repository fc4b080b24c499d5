"""Finds where two recordings of the same tokens disagree: diff(a, b) -> shares by layer and by position.

A choice differs if the other recording did not choose that expert for the token; the order does not matter.
The margin of a flipped choice is a's score of the expert that a chose, minus a's score of the expert that b
chose instead. Rounding flips near ties; a large margin means a fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.models.tracing import ModelTrace, some_numbers
from moe_routing_bench.workloads.trace import Trace

# comparing takes K x K numbers for each token
MAX_CELLS = 1 << 24
RULED_OUT = -3e38  # replaces -inf, so that it sorts before choices that did not flip


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Some tokens of one layer, or of all. Two tokens, K=2: [[0, 1], [2, 3]] against [[1, 0], [2, 5]]:

    tokens  = 2
    choices = 0.25     share of choices that differ: 3 or 5, of four
    flipped = 0.5      share of tokens with at least one
    margin  = 0.003    median over flipped choices; None without scores, or if nothing flipped
    usual   = 0.41     median over all tokens: the lowest chosen score minus the best that was not chosen
    """

    tokens: int
    choices: float
    flipped: float
    margin: float | None = None
    usual: float | None = None


@dataclass(frozen=True, kw_only=True)
class TraceDiff:
    """The tokens that both have: by_layer[3] is layer 3, by_position[(64, 127)] these positions.

    only_a, only_b  how many tokens only one of them has
    scores_of       whose scores the margins use: "A", "B" or None
    """

    whole: Difference
    by_layer: Mapping[int, Difference]
    by_position: Mapping[tuple[int, int], Difference]
    only_a: int
    only_b: int
    scores_of: str | None


def diff(a: Trace, b: Trace) -> TraceDiff:
    """Raises ValueError if they cannot be recordings of the same tokens and layers."""
    one, other = a.by_layer(), b.by_layer()
    sizes = [(t.num_experts, next(iter(t.expert_TK.values())).shape[1]) for t in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"A has E={sizes[0][0]} and K={sizes[0][1]}, B E={sizes[1][0]} and K={sizes[1][1]}: not one model"
        )
    if [*one.names] != [*other.names]:
        raise ValueError(
            f"A has the layers {some_numbers(one.names)}, B {some_numbers(other.names)}; compare the same "
            "layers, or record both with --layers"
        )
    row_a, row_b = _common(one, other)
    if not row_a.numel():
        raise ValueError("A and B have no position of a document in common; record both from the same texts")
    scores_of = "A" if one.score_TE else "B" if other.score_TE else None
    parts = [_Compared.of(one, other, layer, row_a, row_b) for layer in one.names]
    position_T = one.position_T[row_a]
    return TraceDiff(
        whole=_difference(parts),
        by_layer={layer: _difference([part]) for layer, part in zip(one.names, parts, strict=True)},
        by_position={
            span: _difference([part.at(inside) for part in parts])
            for span in _spans(int(position_T.max()))
            if bool((inside := (position_T >= span[0]) & (position_T <= span[1])).any())
        },
        only_a=one.num_tokens - row_a.numel(),
        only_b=other.num_tokens - row_b.numel(),
        scores_of=scores_of,
    )


def _common(one: ModelTrace, other: ModelTrace) -> tuple[Tensor, Tensor]:
    """Returns the rows of both for the same (document, position), in the order of the first."""
    where = []
    for trace, name in ((one, "A"), (other, "B")):
        keys = zip(trace.document_T.tolist(), trace.position_T.tolist(), strict=True)
        rows = {key: row for row, key in enumerate(keys)}
        if len(rows) < trace.num_tokens:
            raise ValueError(f"{name} has a position of a document twice; rows cannot be matched")
        where.append(rows)
    both = [key for key in where[0] if key in where[1]]
    return torch.tensor([where[0][key] for key in both]), torch.tensor([where[1][key] for key in both])


def _spans(last: int) -> list[tuple[int, int]]:
    """Returns the spans 0, 1 to 7, 8 to 63, 64 to 511, ... up to the last position."""
    spans, first = [(0, 0)], 1
    while first <= last:
        spans.append((first, first * 8 - 1))
        first *= 8
    return spans


@dataclass(frozen=True, kw_only=True)
class _Compared:
    differs_TK: Tensor  # of a's choices
    margin_TK: Tensor | None  # NaN where nothing flipped
    usual_T: Tensor | None

    @staticmethod
    def of(one: ModelTrace, other: ModelTrace, layer: int, row_a: Tensor, row_b: Tensor) -> _Compared:
        a_TK, b_TK = one.expert_TK[layer][row_a].long(), other.expert_TK[layer][row_b].long()
        size = max(1, MAX_CELLS // a_TK.shape[1] ** 2)
        there_TKK = [
            (some_a.unsqueeze(2) == some_b.unsqueeze(1))
            for some_a, some_b in zip(a_TK.split(size), b_TK.split(size), strict=True)
        ]
        differs_a = torch.cat([~there.any(2) for there in there_TKK])
        differs_b = torch.cat([~there.any(1) for there in there_TKK])
        if one.score_TE:
            score_TE = one.score_TE[layer][row_a]
        elif other.score_TE:
            score_TE, a_TK, b_TK = other.score_TE[layer][row_b], b_TK, a_TK
            differs_a, differs_b = differs_b, differs_a
        else:
            return _Compared(differs_TK=differs_a, margin_TK=None, usual_T=None)
        # pair the best with the best and so on: flipped choices sort first, the others last
        mine, theirs = (
            torch.where(differs, score_TE.gather(1, ids).clamp(min=RULED_OUT), -math.inf)
            for differs, ids in ((differs_a, a_TK), (differs_b, b_TK))
        )
        mine, theirs = mine.sort(dim=1, descending=True)[0], theirs.sort(dim=1, descending=True)[0]
        margin_TK = torch.where(mine == -math.inf, math.nan, mine - theirs)
        left_TE = score_TE.scatter(1, a_TK, -math.inf)
        usual_T = score_TE.gather(1, a_TK).amin(1) - left_TE.amax(1)
        return _Compared(differs_TK=differs_a, margin_TK=margin_TK, usual_T=usual_T)

    def at(self, inside_T: Tensor) -> _Compared:
        return _Compared(
            differs_TK=self.differs_TK[inside_T],
            margin_TK=None if self.margin_TK is None else self.margin_TK[inside_T],
            usual_T=None if self.usual_T is None else self.usual_T[inside_T],
        )


def _difference(parts: list[_Compared]) -> Difference:
    differs_TK = torch.cat([part.differs_TK for part in parts])
    margins = [part.margin_TK for part in parts if part.margin_TK is not None]
    usual = [part.usual_T for part in parts if part.usual_T is not None]
    return Difference(
        tokens=parts[0].differs_TK.shape[0],
        choices=differs_TK.double().mean().item(),
        flipped=differs_TK.any(1).double().mean().item(),
        margin=_median(torch.cat(margins)) if margins else None,
        usual=_median(torch.cat(usual)) if usual else None,
    )


def _median(values: Tensor) -> float | None:
    values = values[values.isfinite() & (values.abs() < -RULED_OUT / 2)]
    return values.median().item() if values.numel() else None
