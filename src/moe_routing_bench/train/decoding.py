"""Measures a trained model in use: tokens a second for reading a prompt and for writing, with a cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.train.loop import evaluate
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.text import Corpus

BATCHES = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`batch` prompts are read together and then continued: Rate(batch=8, prefill=21e3, decode=900.0,
    ...)."""

    batch: int
    prefill: float  # tokens a second, all prompts together
    decode: float
    implementation: str  # what ran in the first layer


@dataclass(frozen=True, kw_only=True)
class Used:
    """Rates with frozen layers, and the held-out loss before and after freezing, which must not differ."""

    rates: tuple[Rate, ...]
    loss: float
    frozen_loss: float


@torch.no_grad()
def use(
    model: Decoder, run: Run, corpus: Corpus, *, prompt: int = 128, new: int = 32, repeats: int = 3
) -> Used:
    """Measures the rates; the layers of `model` are frozen afterwards."""
    if not all(layer.causal for layer in model.layers()):
        raise NotImplementedError(
            "this rule looks at later tokens, which do not exist while a model writes: it cannot decode"
        )
    first = corpus.sources[0].name
    model.eval()
    loss = evaluate(model, corpus, run)[first]
    model.eval()
    for module in model.modules():
        if isinstance(module, MoE):
            module.freeze()
    model.requires_grad_(False)
    frozen_loss = evaluate(model, corpus, run)[first]
    model.eval()
    rates = [_rate(model, corpus, batch, prompt, new, repeats) for batch in BATCHES]
    return Used(rates=tuple(rates), loss=loss, frozen_loss=frozen_loss)


def _rate(model: Decoder, corpus: Corpus, batch: int, prompt: int, new: int, repeats: int) -> Rate:
    token_BN = corpus.held_out(0, pieces=batch, sequence=prompt)[:, :-1]
    token_BN = token_BN.repeat(-(-batch // len(token_BN)), 1)[:batch]
    reading, writing = [], []
    for _ in range(repeats + 1):
        caches = model.caches(batch, prompt + new)
        began = time.perf_counter()
        logits_BNV, _ = model(token_BN, caches)
        next_B1 = logits_BNV[:, -1:].argmax(-1)
        read = time.perf_counter()
        for _ in range(new - 1):
            logits_BNV, _ = model(next_B1, caches)
            next_B1 = logits_BNV[:, -1:].argmax(-1)
        reading.append(read - began)
        writing.append(time.perf_counter() - read)
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, MoE)]
    ran = layers[0].implementation if layers and isinstance(layers[0], MoE) else "dense"
    # the first time is dropped: it compiles kernels, and caches are cold
    return Rate(
        batch=batch,
        prefill=batch * prompt / median(reading[1:]),
        decode=batch * (new - 1) / median(writing[1:]),
        implementation=ran,
    )
