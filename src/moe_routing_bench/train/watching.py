"""Watches the routers of a model during training: load, collapse, and what choices tell about the tokens.

All numbers come from RoutingStatistics, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.models.feed_forward import Chosen, routings_of
from moe_routing_bench.moe.chain import ChainOfExperts
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.moe.perft import Perft
from moe_routing_bench.moe.statistics import RoutingStatistics
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.text import CLASSES, Corpus

# a layer with 4 experts or more has collapsed if one of these is true
DEAD_SHARE = 0.25  # more experts than this share of them got no token
GREEDY_SHARE = 0.75  # one expert read more than this share of all tokens, where K / E is under half of it
ENTROPY_SHARE = 0.6  # the entropy of the load is under this share of log2(E)
POSITIONS = 8  # parts of a sequence, as labels


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """One router over one batch: load cv, max violation, entropy and so on, as in LoadStatistics."""

    cv: float
    max_violation: float
    entropy_bits: float
    dead_experts: int
    experts_per_token: float
    drop_rate: float | None
    confidence: float | None
    share_E: list[float]

    def collapse(self) -> str | None:
        """Returns how this layer has collapsed; None if it has not."""
        E = len(self.share_E)
        if E < 4:
            return None
        if self.dead_experts > DEAD_SHARE * E:
            return f"{self.dead_experts} of {E} experts got no token"
        most = max(self.share_E) * self.experts_per_token
        if most > GREEDY_SHARE and self.experts_per_token / E < GREEDY_SHARE / 2:
            return f"one expert read {100 * most:.0f} % of all tokens"
        if self.entropy_bits < ENTROPY_SHARE * torch.tensor(E).log2().item():
            return f"the load has {self.entropy_bits:.2f} bits of {torch.tensor(E).log2().item():.2f}"
        return None


def named_routings(chosen: Sequence[Chosen]) -> dict[str, Routing]:
    """Returns routings by layer: "0", "1", ...; the iterations of a chain are "0.0", "0.1". Soft routings are
    left out, because they choose nothing."""
    named = {}
    for layer, routings in enumerate(chosen):
        each = routings_of(routings)
        for number, routing in enumerate(each):
            if isinstance(routing, Routing):
                named[f"{layer}.{number}" if len(each) > 1 else str(layer)] = routing
    return named


def loads(model: Decoder, chosen: Sequence[Chosen]) -> dict[str, LayerLoad]:
    by_layer = {}
    for name, routing in named_routings(chosen).items():
        moe = _moe(model.layers()[int(name.partition(".")[0])])
        drops = moe.layout.kind == "padded" and routing.num_experts == moe.experts.w_in_EDG.shape[0]
        plain = replace(routing, expert_TK=routing.expert_TK.detach(), gate_TK=routing.gate_TK.detach())
        numbers = RoutingStatistics.of(plain, moe.plan(plain) if drops else None)
        by_layer[name] = LayerLoad(
            cv=numbers.load.cv.item(),
            max_violation=numbers.load.max_violation.item(),
            entropy_bits=numbers.load.entropy_bits.item(),
            dead_experts=int(numbers.load.zero_experts.item()),
            experts_per_token=numbers.experts_per_token.item(),
            drop_rate=None if numbers.drop_rate is None else numbers.drop_rate.item(),
            confidence=None if numbers.confidence is None else numbers.confidence.item(),
            share_E=numbers.share_E.tolist(),
        )
    return by_layer


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What one router's choices tell about their tokens, on held-out text of all sources.

    of: {"source": 0.12, ...}: the share of the label's entropy that the chosen expert tells
    agreement: with the choices for the same tokens at the evaluation before; None at the first
    by_source: [[...], ...]: the share of each expert's pairs, one row for each source
    """

    of: dict[str, float]
    agreement: float | None
    by_source: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Held-out tokens of every source with labels, the same for all runs of a study."""

    token_BN: Tensor
    labels: Mapping[str, tuple[Tensor, int]]  # label_T, and how many labels there are

    @staticmethod
    def of(corpus: Corpus, *, sequence: int, pieces: int = 8) -> Probe:
        each = [
            corpus.held_out(source, pieces=pieces, sequence=sequence)[:, :-1]
            for source in range(len(corpus.sources))
        ]
        token_BN = torch.cat(each)
        source_B = torch.cat([torch.full((len(tokens),), source) for source, tokens in enumerate(each)])
        place_N = torch.arange(sequence) * POSITIONS // sequence
        labels = {
            "source": (source_B.repeat_interleave(sequence), len(each)),
            "character": (corpus.character_class(token_BN).flatten(), len(CLASSES)),
            "position": (place_N.repeat(len(token_BN)), POSITIONS),
        }
        return Probe(token_BN=token_BN, labels=labels)

    @torch.no_grad()
    def ask(
        self, model: Decoder, before: Mapping[str, Tensor]
    ) -> tuple[dict[str, Knowledge], dict[str, Tensor]]:
        """Returns what every router's choices tell, and the choices, which are `before` of the next call."""
        training = model.training
        model.eval()
        parts = [named_routings(model(token_BN)[1]) for token_BN in self.token_BN.split(8)]
        model.train(training)
        knowledge, choices = {}, {}
        for name in parts[0]:
            routing = _joined([part[name] for part in parts])
            # small, because states keep it; there are fewer than 2^15 experts
            choices[name] = routing.expert_TK.to(torch.int16)
            previous = None
            if name in before and before[name].shape == routing.expert_TK.shape:
                previous = replace(routing, expert_TK=before[name].long())
            knowledge[name] = self._knowledge(routing, previous)
        return knowledge, choices

    def _knowledge(self, routing: Routing, previous: Routing | None) -> Knowledge:
        of, agreement = {}, None
        for label, (label_T, count) in self.labels.items():
            numbers = RoutingStatistics.of(routing, previous=previous, label_T=label_T, num_labels=count)
            assert numbers.label_share is not None
            of[label] = numbers.label_share.item()
            agreement = None if numbers.agreement is None else numbers.agreement.item()
        source_T, sources = self.labels["source"]
        parts = [replace(routing, expert_TK=routing.expert_TK[source_T == n]) for n in range(sources)]
        loads_LE = torch.stack([part.load_E() for part in parts]).double()
        shares = loads_LE / loads_LE.sum(1, keepdim=True).clamp(min=1)
        return Knowledge(of=of, agreement=agreement, by_source=shares.tolist())


def _joined(parts: list[Routing]) -> Routing:
    """Joins the tokens of several batches; ragged rows may have different widths."""
    width = max(part.num_choices for part in parts)
    ids = [torch.nn.functional.pad(part.expert_TK, (0, width - part.num_choices), value=-1) for part in parts]
    expert_TK = torch.cat(ids)
    return Routing(expert_TK=expert_TK, gate_TK=torch.ones(expert_TK.shape), num_experts=parts[0].num_experts)


def _moe(layer: Any) -> MoE:
    layer = layer.layer if isinstance(layer, ChainOfExperts) else layer
    return layer.moe if isinstance(layer, Perft) else layer
