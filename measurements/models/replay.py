"""What bfloat16 changes in routing, and what replay of the float32 choices leaves of it, for five families.

    python measurements/models/replay.py | tee measurements/models/replay.txt

Random models of the real architectures with a few million parameters; 4 documents of 256 tokens. "rollout" is
the model in float32, "trainer" the same weights in bfloat16: KL is of its next token against the rollout's.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import moe_routing_bench.models.transformers as plugin
from moe_routing_bench.models.tracing import ModelTrace, pieces, record_trace
from moe_routing_bench.workloads.trace import Trace, read_trace, write_trace
from moe_routing_bench.workloads.trace_diff import diff

VOCABULARY, DOCUMENTS, LENGTH = 512, 4, 256
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "DeepseekV3": {
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 4, "head_dim": 16,
        "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32,
    },
    "GptOss": {
        "num_local_experts": 32, "num_experts_per_tok": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def made(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family]))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    return model.eval()


def texts() -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    share = 1 / torch.arange(1, VOCABULARY - 1)
    return list((2 + share.expand(DOCUMENTS, -1).multinomial(LENGTH, True, generator=draws)).unbind(0))


def recorded(model: Any, documents: list[Tensor]) -> ModelTrace:
    return record_trace(model, pieces(documents, batch=DOCUMENTS, sequence=LENGTH), scores=True)


def kept(trace: ModelTrace, folder: Path) -> Trace:
    write_trace(folder / "t", *trace.routings(), source="", score_TE=trace.scores(), **trace.labels())
    return read_trace(folder / "t")


@torch.no_grad()
def logits(model: Any, documents: list[Tensor]) -> Tensor:
    return torch.cat([model(document.unsqueeze(0), use_cache=False).logits.float() for document in documents])


def divergence(true: Tensor, other: Tensor) -> float:
    log_true, two = true.log_softmax(-1), other.log_softmax(-1)
    return (log_true.exp() * (log_true - two)).sum(-1).mean().item()


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"$ python measurements/models/replay.py    ({platform.processor() or platform.machine()}, ", end=""
    )
    print(f"{os.cpu_count()} cores; torch {torch.__version__}, transformers {transformers.__version__})\n")
    columns = (
        "same bits",
        "choices differ",
        "tokens differ",
        "margin",
        "usual",
        "differ, replayed",
        "KL",
        "KL, replayed",
    )
    print(f"{'':12}" + "".join(f"{column:>18}" for column in columns))
    documents = texts()
    with tempfile.TemporaryDirectory() as name:
        for family in FAMILIES:
            model = made(family)
            rollout, true = recorded(model, documents), logits(model, documents)
            with plugin.replay(model, rollout):
                same = torch.equal(logits(model, documents), true)
            model = model.bfloat16()
            trainer, half = recorded(model, documents), logits(model, documents)
            with plugin.replay(model, rollout):
                replayed = recorded(model, documents)
            with plugin.replay(model, rollout):
                close = logits(model, documents)
            traces = [kept(trace, Path(name)) for trace in (rollout, trainer, replayed)]
            before, after = diff(traces[0], traces[1]).whole, diff(traces[0], traces[2]).whole
            cells = (
                "yes" if same else "NO", f"{100 * before.choices:.2f} %", f"{100 * before.flipped:.1f} %",
                f"{before.margin:.2g}", f"{before.usual:.2g}", f"{100 * after.choices:.2f} %",
                f"{divergence(true, half):.2e}", f"{divergence(true, close):.2e}",
            )  # fmt: skip
            print(f"{family:12}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    print(
        "\nsame bits: the float32 model under replay of its own trace. margin, usual: medians of scores that"
    )
    print("flipped, and of the last chosen less the first not chosen. KL: nats, mean over tokens.")


if __name__ == "__main__":
    main()
