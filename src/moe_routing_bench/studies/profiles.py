"""Where the time of a MoE block goes: torch.profiler over Transformers' block, a hand-ordered path, and ours.

Four shares, the same for all: route (logits, top-k, gates), pack (where every pair goes, rows gathered), GEMM
(both projections and the activation between), combine (weighted rows back to tokens). Our stages and the
hand-ordered ones run inside named ranges. Inside Transformers' experts there are none, so their operations
are sorted by name, shape and place (`share_of`). What the profiler saw between operations is Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.accuracy import judge as judge_values
from moe_routing_bench.bench.blocks import our_layer, plain_layer
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.paired import Contender
from moe_routing_bench.bench.spans import layer_of
from moe_routing_bench.experts import activate
from moe_routing_bench.layer import MoE
from moe_routing_bench.models.decoder import transformers_moe
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.registry import all_ops

SHARES = ("route", "pack", "gemm", "combine", "fused", "shared", "python")
STAGED = ("dispatch", "grouped_gemm", "combine")
DEFAULT_CONTENDERS = (
    "transformers(eager)",
    "transformers(grouped_mm)",
    "hand-ordered",
    "ours(staged(dispatch=native,grouped_gemm=native,combine=native))",
    "ours",
)
PREFIX = "mrb::"
MULTIPLIES = re.compile(r"aten::(linear|mm|addmm|bmm|matmul|_?grouped_mm)$|transformers::.*grouped_mm")
ACTIVATES = re.compile(r"aten::(silu|gelu|relu|sigmoid|chunk|split|clamp|mul|mul_|add|add_)$")
SUMS = re.compile(r"aten::(index_add_?|scatter_add_?|sum)$")


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """A line of a profile, over all calls: OpRow(name="aten::mm", calls=192, self_us=9100, total_us=9100)."""

    name: str
    calls: int
    self_us: float
    total_us: float
    self_device_us: float = 0.0
    device_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profile(calls=10, seconds=0.031, rows=(...), shares={"route": 0.02, "pack": 0.1, ...})

    seconds: of one call, the profiler's own cost included; shares: of the calls' time, summing to 1.
    """

    calls: int
    seconds: float
    rows: tuple[OpRow, ...]
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A contender, and the same computation with its stages in named ranges."""

    contender: Contender
    ranged: Callable[[Tensor], Tensor] | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)  # put into ranges by hooks


@contextmanager
def stage(name: str, nvtx: Any = None) -> Iterator[None]:
    """A range with this name for torch.profiler; also for NVTX if given torch.cuda.nvtx."""
    with record_function(PREFIX + name), nvtx.range(PREFIX + name) if nvtx else nullcontext():
        yield


class MoEInputs:
    """One case's MoE block: x by call number, the judge, and contenders by name."""

    def __init__(self, inputs: Inputs, *, device: str = "cpu", nvtx: Any = None):
        self.inputs, self.layout = inputs, inputs.case.layout
        self.device, self.nvtx = device, nvtx
        self._layer = layer_of(expert_ffn_op.get("staged"), inputs, self.layout).to(device)
        self._expected: dict[tuple[int, torch.dtype], Tensor] = {}

    def x(self, number: int) -> Tensor:
        (x_TD,) = self.inputs.call(number, self.layout)
        return x_TD.to(self.device)

    def judge(self, y_TD: Tensor, number: int) -> Verdict:
        oracle, baseline = (self._plain(number, dtype) for dtype in (torch.float64, self.inputs.dtype))
        return judge_values(y_TD.cpu(), oracle, baseline)

    @torch.no_grad()
    def _plain(self, number: int, dtype: torch.dtype) -> Tensor:
        if (number, dtype) not in self._expected:
            layer = plain_layer(self.inputs, self.layout, dtype)
            (x_TD,) = self.inputs.call(number, self.layout)
            self._expected[number, dtype] = layer(x_TD.to(dtype))[0]
        return self._expected[number, dtype]

    def contender(self, spec: str) -> Profiled:
        """transformers(EXPERTS), hand-ordered, ours or ours(IMPLEMENTATION)."""
        match = re.fullmatch(r"\s*(transformers|hand-ordered|ours)\s*(?:\((.*)\))?\s*", spec)
        if match is None or (match[1] == "hand-ordered" and match[2]):
            raise ValueError(
                f"cannot read {spec!r}; write transformers, transformers(eager), hand-ordered, ours or "
                "ours(IMPLEMENTATION)"
            )
        name, inside = match.groups()
        try:
            layer = our_layer(self.inputs, self._layer, (inside or "auto") if name == "ours" else "staged")
            if name == "transformers":
                return self._transformers(spec, layer, inside or "grouped_mm")
        except NotImplementedError as reason:
            return Profiled(contender=Contender(name=spec, missing=str(reason)))
        if name == "ours":
            ours = Contender(name=spec, label=layer.implementation, call=lambda x_TD: layer(x_TD)[0])
            return Profiled(contender=ours, ranged=in_stages(layer, self.nvtx))
        call = lambda x_TD: hand_ordered(layer, x_TD, self.nvtx)  # noqa: E731
        told = "sort, index, one matmul for each expert, index_add"
        return Profiled(contender=Contender(name=spec, label=told, call=call), ranged=call)

    def _transformers(self, spec: str, layer: MoE, experts: str) -> Profiled:
        block = transformers_moe(layer, experts=experts)

        def call(x_TD: Tensor) -> Tensor:
            return block(x_TD.unsqueeze(0)).squeeze(0)

        told = f"Transformers' Qwen3MoeSparseMoeBlock, {experts} experts"
        return Profiled(
            contender=Contender(name=spec, label=told, call=call),
            ranged=call,
            modules={"route": block.gate, "experts": block.experts},
        )


def hand_ordered(layer: MoE, x_TD: Tensor, nvtx: Any = None) -> Tensor:
    """What a careful person writes in torch: one sort, rows in order, a matmul for each expert, index_add."""
    weights, router = layer.experts.weights(), layer.router
    E, K, w_DE = router.E, router.K, router.get_parameter("w_DE")
    with stage("route", nvtx):
        probability_TE = (x_TD.float() @ w_DE).softmax(-1)
        gate_TK, expert_TK = probability_TE.topk(K, dim=-1)
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
    with stage("pack", nvtx):
        expert_P, order_P = expert_TK.flatten().sort()
        token_P = order_P // K
        counts = torch.bincount(expert_P, minlength=E).tolist()
        x_PD = x_TD[token_P]
    with stage("gemm", nvtx):
        y_PD, start = torch.empty_like(x_PD), 0
        for e, count in enumerate(counts):
            if count:
                h_PG = x_PD[start : start + count] @ weights.w_in_EDG[e]
                if weights.b_in_EG is not None:
                    h_PG += weights.b_in_EG[e]
                h_PF = activate(h_PG, weights.activation)
                torch.mm(h_PF, weights.w_out_EFD[e], out=y_PD[start : start + count])
                if weights.b_out_ED is not None:
                    y_PD[start : start + count] += weights.b_out_ED[e]
                start += count
    with stage("combine", nvtx):
        gate_P1 = gate_TK.flatten()[order_P].unsqueeze(1)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        y_TD = y_TD.index_add_(0, token_P, y_PD * gate_P1).to(x_TD.dtype)
    return _with_shared(layer, x_TD, y_TD, nvtx)


def in_stages(layer: MoE, nvtx: Any = None) -> Callable[[Tensor], Tensor]:
    """What `layer` does, stage by stage; a kernel that does all at once is one stage, "fused"."""
    ffn, weights = layer.expert_ffn, layer.experts.weights()
    ops = all_ops()
    parts = [ops[name].get(str(ffn.config[name])).run for name in STAGED if name in ffn.config]

    def run(x_TD: Tensor) -> Tensor:
        with stage("route", nvtx):
            routing = layer.router(x_TD)
        with stage("pack", nvtx):
            plan = layer.make_plan(routing, layer.layout)
        if len(parts) < len(STAGED):
            with stage("fused", nvtx):
                y_TD = ffn(x_TD, routing.gate_TK, plan, weights)
            return _with_shared(layer, x_TD, y_TD, nvtx)
        dispatch, gemm, combine = parts
        with stage("pack", nvtx):
            x_RD = dispatch(x_TD, plan)
        with stage("gemm", nvtx):
            h_RG = gemm(x_RD, weights.w_in_EDG, plan, weights.b_in_EG)
            y_RD = gemm(activate(h_RG, weights.activation), weights.w_out_EFD, plan, weights.b_out_ED)
        with stage("combine", nvtx):
            y_TD = combine(y_RD, routing.gate_TK, plan)
        return _with_shared(layer, x_TD, y_TD, nvtx)

    return run


def _with_shared(layer: MoE, x_TD: Tensor, y_TD: Tensor, nvtx: Any) -> Tensor:
    if layer.shared is None:
        return y_TD
    with stage("shared", nvtx):
        return y_TD + layer.shared.on_every_token(x_TD)


@torch.no_grad()
def profile(
    one: Profiled, x_of: Callable[[int], Tensor], *, calls: int, chrome: Path | None = None
) -> Profile:
    """torch.profiler over `calls` calls, each on an input of its own, after two that are not seen."""
    assert one.ranged is not None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every start and stop on stderr
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    inputs = [x_of(500 + n) for n in range(calls + 2)]
    with _hooked(one.modules):
        for x in inputs[:2]:
            one.ranged(x)
        with torch.profiler.profile(activities=activities, record_shapes=True) as seen:
            for x in inputs[2:]:
                with stage("call"):
                    one.ranged(x)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    if chrome is not None:
        seen.export_chrome_trace(str(chrome))
    D = inputs[0].shape[-1]
    return read_profile(seen.key_averages(), seen.events(), calls=calls, width=D)


@contextmanager
def _hooked(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Each module's forward inside a range of its name."""
    handles: list[Any] = []
    open_ranges: list[Any] = []

    def enter(name: str) -> None:
        open_ranges.append(record_function(PREFIX + name))
        open_ranges[-1].__enter__()

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(lambda m, a, name=name: enter(name)))
            handles.append(
                module.register_forward_hook(lambda m, a, y: open_ranges.pop().__exit__(None, None, None))
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def read_profile(averages: Iterable[Any], events: Iterable[Any], *, calls: int, width: int) -> Profile:
    """A Profile from what torch.profiler gives; `width` is D, to tell rows of the model from hidden ones."""
    rows = [
        OpRow(
            name=one.key,
            calls=one.count,
            self_us=one.self_cpu_time_total,
            total_us=one.cpu_time_total,
            self_device_us=one.self_device_time_total,
            device_us=one.device_time_total,
        )
        for one in averages
    ]
    on_device = sum(row.self_device_us for row in rows) > 0
    ranges = [event for event in events if event.name.startswith(PREFIX) and _is_host(event)]
    whole = sum(event.cpu_time_total for event in ranges if event.name == PREFIX + "call")
    time_of = (lambda event: event.device_time_total) if on_device else (lambda event: event.cpu_time_total)
    total = sum(time_of(event) for event in ranges if event.name == PREFIX + "call")
    spent = dict.fromkeys(SHARES, 0.0)
    for event in ranges:
        name = event.name.removeprefix(PREFIX)
        if name == "experts":
            children = sorted(event.cpu_children, key=lambda child: child.time_range.start)
            for child, share in zip(children, share_of(children, width), strict=True):
                spent[share] += time_of(child)
        elif name in spent:
            spent[name] += time_of(event)
    spent["python"] = max(0.0, total - sum(spent.values()))
    order = sorted(rows, key=lambda row: -(row.self_device_us if on_device else row.self_us))
    shares = {name: us / total for name, us in spent.items() if us > 0} if total else {}
    return Profile(calls=calls, seconds=whole * 1e-6 / calls, rows=tuple(order), shares=shares)


def _is_host(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


def share_of(operations: Sequence[Any], width: int) -> list[str]:
    """The share each operation inside an experts module belongs to, in the order they ran.

    Products of matrices are GEMM. Before the first everything is packing, after the last combining. Between
    two of them, as in a loop over experts: sums over rows combine; what is elementwise belongs to the
    activation, unless its rows have the model's width: then it weighs results; the rest gathers rows.
    """
    products = [place for place, one in enumerate(operations) if MULTIPLIES.match(one.name)]
    if not products:
        return ["pack"] * len(operations)
    found = []
    for place, one in enumerate(operations):
        if MULTIPLIES.match(one.name):
            found.append("gemm")
        elif place > products[-1] or SUMS.match(one.name):
            found.append("combine")
        elif place < products[0]:
            found.append("pack")
        elif ACTIVATES.match(one.name):
            shape = (one.input_shapes or [[]])[0] or [0]
            weighs = shape[-1] == width and one.name.startswith("aten::mul")
            found.append("combine" if weighs else "gemm")
        else:
            found.append("pack")
    return found
