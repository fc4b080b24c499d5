"""The command that measures one record again."""

from __future__ import annotations

import shlex
from dataclasses import fields

from moe_routing_bench.bench.cell import Cell, Policy
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.published import MODELS
from moe_routing_bench.workloads.cases import SUITES, BenchCase, cases

# options of `mrb bench` by field of Policy
OPTIONS = {
    "device": "--device", "threads": "--threads", "cache": "--cache", "target": "--target",
    "min_rounds": "--min-rounds", "max_rounds": "--rounds", "max_seconds": "--seconds",
    "processes": "--processes", "step_seconds": "--limit", "memory_gib": "--memory", "checked": "--checked",
    "stages": "--stages", "sandbox": "--sandbox", "all": "--all",
}  # fmt: skip


def repro_command(cell: Cell, subject: Subject) -> str:
    """`mrb bench ...` for the subject beside the cell's baseline, with every choice spelled out."""
    case = cell.case
    words = ["mrb", "bench", case.span, *_sizes(case)]
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
            words.append(OPTIONS[field.name])
            if value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
    for folder in cell.include:
        words += ["--include-path", folder]
    return shlex.join(words)


def _sizes(case: BenchCase) -> list[str]:
    """Its sizes, by a name if there is one: fewer options, and the same name in the key."""
    s = case.shape
    if case.checkpoint:
        return ["--checkpoint", case.checkpoint, "--layer", str(case.layer), "--tokens", str(s.T)]
    name = _unstored(case.scaled_from if case.fewer_tokens else case.name, case.store)
    if (known := _known(name)) is not None:
        words = ["--dtype", case.dtype] if case.dtype != known.dtype else []
        words += ["--activation", case.activation] if case.activation != known.activation else []
        if known.shape == s:
            return ["--case", name, "--full", *words]
        if case.fewer_tokens:
            model = name.partition("/")[0]
            few = ["--model", model, "--tokens", str(s.T)] if model in MODELS else ["--case", name]
            return [*few, *words]
    sizes = (("tokens", s.T), ("width", s.D), ("hidden", s.F), ("experts", s.E), ("topk", s.K))
    words = [word for letter, size in sizes for word in (f"--{letter}", str(size))]
    words += ["--dtype", case.dtype, "--activation", case.activation]
    words += ["--bias"] if case.bias else []
    return words + (["--shared", str(case.shared_F)] if case.shared_F else [])


def _unstored(name: str, store: str) -> str:
    """The name without the format that --store adds to it."""
    return name.removesuffix(f"-{store}") if store else name


def _known(name: str) -> BenchCase | None:
    if name.partition("/")[0] not in {*SUITES, *MODELS}:
        return None
    try:
        (known,) = cases(name)
    except ValueError:
        return None
    return known
