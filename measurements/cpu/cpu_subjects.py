"""What the CPU measurements share: layers, weights, subjects, the oracle, the machine's own limit, rounds.

Imported by cpu_grid.py and cpu_more.py, which lie beside it; it measures nothing by itself.

Two layers are scaled, because a whole one leaves no room for packed copies in 23 GB: mixtral-8x7b has half of
both widths, deepseek-v3 half of both widths and a quarter of the experts. What is measured on them says
nothing about the full sizes.
"""

from __future__ import annotations

import importlib
import mmap
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.accuracy import judge
from moe_routing_bench.cost import Cost, expert_ffn_cost
from moe_routing_bench.experts import ExpertWeights, activate
from moe_routing_bench.ops.auto import choose
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.ops.registry import include
from moe_routing_bench.plan import Layout
from moe_routing_bench.published import MODELS as PUBLISHED
from moe_routing_bench.published import PublishedModel
from moe_routing_bench.routing import Routing
from moe_routing_bench.workloads.workload import make_workload

QWEN = PUBLISHED["qwen3-30b-a3b"]
MODELS = {
    "qwen3-30b-a3b": QWEN,
    "olmoe-1b-7b": PUBLISHED["olmoe-1b-7b"],
    "mixtral-8x7b~scaled": replace(PUBLISHED["mixtral-8x7b"], name="mixtral-8x7b~scaled", D=2048, F=7168),
    "deepseek-v3~scaled": replace(PUBLISHED["deepseek-v3"], name="deepseek-v3~scaled", D=3584, F=1024, E=64),
    "seed-qwen": replace(QWEN, name="seed-qwen", E=64),
}
TINY = {"tiny": replace(QWEN, name="tiny", D=64, F=32, E=8, K=2)}

HF = ("hf_eager", "hf_grouped_mm", "hf_batched_mm")
DEFAULT_SUBJECTS = ("auto", *HF, "bare")
MORE_SUBJECTS = ("staged", "compiled")
FOLDER = Path(__file__).parent / "subjects"  # implementations that are only measured, such as compiled
COMPACT = Layout.compact()
BATCHED_BYTES = 700_000_000  # a call of seconds, and never the best
JUDGED_TOKENS = 48
PERIOD = 1_048_573  # a prime, so that no two rows of repeated values are alike
EVICT_BYTES = 2**29
LEAST_ROUNDS, MOST_ROUNDS = 3, 25
SLOW = 5.0  # a subject this much slower than the fastest has no more than LEAST_ROUNDS
SHORTEST_SAMPLE = 1e-3
# a call that reads less than this could find its weights in the last cache (300 MiB here) when its turn comes
# again, or because another subject has just read them
SMALL_BYTES = 6e8


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One thing to time.

    Subject(name="auto", call=..., judged=True, label="make_plan.native + expert_ffn.native")
      call(x_TD, routing) -> y_TD
      judged=False: it computes no layer, so there is nothing to judge
    """

    name: str
    call: Callable[..., Any]
    judged: bool = True
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The machine's best rates, measured just now with `threads` threads, and which try was best.

    Limits(threads=2, bytes_per_second=2.3e10, bandwidth_by="copy", flops_per_second=1.6e12,
           peak_by="packed linear 4096")
    """

    threads: int
    bytes_per_second: float
    bandwidth_by: str
    flops_per_second: float
    peak_by: str

    def floor_seconds(self, cost: Cost) -> float:
        return max(cost.bytes / self.bytes_per_second, cost.useful_flops / self.flops_per_second)


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0, place: int = 0) -> Tensor:
    """Normal values; about a million are drawn and then repeated, because 13 GB of them take minutes."""
    generator = torch.Generator().manual_seed(place)
    values = (torch.randn(PERIOD, generator=generator) * scale).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    whole = flat.numel() // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).copy_(values)
    flat[whole:] = values[: flat.numel() - whole]
    return out


def touch_memory() -> None:
    """Write to most of the free memory once. A virtual machine gets memory from its host when it is first
    written to, at 1.2 GB/s seen here against 4.5 the second time, and whoever allocates next would pay."""
    size = int(psutil.virtual_memory().available * 0.85) >> 21 << 21
    with mmap.mmap(-1, size) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, 2**21):
            memory[at] = 1


def make_weights(model: PublishedModel, dtype: torch.dtype, *, requires_grad: bool = False) -> ExpertWeights:
    """Stored output-first as Transformers stores them, so that its functions read them without a copy."""
    w_in_EGD = normal(model.E, 2 * model.F, model.D, dtype=dtype, scale=model.D**-0.5, place=11)
    w_out_EDF = normal(model.E, model.D, model.F, dtype=dtype, scale=model.F**-0.5, place=12)
    return ExpertWeights(
        w_in_EDG=w_in_EGD.transpose(1, 2).detach().requires_grad_(requires_grad),
        w_out_EFD=w_out_EDF.transpose(1, 2).detach().requires_grad_(requires_grad),
    )


def make_inputs(
    model: PublishedModel, dtype: torch.dtype, T: int, workload: str, steps: int = 4
) -> list[tuple[Tensor, Routing]]:
    """x_TD and routing of each step. Gates are rounded to dtype and kept in float32: the same numbers for
    those who take them in the model's dtype, as Transformers does, and for those who take float32."""
    made = []
    for step in range(steps):
        routing = make_workload(workload, T=T, E=model.E, K=model.K, step=step).routing
        gate_TK = routing.gate_TK.to(dtype).float()
        made.append((normal(T, model.D, dtype=dtype, place=100 + step), replace(routing, gate_TK=gate_TK)))
    return made


def layer_subject(
    name: str, spec: str, plan_spec: str, x_TD: Tensor, routing: Routing, weights: ExpertWeights
) -> Subject:
    """From a Routing to y, so planning is timed. NotImplementedError or ValueError if it cannot run."""
    plan_impl, impl = make_plan_op.get(plan_spec), expert_ffn_op.get(spec)
    plan = plan_impl(routing, COMPACT)
    if (reason := impl.why_not(x_TD, routing.gate_TK, plan, weights)) is not None:
        raise NotImplementedError(reason)

    def call(x_TD: Tensor, routing: Routing) -> Tensor:
        return impl(x_TD, routing.gate_TK, plan_impl(routing, COMPACT), weights)

    return Subject(name=name, call=call, label=f"make_plan.{plan_impl.label} + expert_ffn.{impl.label}")


def auto_specs(x_TD: Tensor, routing: Routing, weights: ExpertWeights) -> tuple[str, str]:
    """What impl="auto" is here: names of make_plan and expert_ffn. ValueError if decisions do not fit."""
    chosen = [choose(make_plan_op, (routing, COMPACT), weights)]
    plan = chosen[0].implementation(routing, COMPACT)
    chosen.append(choose(expert_ffn_op, (x_TD, routing.gate_TK, plan, weights)))
    for choice in chosen:
        if choice.warning is not None:
            raise ValueError(choice.warning)
    return chosen[0].implementation.label, chosen[1].implementation.label


def hf_subject(name: str, x_TD: Tensor, routing: Routing, weights: ExpertWeights) -> Subject:
    """Transformers' own function on ids and gates, without our plan."""
    T, K = routing.expert_TK.shape
    copied = T * K * 3 * weights.D * weights.F * x_TD.element_size()
    if name == "hf_batched_mm" and copied > BATCHED_BYTES:
        raise NotImplementedError(f"it would copy {copied / 1e9:.0f} GB of weights, a matrix for every pair")
    expert_ffn_op.get(name)
    plan = make_plan(routing, COMPACT)
    if (reason := expert_ffn_op.why_not(name, x_TD, routing.gate_TK, plan, weights)) is not None:
        raise NotImplementedError(reason)
    experts = importlib.import_module(f"{expert_ffn_op.package}.{name}").experts

    def call(x_TD: Tensor, routing: Routing) -> Tensor:
        return experts(x_TD, routing.expert_TK, routing.gate_TK.to(x_TD.dtype), weights)

    return Subject(name=name, call=call, label=name)


@dataclass
class Bare:
    """The same GEMMs as the layer, prepacked in oneDNN: no routing, no activation, no gates, inputs at hand.

    Bare(weights).call(x_TD, routing): for every expert with m tokens two linears, (m, D) and (m, F).
    For float32 also plain sgemm is tried, and a cell takes the faster one: mkl's own packed op uses what it
    packed only for the number of rows it was packed for, and is plain sgemm otherwise.
    """

    weights: ExpertWeights
    plain: bool = False
    _packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _work: dict[int, tuple[Routing, list[tuple[int, int]]]] = field(default_factory=dict)
    _x: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        for e in range(self.weights.num_experts):
            pair = self.weights.w_in_EDG[e].t(), self.weights.w_out_EFD[e].t()
            self._packed.append((reorder(pair[0].contiguous()), reorder(pair[1].contiguous())))

    def ready(self, inputs: Sequence[tuple[Tensor, Routing]]) -> Subject:
        """For one cell: counts and inputs made beforehand, the faster engine chosen."""
        self._work = {
            id(routing): (routing, [(e, m) for e, m in enumerate(routing.load_E().tolist()) if m])
            for _, routing in inputs
        }
        most = max(m for _, work in self._work.values() for _, m in work)
        dtype = self.weights.w_in_EDG.dtype
        self._x = normal(most, self.weights.D, dtype=dtype), normal(most, self.weights.F, dtype=dtype)
        self.plain = False
        if dtype == torch.float32:
            taken = {}
            for self.plain in (False, True):
                tries = [_seconds(lambda: self.call(*inputs[0])) for _ in range(2)]
                taken[self.plain] = min(tries)
            self.plain = taken[True] < taken[False]
        return Subject(
            name="bare", call=self.call, judged=False, label="sgemm" if self.plain else "oneDNN packed"
        )

    def call(self, x_TD: Tensor, routing: Routing) -> None:
        assert self._x is not None
        x_mD, h_mF = self._x
        linear = torch.ops.mkldnn._linear_pointwise
        w_in_EDG, w_out_EFD = self.weights.w_in_EDG, self.weights.w_out_EFD
        for e, m in self._work[id(routing)][1]:
            if self.plain:
                F.linear(x_mD[:m], w_in_EDG[e].t())
                F.linear(h_mF[:m], w_out_EFD[e].t())
            else:
                linear(x_mD[:m], self._packed[e][0], None, "none", [], "")
                linear(h_mF[:m], self._packed[e][1], None, "none", [], "")


def subjects_for(
    names: Sequence[str], inputs: Sequence[tuple[Tensor, Routing]], weights: ExpertWeights, bare: Bare | None
) -> tuple[list[Subject], dict[str, str]]:
    """Those that can run, and for the others a sentence why not."""
    found, skipped = [], {}
    x_TD, routing = inputs[0]
    if FOLDER.is_dir():
        include(FOLDER)
    for name in names:
        try:
            if name == "bare":
                assert bare is not None
                found.append(bare.ready(inputs))
            elif name in HF:
                found.append(hf_subject(name, x_TD, routing, weights))
            else:
                plan_spec, spec = auto_specs(x_TD, routing, weights)
                spec = spec if name == "auto" else name
                found.append(layer_subject(name, spec, plan_spec, x_TD, routing, weights))
        except (NotImplementedError, ValueError) as reason:
            skipped[name] = str(reason)
    return found, skipped


def oracle_and_plain(
    x_TD: Tensor, routing: Routing, weights: ExpertWeights, token_t: Tensor
) -> tuple[Tensor, Tensor]:
    """y of some tokens in float64, and in plain torch of x's dtype, with sums in float32."""
    x_tD, expert_tK, gate_tK = x_TD[token_t], routing.expert_TK[token_t], routing.gate_TK[token_t]
    true_tD = torch.zeros(x_tD.shape, dtype=torch.float64)
    plain_tD = torch.zeros(x_tD.shape, dtype=torch.float32)
    for e in expert_tK.unique().tolist():
        t, k = (expert_tK == e).nonzero(as_tuple=True)
        w_in, w_out = weights.w_in_EDG[e].detach(), weights.w_out_EFD[e].detach()
        # one float64 matrix at a time: of the largest layer here it has 2 GB
        y = activate(x_tD[t].double() @ w_in.double(), weights.activation) @ w_out.double()
        true_tD.index_add_(0, t, gate_tK[t, k].double().unsqueeze(1) * y)
        plain = activate(x_tD[t] @ w_in, weights.activation) @ w_out
        plain_tD.index_add_(0, t, gate_tK[t, k].float().unsqueeze(1) * plain.float())
    return true_tD, plain_tD.to(x_TD.dtype)


def judge_subjects(
    subjects: Sequence[Subject], inputs: Sequence[tuple[Tensor, Routing]], weights: ExpertWeights
) -> dict[str, str]:
    """PASSED or a sentence for each; the judged calls are its warm-up. A crash is a sentence too."""
    x_TD, routing = inputs[0]
    generator = torch.Generator().manual_seed(x_TD.shape[0])
    token_t = torch.randperm(x_TD.shape[0], generator=generator)[:JUDGED_TOKENS]
    true_tD, plain_tD = oracle_and_plain(x_TD, routing, weights, token_t)
    found = {}
    for subject in subjects:
        try:
            y_TD = subject.call(x_TD, routing)
        except (RuntimeError, NotImplementedError, MemoryError) as error:
            found[subject.name] = f"CRASHED: {str(error)[:200]}"
            continue
        if not subject.judged:
            found[subject.name] = "NOT JUDGED"
        elif y_TD.shape != x_TD.shape:
            found[subject.name] = f"shape {tuple(y_TD.shape)}, expected {tuple(x_TD.shape)}"
        else:
            verdict = judge(y_TD[token_t], true_tD, plain_tD)
            found[subject.name] = "PASSED" if verdict.passed else verdict.sentence
    return found


def layer_cost(x_TD: Tensor, routing: Routing, weights: ExpertWeights) -> Cost:
    return expert_ffn_cost(x_TD, routing.gate_TK, make_plan(routing, COMPACT), weights)


def measure_limits(dtype: torch.dtype, *, small: bool = False) -> Limits:
    """The best of several ways to read or copy 1 GiB, and of several large products. About five seconds."""
    buffer = torch.ones(2**22 if small else 2**28)
    target, source = buffer.chunk(2)
    memory: dict[str, Callable[[], object]] = {
        "float32 sum": buffer.sum,
        "int64 sum": buffer.view(torch.int64).sum,
        "copy": partial(target.copy_, source),
    }
    rates = {what: buffer.nbytes / _best(run) for what, run in memory.items()}
    peaks = {}
    for size in (128,) if small else (1024, 2048, 4096):
        a, b = normal(size, size, dtype=dtype), normal(size, size, dtype=dtype)
        tries: dict[str, Callable[[], object]] = {"mm": partial(torch.mm, a, b)}
        if dtype in (torch.bfloat16, torch.float32):
            packed = torch.ops.mkldnn._reorder_linear_weight(b)
            tries["packed linear"] = partial(
                torch.ops.mkldnn._linear_pointwise, a, packed, None, "none", [], ""
            )
        for what, run in tries.items():
            peaks[f"{what} {size}"] = 2 * size**3 / _best(run)
    best_rate, best_peak = max(rates, key=rates.__getitem__), max(peaks, key=peaks.__getitem__)
    return Limits(
        threads=torch.get_num_threads(),
        bytes_per_second=rates[best_rate],
        bandwidth_by=best_rate,
        flops_per_second=peaks[best_peak],
        peak_by=best_peak,
    )


def run_rounds(
    subjects: Sequence[Subject],
    inputs: Sequence[tuple[Any, ...]],
    *,
    until: float,
    before: Callable[[], object] | None = None,
    most: int = MOST_ROUNDS,
    cap: float = float("inf"),
    slow: float = SLOW,
) -> dict[str, list[float | None]]:
    """Seconds per call of each subject in each round; None where it sat out.

    until: the perf_counter() after which no round starts, once there are LEAST_ROUNDS.
    before: runs untimed before each sample. cap: seconds of samples after which a subject sits out.
    slow: times slower than the fastest, after which it sits out once it has LEAST_ROUNDS.
    """
    order = random.Random(0)
    seconds: dict[str, list[float | None]] = {subject.name: [] for subject in subjects}
    for number in range(most):
        if number >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        middle = {name: median(s for s in found if s) for name, found in seconds.items() if any(found)}
        for subject in order.sample(list(subjects), len(subjects)):
            mine = seconds[subject.name]
            late = number >= LEAST_ROUNDS and middle[subject.name] > slow * min(middle.values())
            if late or sum(s for s in mine if s) > cap:
                mine.append(None)
                continue
            if before is not None:
                before()
            mine.append(one_sample(subject, inputs[number % len(inputs)]))
    return seconds


def one_sample(subject: Subject, args: tuple[Any, ...]) -> float:
    """A call; if it is shorter than a millisecond, the mean of as many as last one."""
    calls, started = 0, time.perf_counter_ns()
    while True:
        subject.call(*args)
        calls += 1
        taken = (time.perf_counter_ns() - started) * 1e-9
        if taken >= SHORTEST_SAMPLE:
            return taken / calls


def paired(seconds: dict[str, list[float | None]], name: str, base: str) -> tuple[float, float, float] | None:
    """The middle ratio of `name` to `base` over the rounds both took part in, and its 95 % interval."""
    pairs = zip(seconds[name], seconds.get(base, ()), strict=False)
    ratios = np.array([a / b for a, b in pairs if a is not None and b is not None])
    if not len(ratios):
        return None
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def _best(run: Callable[[], object]) -> float:
    run()
    return min(_seconds(run) for _ in range(4))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
