"""The MoE layers of published models: shapes alone, nothing is downloaded.

Numbers are those of each model's config.json (hidden_size, moe_intermediate_size, experts, experts per token,
shared expert width).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_routing_bench.names import did_you_mean
from moe_routing_bench.shapes import MoEShape


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """One model's MoE layer: ModelPreset(name="mixtral-8x7b", D=4096, F=14336, E=8, K=2)."""

    name: str
    D: int
    F: int
    E: int
    K: int
    shared_F: int = 0
    activation: str = "swiglu"
    bias: bool = False
    note: str = ""

    def shape(self, T: int) -> MoEShape:
        return MoEShape(T=T, D=self.D, F=self.F, E=self.E, K=self.K)


MODELS = {
    preset.name: preset
    for preset in (
        ModelPreset(name="qwen3-30b-a3b", D=2048, F=768, E=128, K=8),
        ModelPreset(name="qwen3-235b-a22b", D=4096, F=1536, E=128, K=8),
        ModelPreset(
            name="qwen1.5-moe-a2.7b",
            D=2048,
            F=1408,
            E=60,
            K=4,
            shared_F=5632,
            note="the model also gates its shared expert with a sigmoid, which is not timed",
        ),
        ModelPreset(name="mixtral-8x7b", D=4096, F=14336, E=8, K=2),
        ModelPreset(name="deepseek-v3", D=7168, F=2048, E=256, K=8, shared_F=2048),
        ModelPreset(name="olmoe-1b-7b", D=2048, F=1024, E=64, K=8),
        ModelPreset(
            name="gpt-oss-20b",
            D=2880,
            F=2880,
            E=32,
            K=4,
            bias=True,
            note="the model clamps its gated activation; plain swiglu stands in for it",
        ),
        ModelPreset(
            name="gpt-oss-120b",
            D=2880,
            F=2880,
            E=128,
            K=4,
            bias=True,
            note="the model clamps its gated activation; plain swiglu stands in for it",
        ),
        ModelPreset(name="phi-3.5-moe", D=4096, F=6400, E=16, K=2),
        ModelPreset(name="granite-3-moe", D=1536, F=512, E=40, K=8, note="granite-3.0-3b-a800m"),
    )
}

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def model(name: str) -> ModelPreset:
    if name not in MODELS:
        hint = did_you_mean(name, MODELS)
        raise ValueError(f"there is no model {name!r}; {hint}there are {', '.join(MODELS)}")
    return MODELS[name]
