"""A small Transformers MoE model made faster with one line, and by how much. Random weights; about a minute.

python examples/faster_transformers.py
"""

import copy
import time
from statistics import median

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_routing_bench.models.transformers as plugin

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
OURS, THEIRS = "moe_routing_bench", ("eager", "grouped_mm")
SECONDS, FEWEST = 12.0, 20


def seconds_by_round(models: dict[str, Qwen3MoeForCausalLM], ids: torch.Tensor) -> dict[str, list[float]]:
    """One call of each a round, in random order, so that what disturbs a round disturbs all of them."""
    found: dict[str, list[float]] = {name: [] for name in models}
    order, began = np.random.default_rng(0), time.perf_counter()
    while len(found[OURS]) < FEWEST or time.perf_counter() - began < SECONDS:
        for name in order.permutation(list(models)):
            model = models[name]
            model.set_experts_implementation(str(name))
            started = time.perf_counter()
            with torch.no_grad():
                model(ids)
            found[str(name)].append(time.perf_counter() - started)
    return {name: times[2:] for name, times in found.items()}  # the first calls compile


def median_interval(values: list[float]) -> tuple[float, float]:
    """Where the true median lies, in 95 of 100 cases: the bootstrap's percentiles."""
    draws = np.random.default_rng(0).choice(values, size=(2000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_experts=32, num_experts_per_tok=4, **SIZES, **HEADS)
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    frozen = copy.deepcopy(model)
    plugin.freeze(frozen)  # the one line; the copy is only for comparing
    models = {**dict.fromkeys(THEIRS, model), OURS: frozen}

    for what, tokens in {"prompt of 256 tokens": 256, "one token": 1}.items():
        ids = torch.randint(config.vocab_size, (1, tokens))
        seconds = seconds_by_round(models, ids)
        best = min(THEIRS, key=lambda name: median(seconds[name]))
        ratios = [theirs / ours for theirs, ours in zip(seconds[best], seconds[OURS], strict=True)]
        low, high = median_interval(ratios)
        print(
            f"{what}: {1e3 * median(seconds[best]):.1f} ms ({best}) -> {1e3 * median(seconds[OURS]):.1f} ms, "
            f"{median(ratios):.2f} x as fast (95 %: {low:.2f} to {high:.2f}, {len(ratios)} pairs)"
        )
    print(plugin.implementations(frozen))


if __name__ == "__main__":
    main()
