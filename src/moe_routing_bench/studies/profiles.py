"""Profiles a MoE layer with torch.profiler (Transformers' layer, a hand-ordered path, ours), or another span.

The time of a layer is divided into four shares: route (logits, top-k, gates), pack (positions of all pairs,
gathered rows), GEMM (both projections and the activation between them), combine (weighted rows back to
tokens). Our stages and the hand-ordered ones run inside named ranges. Transformers' experts have no ranges,
so `share_of` sorts their operations by name, shape and position. Time between operations is Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.outcome import Operation
from moe_routing_bench.bench.spans.layer import span as layer_span
from moe_routing_bench.bench.spans.op import STAGED
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.core.experts import activate
from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.models.hand_ordered import Stage, hand_ordered
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.workloads.experiment import ImplementationRef

SHARES = ("route", "pack", "gemm", "combine", "fused", "shared", "python")
IMPLEMENTATIONS = (
    "transformers(eager)",
    "transformers(grouped_mm)",
    "hand-ordered",
    "staged(dispatch=native,grouped_gemm=native,combine=native)",
    "auto",
)
PREFIX = "mrb::"
MULTIPLIES = re.compile(r"aten::(linear|mm|addmm|bmm|matmul|_?grouped_mm)$|transformers::.*grouped_mm")
ACTIVATES = re.compile(r"aten::(silu|gelu|relu|sigmoid|chunk|split|clamp|mul|mul_|add|add_)$")
SUMS = re.compile(r"aten::(index_add_?|scatter_add_?|sum)$")


@dataclass(frozen=True, kw_only=True)
class ProfiledOp:
    """An operation in all calls: ProfiledOp(name="aten::mm", calls=192, self_us=9100, total_us=9100)."""

    name: str
    calls: int
    self_us: float
    total_us: float
    self_device_us: float = 0.0
    device_us: float = 0.0
    memory_bytes: int = 0  # allocated by the operation itself, less what it freed


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profile(calls=10, seconds=0.031, rows=(...), shares={"route": 0.02, "pack": 0.1, ...})

    seconds: of one call, with the cost of the profiler; shares: of the calls' time, with sum 1; empty for
    spans other than a layer.
    """

    calls: int
    seconds: float
    rows: tuple[ProfiledOp, ...]
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> ProfiledOp:
        """Returns the sum of all rows, as torch's table ends."""
        names = ("calls", "self_us", "self_device_us", "memory_bytes")
        sums = {name: sum(getattr(row, name) for row in self.rows) for name in names}
        return ProfiledOp(
            name="all", **sums, total_us=1e6 * self.seconds * self.calls, device_us=sums["self_device_us"]
        )

    def operations(self, rows: int) -> dict[str, Operation]:
        """The longest ones, for a record: of one call."""
        return {
            row.name: Operation(
                calls=row.calls / self.calls,
                self_seconds=1e-6 * row.self_us / self.calls,
                seconds=1e-6 * row.total_us / self.calls,
                device_seconds=1e-6 * row.device_us / self.calls,
                memory_bytes=row.memory_bytes / self.calls,
            )
            for row in self.rows[:rows]
        }


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """An implementation's computation with its stages in named ranges."""

    implementation: ImplementationRef
    run: Callable[..., Tensor]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)  # hooks run them inside ranges


@contextmanager
def stage(name: str, nvtx: Any = None) -> Iterator[None]:
    """A range with this name for torch.profiler; also for NVTX if given torch.cuda.nvtx."""
    with record_function(PREFIX + name), nvtx.range(PREFIX + name) if nvtx else nullcontext():
        yield


def profiled(implementation: ImplementationRef, inputs: Inputs, nvtx: Any = None) -> Profiled:
    """A layer with its stages in named ranges, layers of other libraries by hooks. Other spans have none."""
    in_range, span = partial(stage, nvtx=nvtx), span_named(inputs.experiment.span)
    computation = span.built(implementation, inputs)
    if span is not layer_span:
        return Profiled(implementation=implementation, run=computation.run)
    owner = computation.owner
    if not isinstance(owner, MoE):
        modules = {} if owner is None else {"route": owner.gate, "experts": owner.experts}
        return Profiled(implementation=implementation, run=computation.run, modules=modules)
    if implementation.name == "hand-ordered":
        return Profiled(
            implementation=implementation, run=lambda x_TD, info: hand_ordered(owner, x_TD, in_range)
        )
    return Profiled(implementation=implementation, run=in_stages(owner, in_range))


def in_stages(layer: MoE, in_range: Stage) -> Callable[[Tensor, TokenInfo], Tensor]:
    """Returns a function that runs `layer` stage by stage. A kernel that does everything is one stage,
    "fused"."""
    ffn, weights = layer.expert_ffn, layer.experts.weights()
    ops = all_ops()
    parts = [ops[name].get(str(ffn.config[name])).run for name in STAGED if name in ffn.config]

    def run(x_TD: Tensor, info: TokenInfo) -> Tensor:
        with in_range("route"):
            routing = layer.router(x_TD, info)
        with in_range("pack"):
            plan = layer.make_plan(routing, layer.layout)
        if len(parts) < len(STAGED):
            with in_range("fused"):
                y_TD = ffn(x_TD, routing.gate_TK, plan, weights)
            return _with_shared(layer, x_TD, y_TD, in_range)
        dispatch, gemm, combine = parts
        with in_range("pack"):
            x_RD = dispatch(x_TD, plan)
        with in_range("gemm"):
            h_RG = gemm(x_RD, weights.w_in_EDG, plan, weights.b_in_EG)
            y_RD = gemm(activate(h_RG, weights.activation), weights.w_out_EFD, plan, weights.b_out_ED)
        with in_range("combine"):
            y_TD = combine(y_RD, routing.gate_TK, plan)
        return _with_shared(layer, x_TD, y_TD, in_range)

    return run


def _with_shared(layer: MoE, x_TD: Tensor, y_TD: Tensor, in_range: Stage) -> Tensor:
    if layer.shared is None:
        return y_TD
    with in_range("shared"):
        return y_TD + layer.shared.on_every_token(x_TD)


@torch.no_grad()
def profile(one: Profiled, inputs: Inputs, *, calls: int, chrome: Path | None = None) -> Profile:
    """Profiles `calls` calls, each with its own inputs, after two calls that are not profiled."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports every start and stop on stderr
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    span = span_named(inputs.experiment.span)
    made = [span.call(one.implementation, inputs, 500 + n, n % 4) for n in range(calls + 2)]
    given = [tuple(span.arguments(call).values()) for call in made]
    with _hooked(one.modules):
        for args in given[:2]:
            one.run(*args)
        with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as seen:
            for args in given[2:]:
                with stage("call"):
                    one.run(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    if chrome is not None:
        seen.export_chrome_trace(str(chrome))
    D = inputs.experiment.D
    return read_profile(seen.key_averages(), seen.events(), calls=calls, width=D)


@contextmanager
def _hooked(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Runs the forward of each module inside a range with its name."""
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
    """Reads the output of torch.profiler. `width` is D and tells rows of the model from hidden rows."""
    rows = [
        ProfiledOp(
            name=average.key,
            calls=average.count,
            self_us=average.self_cpu_time_total,
            total_us=average.cpu_time_total,
            self_device_us=average.self_device_time_total,
            device_us=average.device_time_total,
            memory_bytes=average.self_cpu_memory_usage + average.self_device_memory_usage,
        )
        for average in averages
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
    in_shares = any(us for name, us in spent.items() if name != "python")
    shares = {name: us / total for name, us in spent.items() if us > 0} if total and in_shares else {}
    return Profile(calls=calls, seconds=whole * 1e-6 / calls, rows=tuple(order), shares=shares)


def _is_host(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


def share_of(operations: Sequence[Any], width: int) -> list[str]:
    """Returns the share of each operation inside an experts module, in the order they ran.

    Matrix products are GEMM. Operations before the first product pack, those after the last combine. Between
    two products, as in a loop over experts, sums over rows combine. Elementwise operations belong to the
    activation, unless their rows have the model's width: then they weight results. All others gather rows.
    """
    products = [place for place, operation in enumerate(operations) if MULTIPLIES.match(operation.name)]
    if not products:
        return ["pack"] * len(operations)
    shares = []
    for place, operation in enumerate(operations):
        if MULTIPLIES.match(operation.name):
            shares.append("gemm")
        elif place > products[-1] or SUMS.match(operation.name):
            shares.append("combine")
        elif place < products[0]:
            shares.append("pack")
        elif ACTIVATES.match(operation.name):
            shape = (operation.input_shapes or [[]])[0] or [0]
            weighs = shape[-1] == width and operation.name.startswith("aten::mul")
            shares.append("combine" if weighs else "gemm")
        else:
            shares.append("pack")
    return shares
