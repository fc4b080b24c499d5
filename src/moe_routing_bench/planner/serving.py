"""Chooses a deployment of a whole model: most tokens per second of a GPU, within a latency and the memory.

A deployment serves one phase. `tp` ranks of a node share the heads of attention and, if ep is 1, the columns
of each expert. `ep` ranks share the experts; every `tp` of them are one copy of attention (data parallel).
The GPUs form equal groups, the replicas. A batch is the tokens of a GPU in a step: sequences in decode,
tokens of prompts in prefill.

With two half batches, one is sent while the other is computed. A step then takes C + M - hidden * min(C, M),
where C is computing and M is sending, both of two halves; so weights are read twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from moe_routing_bench.core.published import PublishedModel
from moe_routing_bench.planner.fabric import Fabric
from moe_routing_bench.planner.plans import Option, Question, degrees_of, options_of
from moe_routing_bench.planner.step import LayerSize, layer_size, seconds_W

Phase = Literal["prefill", "decode"]
# The share of the shorter of computing and sending that two half batches hide, and its range. With 0.47 to
# 0.57 prefill gains the 27 to 35 % that SGLang publishes for two batches on 32 H100
# (lmsys.org/blog/2025-05-05-large-scale-ep, measurements/parallel/published.txt); 1 is the bound.
HIDDEN, HIDDEN_RANGE = 0.5, (0.45, 1.0)
WORKSPACE = 3e9  # CUDA's context, communication buffers and graphs: an assumption
FRAGMENTED = 0.04  # of cache and rows; paging wastes less than 4 % (arXiv:2309.06180)
CACHE_BYTES = 2
BATCHES = {"decode": [2**n for n in range(11)], "prefill": [2048, 4096, 8192, 16_384]}


@dataclass(frozen=True, kw_only=True)
class Format:
    """Bits of a number: in weights of experts, in other weights, and in rows sent to experts."""

    expert: float
    other: float
    send: float


FORMATS = {
    "bf16": Format(expert=16, other=16, send=16),
    # DeepSeek: a float32 scale for 128 x 128 weights and for 128 numbers sent
    "fp8": Format(expert=8 + 32 / 128**2, other=8 + 32 / 128**2, send=8 + 32 / 128),
    # gpt-oss: a byte of scale for 32 weights of experts, the rest in 16 bit
    "mxfp4": Format(expert=4.25, other=16, send=16),
}


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The ranks of DeepSeek's latent attention, and the numbers of a head that are rotated."""

    query: int
    cache: int
    rotated: int


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What a model has besides its MoE layers; from its config.json."""

    vocab: int = 0
    dense_layers: int = 0
    dense_F: int = 0
    latent: Latent | None = None
    window: int = 0  # of every second layer's attention


RESTS = {
    "deepseek-v3": Rest(
        vocab=129_280, dense_layers=3, dense_F=18_432, latent=Latent(query=1536, cache=512, rotated=64)
    ),
    "gpt-oss-20b": Rest(vocab=201_088, window=128),
    "gpt-oss-120b": Rest(vocab=201_088, window=128),
    "qwen3-30b-a3b": Rest(vocab=151_936),
    "qwen3-235b-a22b": Rest(vocab=151_936),
    "mixtral-8x7b": Rest(vocab=32_000),
    "olmoe-1b-7b": Rest(vocab=50_304),
}


def rest_of(model: PublishedModel) -> Rest:
    return RESTS.get(model.name, Rest())


def attention_numbers(model: PublishedModel) -> int:
    """The weights of one layer's attention."""
    one, D = model.attention, model.D
    if (latent := rest_of(model).latent) is None:
        return 2 * D * one.head_dim * (one.heads + one.kv_heads)
    query = latent.query * (D + one.heads * (one.head_dim + latent.rotated))
    keys_and_values = D * latent.rotated + latent.cache * (D + 2 * one.heads * one.head_dim)
    return query + keys_and_values + D * one.heads * one.head_dim


def other_weights(model: PublishedModel, bits: float, tp: int = 1) -> float:
    """Bytes of a rank besides the chosen experts: attention, dense layers and shared experts in these bits,
    both tables of the vocabulary in 16."""
    rest = rest_of(model)
    layers = attention_numbers(model) * (model.layers + rest.dense_layers)
    dense = 3 * model.D * (rest.dense_F * rest.dense_layers + model.shared_F * model.layers)
    return ((layers + dense) * bits / 8 + 2 * 2 * model.D * rest.vocab) / tp


@dataclass(frozen=True, kw_only=True)
class Served:
    """The question: this model and these GPUs; sequences of `context` tokens; at most `latency` seconds a
    step, which in decode is the time of a token. tp, ep, batch: only these, if not empty."""

    model: PublishedModel
    gpus: int
    fabric: Fabric
    phase: Phase
    context: int
    format: str = "bf16"
    latency: float = math.inf
    workload: str = "uniform"
    spare: tuple[int, ...] = (0,)
    tp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    hidden: float = HIDDEN

    @property
    def rest(self) -> Rest:
        return rest_of(self.model)

    @property
    def cache_numbers(self) -> int:
        """The numbers of one token and layer in the cache."""
        one, latent = self.model.attention, self.rest.latent
        return 2 * one.kv_heads * one.head_dim if latent is None else latent.cache + latent.rotated

    def seen(self, tokens: float) -> float:
        """How many of the last `tokens` a layer attends to and keeps, in the mean of layers."""
        return (tokens + min(tokens, self.rest.window or tokens)) / 2

    def size(self, tp: int, ep: int) -> LayerSize:
        """One rank's experts: whole ones, or their columns if ep is 1."""
        bits, columns = FORMATS[self.format], 1 if ep > 1 else tp
        return layer_size(self.model, weight_bits=bits.expert, send_bits=bits.send, columns=columns)

    def cache_ranks(self, tp: int) -> int:
        """How many ranks share the cache. All heads need a latent cache, so every rank has it."""
        return 1 if self.rest.latent is not None else min(tp, self.model.attention.kv_heads)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One way to serve: seconds of a step by part, bytes of a GPU by part, tokens per second of a GPU.

    halves: two half batches. hidden: seconds of sending or computing that they hide. between: tokens per
    second at both ends of HIDDEN_RANGE.
    """

    tp: int
    ep: int
    replicas: int
    batch: int
    halves: bool
    way: str
    seconds: dict[str, float]
    hidden: float
    memory: dict[str, float]
    between: tuple[float, float]
    fits: bool
    in_time: bool

    @property
    def step(self) -> float:
        return sum(self.seconds.values()) - self.hidden

    @property
    def allowed(self) -> bool:
        return self.fits and self.in_time

    @property
    def rate(self) -> float:
        return self.batch / self.step


def serve(
    asked: Served, on_group: Callable[[int, int], None] = lambda tp, ep: None
) -> tuple[Deployment | None, list[Deployment]]:
    """The best deployment, or None, and the best of each tp and ep, or else the smallest one tried."""
    node = min(asked.gpus, asked.fabric.ranks_per_node)
    tps = asked.tp or [
        n for n in range(1, node + 1) if node % n == 0 and asked.model.attention.heads % n == 0
    ]
    counted = cache(partial(_counted, asked))
    best_of = []
    for tp in tps:
        for ep in asked.ep or degrees_of(asked.gpus, asked.fabric.ranks_per_node):
            if (ep % tp and ep != 1) or asked.gpus % max(tp, ep):
                continue
            on_group(tp, ep)
            tried = list(_batches(asked, tp, ep, counted))
            best_of.append(max(tried, key=lambda one: (one.allowed, one.rate if one.allowed else -one.batch)))
    allowed = [one for one in best_of if one.allowed]
    return max(allowed, key=lambda one: one.rate, default=None), best_of


def _batches(
    asked: Served, tp: int, ep: int, counted: Callable[[int, int, int], Option]
) -> Iterator[Deployment]:
    """Larger and larger batches, until one does not fit or is too slow; that one is the last."""
    for batch in asked.batch or BATCHES[asked.phase]:
        parts = (1, 2) if batch > 1 else (1,)
        layers = [(n, _layer(asked, tp, ep, batch // n, counted)) for n in parts]
        best = min((_deployment(asked, tp, ep, batch, *one) for one in layers), key=lambda one: one.step)
        yield best
        if not best.allowed:
            return


def _counted(asked: Served, tp: int, ep: int, tokens: int) -> Option:
    """The fastest way to run the experts of a layer. Counts travel with the rows, as in DeepEP, so the part
    `plan` does not count."""
    question = Question(
        size=asked.size(tp, ep), gpus=ep, tokens=tokens, fabric=asked.fabric, workload=asked.workload,
        spare=asked.spare, steps=1,
    )  # fmt: skip
    options, _, _ = options_of(question, ep)
    return min(options, key=lambda one: one.total - one.seconds["plan"])


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The seconds of a MoE layer with its attention: what a rank computes and what is sent."""

    attention: float
    experts: float
    sending: float
    option: Option


def _layer(
    asked: Served, tp: int, ep: int, tokens: int, counted: Callable[[int, int, int], Option]
) -> _Layer:
    # with experts in columns a rank has the tokens of all tp ranks
    option = counted(1, ep, tokens) if ep > 1 else counted(tp, ep, tokens * tp)
    moving = option.seconds["send"] + option.seconds["return"]
    experts = option.seconds["route"] + option.seconds["compute"] + 2e-6 * asked.fabric.device.launch_us
    sharing = 2 * _sum_over(tp, tokens * tp * asked.model.D * 2, asked.fabric)
    return _Layer(
        attention=_attention(asked, tp, tokens * tp),
        experts=experts if ep > 1 else experts + moving,
        sending=sharing + (moving if ep > 1 else 0.0),
        option=option,
    )


def _attention(asked: Served, tp: int, tokens: int) -> float:
    """The seconds of one layer for the tokens of tp ranks: projections, then heads over the cache."""
    one, latent, bits = asked.model.attention, asked.rest.latent, FORMATS[asked.format]
    numbers, device = attention_numbers(asked.model) / tp, asked.fabric.device
    projections = seconds_W(
        device, flops_W=2 * numbers * tokens, bytes_W=numbers * bits.other / 8 + 4 * asked.model.D * tokens,
        launches=4, math_bits=8 if bits.other < 9 else 16,
    )  # fmt: skip
    if latent is None:
        width = 2 * one.head_dim
    elif asked.phase == "decode":  # heads work on the latent numbers themselves
        width = 2 * latent.cache + latent.rotated
    else:
        width = 2 * one.head_dim + latent.rotated
    # a token of a prompt comes after half of the others in the mean
    seen = asked.seen(asked.context if asked.phase == "decode" else asked.context / 2)
    read = tokens * seen * asked.cache_numbers * CACHE_BYTES if asked.phase == "decode" else 0
    heads = seconds_W(
        device, flops_W=2 * one.heads / tp * width * seen * tokens, bytes_W=read / asked.cache_ranks(tp),
        launches=2,
    )  # fmt: skip
    return float(projections + heads)


def _sum_over(tp: int, size: float, fabric: Fabric) -> float:
    """The seconds of a sum over tp ranks of a node (all-reduce)."""
    if tp == 1:
        return 0.0
    return 1e-6 * fabric.inside.exchange_us + 2 * (tp - 1) / tp * size / (1e9 * fabric.inside.gb_per_second)


def _deployment(asked: Served, tp: int, ep: int, batch: int, parts: int, one: _Layer) -> Deployment:
    model, rest, device, bits = asked.model, asked.rest, asked.fabric.device, FORMATS[asked.format]
    tokens, D = batch * tp, model.D
    last = tokens if asked.phase == "decode" else tokens / asked.context  # only these need the vocabulary
    dense = 3 * D * rest.dense_F / tp
    other = seconds_W(
        device, flops_W=2 * (dense * rest.dense_layers * tokens + D * rest.vocab / tp * last),
        bytes_W=dense * rest.dense_layers * bits.other / 8 + 2 * D * rest.vocab / tp, launches=4,
    )  # fmt: skip
    layers = model.layers + rest.dense_layers
    seconds = {
        "attention": parts * one.attention * layers,
        "experts": parts * one.experts * model.layers,
        "sending": parts * one.sending * model.layers,
        "rest": float(other),
    }
    shorter = min(seconds["attention"] + seconds["experts"], seconds["sending"]) if parts > 1 else 0.0
    held = asked.seen(asked.context) if asked.phase == "decode" else 1  # in the cache, for a token of a step
    memory = {
        "experts": one.option.places * asked.size(tp, ep).expert_bytes * model.layers,
        "other weights": other_weights(model, bits.other, tp),
        "cache": tokens * held * asked.cache_numbers * CACHE_BYTES * layers / asked.cache_ranks(tp),
        "rows": parts * one.option.buffers + tokens * D * 8 + last * rest.vocab / tp * 4,
        "workspace": WORKSPACE,
    }
    memory["fragmentation"] = FRAGMENTED * (memory["cache"] + memory["rows"])
    total, hidden = sum(seconds.values()), asked.hidden * shorter
    low, high = (batch / (total - share * shorter) for share in HIDDEN_RANGE)
    return Deployment(
        tp=tp, ep=ep, replicas=asked.gpus // max(tp, ep), batch=batch, halves=parts > 1,
        way=f"{one.option.way}, {one.option.transport}, {one.option.layout}", seconds=seconds, hidden=hidden,
        memory=memory, between=(low, high), fits=sum(memory.values()) <= 1e9 * device.memory_gb,
        in_time=total - hidden <= asked.latency,
    )  # fmt: skip
