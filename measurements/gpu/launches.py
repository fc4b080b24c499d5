"""Every launch that the Triton implementations ask for, compiled for eight GPUs, none of which is here.

    python measurements/gpu/launches.py                hours on 2 cores; stopped and run again, it goes on
    python measurements/gpu/launches.py --minutes 30   the sizes of a model first, then those of the kit

`ask` records the launches for the sizes of Qwen3-30B-A3B and of the conformance kit, on fake tensors, as the
launcher of each implementation makes them for each architecture. A launch is what Triton compiles once: the
kernel, the dtype of every pointer and whether it is aligned, the class of every integer (1, a multiple of 16,
any), the constexprs and the options. The fake tensors are on the CPU and count as tensors on a GPU
(targets.as_if), because a CPU build of torch can neither copy nor differentiate tensors on a GPU.

It writes launches.json.xz (a row for each launch and architecture; null if it is not compiled yet, and its
spill_bytes are null if they are not known) and launches.txt (counts, what is refused and why, what is wrong).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import lzma
import multiprocessing
import pkgutil
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moe_routing_bench import ops
from moe_routing_bench.conformance.arguments import arguments
from moe_routing_bench.conformance.cases import KitCell, layouts_for
from moe_routing_bench.conformance.check import cells
from moe_routing_bench.core.dtypes import name_of
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.published import model
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.gpu import Compilation
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.registry import BUILT_IN, OURS, all_ops, get_op
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.ops.stand_ins import StandIns, weights_without_values
from moe_routing_bench.ops.targets import TARGETS, Target, as_if
from moe_routing_bench.studies.triton_code import compile_kernel

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
DEFAULT_STAGES = {"cuda": 3, "hip": 2}  # what a launch without num_stages gets
DEFAULT_WARPS = 4
HERE = Path(__file__).parent
TABLE = HERE / "launches.json.xz"
MODEL = "qwen3-30b-a3b"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What Triton compiles once; str() is its key in the table."""

    kernel: str  # "dispatch.triton_gather._gather_rows"
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        parts = (self.signature, self.constexprs, self.options)
        return " | ".join([self.kernel, *(" ".join(f"{n}={v}" for n, v in part) for part in parts)])

    def compilation(self, target: Target) -> Compilation:
        module, _, name = self.kernel.rpartition(".")
        options = dict(self.options)
        return Compilation(
            name=name.lstrip("_"),
            kernel=getattr(importlib.import_module(f"{OURS}.ops.{module}"), name),
            signature=dict(self.signature),
            constexprs=dict(self.constexprs),
            num_warps=options.pop("num_warps", DEFAULT_WARPS),
            num_stages=options.pop("num_stages", DEFAULT_STAGES[target.backend]),
            options=options,
        )


class _Recorded:
    """Stands where a wrapped kernel does: kernel[grid](arguments) is noted, not launched."""

    def __init__(self, kernel: Any, asked: set[Launch]):
        self.kernel, self.asked = kernel, asked

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | kwargs
        signature, constexprs = [], []
        for parameter in self.kernel.params:
            value = given.pop(parameter.name)
            kind = None if parameter.is_constexpr else _kind(value, not parameter.do_not_specialize)
            if kind is None:
                constexprs.append((parameter.name, value))
            else:
                signature.append((parameter.name, kind))
        module = self.kernel.fn.__module__.removeprefix(f"{OURS}.ops.")
        self.asked.add(
            Launch(
                kernel=f"{module}.{self.kernel.fn.__name__}",
                signature=tuple(signature),
                constexprs=tuple(constexprs),
                options=tuple(sorted(given.items())),
            )
        )


def _kind(value: Any, specialised: bool) -> str | None:
    """How Triton sees an argument, in the words of a Compilation; None if it becomes a constant."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return f"*{TYPES[value.dtype]}" + ("" if aligned else ":any")
    if isinstance(value, float):
        return "fp32"
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    if not specialised:
        return width
    return f"{width}:1" if value == 1 else f"{width}:16" if value % 16 == 0 else width


@contextmanager
def recording(target: Target) -> Iterator[set[Launch]]:
    """Inside, tensors are fake and taken to be on this GPU, and launches are noted in the set."""
    asked: set[Launch] = set()
    with ExitStack() as stack:
        for module in _kernel_modules():
            stack.enter_context(patch.object(module, "wrap_triton", lambda k: _Recorded(k, asked)))
            for op in [value for value in vars(module).values() if isinstance(value, CustomOpDef)]:
                stack.enter_context(patch.object(op, "_abstract_fn", _with_gradients(op)))
        stack.enter_context(as_if(target))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        yield asked


def _kernel_modules() -> list[ModuleType]:
    names = [name for _, name, _ in pkgutil.walk_packages(ops.__path__, f"{OURS}.ops.")]
    loaded = [importlib.import_module(name) for name in names if ".triton_" in name or ".gpu" in name]
    return [module for module in loaded if hasattr(module, "wrap_triton")]


def _with_gradients(op: CustomOpDef) -> Any:
    """The launcher itself instead of its shapes alone, and then its backward: with every gradient wanted, and
    with one alone."""

    inside = False  # the gradient of a product is a product, and so on

    def run(*args: Any) -> Any:
        nonlocal inside
        out = op._init_fn(*args)
        if inside or op._backward_fn is None or op._setup_context_fn is None:
            return out
        inside = True
        tensors = [isinstance(value, Tensor) and value.is_floating_point() for value in args]
        wanted = [tensors, *([n == at for n in range(len(args))] for at, is_ in enumerate(tensors) if is_)]
        gradients = [torch.empty_like(result) for result in (out if isinstance(out, tuple) else (out,))]
        for needs in wanted:
            ctx = SimpleNamespace(needs_input_grad=tuple(needs), mark_non_differentiable=lambda *_: None)
            ctx.save_for_backward = lambda *saved, ctx=ctx: setattr(ctx, "saved_tensors", saved)
            op._setup_context_fn(ctx, args, out)
            op._backward_fn(ctx, *gradients)
        inside = False
        return out

    return run


def launches_of(implementation: Implementation, args: Mapping[str, Any]) -> str | None:
    """Ask an implementation for its launches while recording; the reason if it refuses."""
    values = [_fake(value) for value in args.values()]
    if (reason := implementation.unsupported(*values)) is not None:
        return reason
    implementation.run(*values)
    if (other := _others_gradients(implementation)) is not None:
        other.run(*values)
    return None


def _others_gradients(implementation: Implementation) -> Implementation | None:
    """The implementation whose gradients are recomputed, for a kernel that has none."""
    run: Any = implementation.run
    gradients = getattr(run, "func", run).__globals__.get("GRADIENTS")
    return gradients if isinstance(gradients, Implementation) else None


def _fake(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        memory = value.untyped_storage().nbytes() // value.element_size()
        flat = torch.empty(memory, dtype=value.dtype)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())
    if is_dataclass(value) and not isinstance(value, type):
        tensors = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{n: _fake(t) for n, t in tensors.items() if isinstance(t, Tensor)})
    return value


FOR_CONFIGS = ("plain", "odd_widths", "biased", "strided")


def kit_cells(*, every: bool) -> list[KitCell]:
    """The kit's cells that differ in more than values. Unless `every`, the default of an implementation meets
    the last layout of all cases in three dtypes, and its other configurations a few in bfloat16."""
    different: dict[Any, KitCell] = {}
    for cell in cells(specs="triton_*"):
        case = cell.case
        few = "(" in cell.spec and (case.name not in FOR_CONFIGS or cell.dtype != "bfloat16")
        if not every and (few or cell.layout != layouts_for(get_op(cell.op), case)[-1]):
            continue
        sizes = (case.T, case.D, case.F, case.E, case.K, case.activation, case.bias, case.strided)
        more = (case.column_step, case.float32_gates, case.rule, case.beyond_int32, case.ragged)
        different.setdefault((cell.op, cell.spec, cell.layout, cell.dtype, sizes, more), cell)
    return list(different.values())


MODEL_LAYOUTS = ("compact", "padded(capacity_factor=1.25)", "block(64)")


class _ModelCell(NamedTuple):
    tokens: int
    dtype: torch.dtype
    layout: str
    hf: bool  # weights stored output-first, as Transformers has them, and biases

    def __str__(self) -> str:
        stored = "stored output-first with biases" if self.hf else "plain"
        return f"{self.tokens} tokens, {name_of(self.dtype)}, {self.layout}, {stored}"

    def arguments(self, model_name: str) -> StandIns:
        """What a layer passes to operations; only while recording."""
        shape = model(model_name).shape(self.tokens)
        weights = weights_without_values(shape, "swiglu", bias=self.hf, train=False, dtype=self.dtype)
        if self.hf:
            stored = (weights.w_in_EDG, weights.w_out_EFD)
            w_in, w_out = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in stored)
            weights = replace(weights, w_in_EDG=w_in, w_out_EFD=w_out)
        return StandIns(weights, shape.K, Layout.parse(self.layout), shape.T, rule=ScoreRule())


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All launches on one architecture, and what was refused: {"op.spec: reason": cells}."""

    launches: dict[Launch, str]  # with the first that asked for it
    refused: dict[str, int]
    cells: int


def ask(target: Target, model_name: str, *, kit: bool = True, every: bool = False) -> Asked:
    """The launches for a model's sizes, in three dtypes, three layouts and two ways to store weights; then
    those of the kit."""
    launches: dict[Launch, str] = {}
    refused: Counter[str] = Counter()
    questions: list[tuple[Implementation, Any, str]] = []
    for op in all_ops().values():
        for entry in find_all(op, configs=True, only=BUILT_IN):
            for source in _model_sources(op.name) if entry.spec.startswith("triton_") else ():
                assert entry.implementation is not None, entry.reason
                questions.append(
                    (entry.implementation, source, f"{op.name}.{entry.spec}, {model_name}, {source}")
                )
    for cell in kit_cells(every=every) if kit else ():
        args = arguments(cell.op, cell.case, cell.layout, cell.dtype)
        questions.append((get_op(cell.op).get(cell.spec), args, str(cell)))
    with recording(target) as asked:
        for implementation, given, who in questions:
            asked.clear()
            if not isinstance(given, dict):
                given = get_op(implementation.op).arguments(given.arguments(model_name))
            if (reason := launches_of(implementation, given)) is not None:
                refused[f"{implementation.op}.{implementation.label}: {reason}"] += 1
            for launch in sorted(asked, key=str):
                launches.setdefault(launch, who)
    return Asked(launches=launches, refused=dict(refused), cells=len(questions))


def _model_sources(op: str) -> Iterator[_ModelCell]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for layout in MODEL_LAYOUTS if get_op(op).has_layout else MODEL_LAYOUTS[:1]:
            for tokens in (4096, 4) if op == "expert_ffn" else (4096,):
                for hf in (False, True) if op in ("expert_ffn", "grouped_gemm") else (False,):
                    yield _ModelCell(tokens, dtype, layout, hf)


def read(path: Path = TABLE) -> dict[str, Any]:
    return json.loads(lzma.decompress(path.read_bytes()))


def spills_known(row: dict[str, Any]) -> bool:
    return row.get("spill_bytes", 0) is not None


def source_of(kernel: str) -> str:
    """The code of a kernel, without its comments, as a short hash: rows of other code are made again."""
    module, _, name = kernel.rpartition(".")
    function = getattr(importlib.import_module(f"moe_routing_bench.ops.{module}"), name)
    (definition,) = ast.parse(function.src).body
    assert isinstance(definition, ast.FunctionDef)
    code = definition.body[ast.get_docstring(definition) is not None :]
    return hashlib.sha256("".join(map(ast.dump, [definition.args, *code])).encode()).hexdigest()[:12]


def compiled(task: tuple[str, Launch]) -> tuple[str, str, dict[str, Any]]:
    arch, launch = task
    target = Target.named(arch)
    code = compile_kernel(launch.compilation(target), target)
    row = {
        "registers": code.registers, "spill_bytes": code.spill_bytes, "shared_bytes": code.shared_bytes,
        "wrong": list(code.wrong),
    }  # fmt: skip
    return arch, str(launch), {name: value for name, value in row.items() if value}


def recorded(arch: str) -> Asked:
    torch.set_num_threads(1)
    return ask(Target.named(arch), MODEL)


def in_turns(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of every kernel, dtype and choice of options, then another of each, and so on."""
    turn: Counter[str] = Counter()
    order = []
    for launch in launches:
        kind = f"{launch.kernel} {[kind for _, kind in launch.signature if kind[0] == '*']} {launch.options}"
        order.append((turn[kind], launch))
        turn[kind] += 1
    return [launch for _, launch in sorted(order, key=lambda pair: pair[0])]


def tasks(asked: dict[str, Asked], known: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Launch]]:
    """For all architectures side by side; a model's come first, as they do in `asked`."""
    queues = {arch: in_turns(found.launches) for arch, found in asked.items()}
    for place in range(max(map(len, queues.values()))):
        for arch, queue in queues.items():
            if place < len(queue) and known[arch][str(queue[place])] is None:
                yield arch, queue[place]


def summary(table: dict[str, Any]) -> str:
    lines = [
        f"{table['command']}; triton {table['triton']}, torch {table['torch']}, {table['machine']}",
        "compiled ahead of time, not run: see docs/gpu.md",
        "",
        f"{'GPU':8} {'cells':>6} {'refused':>8} {'launches':>9} {'compiled':>9} {'wrong':>6} "
        f"{'most shared KiB':>16} {'of':>5} {'most registers':>15}",
    ]
    for arch, rows in ((arch, table["launches"][arch]) for arch in TARGETS):
        asked, made = table["asked"][arch], [row for row in rows.values() if row is not None]
        most = {
            name: max((row.get(name, 0) for row in made), default=0) for name in ("shared_bytes", "registers")
        }
        lines.append(
            f"{arch:8} {asked['cells']:6} {sum(asked['refused'].values()):8} {asked['launches']:9} "
            f"{len(made):9} {sum('wrong' in row for row in made):6} {most['shared_bytes'] / 1024:16.1f} "
            f"{TARGETS[arch].shared_per_program // 1024:5} {most['registers']:15}"
        )
    wrong: Counter[str] = Counter()
    for arch, rows in ((arch, table["launches"][arch]) for arch in TARGETS):
        for launch, row in rows.items():
            for sentence in (row or {}).get("wrong", ()):
                wrong[f"{arch}: {launch.partition(' |')[0]}: {sentence}"] += 1
    lines += [
        "",
        "wrong:" if wrong else "nothing wrong",
        *(f"{n:5} {what}" for what, n in sorted(wrong.items())),
    ]
    for arch, rows in ((arch, table["launches"][arch]) for arch in TARGETS):
        if unknown := sum(row is not None and not spills_known(row) for row in rows.values()):
            lines.append(f"{unknown:5} of {arch}: not known if they spill, to be compiled again")
    lines += ["", "refused by unsupported(), cells:"]
    refused: dict[str, dict[str, int]] = {}
    for arch, asked in ((arch, table["asked"][arch]) for arch in TARGETS):
        for sentence, count in asked["refused"].items():
            refused.setdefault(sentence, {})[arch] = count
    for sentence, counts in sorted(refused.items()):
        lines.append(f"  {sentence} [{', '.join(f'{arch} {count}' for arch, count in counts.items())}]")
    return "\n".join(lines) + "\n"


def write(table: dict[str, Any]) -> None:
    TABLE.write_bytes(lzma.compress(json.dumps(table, separators=(",", ":"), sort_keys=True).encode()))
    TABLE.with_name("launches.txt").write_text(summary(table))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    pool = multiprocessing.get_context("spawn").Pool(options.jobs)
    asked = dict(zip(TARGETS, pool.map(recorded, TARGETS, chunksize=1), strict=True))
    sources = {launch.kernel: source_of(launch.kernel) for seen in asked.values() for launch in seen.launches}
    before = read() if TABLE.exists() else {}
    fresh = before.get("triton") == triton.__version__
    known: dict[str, dict[str, Any]] = {}
    for arch, found in asked.items():
        old = before.get("launches", {}).get(arch, {}) if fresh else {}
        keep = {str(launch): launch.kernel for launch in found.launches}
        old = {key: row for key, row in old.items() if row is not None and spills_known(row)}
        known[arch] = {
            key: old.get(key) if before.get("sources", {}).get(kernel) == sources[kernel] else None
            for key, kernel in keep.items()
        }
    table = {
        "command": shlex.join(["python", "measurements/gpu/launches.py", *sys.argv[1:]]),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "machine": this_machine().name,
        "model": MODEL,
        "sources": sources,
        "asked": {
            arch: {"cells": found.cells, "launches": len(found.launches), "refused": found.refused}
            for arch, found in asked.items()
        },
        "launches": known,
    }
    todo = list(tasks(asked, known))
    print(f"{len(todo)} of {sum(map(len, known.values()))} to compile", flush=True)
    write(table)
    with pool:
        for number, (arch, key, row) in enumerate(pool.imap_unordered(compiled, todo), 1):
            known[arch][key] = row
            if number % 50 == 0:
                write(table)
                print(f"{number} of {len(todo)}, {time.perf_counter() - started:.0f} s", flush=True)
            if time.perf_counter() - started > 60 * options.minutes:
                break
    write(table)
    print(summary(table))


if __name__ == "__main__":
    main()
