"""Measures the error of a weight format against float32, and the error that a kernel adds.

Weights are random, with a distribution similar to that of trained weights: Student's t with 5 degrees of
freedom, which has heavier tails than a Gaussian, and columns of different size. Or a small model is trained,
and its held-out loss is computed with the experts of every layer in the format.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_routing_bench.core.experts import ExpertWeights, QuantisedExperts
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.formats.named import INT8_ROWS, NAMES, quantise
from moe_routing_bench.formats.stored import bytes_per_weight
from moe_routing_bench.moe.layer import Experts, MoE
from moe_routing_bench.ops.expert_ffn import native
from moe_routing_bench.ops.expert_ffn.op import op
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.train.loop import Ended, evaluate, train
from moe_routing_bench.train.settings import Rule, Run
from moe_routing_bench.train.text import Corpus

FREEDOM = 5.0  # of Student's t
COLUMNS = 0.3  # spread of the columns' sizes, as the standard deviation of their logarithm
MODEL = "softmax_topk"


@dataclass(frozen=True, kw_only=True)
class FormatLoss:
    """Errors are root mean squares, relative to that of the correct values:
    FormatLoss(name="int8", bits=8.02, weights=0.011, layer=0.019, kernel=0.0017, int8_rows=0.0186)

    weights   of the stored weights against float32
    layer     of the layer's result with stored weights, computed exactly, against the same with float32
    kernel    of expert_ffn.native in bfloat16 against the exact result with stored weights; None: cannot run
    int8_rows the same with rows rounded to 8 bits
    """

    name: str
    bits: float
    weights: float
    layer: float
    kernel: float | None
    int8_rows: float | None


@dataclass(frozen=True, kw_only=True)
class TrainedLoss:
    """Held-out nats per byte, and how many more than with float32; int8_rows: how many more if the kernel
    rounds rows to 8 bits as well, None if it cannot run.
    TrainedLoss(name="int4_g32", loss=2.2496, more=0.0015, int8_rows=0.0017)."""

    name: str
    loss: float
    more: float
    int8_rows: float | None = None


def like_trained(size: tuple[int, int, int], dice: torch.Generator) -> Tensor:
    """Returns experts x depth x columns; the root mean square of a column is about 1 / sqrt(depth)."""
    E, K, N = size
    normal = torch.randn(size, generator=dice)
    chi_EKN = torch.stack([torch.randn(size, generator=dice).square_() for _ in range(int(FREEDOM))]).sum(0)
    t_EKN = normal / (chi_EKN / FREEDOM).sqrt() * ((FREEDOM - 2) / FREEDOM) ** 0.5
    return t_EKN * torch.exp(COLUMNS * torch.randn(E, 1, N, generator=dice)) / K**0.5


def layer_losses(shape: MoEShape, *, seed: int = 0, names: Sequence[str] = NAMES) -> Iterator[FormatLoss]:
    dice = torch.Generator().manual_seed(seed)
    T, D, F, E, K = shape.T, shape.D, shape.F, shape.E, shape.K
    weights = ExpertWeights(
        w_in_EDG=like_trained((E, D, 2 * F), dice), w_out_EFD=like_trained((E, F, D), dice)
    ).validate()
    x_TD = torch.randn(T, D, generator=dice).bfloat16()
    expert_TK = torch.stack([torch.randperm(E, generator=dice)[:K] for _ in range(T)])
    gate_TK = torch.rand(T, K, generator=dice).softmax(dim=1)
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=False)
    plan = make_plan(routing, Layout.compact())
    exact = (x_TD.double(), gate_TK.double(), plan)
    right_TD = op.reference(*exact, weights.to(dtype=torch.float64))
    for name in names:
        w_in, w_out = quantise(weights.w_in_EDG, name), quantise(weights.w_out_EFD, name)
        experts = QuantisedExperts(w_in=w_in, w_out=w_out)
        kept = experts.dequantised()
        stored_TD = op.reference(*exact, kept)
        errors: list[float | None] = []
        for store in (name, name + INT8_ROWS):
            errors.append(None)
            if native.why_not_freeze(torch.bfloat16, store) is None:
                frozen = native.freeze_stored(experts, torch.bfloat16, store=store)
                errors[-1] = _relative(native.run(x_TD, gate_TK, plan, frozen, store=store), stored_TD)
        sizes = [weights.w_in_EDG.numel(), weights.w_out_EFD.numel()]
        total = sum(n * bytes_per_weight(w) for n, w in zip(sizes, (w_in, w_out), strict=True))
        yield FormatLoss(
            name=name, bits=8 * total / sum(sizes),
            weights=_relative(kept.w_in_EDG, weights.w_in_EDG.double()),
            layer=_relative(stored_TD, right_TD), kernel=errors[0], int8_rows=errors[1],
        )  # fmt: skip


def trained_losses(corpus: Corpus, *, steps: int, seed: int = 0) -> Iterator[TrainedLoss]:
    """Trains a small model and yields its loss in float32, then in every format."""
    run = Run(
        rule=Rule(name=MODEL, router=MODEL), steps=steps, seed=seed, evaluations=1, warmup=min(40, steps)
    )
    (model,) = (event.model for event in train(run, corpus) if isinstance(event, Ended))

    def loss_of(model: nn.Module) -> float:
        return next(iter(evaluate(model, corpus, run).values()))

    first = loss_of(model)
    yield TrainedLoss(name="float32", loss=first, more=0.0)
    for name in NAMES:
        loss, rows = loss_of(_stored(model, name)), name + INT8_ROWS
        runs = native.why_not_freeze(torch.float32, rows) is None
        int8_rows = loss_of(_frozen(model, rows)) - first if runs else None
        yield TrainedLoss(name=name, loss=loss, more=loss - first, int8_rows=int8_rows)


@torch.no_grad()
def _stored(model: nn.Module, name: str) -> nn.Module:
    """Returns a copy whose expert weights are rounded to the format."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, Experts):
            for w_EKN in (layer.w_in_EDG, layer.w_out_EFD):
                w_EKN.copy_(quantise(w_EKN, name).decoded().weights())
    return model


def _frozen(model: nn.Module, store: str) -> nn.Module:
    """Returns a copy whose experts use the kernel for stored weights."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.expert_ffn = op.get(f"native(store={store})")
            layer.freeze()
    return model


def _relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).square().mean().sqrt() / right.square().mean().sqrt())
