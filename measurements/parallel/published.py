"""`mrb parallel serve` beside deployments that others published:

    python measurements/parallel/published.py > measurements/parallel/published.txt     # minutes

Published, in tokens per second of the GPUs named (of input in prefill, of output in decode):
  DeepSeek   open-infra-index, day 6, at 56d8685 on github.com/deepseek-ai: 73.7 thousand a node in prefill,
             of which 56.3 % were in a cache; 14.8 thousand in decode, 4,989 tokens in the cache, 20 to 22
             tokens per second for a user, so 50 ms a token. profile-data there: 16 thousand tokens a GPU and
             prompts of 4,096
  SGLang     lmsys.org/blog/2025-05-05-large-scale-ep: 52.3 and 22.3 thousand a node of H100, 2,000 tokens
  GPUStack   docs/performance-lab at 47277d7 of github.com/gpustack/gpustack, vLLM 0.10.2 and 0.11.0: 4,000
             tokens in and 200 out, total without output; "batch 4": 4 requests at a time, by the time of one
Nothing is fitted to these numbers but the hidden share of the last line, whose range the table shows.
`peak`: the arithmetic of the published rate (2 operations for each active weight and token) over the data
sheet's; fabrics assume 60 % in matrix products.
"""

from __future__ import annotations

from typing import Any

from moe_routing_bench.core.published import model
from moe_routing_bench.planner.fabric import read_fabric
from moe_routing_bench.planner.serving import Deployment, Phase, Served, serve


def deployed(name: str, fabric: str, phase: Phase, context: int, format: str, **more: Any) -> Deployment:
    """The best batch of one TP and EP."""
    (tp,), (ep,) = more.setdefault("tp", (1,)), more.setdefault("ep", (1,))
    asked = Served(
        model=model(name), gpus=max(tp, ep), fabric=read_fabric(fabric), phase=phase, context=context,
        format=format, **more,
    )  # fmt: skip
    (best,) = serve(asked)[1]
    assert best.allowed, f"{name}: {best}"
    return best


DEEPSEEK = {"ep": (32,), "spare": (1,)}
DECODE = (32, 64, 128, 256)
CASES: tuple[tuple[str, int, int, tuple[Any, ...], dict[str, Any], str], ...] = (
    (
        "DeepSeek-V3 prefill, EP32, 8 of 32 H800", 32_200, 8,
        ("deepseek-v3", "h800-400g", "prefill", 4096, "fp8"), {**DEEPSEEK, "batch": (16_384,)},
        "a mean of day and night, at 15 % of the peak",
    ),
    (
        "DeepSeek-V3 decode, EP144, 8 of 144 H800", 14_800, 8,
        ("deepseek-v3", "h800-400g", "decode", 4989, "fp8"),
        {"ep": (144,), "batch": DECODE, "latency": 0.05},
        "128 sequences take more than 50 ms if half of sending is hidden; theirs takes no part of a GPU",
    ),
    (
        "DeepSeek-V3 prefill, EP32, 8 of 32 H100", 52_300, 8,
        ("deepseek-v3", "h100-400g", "prefill", 2000, "fp8"), {**DEEPSEEK, "batch": (8192,)},
        "24 % of the peak; we count no norms, casts or uneven experts",
    ),
    (
        "DeepSeek-V3 decode, EP72, 8 of 72 H100", 22_300, 8,
        ("deepseek-v3", "h100-400g", "decode", 2000, "fp8"), {"ep": (72,), "batch": DECODE},
        "the batch is the largest tried that fits; theirs is not known to us",
    ),
    (
        "gpt-oss-120b prefill, one H100", 13_784, 1,
        ("gpt-oss-120b", "h100-400g", "prefill", 4000, "mxfp4"), {"batch": (8192,)},
        "14 % of the peak; also decodes a token for 20 of input",
    ),
    (
        "gpt-oss-120b prefill, TP2, 2 H100", 33_356, 2,
        ("gpt-oss-120b", "h100-400g", "prefill", 4000, "mxfp4"), {"tp": (2,), "batch": (4096,)},
        "17 % of the peak; also decodes a token for 20 of input",
    ),
    (
        "gpt-oss-120b batch 4, one H100", 481, 1,
        ("gpt-oss-120b", "h100-400g", "decode", 338, "mxfp4"), {"batch": (4,)},
        "launches are an assumption, and the host's work between steps is not counted",
    ),
    (
        "gpt-oss-120b batch 4, TP2, 2 H100", 696, 2,
        ("gpt-oss-120b", "h100-400g", "decode", 338, "mxfp4"), {"tp": (2,), "batch": (2,)},
        "the same",
    ),
    (
        "Qwen3-235B prefill, FP8, TP4, 4 H100", 15_761, 4,
        ("qwen3-235b-a22b", "h100-400g", "prefill", 4000, "fp8"), {"tp": (4,), "batch": (4096,)},
        "9 % of the peak; also decodes a token for 20 of input",
    ),
    (
        "Qwen3-235B prefill, BF16, TP8, 8 H100", 20_183, 8,
        ("qwen3-235b-a22b", "h100-400g", "prefill", 4000, "bf16"), {"tp": (8,), "batch": (1024,)},
        "11 % of the peak; also decodes a token for 20 of input",
    ),
)  # fmt: skip


def main() -> None:
    print(__doc__)
    print(f"{'':40} published  predicted    (range)         ratio  batch  GB a GPU")
    for name, published, gpus, words, more, reason in CASES:
        one = deployed(*words, **more)
        low, high = (f"{gpus * rate:,.0f}" for rate in one.between)
        rate, memory = gpus * one.rate, sum(one.memory.values()) / 1e9
        print(
            f"{name:40} {published:>9,} {rate:>10,.0f}  {f'({low} to {high})':>20} {rate / published:>6.2f} "
            f"{one.batch:>6} {memory:>9.1f}  {reason}"
        )
    words, more = ("deepseek-v3", "h100-400g", "prefill", 2000, "fp8"), {**DEEPSEEK, "batch": (8192,)}
    whole, halves = deployed(*words, **more, hidden=0.0), deployed(*words, **more, hidden=1.0)
    total = sum(halves.seconds.values())
    shares = ((total - whole.step / gain) / halves.hidden for gain in (1.27, 1.35))
    print(
        "\nTwo half batches gain 1.27 to 1.35 in SGLang's prefill on 32 H100 (the same page); here they do if"
    )
    print("they hide {:.2f} to {:.2f} of the shorter of computing and sending.".format(*shares))


if __name__ == "__main__":
    main()
