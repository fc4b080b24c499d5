"""Published models: sizes of the MoE layer, routing, attention, and the names of their parts in Transformers.

This is data; nothing is downloaded. The sizes are from each model's config.json, which was looked up in

    deepseek        inference/configs of github.com/deepseek-ai/DeepSeek-V3: 16B and 236B are V2's
    glm-4.5-air     huggingface.co/PrimeIntellect/INTELLECT-3-Base, trained from it with the same config
    switch-base-8   huggingface.co/emre/switch-base-8-finetuned-samsum, likewise
    llama-4-scout   Transformers' Llama4TextConfig; its shared expert in Megatron-Bridge's Llama4ModelProvider

The heads of the others are from Megatron-LM's and slime's model scripts (Qwen3), from huggingface.co
(Granite, Phi), else the defaults of Transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_routing_bench.core.names import no_such
from moe_routing_bench.core.shapes import MoEShape


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names in the config.json and checkpoints of one model_type. Without a name for F they cannot be
    read."""

    model_type: str
    E: tuple[str, ...] = ()  # the first name that exists is used
    F: str = ""
    module: str = "mlp"  # the MoE layer's
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    router_bias: str = ""
    score: str = "softmax"
    renormalises: bool = False  # True: always; False: norm_topk_prob in config.json decides


@dataclass(frozen=True, kw_only=True)
class PublishedRouting:
    """A rule of routers/ with its options: PublishedRouting(rule="sigmoid_bias", options={"scale": 2.5})."""

    rule: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # how the layer around the router differs from ours
    missing: str = ""  # why no rule here can do it


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """AttentionShape(heads=32, kv_heads=4, head_dim=128, qk_norm=True) is Qwen3-30B-A3B's."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False
    theta: float = 10_000.0
    note: str = ""  # what the model has and our decoder block does not have
    missing: str = ""  # why our decoder block cannot represent the model at all

    def scaled(self, factor: float) -> AttentionShape:
        """Fewer heads of the same width, for a decoder block of `factor` times the width."""
        kv_heads = max(1, round(self.kv_heads * factor))
        return replace(self, kv_heads=kv_heads, heads=kv_heads * (self.heads // self.kv_heads))


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """One model: MODELS["mixtral-8x7b"] has D=4096, F=14336, E=8, K=2, a routing, an attention, a family."""

    name: str
    family: str
    D: int
    F: int
    E: int
    K: int
    layers: int  # layers with experts
    shared_F: int = 0
    activation: str = "swiglu"
    bias: bool = False
    note: str = ""
    routing: PublishedRouting
    attention: AttentionShape

    def shape(self, T: int) -> MoEShape:
        return MoEShape(T=T, D=self.D, F=self.F, E=self.E, K=self.K)


FAMILIES = {
    "qwen3-moe": Family(
        model_type="qwen3_moe", E=("num_experts", "num_local_experts"), F="moe_intermediate_size"
    ),
    "olmoe": Family(model_type="olmoe", E=("num_experts", "num_local_experts"), F="intermediate_size"),
    "mixtral": Family(
        model_type="mixtral", E=("num_local_experts",), F="intermediate_size", module="block_sparse_moe",
        parts=("w1", "w3", "w2"), renormalises=True,
    ),
    "deepseek-v3": Family(
        model_type="deepseek_v3", E=("n_routed_experts", "num_local_experts"), F="moe_intermediate_size",
        router_bias="e_score_correction_bias", score="sigmoid",
    ),
    "gpt-oss": Family(
        model_type="gpt_oss", E=("num_local_experts", "num_experts"), F="intermediate_size", router="router",
        router_bias="bias", renormalises=True,
    ),
    "deepseek-v2": Family(model_type="deepseek_v2"),
    "glm4-moe": Family(model_type="glm4_moe"),
    "granite-moe": Family(model_type="granitemoe"),
    "llama4": Family(model_type="llama4"),
    "phi-moe": Family(model_type="phimoe"),
    "qwen2-moe": Family(model_type="qwen2_moe"),
    "switch": Family(model_type="switch_transformers"),
}  # fmt: skip

RAW = PublishedRouting(rule="softmax_topk", options={"order": "softmax_then_topk"})
RENORMALISED = PublishedRouting(rule="softmax_topk", options={"order": "softmax_then_topk_renormalised"})
QWEN3 = replace(
    RENORMALISED,
    note="Transformers' Qwen3MoeConfig does not renormalise unless asked to; the published models do",
)
TOPK_FIRST = PublishedRouting(rule="softmax_topk", options={"order": "topk_then_softmax"})
GPT_OSS = replace(TOPK_FIRST, options={**TOPK_FIRST.options, "bias": True})
SINKS = AttentionShape(
    heads=64, kv_heads=8, head_dim=64, bias=True, theta=150_000.0,
    note="the model has attention sinks, and a window in every second layer",
)  # fmt: skip
CLAMPED = "the model clamps its gated activation; plain swiglu stands in for it"
LATENT = (
    "the model has latent attention, our decoder block grouped-query attention; `mrb bench layer` "
    "measures its MoE alone"
)

MODELS = {
    published.name: published
    for published in (
        PublishedModel(
            name="qwen3-30b-a3b", family="qwen3-moe", D=2048, F=768, E=128, K=8, layers=48, routing=QWEN3,
            attention=AttentionShape(heads=32, kv_heads=4, head_dim=128, qk_norm=True, theta=1e6),
        ),
        PublishedModel(
            name="qwen3-235b-a22b", family="qwen3-moe", D=4096, F=1536, E=128, K=8, layers=94, routing=QWEN3,
            attention=AttentionShape(heads=64, kv_heads=4, head_dim=128, qk_norm=True, theta=1e6),
        ),
        PublishedModel(
            name="qwen1.5-moe-a2.7b", family="qwen2-moe", D=2048, F=1408, E=60, K=4, layers=24, shared_F=5632,
            note="the model also gates its shared expert with a sigmoid, which is not timed",
            routing=RAW,
            attention=AttentionShape(
                heads=16, kv_heads=16, head_dim=128, theta=1e6, note="the model has biases on q, k and v"
            ),
        ),
        PublishedModel(
            name="mixtral-8x7b", family="mixtral", D=4096, F=14336, E=8, K=2, layers=32, routing=RENORMALISED,
            attention=AttentionShape(heads=32, kv_heads=8, head_dim=128, theta=1e6),
        ),
        PublishedModel(
            name="deepseek-v3", family="deepseek-v3", D=7168, F=2048, E=256, K=8, layers=58, shared_F=2048,
            routing=PublishedRouting(
                rule="sigmoid_bias",
                options={"groups": 8, "keep_groups": 4, "group_score": "top2_sum", "scale": 2.5},
            ),
            attention=AttentionShape(heads=128, kv_heads=128, head_dim=128, missing=LATENT),
        ),
        PublishedModel(
            name="olmoe-1b-7b", family="olmoe", D=2048, F=1024, E=64, K=8, layers=16, routing=RAW,
            attention=AttentionShape(
                heads=16, kv_heads=16, head_dim=128, note="the model norms q and k over all heads together"
            ),
        ),
        PublishedModel(
            name="gpt-oss-20b", family="gpt-oss", D=2880, F=2880, E=32, K=4, layers=24, bias=True,
            note=CLAMPED, routing=GPT_OSS, attention=SINKS,
        ),
        PublishedModel(
            name="gpt-oss-120b", family="gpt-oss", D=2880, F=2880, E=128, K=4, layers=36, bias=True,
            note=CLAMPED, routing=GPT_OSS, attention=SINKS,
        ),
        PublishedModel(
            name="phi-3.5-moe", family="phi-moe", D=4096, F=6400, E=16, K=2, layers=32,
            routing=PublishedRouting(
                missing="it routes by SparseMixer-v2 (arXiv:2409.12136): each choice has its own softmax "
                "over the experts close to the best, and training samples; no rule here does that"
            ),
            attention=AttentionShape(
                heads=32, kv_heads=8, head_dim=128, bias=True, note="the model has LayerNorm, not RMSNorm"
            ),
        ),
        PublishedModel(
            name="granite-3-moe", family="granite-moe", D=1536, F=512, E=40, K=8, layers=32,
            note="granite-3.0-3b-a800m", routing=TOPK_FIRST,
            attention=AttentionShape(
                heads=24, kv_heads=8, head_dim=64, note="the model scales its residuals, which is not timed"
            ),
        ),
        PublishedModel(
            name="deepseek-v2", family="deepseek-v2", D=5120, F=1536, E=160, K=6, layers=59, shared_F=3072,
            routing=PublishedRouting(
                rule="group_limited",
                options={
                    "groups": 8, "keep_groups": 3, "group_score": "max", "renormalise": False, "scale": 16.0
                },
            ),
            attention=AttentionShape(heads=128, kv_heads=128, head_dim=128, missing=LATENT),
        ),
        PublishedModel(
            name="deepseek-v2-lite", family="deepseek-v2", D=2048, F=1408, E=64, K=6, layers=26,
            shared_F=2816, routing=RAW,
            attention=AttentionShape(heads=16, kv_heads=16, head_dim=128, missing=LATENT),
        ),
        PublishedModel(
            name="glm-4.5-air", family="glm4-moe", D=4096, F=1408, E=128, K=8, layers=45, shared_F=1408,
            routing=PublishedRouting(rule="sigmoid_bias"),
            attention=AttentionShape(
                heads=96, kv_heads=8, head_dim=128, theta=1e6,
                note="the model has biases on q, k and v, and rotates half of each head",
            ),
        ),
        PublishedModel(
            name="switch-base-8", family="switch", D=768, F=3072, E=8, K=1, layers=12, activation="relu",
            routing=PublishedRouting(
                rule="switch", options={"jitter": 0.01},
                note="the model gives each expert room for 64 tokens of a sequence, here the layout's part",
            ),
            attention=AttentionShape(
                heads=12, kv_heads=12, head_dim=64,
                missing="the model has T5's relative positions, our decoder block rotary ones; `mrb bench "
                "layer` measures its MoE alone",
            ),
        ),
        PublishedModel(
            name="llama-4-scout", family="llama4", D=5120, F=8192, E=16, K=1, layers=48, shared_F=8192,
            routing=PublishedRouting(
                rule="sigmoid_bias", options={"renormalise": False},
                note="choices and weights are the model's, but it multiplies the expert's input by the "
                "weight, f(g x), where our layer multiplies the output, g f(x): the results differ",
            ),
            attention=AttentionShape(
                heads=40, kv_heads=8, head_dim=128, theta=500_000.0,
                note="the model norms q and k without weights, and does not rotate in every fourth layer",
            ),
        ),
    )
}  # fmt: skip


def model(name: str, known: Mapping[str, PublishedModel] = MODELS) -> PublishedModel:
    if name not in known:
        raise no_such("model", name, known)
    return known[name]
