"""Named cases to measure: pure data. A suite is a list of cases; a big case has a scaled twin.

A case is an experiment without implementations: it says what is timed (`span`), at which sizes, dtype and
layout. A suite named seed-... has the sizes of the project's original plan; its docstring is what `mrb list`
shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from moe_routing_bench.core.names import did_you_mean
from moe_routing_bench.core.published import MODELS, model
from moe_routing_bench.workloads.experiment import (
    ATTENTION,
    FEWER_TOKENS,
    MAX_ACTIVATION_BYTES,
    MAX_FLOPS,
    Experiment,
)
from moe_routing_bench.workloads.gpu_cases import gpu_hour
from moe_routing_bench.workloads.regret_cases import regret

# of the cases of a published model
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# five implementations call it about 40 times each in a minute, at 0.1 TFLOP/s
MINUTE_FLOPS = 3e10


def scaled(case: Experiment) -> Experiment:
    """The case itself if it fits, else its twin: tokens, then both widths, then experts halved until it does.

    K stays, and the ratio of D to F down to widths of 128. What is measured on a twin says nothing about the
    full size, so its name ends in ~scaled and `scaled_from` names the original.
    """
    twin = case
    while not twin.fits_a_laptop:
        s = twin.shape
        too_much_work = twin.flops > MAX_FLOPS or twin.activation_bytes > MAX_ACTIVATION_BYTES
        if twin.span == ATTENTION:
            twin = _half(twin)
            continue
        if too_much_work and s.T > 128:
            smaller = replace(s, T=s.T // 2)
        elif min(s.D, s.F) > 128:
            smaller = replace(s, D=s.D // 2, F=s.F // 2)
        elif s.E > 2 * s.K:
            smaller = replace(s, E=s.E // 2)
        elif s.D > 256:
            smaller = replace(s, D=s.D // 2)
        else:
            smaller = replace(s, T=s.T // 2)
        twin = replace(twin, **vars(smaller), shared_F=twin.shared_F * smaller.F // s.F)
    return case if twin == case else replace(twin, case=f"{case.case}~scaled", scaled_from=case.case)


def _half(case: Experiment) -> Experiment:
    """With half of its tokens. Attention has fewer sequences, and shorter ones only if there is one."""
    if case.span != ATTENTION or case.sequences == 1:
        return replace(case, T=case.T // 2, context=case.context // 2)
    B = case.sequences // 2
    return replace(case, T=case.T // case.sequences * B, sequences=B)


def fitted(case: Experiment, *, memory_bytes: int, most_flops: float = MINUTE_FLOPS) -> Experiment:
    """The case itself if this machine can hold it and its time is enough, else with fewer tokens; if even the
    weights do not fit, its scaled twin.

    Room is needed for the weights four times (the judge's, the worker's, packed ones, those in the order of
    Transformers) and the rows eight times; with gradients also for weights and gradients in float64, which
    is 16 times.
    """
    train = case.direction != "forward"
    if (20 if train else 4) * case.held_bytes > 0.8 * memory_bytes:
        return scaled(case)
    smaller = case
    while smaller.T > 1 and (
        smaller.flops * (3 if train else 1) > most_flops
        or (20 if train else 4) * smaller.held_bytes + 8 * smaller.activation_bytes > 0.8 * memory_bytes
    ):
        smaller = _half(smaller)
    name = f"{case.case}~{smaller.T}{FEWER_TOKENS}"
    return case if smaller == case else replace(smaller, case=name, scaled_from=case.case)


def _case(name: str, span: str, T: int, D: int, F: int, E: int, K: int, **more: Any) -> Experiment:
    return Experiment(case=name, span=span, T=T, D=D, F=F, E=E, K=K, **more)


def seed_fused() -> list[Experiment]:
    """Expert FFN in float32, sizes of the original plan: decoding with 256 experts, small batches with 8."""
    sizes = [(T, 7168, 256, 256, 8) for T in (1, 2, 4, 8, 16, 32)]
    sizes += [(T, 8192, F, 8, 2) for F in (6144, 16384) for T in (32, 128)]
    return [
        _case(f"seed-fused/{T}x{D}x{F}", "expert_ffn", T, D, F, E, K, dtype="float32")
        for T, D, F, E, K in sizes
    ]


def seed_qwen() -> list[Experiment]:
    """Layers of the original plan at 128 tokens: Qwen3-30B-A3B, the same with 64 experts, Qwen1.5-MoE."""
    qwen3, qwen2 = MODELS["qwen3-30b-a3b"], MODELS["qwen1.5-moe-a2.7b"]
    models = {"e64": replace(qwen3, E=64), "qwen3-30b-a3b": qwen3, "qwen1.5-moe": qwen2}
    return [
        Experiment(case=f"seed-qwen/{name}", span="layer", **vars(one.shape(128)), shared_F=one.shared_F)
        for name, one in models.items()
    ]


def seed_pack() -> list[Experiment]:
    """Moving rows to experts and back in float16, a grid of the original plan."""
    return [
        _case(f"seed-pack/{T}x{D}-e{E}-k{K}", "pack", T, D, 1, E, K, weights=False, dtype="float16")
        for T, D, E, K in product((8192, 16384, 32768), (2048, 4096), (32, 64, 128), (1, 2, 4))
    ]


def seed_grid() -> list[Experiment]:
    """Padded layers, a grid of the original plan: batches, experts, widths, capacities; K and F are ours."""
    return [
        _case(
            f"seed-grid/{B}x{N}-e{E}-d{D}-c{factor}", "layer", B * N, D, 4 * D, E, 2,
            layout=f"padded(capacity_factor={factor})", activation="gelu", sequences=B,
        )
        for (B, N), E, D, factor in product(
            ((32, 128), (64, 256), (128, 512)), (4, 8, 16), (1024, 2048), (1.0, 1.25)
        )
    ]  # fmt: skip


def seed_routing() -> list[Experiment]:
    """A layer without its experts (top-k, plan, pack), a grid of the original plan."""
    return [
        _case(f"seed-routing/{T}-e{E}", "routing", T, 4096, 1, E, 2, weights=False)
        for T, E in product((8192, 16384, 32768), (64, 128, 256))
    ]


def seed_moe_block() -> list[Experiment]:
    """Decoder blocks with experts, attention included, batches and widths of the original plan; E, K ours."""
    return [
        _case(f"seed-moe-block/{B}x{N}", "block", B * N, 2048, 4096, 8, 2, heads=32, sequences=B)
        for B, N in product((1, 4, 8), (64, 128))
    ]


def whole_model() -> list[Experiment]:
    """Four layers of OLMoE's sizes and lm_head: a prompt of 128 tokens, and a token after 128 or 2,048."""
    return [
        _case(
            f"whole-model/{name}", "model", T, 2048, 1024, 64, 8, heads=16, kv_heads=16, layers=4, context=M
        )
        for name, T, M in (("prompt-128", 128, 0), ("decode-128", 1, 128), ("decode-2048", 1, 2048))
    ]


def gpu_quick() -> list[Experiment]:
    """Every op and the layer, for a GPU: sizes of our own, which a CPU judges in seconds."""
    scored, moved = (4096, 1, 1, 128, 8), (4096, 2048, 1, 64, 4)
    prefill, decode = (512, 1024, 512, 32, 4), (8, 2048, 512, 32, 8)
    suite = [
        _case("gpu-quick/topk", "topk", *scored, weights=False),
        _case("gpu-quick/score_topk", "score_topk", *scored, weights=False),
        _case("gpu-quick/make_plan", "make_plan", *moved, weights=False),
        _case("gpu-quick/dispatch", "dispatch", *moved, weights=False),
        _case("gpu-quick/combine", "combine", *moved, weights=False),
        _case("gpu-quick/gemm", "grouped_gemm", *prefill),
        _case("gpu-quick/gemm-blocks", "grouped_gemm", *prefill, layout="block(64)"),
        _case("gpu-quick/ffn-prefill", "expert_ffn", *prefill),
        _case("gpu-quick/ffn-decode", "expert_ffn", *decode),
        _case("gpu-quick/layer-prefill", "layer", *prefill),
    ]
    assert all(case.fits_a_laptop for case in suite)
    return suite


def model_cases(name: str, tokens: Sequence[int] = (*DECODE_TOKENS, *PREFILL_TOKENS)) -> list[Experiment]:
    preset = model(name)
    return [
        Experiment(
            case=f"{name}/{'decode' if T <= max(DECODE_TOKENS) else 'prefill'}-{T}",
            span="layer",
            **vars(preset.shape(T)),
            activation=preset.activation,
            bias=preset.bias,
            shared_F=preset.shared_F,
        )
        for T in tokens
    ]


def topk_grid() -> list[Experiment]:
    """Choosing the K largest scores, a grid of our own over tokens, experts and K."""
    return [
        _case(f"topk-grid/{T}-e{E}-k{K}", "topk", T, 1, 1, E, K, dtype="float32", weights=False)
        for T, E, K in product((512, 4096, 32768), (32, 64, 128), (1, 2, 4))
    ]


def cpu_grid() -> list[Experiment]:
    """Layers of three models at full size, decoding and prompts, in bfloat16 and float32."""
    tokens = {"bfloat16": (1, 16, 256, 1024), "float32": (1, 16, 256)}
    models = ("granite-3-moe", "olmoe-1b-7b", "qwen3-30b-a3b")
    return [
        replace(case, case=f"cpu-grid/{name}-{case.T}-{dtype}", dtype=dtype)
        for dtype, name in product(tokens, models)
        for case in model_cases(name, tokens[dtype])
    ]


def layouts() -> list[Experiment]:
    """Two layers of seed-grid that a CPU decides in minutes, without a capacity of their own."""
    return [
        _case(f"layouts/4096-e{E}", "layer", 4096, 1024, 4096, E, 2, activation="gelu", sequences=32)
        for E in (8, 16)
    ]


def soft_moe() -> list[Experiment]:
    """Layers for Soft-MoE, whose slots are mixed from all tokens and written back to all of them."""
    return [_case(f"soft-moe/{B}x256", "layer", 256 * B, 1024, 2048, 16, 2, sequences=B) for B in (1, 8)]


# from even to collapsed
SKEWS = (
    "balanced", "uniform", "zipf(0.3)", "zipf(0.6)", "zipf(0.9)", "zipf(1.2)", "zipf(1.6)",
    "lognormal(maxvio=1)", "lognormal(maxvio=2)", "one_expert",
)  # fmt: skip


def seed_balance() -> list[Experiment]:
    """Uneven load against time, Table D of the original plan: ten routings, 8 and 64 experts, sizes ours."""
    return [
        _case(f"seed-balance/e{E}-{workload}", "layer", T, 512, 1024, E, K, workload=workload)
        for (T, E, K), workload in product(((1024, 8, 2), (256, 64, 8)), SKEWS)
    ]


def _dense(name: str, span: str, T: int, D: int, F: int = 1, **more: Any) -> Experiment:
    """A layer around the experts: no routing, and at most the matrices of one expert."""
    return _case(name, span, T, D, F, 1, 1, weights=span == "linear", activation="relu", **more)


def seed_dense() -> list[Experiment]:
    """Dense decoder blocks of the original plan: 32 heads of 64, 33,572,864 parameters, no gate, biases."""
    return [
        _case(
            f"seed-dense/{B}x{N}", "decoder", B * N, 2048, 4096, 1, 1, heads=32, sequences=B,
            activation="gelu", bias=True,
        )
        for B, N in product((1, 4, 8), (64, 128))
    ]  # fmt: skip


def seed_attention() -> list[Experiment]:
    """Attention: 512 heads of 16, 1,024 tokens, rotary inside, forward and backward; BERT; decoding."""
    founding = {"heads": 32, "kv_heads": 16, "sequences": 16, "causal": False, "rotary": True}
    bert, decode = {"heads": 12, "causal": False}, {"heads": 32, "kv_heads": 8}
    sizes: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
        ("founding", 16 * 1024, 512, founding),
        ("founding-backward", 16 * 1024, 512, {**founding, "direction": "backward"}),
        ("tuned", 32, 1024, {"heads": 4}),
        ("bert-128", 128, 768, bert),
        ("bert-512", 512, 768, bert),
        ("decode-1024", 1, 4096, {**decode, "context": 1024}),
        ("decode-8192", 1, 4096, {**decode, "context": 8192}),
    )
    return [
        _dense(f"seed-attention/{name}-{dtype}", "attention", T, D, dtype=dtype, **more)
        for name, T, D, more in sizes
        for dtype in ("float32", "bfloat16")
    ]


def seed_linear() -> list[Experiment]:
    """The four dense products of the decoders that the original plan tunes."""
    sizes = ((32, 256, 1024), (128, 768, 3072), (128, 1024, 4096))
    return [
        _dense(f"seed-linear/{T}x{D}-{name}-{dtype}", "linear", T, depth, columns, dtype=dtype, bias=True)
        for T, D, hidden in sizes
        for name, depth, columns in (
            ("qkv", D, 3 * D), ("out", D, D), ("ffn1", D, hidden), ("ffn2", hidden, D),
        )
        for dtype in ("float32", "bfloat16")
    ]  # fmt: skip


def seed_rmsnorm() -> list[Experiment]:
    """RMSNorm of the original plan: 16 x 4,096 tokens of 512."""
    return [
        _dense(f"seed-rmsnorm/65536x512-{dtype}", "rms_norm", 65536, 512, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]


SUITES: dict[str, Callable[[], list[Experiment]]] = {
    suite.__name__.replace("_", "-"): suite
    for suite in (
        seed_fused, seed_qwen, seed_pack, seed_grid, seed_routing, seed_moe_block, seed_dense, seed_attention,
        seed_linear, seed_rmsnorm, seed_balance, whole_model, topk_grid, gpu_quick, gpu_hour, cpu_grid,
        layouts, soft_moe, regret,
    )
}  # fmt: skip


def cases(name: str) -> list[Experiment]:
    """The cases of a suite or a model, or the one case called `name`; with ~scaled their twins."""
    wanted, _, twin = name.partition("~")
    if twin not in ("", "scaled"):
        raise ValueError(f"cannot read {name!r}; a name may end in ~scaled")
    group = wanted.partition("/")[0]
    if group in SUITES:
        chosen = SUITES[group]()
    elif group in MODELS:
        chosen = model_cases(group)
    else:
        raise ValueError(_no_such(group, [*SUITES, *MODELS]))
    if wanted != group:
        names = [case.case for case in chosen]
        chosen = [case for case in chosen if case.case == wanted]
        if not chosen:
            raise ValueError(_no_such(wanted, names))
    return [scaled(case) for case in chosen] if twin else chosen


def _no_such(name: str, known: list[str]) -> str:
    some = ", ".join(known[:16]) + (", ..." if len(known) > 16 else "")
    return f"there is no case {name!r}; {did_you_mean(name, known)}there are {some}"
