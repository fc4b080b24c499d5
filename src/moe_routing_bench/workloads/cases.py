"""Named cases to measure: pure data. A suite is a list of cases; a big case has a scaled twin.

A case says what is timed (`span`), at which sizes, dtype and layout. The routing workload is another axis. A
suite named seed-... has the sizes of the project's original plan; its docstring is what `mrb list` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moe_routing_bench.core.experts import GATED
from moe_routing_bench.core.names import did_you_mean
from moe_routing_bench.core.published import MODELS, model
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads import regret_cases
from moe_routing_bench.workloads.axes import BYTES, CaseAxes
from moe_routing_bench.workloads.stored_cases import bytes_per_weight, check_store

# of the cases of a published model
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# a twin for tests and for a first look: what takes seconds on any machine
MAX_WEIGHT_BYTES = 256 * 2**20
MAX_ACTIVATION_BYTES = 256 * 2**20
MAX_FLOPS = 2e10
# five subjects call it about 40 times each in a minute, at 0.1 TFLOP/s
MINUTE_FLOPS = 3e10
FEWER_TOKENS = "-tokens"  # ends the name of a case that has fewer tokens than asked for
DIRECTIONS = {
    "forward": "the result alone",
    "backward": "gradients alone; the forward before it is not timed",
    "train": "forward and backward",
}


@dataclass(frozen=True, kw_only=True)
class BenchCase(CaseAxes):
    """One thing to measure; CaseAxes has the rest of its fields.

    BenchCase(name="seed-fused/32x7168", span="expert_ffn", shape=MoEShape(T=32, D=7168, F=256, E=256, K=8),
              dtype="float32")
    span: an op; or pack (dispatch and combine), routing (top-k, plan, pack), layer, block (a decoder block).
    weights: whether experts' weights take part. checkpoint: a saved model to take them from, from this layer.
    store: the format their weights are stored in (formats/named.py), which says what is right; empty: none.
    workload, threads: of a case that has its own, used unless a command names others.
    """

    name: str
    span: str
    shape: MoEShape
    layout: str = "compact"
    weights: bool = True
    direction: str = "forward"
    checkpoint: str = ""
    layer: int = 0
    scaled_from: str = ""  # the name of the case this one stands in for
    workload: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ValueError(f"cases come in {', '.join(BYTES)}, not in {self.dtype!r}")
        if self.direction not in DIRECTIONS:
            raise ValueError(f"there is no direction {self.direction!r}; there are {', '.join(DIRECTIONS)}")
        if self.store:
            where = {"span": self.span, "direction": self.direction, "checkpoint": self.checkpoint}
            check_store(self.store, self.shape, **where)

    @property
    def element_size(self) -> int:
        return BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """As they are stored: in the case's dtype, or with the bits and scales of its format."""
        if not self.store:
            return self.drawn_bytes
        matrices = 3 if self.activation in GATED else 2  # all but one as deep as the model is wide
        of_in, of_out = (bytes_per_weight(self.store, depth) for depth in (self.shape.D, self.shape.F))
        share = ((matrices - 1) * of_in + of_out) / matrices / self.element_size
        return round(self.drawn_bytes * share)

    @property
    def drawn_bytes(self) -> int:
        """All weights in the case's dtype."""
        if not self.weights:
            return 0
        per_unit = 3 if self.activation in GATED else 2
        units = self.shape.E * self.shape.F + self.shared_F
        return per_unit * self.shape.D * units * self.element_size

    @property
    def held_bytes(self) -> int:
        """Of weights in the memory of a process: those of a stored case are also held as they were drawn."""
        return self.drawn_bytes * (2 if self.store else 1)

    @property
    def activation_bytes(self) -> int:
        """The largest set of rows a plain implementation holds at once."""
        s = self.shape
        width = s.D + 2 * s.F if self.weights else s.D
        return s.num_pairs * width * self.element_size

    @property
    def flops(self) -> int:
        s = self.shape
        if not self.weights:
            return 2 * s.num_pairs * s.D
        per_unit = 3 if self.activation in GATED else 2
        return 2 * per_unit * s.D * (s.num_pairs * s.F + s.T * self.shared_F)

    @property
    def fewer_tokens(self) -> bool:
        """Does it stand in for a case that differs in nothing but its tokens?"""
        return bool(self.scaled_from) and self.name.endswith(FEWER_TOKENS)

    @property
    def fits_a_laptop(self) -> bool:
        return (
            self.held_bytes <= MAX_WEIGHT_BYTES
            and self.activation_bytes <= MAX_ACTIVATION_BYTES
            and self.flops <= MAX_FLOPS
        )


def stored_as(case: BenchCase, store: str | None) -> BenchCase:
    """The case with its weights in a format, which its name then says; the case itself without one."""
    return replace(case, name=f"{case.name}-{store}", store=store) if store else case


def scaled(case: BenchCase) -> BenchCase:
    """The case itself if it fits, else its twin: tokens, then both widths, then experts halved until it does.

    K stays, and the ratio of D to F down to widths of 128. What is measured on a twin says nothing about the
    full size, so its name ends in ~scaled and `scaled_from` names the original.
    """
    twin = case
    while not twin.fits_a_laptop:
        s = twin.shape
        too_much_work = twin.flops > MAX_FLOPS or twin.activation_bytes > MAX_ACTIVATION_BYTES
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
        twin = replace(twin, shape=smaller, shared_F=twin.shared_F * smaller.F // s.F)
    return case if twin == case else replace(twin, name=f"{case.name}~scaled", scaled_from=case.name)


def fitted(case: BenchCase, *, memory_bytes: int, most_flops: float = MINUTE_FLOPS) -> BenchCase:
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
    while smaller.shape.T > 1 and (
        smaller.flops * (3 if train else 1) > most_flops
        or (20 if train else 4) * smaller.held_bytes + 8 * smaller.activation_bytes > 0.8 * memory_bytes
    ):
        smaller = replace(smaller, shape=replace(smaller.shape, T=smaller.shape.T // 2))
    name = f"{case.name}~{smaller.shape.T}{FEWER_TOKENS}"
    return case if smaller == case else replace(smaller, name=name, scaled_from=case.name)


def seed_fused() -> list[BenchCase]:
    """Expert FFN in float32, sizes of the original plan: decoding with 256 experts, small batches with 8."""
    sizes = [(T, 7168, 256, 256, 8) for T in (1, 2, 4, 8, 16, 32)]
    sizes += [(T, 8192, F, 8, 2) for F in (6144, 16384) for T in (32, 128)]
    return [
        BenchCase(
            name=f"seed-fused/{T}x{D}x{F}",
            span="expert_ffn",
            shape=MoEShape(T=T, D=D, F=F, E=E, K=K),
            dtype="float32",
        )
        for T, D, F, E, K in sizes
    ]


def seed_qwen() -> list[BenchCase]:
    """Layers of the original plan at 128 tokens: Qwen3-30B-A3B, the same with 64 experts, Qwen1.5-MoE."""
    qwen3, qwen2 = MODELS["qwen3-30b-a3b"], MODELS["qwen1.5-moe-a2.7b"]
    models = {"e64": replace(qwen3, E=64), "qwen3-30b-a3b": qwen3, "qwen1.5-moe": qwen2}
    return [
        BenchCase(name=f"seed-qwen/{name}", span="layer", shape=one.shape(128), shared_F=one.shared_F)
        for name, one in models.items()
    ]


def seed_pack() -> list[BenchCase]:
    """Moving rows to experts and back in float16, a grid of the original plan."""
    return [
        BenchCase(
            name=f"seed-pack/{T}x{D}-e{E}-k{K}",
            span="pack",
            weights=False,
            shape=MoEShape(T=T, D=D, F=1, E=E, K=K),
            dtype="float16",
        )
        for T, D, E, K in product((8192, 16384, 32768), (2048, 4096), (32, 64, 128), (1, 2, 4))
    ]


def seed_grid() -> list[BenchCase]:
    """Padded layers, a grid of the original plan: batches, experts, widths, capacities; K and F are ours."""
    return [
        BenchCase(
            name=f"seed-grid/{B}x{N}-e{E}-d{D}-c{factor}",
            span="layer",
            shape=MoEShape(T=B * N, D=D, F=4 * D, E=E, K=2),
            layout=f"padded(capacity_factor={factor})",
            activation="gelu",
            sequences=B,
        )
        for (B, N), E, D, factor in product(
            ((32, 128), (64, 256), (128, 512)), (4, 8, 16), (1024, 2048), (1.0, 1.25)
        )
    ]


def seed_routing() -> list[BenchCase]:
    """A layer without its experts (top-k, plan, pack), a grid of the original plan."""
    return [
        BenchCase(
            name=f"seed-routing/{T}-e{E}",
            span="routing",
            shape=MoEShape(T=T, D=4096, F=1, E=E, K=2),
            weights=False,
        )
        for T, E in product((8192, 16384, 32768), (64, 128, 256))
    ]


def seed_decoder() -> list[BenchCase]:
    """Decoder blocks, attention included, batches and widths of the original plan; E and K are ours."""
    return [
        BenchCase(
            name=f"seed-decoder/{B}x{N}",
            span="block",
            shape=MoEShape(T=B * N, D=2048, F=4096, E=8, K=2),
            heads=32,
            sequences=B,
        )
        for B, N in product((1, 4, 8), (64, 128))
    ]


def gpu_quick() -> list[BenchCase]:
    """Every op and the layer, for a GPU: sizes of our own, which a CPU judges in seconds."""
    scored = MoEShape(T=4096, D=1, F=1, E=128, K=8)
    moved = MoEShape(T=4096, D=2048, F=1, E=64, K=4)
    prefill = MoEShape(T=512, D=1024, F=512, E=32, K=4)
    decode = MoEShape(T=8, D=2048, F=512, E=32, K=8)
    suite = [
        BenchCase(name="gpu-quick/topk", span="topk", shape=scored, weights=False),
        BenchCase(name="gpu-quick/score_topk", span="score_topk", shape=scored, weights=False),
        BenchCase(name="gpu-quick/make_plan", span="make_plan", shape=moved, weights=False),
        BenchCase(name="gpu-quick/dispatch", span="dispatch", shape=moved, weights=False),
        BenchCase(name="gpu-quick/combine", span="combine", shape=moved, weights=False),
        BenchCase(name="gpu-quick/gemm", span="grouped_gemm", shape=prefill),
        BenchCase(name="gpu-quick/gemm-blocks", span="grouped_gemm", shape=prefill, layout="block(64)"),
        BenchCase(name="gpu-quick/ffn-prefill", span="expert_ffn", shape=prefill),
        BenchCase(name="gpu-quick/ffn-decode", span="expert_ffn", shape=decode),
        BenchCase(name="gpu-quick/layer-prefill", span="layer", shape=prefill),
    ]
    assert all(case.fits_a_laptop for case in suite)
    return suite


def model_cases(name: str, tokens: Sequence[int] = (*DECODE_TOKENS, *PREFILL_TOKENS)) -> list[BenchCase]:
    preset = model(name)
    return [
        BenchCase(
            name=f"{name}/{'decode' if T <= max(DECODE_TOKENS) else 'prefill'}-{T}",
            span="layer",
            shape=preset.shape(T),
            activation=preset.activation,
            bias=preset.bias,
            shared_F=preset.shared_F,
        )
        for T in tokens
    ]


def topk_grid() -> list[BenchCase]:
    """Choosing the K largest scores, a grid of our own over tokens, experts and K."""
    return [
        BenchCase(
            name=f"topk-grid/{T}-e{E}-k{K}", span="topk", shape=MoEShape(T=T, D=1, F=1, E=E, K=K),
            dtype="float32", weights=False,
        )
        for T, E, K in product((512, 4096, 32768), (32, 64, 128), (1, 2, 4))
    ]  # fmt: skip


def cpu_grid() -> list[BenchCase]:
    """Layers of three models at full size, decoding and prompts, in bfloat16 and float32."""
    tokens = {"bfloat16": (1, 16, 256, 1024), "float32": (1, 16, 256)}
    models = ("granite-3-moe", "olmoe-1b-7b", "qwen3-30b-a3b")
    return [
        replace(case, name=f"cpu-grid/{name}-{case.shape.T}-{dtype}", dtype=dtype)
        for dtype, name in product(tokens, models)
        for case in model_cases(name, tokens[dtype])
    ]


def layouts() -> list[BenchCase]:
    """Two layers of seed-grid that a CPU decides in minutes, without a capacity of their own."""
    return [
        BenchCase(
            name=f"layouts/4096-e{E}",
            span="layer",
            shape=MoEShape(T=4096, D=1024, F=4096, E=E, K=2),
            activation="gelu",
            sequences=32,
        )
        for E in (8, 16)
    ]


def soft_moe() -> list[BenchCase]:
    """Layers for Soft-MoE, whose slots are mixed from all tokens and written back to all of them."""
    return [
        BenchCase(
            name=f"soft-moe/{B}x256",
            span="layer",
            shape=MoEShape(T=256 * B, D=1024, F=2048, E=16, K=2),
            sequences=B,
        )
        for B in (1, 8)
    ]


def regret() -> list[BenchCase]:
    """Is impl="auto" the fastest that can run, Transformers' experts among them? From 1 to 4096 tokens."""
    return [
        BenchCase(
            name=f"regret/{one.name}", span=one.span, shape=one.shape, dtype=one.dtype, weights=one.weights,
            direction=one.direction, workload=one.workload, threads=one.threads,
        )
        for one in regret_cases.asked()
    ]  # fmt: skip


SUITES: dict[str, Callable[[], list[BenchCase]]] = {
    suite.__name__.replace("_", "-"): suite
    for suite in (
        seed_fused, seed_qwen, seed_pack, seed_grid, seed_routing, seed_decoder, topk_grid, gpu_quick,
        cpu_grid, layouts, soft_moe, regret,
    )
}  # fmt: skip


def cases(name: str) -> list[BenchCase]:
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
        names = [case.name for case in chosen]
        chosen = [case for case in chosen if case.name == wanted]
        if not chosen:
            raise ValueError(_no_such(wanted, names))
    return [scaled(case) for case in chosen] if twin else chosen


def _no_such(name: str, known: list[str]) -> str:
    some = ", ".join(known[:16]) + (", ..." if len(known) > 16 else "")
    return f"there is no case {name!r}; {did_you_mean(name, known)}there are {some}"
