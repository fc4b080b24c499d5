"""The command that measures one record again."""

from __future__ import annotations

import shlex

from moe_routing_bench.bench.cell import Cell, Policy
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.workloads.axes import option_words
from moe_routing_bench.workloads.cases import SUITES, BenchCase, cases


def repro_command(cell: Cell, subject: Subject) -> str:
    """`mrb bench ...` for the subject beside the cell's baseline, with every choice spelled out."""
    case = cell.case
    words = ["mrb", "bench", case.span, *_sizes(case)]
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
    # the command's default for threads is the machine's
    words += option_words(cell.policy, beside=Policy(), always=("threads",))
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
        words = option_words(case, beside=known)
        if known.shape == s:
            return ["--case", name, "--full", *words]
        if case.fewer_tokens:
            model = name.partition("/")[0]
            few = ["--model", model, "--tokens", str(s.T)] if model in MODELS else ["--case", name]
            return [*few, *words]
    sizes = (("tokens", s.T), ("width", s.D), ("hidden", s.F), ("experts", s.E), ("topk", s.K))
    return [*(word for letter, size in sizes for word in (f"--{letter}", str(size))), *option_words(case)]


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
