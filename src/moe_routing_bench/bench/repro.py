"""The command that measures one record again."""

from __future__ import annotations

import shlex
from dataclasses import fields

from moe_routing_bench.bench.cell import Cell, Policy
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.published import MODELS
from moe_routing_bench.workloads.cases import SUITES, cases

# options of `mrb bench` by field of Policy
OPTIONS = {
    "device": "--device", "threads": "--threads", "cache": "--cache", "target": "--target",
    "min_rounds": "--min-rounds", "max_rounds": "--rounds", "max_seconds": "--seconds",
    "processes": "--processes", "step_seconds": "--limit", "memory_gib": "--memory", "checked": "--checked",
}  # fmt: skip


def repro_command(cell: Cell, subject: Subject) -> str:
    """`mrb bench ...` for the subject beside the cell's baseline, with every choice spelled out."""
    case, s = cell.case, cell.case.shape
    words = ["mrb", "bench", case.span]
    if case.checkpoint:
        words += ["--checkpoint", case.checkpoint, "--layer", str(case.layer), "--tokens", str(s.T)]
    elif _is_named(cell):
        words += ["--case", _unstored_name(cell)]
    else:
        sizes = (("tokens", s.T), ("width", s.D), ("hidden", s.F), ("experts", s.E), ("topk", s.K))
        for name, size in sizes:
            words += [f"--{name}", str(size)]
        words += ["--dtype", case.dtype, "--activation", case.activation]
        words += ["--bias"] if case.bias else []
        words += ["--shared", str(case.shared_F)] if case.shared_F else []
    words += ["--store", case.store] if case.store else []
    words += ["--direction", case.direction] if case.direction != "forward" else []
    words += ["--workload", cell.workload] if cell.workload else []
    words += ["--seed", str(cell.seed)]
    words += ["--ranks", str(cell.W)] if cell.W > 1 else []
    shown = dict.fromkeys((cell.subjects[0], subject))
    for implementation in dict.fromkeys(f"{one.text} @ {one.layout}" for one in shown):
        words += ["--impl", implementation]
    for option, names in (
        ("--router", [one.router for one in shown]),
        ("--layer-kind", [one.layer for one in shown]),
    ):
        for name in dict.fromkeys(names):
            words += [option, name] if name else []
    default = Policy()
    for field in fields(Policy):
        value = getattr(cell.policy, field.name)
        # the command's default for threads is the machine's
        if field.name in OPTIONS and (field.name == "threads" or value != getattr(default, field.name)):
            words += [OPTIONS[field.name], f"{value:g}" if isinstance(value, float) else str(value)]
    for folder in cell.include:
        words += ["--include-path", folder]
    return shlex.join(words)


def _unstored_name(cell: Cell) -> str:
    """The name without the format that --store adds to it."""
    store = cell.case.store
    return cell.case.name.removesuffix(f"-{store}") if store else cell.case.name


def _is_named(cell: Cell) -> bool:
    group = cell.case.name.partition("/")[0]
    if group not in SUITES and group not in MODELS:
        return False
    try:
        (named,) = cases(_unstored_name(cell))
    except ValueError:
        return False
    return named.shape == cell.case.shape and named.dtype == cell.case.dtype
