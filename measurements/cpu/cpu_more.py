"""The other CPU measurements, one subcommand each; every one writes cpu_<name>.json beside it.

    python measurements/cpu/cpu_more.py pack       dispatch + combine against sort + index, and against a copy
    python measurements/cpu/cpu_more.py fused      the ten cases of seed-fused against the naive loop; 13 GB
    python measurements/cpu/cpu_more.py imbalance  skewed loads against a balanced one
    python measurements/cpu/cpu_more.py threads    1 thread against 2
    python measurements/cpu/cpu_more.py memory     peak memory over the weights
    python measurements/cpu/cpu_more.py prepack    what packing the weights costs, once
    python measurements/cpu/cpu_more.py stored     float32 activations on weights kept as bfloat16 or int8
    python measurements/cpu/cpu_more.py training   forward + backward against Transformers

--quick runs each on tiny sizes and writes to /tmp. Samples are interleaved and paired as in cpu_grid.py: a
ratio is the median over rounds of one subject's time over another's in the same round.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import cpu_subjects as cpu
import torch
import typer
from cpu_grid import HERE, Measured, measured, session
from torch import Tensor

from moe_routing_bench.accuracy import judge
from moe_routing_bench.bench.roofs import DTYPES
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.dispatch.op import op as dispatch_op
from moe_routing_bench.ops.expert_ffn import native as native_layer
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.expert_ffn.op import reference
from moe_routing_bench.ops.make_plan.op import make_plan
from moe_routing_bench.ops.make_plan.op import op as make_plan_op
from moe_routing_bench.published import PublishedModel
from moe_routing_bench.routing import Routing
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import seed_fused

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Quick = Annotated[bool, typer.Option(help="tiny sizes, written to /tmp")]
Threads = Annotated[int, typer.Option(help="torch's threads")]
TINY = cpu.TINY["tiny"]
# hf_eager takes 64 s a step at qwen3's size: the gradient of each expert's slice is a tensor of all experts
PEERS = ("auto", "hf_grouped_mm")
# glibc keeps freed blocks of up to 32 MB for itself, and a call that finds them seems to need no memory
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# packed copies of these weights would not fit beside them in 23 GB
LARGEST_PACKED = 7e9


def _begin(quick: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    if not quick:
        cpu.touch_memory()


def finish(name: str, quick: bool, rows: list[dict[str, Any]], **notes: Any) -> None:
    record = {"session": session(torch.get_num_threads()).model_dump(), **notes, "rows": rows}
    path = (Path("/tmp") if quick else HERE) / f"cpu_{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


def timed_cell(
    subjects: Sequence[cpu.Subject],
    inputs: Sequence[tuple[Any, ...]],
    statuses: dict[str, str],
    *,
    base: str,
    budget: float,
    cap: float = float("inf"),
) -> dict[str, Measured]:
    alive = [subject for subject in subjects if not statuses[subject.name].startswith("CRASHED")]
    seconds = cpu.run_rounds(alive, inputs, until=time.perf_counter() + budget, cap=cap)
    return measured(subjects, statuses, seconds, base)


def show(title: str, found: dict[str, Measured], base: str) -> None:
    print(title, flush=True)
    for name, one in found.items():
        time_text = "-" if one.ms is None else f"{one.ms:10.3f} ms"
        ratio = ""
        if one.ratio is not None:
            middle, low, high = one.ratio
            ratio = f"{middle:8.3f}x of {base} [{low:.3f}, {high:.3f}]"
        print(f"    {name:36} {time_text} {ratio}  {one.status[:110]}", flush=True)


def dumped(found: dict[str, Measured]) -> dict[str, Any]:
    return {name: one.model_dump() for name, one in found.items()}


def pack_subject(name: str, plan_spec: str, dispatch_spec: str, combine_spec: str) -> cpu.Subject:
    """Routing and x to y through the three operations; planning is timed, as the baseline's sort is."""
    plan_impl = make_plan_op.get(plan_spec)
    dispatch, combine = dispatch_op.get(dispatch_spec), combine_op.get(combine_spec)

    def call(x_TD: Tensor, routing: Routing) -> Tensor:
        plan = plan_impl(routing, cpu.COMPACT)
        # embedding_bag takes gates of the rows' dtype; the cast is part of its time
        wide = combine.name != "embedding_bag"
        gate_TK = routing.gate_TK if wide else routing.gate_TK.to(x_TD.dtype)
        return combine(dispatch(x_TD, plan), gate_TK, plan)

    label = f"make_plan.{plan_impl.label} + dispatch.{dispatch.label} + combine.{combine.label}"
    return cpu.Subject(name=name, call=call, label=label)


def sort_and_index(x_TD: Tensor, routing: Routing) -> Tensor:
    """As a person writes it first: sort the expert ids, index the rows, weigh them and add them up."""
    K = routing.num_choices
    order_P = routing.expert_TK.flatten().argsort()
    token_P = order_P // K
    rows_PD = x_TD[token_P]
    gate_P = routing.gate_TK.to(x_TD.dtype).flatten()[order_P]
    return torch.zeros_like(x_TD).index_add(0, token_P, rows_PD * gate_P.unsqueeze(1))


@app.command()
def pack(quick: Quick = False, threads: Threads = 2) -> None:
    """dispatch + combine at 16384 x 4096, E 128, K 2, in both 16-bit types.

    "A copy of the same bytes": dispatch reads T D and writes T K D elements, combine reads T K D and writes
    T D; the copy is y.copy_(x) of half that sum, which reads one half and writes the other.
    """
    _begin(quick, threads)
    T, D, E, K = (256, 128, 16, 2) if quick else (16384, 4096, 128, 2)
    model = replace(cpu.QWEN, name="seed-pack", D=D, F=1, E=E, K=K)
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        inputs = cpu.make_inputs(model, dtype, T, "uniform")
        source, target = torch.ones(2, (K + 1) * T * D, dtype=dtype)
        subjects = [
            cpu.Subject(name="sort + index", call=sort_and_index),
            cpu.Subject(
                name="copy of the same bytes", judged=False, call=lambda *_, s=source, t=target: t.copy_(s)
            ),
        ]
        wanted = {
            "native": ("native", "native", "native"),
            "native_reused": ("native", "native_reused", "native_reused"),
            "index_select_reused + embedding_bag": ("argsort", "index_select_reused", "embedding_bag"),
        }
        for name, specs in wanted.items():
            try:
                subjects.append(pack_subject(name, *specs))
            except (ValueError, NotImplementedError) as reason:
                print(f"{name} skipped: {reason}")
        with torch.no_grad():
            statuses = {subject.name: _judge_pack(subject, *inputs[0]) for subject in subjects}
            until = time.perf_counter() + (1 if quick else 15)
            seconds = cpu.run_rounds(subjects, inputs, until=until, slow=float("inf"))
        print(f"seed-pack T={T} D={D} E={E} K={K} {dtype}, {source.nbytes / 1e6:.0f} MB copied")
        for base in ("sort + index", "copy of the same bytes"):
            found = measured(subjects, statuses, seconds, base)
            show("  all against " + base, found, base)
            rows.append({"dtype": str(dtype), "base": base, "subjects": dumped(found)})
    finish("pack", quick, rows, sizes={"T": T, "D": D, "E": E, "K": K}, copy=(pack.__doc__ or "").strip())


def _judge_pack(subject: cpu.Subject, x_TD: Tensor, routing: Routing) -> str:
    y_TD = subject.call(x_TD, routing)
    if not subject.judged:
        return "NOT JUDGED"
    token_t = torch.arange(0, x_TD.shape[0], max(1, x_TD.shape[0] // 128))
    gate_t1 = routing.gate_TK[token_t].double().sum(1, keepdim=True)
    true_tD = x_TD[token_t].double() * gate_t1
    plain_tKD = x_TD[token_t].float().unsqueeze(1) * routing.gate_TK[token_t].unsqueeze(2)
    verdict = judge(y_TD[token_t], true_tD, plain_tKD.sum(1).to(x_TD.dtype))
    return "PASSED" if verdict.passed else verdict.sentence


@app.command()
def fused(quick: Quick = False, threads: Threads = 2) -> None:
    """The ten cases of seed-fused, float32: ours against a plain loop over the experts.

    See _fused_weights for the two largest."""
    _begin(quick, threads)
    shapes = [case.shape for case in seed_fused()]
    if quick:
        shapes = [replace(shape, D=64, F=32, E=min(shape.E, 16)) for shape in shapes[::4]]
    rows: list[dict[str, Any]] = []
    weights = made_for = None
    for shape in shapes:
        model = replace(cpu.QWEN, name="seed-fused", D=shape.D, F=shape.F, E=shape.E, K=shape.K)
        if made_for != model:
            weights = None
            gc.collect()  # the old weights must be gone before 13 GB of new ones are made
            weights, made_for = _fused_weights(model), model
        assert weights is not None
        with torch.no_grad():
            rows.append(_fused_case(shape, model, weights, 1 if quick else 4))
    finish("fused", quick, rows)


def _fused_weights(model: PublishedModel) -> ExpertWeights:
    """12.9 GB and a packed copy of it do not fit here: then all experts are one, shared, still five times the
    last cache and read by everybody as often as if each had its own."""
    if 4 * 3 * model.D * model.F * model.E <= LARGEST_PACKED:
        return cpu.make_weights(model, torch.float32)
    one = cpu.make_weights(replace(model, E=1), torch.float32)
    shared = {name: tensor.expand(model.E, -1, -1) for name, tensor in one.tensors().items()}
    return replace(one, **shared)


def _fused_case(
    shape: MoEShape, model: PublishedModel, weights: ExpertWeights, budget: float
) -> dict[str, Any]:
    """In a function of its own, so that nothing holds the weights when it is done."""
    _forget_peak()
    nbytes = weights.w_in_EDG.nbytes + weights.w_out_EFD.nbytes
    inputs = cpu.make_inputs(model, torch.float32, shape.T, "uniform")
    plan_spec = cpu.auto_specs(*inputs[0], weights)[0]
    subjects = [_naive(inputs, weights), cpu.layer_subject("ours", "native", plan_spec, *inputs[0], weights)]
    statuses = cpu.judge_subjects(subjects, inputs, weights)
    found = timed_cell(subjects, inputs, statuses, base="naive", budget=budget)
    peak = _status_kb("VmHWM") / 1e6
    label = subjects[1].label
    show(f"{shape} weights {nbytes / 1e9:.1f} GB, {label}, peak memory {peak:.1f} GB", found, "naive")
    row = {"shape": asdict(shape), "weight_bytes": nbytes, "peak_gb": peak}
    return {**row, "subjects": dumped(found)}


def _naive(inputs: Sequence[tuple[Tensor, Routing]], weights: ExpertWeights) -> cpu.Subject:
    """eager_loop with plans made beforehand: a naive loop needs none, so it does not pay for one."""
    impl = expert_ffn_op.get("eager_loop")
    plans = {id(routing): make_plan(routing, cpu.COMPACT) for _, routing in inputs}

    def call(x_TD: Tensor, routing: Routing) -> Tensor:
        return impl(x_TD, routing.gate_TK, plans[id(routing)], weights)

    return cpu.Subject(name="naive", call=call, label="eager_loop")


@app.command()
def imbalance(quick: Quick = False, threads: Threads = 2) -> None:
    """one_expert and lognormal(maxvio=16) against balanced: time, and beside it the roofline's ratio."""
    _begin(quick, threads)
    qwen = cpu.MODELS["qwen3-30b-a3b"]
    # maxvio is at most E / K - 1: 15 for qwen3, 3 for mixtral; with K=4 the full 16 can be reached
    models = [qwen, replace(qwen, name="qwen3-30b-a3b with K=4", K=4), cpu.MODELS["mixtral-8x7b~scaled"]]
    rows = []
    for model in [TINY] if quick else models:
        weights = cpu.make_weights(model, torch.bfloat16)
        limits = cpu.measure_limits(torch.bfloat16, small=quick)
        maxvio = min(16, model.E // model.K - 1)
        workloads = ("balanced", "one_expert", f"lognormal(maxvio={maxvio})")
        for T in (16, 64) if quick else (64, 256, 1024):
            given = {name: cpu.make_inputs(model, torch.bfloat16, T, name) for name in workloads}
            subjects, statuses, floors = [], {}, {}
            with torch.no_grad():
                for name, inputs in given.items():
                    plan_spec, spec = cpu.auto_specs(*inputs[0], weights)
                    ours = cpu.layer_subject("auto", spec, plan_spec, *inputs[0], weights)
                    statuses[name] = cpu.judge_subjects([ours], inputs, weights)["auto"]
                    call = _by_step(ours.call, inputs)
                    subjects.append(cpu.Subject(name=name, call=call, label=ours.label))
                    costs = [cpu.layer_cost(x_TD, routing, weights) for x_TD, routing in inputs]
                    floors[name] = sum(map(limits.floor_seconds, costs)) / len(costs)
                steps = [(step,) for step in range(4)]
                found = timed_cell(subjects, steps, statuses, base="balanced", budget=1 if quick else 3)
            show(f"{model.name} bfloat16 T={T}", found, "balanced")
            roof = {name: floor / floors["balanced"] for name, floor in floors.items()}
            print("    roofline ratio  " + "  ".join(f"{name} {ratio:.3f}x" for name, ratio in roof.items()))
            row = {"model": model.name, "T": T, "roofline_ratio": roof, "subjects": dumped(found)}
            rows.append({**row, "limits": asdict(limits)})
        del weights
        gc.collect()
    finish("imbalance", quick, rows)


def _by_step(call: Callable[..., Any], inputs: Sequence[tuple[Tensor, Routing]]) -> Callable[[int], Any]:
    return lambda step: call(*inputs[step])


@app.command()
def threads(quick: Quick = False, most: Annotated[int, typer.Option(help="the larger number")] = 2) -> None:
    """auto with 1 thread against auto with 2, in turn in one process."""
    rows = []
    model = TINY if quick else cpu.MODELS["qwen3-30b-a3b"]
    for dtype_name in ("bfloat16", "float32"):
        weights = cpu.make_weights(model, DTYPES[dtype_name])
        for T in (1, 16) if quick else (1, 16, 256, 4096):
            inputs = cpu.make_inputs(model, DTYPES[dtype_name], T, "zipf(1.2)")
            torch.set_num_threads(most)
            with torch.no_grad():
                plan_spec, spec = cpu.auto_specs(*inputs[0], weights)
                ours = cpu.layer_subject("auto", spec, plan_spec, *inputs[0], weights)
                names = {f"{n} threads": n for n in (1, most)}
                subjects = [
                    cpu.Subject(name=name, call=_with_threads(n, ours.call), label=ours.label)
                    for name, n in names.items()
                ]
                statuses = cpu.judge_subjects(subjects, inputs, weights)
                found = timed_cell(
                    subjects, inputs, statuses, base=f"{most} threads", budget=1 if quick else 4
                )
            show(f"{model.name} {dtype_name} T={T} zipf(1.2)", found, f"{most} threads")
            rows.append({"model": model.name, "dtype": dtype_name, "T": T, "subjects": dumped(found)})
        del weights
        gc.collect()
    torch.set_num_threads(most)
    finish("threads", quick, rows)


def _with_threads(n: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        torch.set_num_threads(n)  # a few microseconds, in the samples of both
        return call(*args)

    return run


@app.command()
def memory(quick: Quick = False, threads: Threads = 2) -> None:
    """Peak memory over the weights and their packed copy, each call in a process of its own.

    over = peak resident memory during the first call of this size, less what was there before it without x
    and the routing. The bound of the issue is 1.5 (inputs + outputs) and one tile's workspace; `workspace` is
    what that leaves for the workspace: over - 1.5 (inputs + outputs).
    """
    rows = []
    for T in (64, 256) if quick else (1024, 4096, 16384):
        for dtype_name in ("bfloat16", "float32"):
            for name in PEERS:
                command = (sys.executable, __file__, "memory-of", name, dtype_name, str(T), str(threads))
                done = subprocess.run(
                    (*command, *(("--quick",) if quick else ())),
                    capture_output=True,
                    text=True,
                    env=os.environ | RETURN_MEMORY,
                )
                if done.returncode:
                    last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
                    print(f"{name} {dtype_name} T={T}: {last[:150]}")
                    continue
                row = json.loads(done.stdout.splitlines()[-1])
                rows.append(row)
                print(
                    f"T={T:<6} {dtype_name:9} {name:14} over {row['over_mb']:9.1f} MB, inputs + outputs "
                    f"{row['in_out_mb']:8.1f} MB, {row['over_mb'] / row['in_out_mb']:6.2f}x, workspace "
                    f"{row['workspace_mb']:9.1f} MB   {row['status']}",
                    flush=True,
                )
    finish("memory", quick, rows, definition=(memory.__doc__ or "").strip())


@app.command(hidden=True)
def memory_of(name: str, dtype_name: str, T: int, threads: int, quick: Quick = False) -> None:
    """One row of `memory`, as JSON."""
    _begin(quick, threads)
    dtype = DTYPES[dtype_name]
    model = TINY if quick else cpu.MODELS["qwen3-30b-a3b"]
    weights = cpu.make_weights(model, dtype)
    with torch.no_grad():
        first = cpu.make_inputs(model, dtype, 16, "zipf(1.2)", steps=1)
        found, skipped = cpu.subjects_for([name], first, weights, None)
        if not found:
            raise SystemExit(skipped[name])
        found[0].call(*first[0])  # packs the weights, once and for all sizes
        inputs = cpu.make_inputs(model, dtype, T, "zipf(1.2)", steps=1)
        (x_TD, routing), (subject,) = inputs[0], found
        gc.collect()
        _forget_peak()
        before = _status_kb("VmRSS")
        y_TD = subject.call(x_TD, routing)
        peak = _status_kb("VmHWM")
        status = cpu.judge_subjects([subject], inputs, weights)[name]
    given = x_TD.nbytes + routing.expert_TK.nbytes + routing.gate_TK.nbytes
    over_mb, in_out_mb = (peak - before) / 1e3 + given / 1e6, (given + y_TD.nbytes) / 1e6
    row = {"subject": name, "label": subject.label, "dtype": dtype_name, "T": T, "status": status}
    sizes = {"over_mb": over_mb, "in_out_mb": in_out_mb, "workspace_mb": over_mb - 1.5 * in_out_mb}
    print(json.dumps(row | sizes))


def _forget_peak() -> None:
    """The peak starts anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_kb(field: str) -> float:
    """In units of 1000 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1.024


@app.command()
def stored(quick: Quick = False, threads: Threads = 2) -> None:
    """Weights kept as bfloat16 or int8 under float32 activations, and what that costs in accuracy.

    The error is its root mean square over that of the result, against float64 with the weights as given."""
    _begin(quick, threads)
    model = cpu.TINY["tiny"] if quick else cpu.MODELS["seed-qwen"]
    weights = cpu.make_weights(model, torch.float32)
    rows = []
    for T in (1, 16) if quick else (1, 16, 64, 256, 1024):
        inputs = cpu.make_inputs(model, torch.float32, T, "uniform")
        plan_spec = cpu.auto_specs(*inputs[0], weights)[0]
        specs = ("native", "native(store=bfloat16)", "native(store=int8)")
        subjects = [cpu.layer_subject(spec, spec, plan_spec, *inputs[0], weights) for spec in specs]
        x_TD, routing = inputs[0]
        token_t = torch.arange(0, T, max(1, T // 16))
        with torch.no_grad():
            true_tD, _ = cpu.oracle_and_plain(x_TD, routing, weights, token_t)
            errors = {}
            for one in subjects:
                error_tD = one.call(x_TD, routing)[token_t].double() - true_tD
                errors[one.name] = float(error_tD.square().mean().sqrt() / true_tD.square().mean().sqrt())
            statuses = {name: f"relative error {error:.1e}" for name, error in errors.items()}
            found = timed_cell(subjects, inputs, statuses, base="native", budget=1 if quick else 5)
        show(f"{model.name} float32 T={T}", found, "native")
        rows.append({"T": T, "relative_error": errors, "subjects": dumped(found)})
    finish("stored", quick, rows, definition=(stored.__doc__ or "").strip())


@app.command()
def prepack(quick: Quick = False, threads: Threads = 2) -> None:
    """What packing costs, once: seconds and bytes, for weights stored as Transformers stores them."""
    _begin(quick, threads)
    rows = []
    models = cpu.TINY if quick else cpu.MODELS
    for name, dtype_name in product(models, ("bfloat16", "float32")):
        weights = cpu.make_weights(models[name], DTYPES[dtype_name])
        native_layer.packed(weights)  # the first time the memory is new too
        native_layer.packed.forget(weights)
        made = native_layer.packed.preparation(weights)
        size = weights.w_in_EDG.nbytes + weights.w_out_EFD.nbytes
        rows.append(
            {"model": name, "dtype": dtype_name, "seconds": made.seconds, "bytes": made.nbytes, "of": size}
        )
        print(f"{name:16} {dtype_name:9} {made.seconds:6.3f} s, {made.nbytes / 1e9:.2f} GB")
        del weights, made
        gc.collect()
    finish("prepack", quick, rows)


@app.command()
def training(quick: Quick = False, threads: Threads = 2) -> None:
    """Forward + backward: gradients of x and both weights for loss = (y * g).sum() with a fixed g.

    Between steps the weights count as changed, as after an optimizer's step, so whatever packs them packs
    them anew and that is timed. Gradients are judged on a small layer of the same dtype.
    """
    _begin(quick, threads)
    plans = [("qwen3-30b-a3b", "bfloat16"), ("olmoe-1b-7b", "bfloat16"), ("seed-qwen", "float32")]
    rows = []
    for model_name, dtype_name in [("tiny", "bfloat16"), ("tiny", "float32")] if quick else plans:
        dtype, model = DTYPES[dtype_name], (cpu.MODELS | cpu.TINY)[model_name]
        weights = cpu.make_weights(model, dtype, requires_grad=True)
        for T in (16, 64) if quick else (256, 1024):
            inputs = cpu.make_inputs(model, dtype, T, "zipf(1.2)")
            for x_TD, _ in inputs:
                x_TD.requires_grad_()
            found, skipped = cpu.subjects_for(PEERS, inputs, weights, None)
            for name, why in skipped.items():
                print(f"{name} skipped: {why}")
            subjects = [replace(one, call=_step(one.call, weights)) for one in found]
            statuses = {one.name: _judge_gradients(one.name, dtype) for one in found}
            for one in subjects:
                if not statuses[one.name].startswith("CRASHED"):
                    one.call(*inputs[0])
            got = timed_cell(subjects, inputs, statuses, base="auto", budget=1 if quick else 15, cap=40)
            show(f"{model_name} {dtype_name} T={T}, forward + backward", got, "auto")
            rows.append({"model": model_name, "dtype": dtype_name, "T": T, "subjects": dumped(got)})
            rows[-1]["skipped"] = skipped
        del weights, found, subjects
        gc.collect()
    finish("training", quick, rows, definition=(training.__doc__ or "").strip())


def _step(call: Callable[..., Tensor], weights: ExpertWeights) -> Callable[[Tensor, Routing], Tensor]:
    def step(x_TD: Tensor, routing: Routing) -> Tensor:
        leaves = (x_TD, *weights.tensors().values())
        for leaf in leaves:
            leaf.grad = None
        with torch.no_grad():
            for weight in weights.tensors().values():
                weight[0, 0, :1].add_(0)  # torch now counts the tensor as written to
        y_TD = call(x_TD, routing)
        y_TD.backward(_fixed(*y_TD.shape, y_TD.dtype))
        return y_TD.detach()

    return step


@lru_cache(maxsize=4)
def _fixed(T: int, D: int, dtype: torch.dtype) -> Tensor:
    return cpu.normal(T, D, dtype=dtype, place=7)


def _judge_gradients(name: str, dtype: torch.dtype) -> str:
    """x, w_in and w_out against float64, with the reference in plain torch as the measure."""
    model = TINY
    (x_TD, routing), *_ = inputs = cpu.make_inputs(model, dtype, 64, "zipf(1.2)", steps=1)
    weights = cpu.make_weights(model, dtype, requires_grad=True)
    x_TD.requires_grad_()
    found, skipped = cpu.subjects_for([name], inputs, weights, None)
    if not found:
        return f"CRASHED: {skipped[name]}"
    plan = make_plan(routing, cpu.COMPACT)

    def of_reference(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x_TD, *weights.tensors().values())]
        cast = replace(weights, w_in_EDG=leaves[1], w_out_EFD=leaves[2])
        gate_TK = routing.gate_TK.double() if dtype == torch.float64 else routing.gate_TK
        y_TD = reference(leaves[0], gate_TK, plan, cast)
        return list(torch.autograd.grad(y_TD, leaves, _fixed(*x_TD.shape, x_TD.dtype).to(dtype)))

    try:
        y_TD = found[0].call(x_TD, routing)
        leaves = (x_TD, *weights.tensors().values())
        got = torch.autograd.grad(y_TD, leaves, _fixed(*x_TD.shape, x_TD.dtype))
    except (RuntimeError, NotImplementedError) as error:
        return f"CRASHED: {str(error)[:200]}"
    parts = zip(("x", "w_in", "w_out"), got, of_reference(torch.float64), of_reference(dtype), strict=True)
    for what, mine, true, plain in parts:
        verdict = judge(mine, true, plain)
        if not verdict.passed:
            return f"gradient of {what}: {verdict.sentence}"
    return "PASSED"


if __name__ == "__main__":
    app()
