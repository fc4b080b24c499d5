"""The suite `regret`: is impl="auto" the fastest that can run? Every case has its own routing and threads.

Cases with the same weights follow each other, so that a sweep makes them once. Sizes are (D, F, E, K).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from moe_routing_bench.workloads.experiment import Experiment

SIZES = {
    "qwen3-e64": (2048, 768, 64, 8),  # Qwen3-30B-A3B with half of its 128 experts
    "olmoe": (2048, 1024, 64, 8),
    "mixtral-s": (1024, 3584, 8, 2),
    "granite": (1536, 512, 40, 8),
    "tiny": (256, 512, 8, 2),
}
# topk and make_plan see E and K alone
CHOICES = {"e128-k8": (1, 1, 128, 8), "e64-k8": (1, 1, 64, 8), "e40-k8": (1, 1, 40, 8), "e8-k2": (1, 1, 8, 2)}
DTYPES = ("float32", "bfloat16")
EVEN, SKEWED = "balanced", "zipf(1.2)"
# what "auto" may pick, and Transformers' experts: each keeps the rule for ties, its result and gradients
IMPLEMENTATIONS = {
    "topk": ("auto", "native", "sort", "packed_key"),
    "make_plan": ("auto", "native", "argsort", "counting"),
    "dispatch": ("auto", "native", "index_select"),
    "combine": ("auto", "native", "gather_sum", "index_add", "embedding_bag"),
    "grouped_gemm": ("auto", "native", "expert_loop", "torch_grouped_mm"),
    "expert_ffn": (
        "auto",
        "frozen(auto)",
        "native",
        "staged(dispatch=native,grouped_gemm=torch_grouped_mm,combine=native)",
        "eager_loop",
        "hf_grouped_mm",
        "hf_eager",
        "hf_batched_mm",
    ),
    "rms_norm": ("auto", "native", "torch"),
    "attention": ("auto", "native", "sdpa", "sdpa_folded"),
    "linear": ("auto", "frozen(auto)", "native", "torch"),
}


Ordered = tuple[tuple[object, ...], Experiment]  # where it stands in the suite, and the case


def regret() -> list[Experiment]:
    """Is impl="auto" the fastest that can run, Transformers' experts among them? From 1 to 4096 tokens."""
    made = [
        # experts with weights as they are and frozen; then with gradients
        *_grid("expert_ffn", SIZES, DTYPES, (1, 4, 16, 64, 256)),
        *_grid("expert_ffn", ("granite",), DTYPES, (1024,)),
        *_grid("expert_ffn", ("tiny",), DTYPES, (1024, 4096)),
        *_grid("expert_ffn", SIZES, DTYPES, (4, 64), workload=EVEN),
        *_grid("expert_ffn", SIZES, DTYPES, (1, 16), threads=1),
        *_grid("expert_ffn", ("mixtral-s", "granite", "tiny"), DTYPES, (16, 64), direction="train"),
        *_grid("expert_ffn", ("tiny",), DTYPES, (256, 1024), direction="train"),
        *_grid("expert_ffn", ("tiny",), DTYPES, (64,), direction="train", threads=1),
        *_grid("grouped_gemm", SIZES, DTYPES, (4, 64)),
        *_grid("grouped_gemm", ("tiny",), DTYPES, (1, 1024), workload=EVEN),
        *_grid("grouped_gemm", ("granite", "tiny"), DTYPES, (16,), threads=1),
        *_grid("topk", CHOICES, ("float32",), (1, 16, 256, 4096)),
        *_grid("topk", ("e128-k8", "e8-k2"), ("float32",), (16, 1024), threads=1),
        *_grid("topk", ("e64-k8",), ("bfloat16",), (16, 1024)),
        *_grid("topk", ("e64-k8",), ("float32",), (64, 1024), direction="train"),
        *_grid("make_plan", CHOICES, ("float32",), (1, 64, 4096)),
        *_grid("make_plan", ("e128-k8", "e8-k2"), ("float32",), (16, 1024), workload=EVEN, threads=1),
        *_moved("dispatch"),
        *_moved("combine"),
        *_around(),
    ]
    return [case for _, case in sorted(made, key=lambda one: one[0])]


def _moved(span: str) -> Iterator[Ordered]:
    yield from _grid(span, ("olmoe", "mixtral-s", "tiny"), DTYPES, (1, 16, 256))
    yield from _grid(span, ("mixtral-s", "tiny"), DTYPES, (4096,), workload=EVEN)
    yield from _grid(span, ("olmoe", "tiny"), DTYPES, (64,), threads=1)
    yield from _grid(span, ("olmoe",), DTYPES, (1024,), direction="train")


def _around() -> Iterator[Ordered]:
    """The layers around the experts: decoding and prompts, wide heads and narrow ones."""
    for dtype in DTYPES:
        for name, T, D, more in (
            ("decode-1024", 1, 4096, {"heads": 32, "kv_heads": 8, "context": 1024}),
            ("decode-8192", 1, 4096, {"heads": 32, "kv_heads": 8, "context": 8192}),
            ("narrow-4x256", 1024, 512, {"heads": 32, "kv_heads": 16, "sequences": 4}),
            ("bert-128", 128, 768, {"heads": 12, "causal": False}),
            ("bert-512", 512, 768, {"heads": 12, "causal": False}),
            ("wide-1024", 1024, 2048, {"heads": 16, "kv_heads": 4}),
            ("bert-128-train", 128, 768, {"heads": 12, "causal": False, "direction": "train"}),
        ):
            yield _dense("attention", name, dtype, T, D, 1, **more)
        for T, (D, F) in product((1, 16, 128, 1024), ((768, 3072), (2048, 2048))):
            yield _dense("linear", f"{T}x{D}x{F}", dtype, T, D, F, weights=True)
        for T, D in ((1, 2048), (128, 2048), (16384, 512)):
            yield _dense("rms_norm", f"{T}x{D}", dtype, T, D, 1)
        yield _dense("rms_norm", "128x2048-train", dtype, 128, 2048, 1, direction="train")


def _dense(
    span: str, name: str, dtype: str, T: int, D: int, F: int, *, weights: bool = False, **more: Any
) -> Ordered:
    case = Experiment(
        case=f"regret/{span}-{name}-{dtype}", span=span, T=T, D=D, F=F, E=1, K=1, dtype=dtype,
        weights=weights, activation="relu", threads=2, **more,
    )  # fmt: skip
    return (True, 2, case.direction, span, name, dtype, T, ""), case


def _grid(
    span: str, sizes: Iterable[str], dtypes: Iterable[str], tokens: Iterable[int], *,
    workload: str = SKEWED, threads: int = 2, direction: str = "forward",
) -> Iterator[Ordered]:  # fmt: skip
    for size, dtype, T in product(sizes, dtypes, tokens):
        words = [span, size, str(T), dtype, *["even"] * (workload == EVEN), *["1-thread"] * (threads == 1)]
        words += [direction] * (direction != "forward")
        weights, (D, F, E, K) = span in ("expert_ffn", "grouped_gemm"), (SIZES | CHOICES)[size]
        case = Experiment(
            case=f"regret/{'-'.join(words)}", span=span, T=T, D=D, F=F, E=E, K=K, dtype=dtype,
            weights=weights, direction=direction, workload=workload, threads=threads,
        )  # fmt: skip
        yield (not weights, threads, direction, span, size, dtype, T, workload), case
