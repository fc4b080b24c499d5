"""The attention of published models, for decoder blocks around their MoE layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_routing_bench.workloads.cases import BenchCase, cases


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """AttentionShape(heads=32, kv_heads=4, head_dim=128, qk_norm=True) is Qwen3-30B-A3B's."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False
    theta: float = 10_000.0
    note: str = ""  # what the model has and the block here has not
    missing: str = ""  # why the block here cannot stand for the model at all

    def scaled(self, factor: float) -> AttentionShape:
        """Fewer heads of the same width, for a block of `factor` times the width."""
        kv_heads = max(1, round(self.kv_heads * factor))
        return replace(self, kv_heads=kv_heads, heads=kv_heads * (self.heads // self.kv_heads))


# heads, kv heads and width from the models' config.json: Qwen3 as in Megatron-LM's and slime's model scripts,
# Granite from huggingface.co, the others as the defaults of Transformers' config classes
ATTENTION = {
    "qwen3-30b-a3b": AttentionShape(heads=32, kv_heads=4, head_dim=128, qk_norm=True, theta=1e6),
    "qwen3-235b-a22b": AttentionShape(heads=64, kv_heads=4, head_dim=128, qk_norm=True, theta=1e6),
    "qwen1.5-moe-a2.7b": AttentionShape(
        heads=16, kv_heads=16, head_dim=128, theta=1e6, note="the model has biases on q, k and v"
    ),
    "mixtral-8x7b": AttentionShape(heads=32, kv_heads=8, head_dim=128, theta=1e6),
    "deepseek-v3": AttentionShape(
        heads=128, kv_heads=128, head_dim=128,
        missing="deepseek-v3 has latent attention, and the block here grouped-query attention; "
        "measure its MoE with `mrb bench layer --model deepseek-v3`",
    ),
    "olmoe-1b-7b": AttentionShape(
        heads=16, kv_heads=16, head_dim=128, note="the model norms q and k over all heads together"
    ),
    "gpt-oss-20b": AttentionShape(
        heads=64, kv_heads=8, head_dim=64, bias=True, theta=150_000.0,
        note="the model has attention sinks, and a window in every second layer",
    ),
    "gpt-oss-120b": AttentionShape(
        heads=64, kv_heads=8, head_dim=64, bias=True, theta=150_000.0,
        note="the model has attention sinks, and a window in every second layer",
    ),
    "phi-3.5-moe": AttentionShape(
        heads=32, kv_heads=8, head_dim=128, bias=True, note="the model has LayerNorm, not RMSNorm"
    ),
    "granite-3-moe": AttentionShape(
        heads=24, kv_heads=8, head_dim=64, note="the model scales its residuals, which is not timed"
    ),
}  # fmt: skip


def attention_of(case: BenchCase) -> AttentionShape:
    """The attention of a case. Ours, where it says nothing: heads of 64, four of q for one of k and v."""
    group, D = case.name.partition("/")[0], case.shape.D
    if group in ATTENTION:
        found = ATTENTION[group]
        if found.missing:
            raise NotImplementedError(found.missing)
        full = cases(case.scaled_from)[0].shape.D if case.scaled_from else D
        return found.scaled(D / full)
    full = cases(case.scaled_from)[0].shape.D if case.scaled_from else D
    head_dim = full // case.heads if case.heads else min(64, D // 2 * 2)
    heads = max(1, D // head_dim)
    return AttentionShape(heads=heads, kv_heads=heads // 4 if heads % 4 == 0 else heads, head_dim=head_dim)
