"""A small decoder: embedding, blocks, norm, and the embedding again as the head.

A parameter's first values depend only on the seed, its name and its shape. So two models have equal weights
wherever they have equal shapes.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.models.decoder import Cache, DecoderBlock, rotary
from moe_routing_bench.models.feed_forward import Chosen, DenseFeedForward, FeedForward
from moe_routing_bench.moe.chain import ChainOfExperts
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.moe.perft import Perft
from moe_routing_bench.routers.hashed import HashedRouter
from moe_routing_bench.routers.router import Router
from moe_routing_bench.train.settings import Rule, Run, Size

THETA = 10_000.0


def feed_forward_of(rule: Rule, size: Size) -> FeedForward:
    E = size.E if rule.E is None else rule.E
    K = size.K if rule.K is None else rule.K
    width = size.F if rule.F is None else rule.F
    if rule.kind == "dense":
        return DenseFeedForward(size.D, rule.times * width)
    options: dict[str, Any] = {
        "router": rule.router, "router_options": dict(rule.options), "layout": rule.layout, "impl": rule.impl,
    }  # fmt: skip
    if rule.kind == "chain":
        return ChainOfExperts(size.D, width, E, K, iterations=rule.iterations, **options)
    moe = MoE(size.D, width, E, K, **options).train_only(rule.only)
    return Perft(moe, **rule.adapter) if rule.kind == "perft" else moe


class Decoder(nn.Module):
    """logits_BNV, chosen = Decoder(run)(token_BN); `chosen` has the routings of each layer.

    state_dict: embedding.weight, blocks.0.* (see DecoderBlock), norm.weight
    """

    def __init__(self, run: Run):
        super().__init__()
        size = run.size
        self.size = size
        self.embedding = nn.Embedding(run.vocabulary, size.D)
        self.blocks = nn.ModuleList(
            DecoderBlock(
                size.D, size.heads, size.kv_heads, size.head_dim, qk_norm=True, theta=THETA,
                feed_forward=feed_forward_of(run.rule, size), sees_future=run.sees_future,
            )
            for _ in range(size.layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(size.D, eps=1e-6)
        start(self, run.seed)
        if run.rule.only == "router" or run.rule.kind == "perft":
            # only the layer is trained
            layers = {id(p) for layer in self.layers() for p in layer.parameters()}
            for parameter in self.parameters():
                if id(parameter) not in layers:
                    parameter.requires_grad_(False)

    def forward(self, token_BN: Tensor, caches: list[Cache] | None = None) -> tuple[Tensor, list[Chosen]]:
        before = caches[0].length if caches else 0
        x_BND = self.embedding(token_BN)
        by = rotary(token_BN.shape[1], self.size.head_dim, THETA, x_BND, start=before)
        chosen: list[Chosen] = []
        for place, block in enumerate(self.blocks):
            cache = caches[place] if caches else None
            x_BND, routings = block(x_BND, by, token_id_BN=token_BN, cache=cache)
            chosen.append(routings)
        return F.linear(self.norm(x_BND), self.embedding.weight), chosen

    def caches(self, B: int, most: int) -> list[Cache]:
        size = self.size
        return [Cache(B, size.kv_heads, most, size.head_dim, self.norm.weight) for _ in self.blocks]

    def get_input_embeddings(self) -> nn.Embedding:
        """Has the name that models of Transformers give it."""
        return self.embedding

    def layers(self) -> list[Any]:
        """Returns the feed-forward layer of each block."""
        return [block.feed_forward for block in self.blocks]

    def routers(self) -> dict[str, Router]:
        return {name: module for name, module in self.named_modules() if isinstance(module, Router)}


@torch.no_grad()
def start(model: nn.Module, seed: int) -> None:
    """Sets the first values of all parameters; each module draws from its own generator."""
    for name, module in model.named_modules():
        # a chain, or a layer with adapters, starts with the experts of the plain layer
        name = re.sub(r"feed_forward\.(layer|moe)\.", "feed_forward.", name)
        own_seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
        if isinstance(module, HashedRouter):
            module.seed = own_seed  # another hash in each layer and run
        if not list(module.parameters(recurse=False)):
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(own_seed)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)  # it is also the head, so logits start near 0
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
