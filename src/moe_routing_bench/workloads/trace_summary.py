"""Summarises a recorded trace layer by layer: summarise, LayerSummary, Overlap, lift_EE."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.moe.statistics import RoutingStatistics
from moe_routing_bench.workloads.trace import Trace

# limits, because tables of E x E or K x K numbers could fill the memory
MAX_EXPERTS, MAX_CHOICES, MAX_LAYERS, MAX_CELLS = 4096, 64, 1024, 1 << 24


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The share of its experts that a token has in common with the token before it in the same document.

    K=2, E=4, the tokens of one document: [[0, 1], [0, 2], [0, 2], [3, 1]]
      neighbours  = 3        pairs of consecutive positions
      kept        = 0.5      (1/2 + 2/2 + 0/2) / 3
      by_document = 0.4167   any two different tokens of one document, whatever their order: 10 common experts
                             of 24 in 12 ordered pairs
      by_chance   = 0.4167   any two different tokens of the layer
    Independent draws with the same popularity give by_chance, which is K / E if all are equally popular.
    by_document is None if documents times experts are too many to count.
    """

    neighbours: int
    kept: float
    by_document: float | None
    by_chance: float

    @staticmethod
    def of(routing: Routing, position_T: Tensor, document_T: Tensor) -> Overlap | None:
        """Returns None if no two tokens are neighbours."""
        K = routing.num_choices
        order = position_T.argsort(stable=True)
        order = order[document_T[order].argsort(stable=True)]
        position_T, document_T, expert_TK = position_T[order], document_T[order], routing.expert_TK[order]
        beside = (document_T[1:] == document_T[:-1]) & (position_T[1:] - position_T[:-1] == 1)
        now = 1 + beside.nonzero().squeeze(1)
        if now.numel() == 0:
            return None
        common = sum(
            int((expert_TK[some].unsqueeze(2) == expert_TK[some - 1].unsqueeze(1)).sum())
            for some in now.split(max(1, MAX_CELLS // K**2))
        )
        return Overlap(
            neighbours=now.numel(),
            kept=common / (K * now.numel()),
            by_document=_by_document(routing.num_experts, expert_TK, document_T, document_T[now]),
            by_chance=float(_two_tokens(routing.load_E().unsqueeze(0), K)),
        )


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer of a trace. Four tokens, expert_TK = [[0, 1], [0, 2], [0, 2], [3, 1]], gates [.75, .25] each:

    layer         = 5        as labelled; None in a trace without layers
    tokens        = 4
    load_E        = (3, 2, 2, 1)
    max_over_mean = 1.5      3 / 2
    entropy_bits  = 1.9056   log2(4) = 2 if all experts were used equally
    dead_experts  = 0
    gini          = 0.1875
    top_gate      = 0.75     the largest gate over the sum of a token's gates, mean over tokens
    document_bits = None     mutual information of expert and document; None for one document
    overlap       = Overlap of the tokens, None without positions and documents
    """

    layer: int | None
    tokens: int
    load_E: tuple[int, ...]
    max_over_mean: float
    entropy_bits: float
    dead_experts: int
    gini: float
    top_gate: float
    document_bits: float | None
    overlap: Overlap | None


def summarise(trace: Trace) -> list[LayerSummary]:
    """Returns a summary of each layer, by number. Raises ValueError if its tables would be too large."""
    routing = trace.routing
    for what, number, most in (
        ("experts", routing.num_experts, MAX_EXPERTS),
        ("choices per token", routing.num_choices, MAX_CHOICES),
    ):
        if number > most:
            raise ValueError(f"the trace has {number:,} {what}; a summary is made of at most {most:,}")
    if routing.num_tokens == 0:
        raise ValueError("the trace holds no tokens to show; record some")
    if trace.layer_T is None:
        return [_summary(trace, None)]
    layers = trace.layer_T.unique().tolist()
    if len(layers) > MAX_LAYERS:
        raise ValueError(f"the trace has {len(layers):,} layers; a summary is made of at most {MAX_LAYERS:,}")
    return [_summary(trace.part(layer=layer), layer) for layer in layers]


def _summary(trace: Trace, layer: int | None) -> LayerSummary:
    routing = trace.routing
    label_T, num_labels = None, None
    if trace.document_T is not None:
        documents, label_T = trace.document_T.unique(return_inverse=True)
        num_labels = documents.numel()
        if num_labels < 2 or num_labels * routing.num_experts > MAX_CELLS:
            label_T = num_labels = None
    statistics = RoutingStatistics.of(routing, label_T=label_T, num_labels=num_labels)
    overlap = None
    if trace.position_T is not None and trace.document_T is not None:
        overlap = Overlap.of(routing, trace.position_T, trace.document_T)
    size_TK = routing.gate_TK.double().abs()
    # a token whose gates are all 0 prefers no expert
    total_T = size_TK.sum(1)
    top_T = torch.where(total_T > 0, size_TK.amax(1) / total_T, 1 / routing.num_choices)
    return LayerSummary(
        layer=layer,
        tokens=routing.num_tokens,
        load_E=tuple(routing.load_E().tolist()),
        max_over_mean=statistics.load.max_over_mean.item(),
        entropy_bits=statistics.load.entropy_bits.item(),
        dead_experts=int(statistics.load.zero_experts),
        gini=statistics.load.gini.item(),
        top_gate=top_T.mean().item(),
        document_bits=None if statistics.label_bits is None else statistics.label_bits.item(),
        overlap=overlap,
    )


def lift_EE(routing: Routing) -> Tensor:
    """Returns how much more often two experts serve one token than if they were paired by popularity alone.

    1 means as often; NaN is on the diagonal and where an expert is never used. Expected and counted pairs
    have the same sum: sum of counts over different experts / sum of load_i * load_j over different experts.
    """
    co_EE = RoutingStatistics.of(routing).co_EE.double()
    load_E = co_EE.diagonal().clone()
    co_EE.fill_diagonal_(0)
    by_load_EE = load_E.unsqueeze(1) * load_E
    by_load_EE.fill_diagonal_(0)
    expected_EE = by_load_EE * (co_EE.sum() / by_load_EE.sum().clamp(min=1))
    return torch.where(expected_EE > 0, co_EE / expected_EE, math.nan)


def _two_tokens(load_BE: Tensor, K: int) -> Tensor:
    """Returns the share of experts that two different tokens of a row have in common, mean over all pairs."""
    load_BE = load_BE.double()
    tokens_B = load_BE.sum(1) / K
    pairs_B = tokens_B * (tokens_B - 1)
    return (load_BE * (load_BE - 1)).sum(1) / (K * pairs_B.clamp(min=1))


def _by_document(E: int, expert_TK: Tensor, document_T: Tensor, document_n: Tensor) -> float | None:
    """Returns the mean over neighbours of what two tokens of their document have in common."""
    documents, index_T = document_T.unique(return_inverse=True)
    B = documents.numel()
    if B * E > MAX_CELLS:
        return None
    load_BE = (index_T.unsqueeze(1) * E + expert_TK).flatten().bincount(minlength=B * E).view(B, E)
    common_B = _two_tokens(load_BE, expert_TK.shape[1])
    return common_B[torch.searchsorted(documents, document_n)].mean().item()
