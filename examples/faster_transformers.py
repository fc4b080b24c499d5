"""A small Transformers MoE model made faster with one line, and by how much. Random weights; about a minute.

python examples/faster_transformers.py
"""

import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_routing_bench.models.transformers as plugin

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}


def best_seconds(model: Qwen3MoeForCausalLM, ids: torch.Tensor, names: tuple[str, ...]) -> dict[str, float]:
    """The shortest of five calls under each implementation, taking turns; the first call is not timed."""
    found: dict[str, float] = {}
    for turn in range(6):
        for name in names:
            model.set_experts_implementation(name)
            started = time.perf_counter()
            with torch.no_grad():
                model(ids)
            if turn:
                found[name] = min(found.get(name, float("inf")), time.perf_counter() - started)
    return found


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_experts=32, num_experts_per_tok=4, **SIZES, **HEADS)
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()

    for what, tokens in {"prompt of 256 tokens": 256, "one token": 1}.items():
        ids = torch.randint(config.vocab_size, (1, tokens))
        seconds = best_seconds(model, ids, ("eager", "grouped_mm", "moe_routing_bench"))
        theirs = min(seconds["eager"], seconds["grouped_mm"])
        ours = seconds["moe_routing_bench"]
        print(f"{what}: {theirs * 1e3:.1f} ms -> {ours * 1e3:.1f} ms, {theirs / ours:.2f} x as fast")
    model.set_experts_implementation("moe_routing_bench")
    print(plugin.implementations(model))


if __name__ == "__main__":
    main()
