"""The suite gpu-hour: what an hour on a hired GPU should answer, the most important first.

The name of a case says its step: gpu-hour/3-founding-pack. A step has its implementations, others' last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from moe_routing_bench.core.published import model
from moe_routing_bench.workloads.experiment import Experiment

GPU_HOUR = "gpu-hour"
EVEN, SKEWED = "uniform", "zipf(1.2)"
SECONDS = 20.0  # of a case, for measuring
_LAYER = ("staged(grouped_gemm=torch_grouped_mm)", "triton_fused", "triton_decode", "quack_gated")
IMPLEMENTATIONS: Mapping[str, Sequence[str]] = {
    "topk": ("torch_topk", "sort", "packed_key", "triton_select"),
    "dispatch": ("index_select", "triton_gather", "cute_gather"),
    "linear": ("torch",),
    "pack": (
        "index_select+gather_sum", "index_select+index_add", "triton_gather+triton_gather_sum",
        "cute_gather+cute_gather_sum",
    ),
    "layer": _LAYER,
}  # fmt: skip
RIVALS = (
    "sonic_moe", "gpt_oss_triton", "vllm_triton", "flashinfer_cutlass", "scatter_moe", "hf_grouped_mm",
    "hf_batched_mm", "hf_eager",
)  # fmt: skip
PADDED = ("staged(grouped_gemm=padded_bmm)", *_LAYER)


def gpu_hour() -> list[Experiment]:
    """An hour on a GPU: right, roofs, the original plan's points, layers of three models, other libraries."""
    suite = [
        _case("1-right-topk", "topk", 4096, 1, 1, 128, 8, weights=False),
        _case("1-right-pack", "pack", 4096, 2048, 1, 64, 4, weights=False),
        _case("1-right-prefill", "layer", 512, 1024, 512, 32, 4),
        _case("1-right-decode", "layer", 8, 2048, 512, 32, 8),
        _case("2-roofs-copy", "dispatch", 32768, 4096, 1, 1, 1, weights=False),
    ]
    suite += [
        _case(f"2-roofs-gemm-{dtype}", "linear", 4096, 4096, 4096, 1, 1, dtype=dtype, activation="relu")
        for dtype in ("bfloat16", "float16", "float32")
    ]
    suite += [
        _case("2-roofs-launch", "topk", 1, 1, 1, 8, 1, weights=False),
        _case("3-founding-pack", "pack", 16384, 4096, 1, 128, 2, weights=False, dtype="float16"),
        _case("3-founding-topk", "topk", 16384, 1, 1, 128, 2, weights=False, dtype="float32"),
    ]
    suite += [
        _case(
            f"3-founding-layer-e{E}", "layer", 4096, 1024, 4096, E, 2, activation="gelu", sequences=32,
            layout="padded(capacity_factor=1.25)",
        )
        for E in (8, 16)
    ]  # fmt: skip
    qwen = "qwen3-30b-a3b"
    tokens = {qwen: (1, 16, 128, 1024, 8192), "gpt-oss-120b": (1, 128, 1024), "deepseek-v3": (1, 128)}
    for name, workload in product(tokens, (EVEN, SKEWED)):
        suite += [_of_model("4-models", name, T, workload=workload) for T in tokens[name]]
    for workload in (EVEN, SKEWED):
        suite.append(_of_model("4-models", qwen, 1024, workload=workload, direction="train"))
    suite += [_of_model("5-rivals", qwen, T) for T in (16, 1024)]
    return [*suite, _of_model("5-rivals", "gpt-oss-120b", 128)]


def _case(name: str, span: str, T: int, D: int, F: int, E: int, K: int, **more: Any) -> Experiment:
    return Experiment(case=f"{GPU_HOUR}/{name}", span=span, T=T, D=D, F=F, E=E, K=K, **more)


def _of_model(step: str, name: str, T: int, **more: Any) -> Experiment:
    preset = model(name)
    sizes = {**vars(preset.shape(T)), "shared_F": preset.shared_F, "bias": preset.bias}
    words = [step, name, T, *(str(value).partition("(")[0] for value in more.values())]
    case = "-".join(map(str, words))
    return Experiment(
        case=f"{GPU_HOUR}/{case}", span="layer", activation=preset.activation, **{**sizes, **more}
    )


def step_of(case: str) -> str:
    """ "3 founding", of gpu-hour/3-founding-pack; empty for a case of another suite."""
    suite, _, name = case.partition("/")
    return " ".join(name.split("-")[:2]) if suite == GPU_HOUR else ""


def implementations_of(case: Experiment) -> list[str]:
    if case.layout != "compact":
        return list(PADDED)
    others = RIVALS if step_of(case.case) == "5 rivals" else ()
    return [*IMPLEMENTATIONS[case.span], *others]


def rehearsed(case: Experiment) -> Experiment:
    """The case as a pretended GPU measures it: so small that its times mean nothing."""
    s = case.shape
    sizes = {"T": min(s.T, 32), "D": min(s.D, 64), "F": min(s.F, 32), "E": min(s.E, 8), "K": min(s.K, 2)}
    small: dict[str, Any] = {**sizes, "shared_F": min(case.shared_F, 32), "sequences": 1}
    return replace(case, **small, case=f"{case.case}~rehearsed", scaled_from=case.case)
