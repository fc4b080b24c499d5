"""Counts the matmul operations of a model for a token, from its sizes and its routers' choices.

A multiplication and an addition count as two. A step counts three forward passes, because backward multiplies
twice as much. Softmax, norms and sorting are not counted; they are in the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from moe_routing_bench.models.feed_forward import DenseFeedForward
from moe_routing_bench.moe.chain import ChainOfExperts
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.moe.perft import Perft
from moe_routing_bench.routers.router import Router
from moe_routing_bench.routers.soft_moe import SoftMoERouter
from moe_routing_bench.train.model import Decoder


@dataclass(frozen=True, kw_only=True)
class Work:
    """Per token, forward: D=128, F=128, E=8, four layers, 2 experts a token, sequences of 256:

    flops = layers * (attention + router + 2 experts) + head;  parameters = all, active = those a token uses
    """

    flops: float
    parameters: int
    active_parameters: float


def work_of(model: Decoder, pairs_per_token: float) -> Work:
    """pairs_per_token: experts per token in one layer, summed over the iterations of a chain."""
    size = model.size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = 2 * size.D * model.embedding.weight.shape[0]
    # scores and values, for half the tokens of a sequence on average
    scores = 2 * 2 * size.heads * size.head_dim * (size.sequence + 1) / 2
    flops, idle = float(head), 0.0
    for block, layer in zip(model.blocks, model.layers(), strict=True):
        matrices = sum(p.numel() for p in block.get_submodule("attention").parameters() if p.ndim == 2)
        computed, unused = _layer_work(layer, pairs_per_token, size.sequence)
        flops += 2 * matrices + scores + computed
        idle += unused
    return Work(flops=flops, parameters=parameters, active_parameters=parameters - idle)


def _layer_work(layer: nn.Module, pairs: float, sequence: int) -> tuple[float, float]:
    """Returns (operations, parameters of experts that a token does not use)."""
    if isinstance(layer, DenseFeedForward):
        return 2.0 * sum(p.numel() for p in layer.parameters()), 0.0
    adapters = 0.0
    if isinstance(layer, Perft):
        each = sum(p.numel() for p in layer.adapters.parameters()) / layer.adapters.down_EDF.shape[0]
        count = {"E": pairs, "R": layer.router.K if layer.router else 0}.get(
            layer.kind, layer.adapters.down_EDF.shape[0]
        )
        adapters, layer = 2 * each * count, layer.moe
    moe = layer.layer if isinstance(layer, ChainOfExperts) else layer
    assert isinstance(moe, MoE)
    E = moe.experts.w_in_EDG.shape[0]
    expert = sum(p.numel() for p in moe.experts.parameters()) / E
    routers = [module for module in layer.modules() if isinstance(module, Router)]
    routing = sum(_router_work(router, sequence) for router in routers)
    return 2 * expert * pairs + routing + adapters, max(0.0, E - pairs) * expert


def _router_work(router: Router, sequence: int) -> float:
    matrices = 2.0 * sum(p.numel() for p in router.parameters() if p.ndim == 2)
    if isinstance(router, SoftMoERouter):  # slots mixed from tokens, tokens from slots
        S = router.phi_DS.shape[1]
        return matrices + 2 * 2 * S * router.D
    return matrices
