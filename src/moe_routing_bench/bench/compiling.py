"""Compiles our own C++ before the first trial and reports it, so that no trial pays for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.spans.span import is_ours, span_named
from moe_routing_bench.core import cpp, levels
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.experiment import Experiment

BUILDING = "building"
SECONDS_PER_BYTE = 1.2e-4  # of sources: 17 s for expert_ffn.native


def compile_first(experiments: Sequence[Experiment], say: Callable[[str], None]) -> None:
    """Compiles all C++ that these experiments need. A file that does not compile is no error here: the trial
    of its implementation reports it."""
    for folder in dict.fromkeys(folder for experiment in experiments for folder in experiment.include):
        include_folder(folder)  # only registers names
    here = [experiment for experiment in experiments if experiment.device == "cpu"]
    needed = [file for experiment in here for file in _needed(experiment)]
    for source, level in dict.fromkeys(needed):
        if not cpp.compiled(source, level):
            size = sum(path.stat().st_size for path in levels.with_includes(source))
            say(
                f"{BUILDING} {source.parent.name}.{source.stem}, once, "
                f"about {max(1, round(SECONDS_PER_BYTE * size))} s"
            )
            try:
                cpp.load(source, level)
            except NotImplementedError:
                continue


def _needed(experiment: Experiment) -> Iterator[tuple[Path, str | None]]:
    ops, span, inputs = all_ops(), span_named(experiment.span), Inputs(experiment)
    for one in experiment.implementations:
        if not all(map(is_ours, span.origins(one.name))):
            continue
        try:
            parts = [*span.parts(one.name)]
            parts += [ops[op].get(name) for op, name in span.resolved(one, inputs)]
        except (NotImplementedError, ValueError):  # a library is absent, or the sizes do not fit: no trial
            continue
        for part in parts:
            yield from _sources(part)
            for option, spec in part.config.items():
                if option in ops:
                    yield from _sources(ops[option].get(str(spec)))


def _sources(part: Implementation) -> Iterator[tuple[Path, str | None]]:
    """The C++ file of an implementation lies beside it: native.py and native.cpp. The kit asks for gradients,
    which may run the implementations of the same name in the operations before it."""
    ops = all_ops()
    own = ops[part.op]
    for op in (own, *(op for op in ops.values() if op.stage < own.stage)):
        source = Path(op.file).with_name(f"{part.name}.cpp")
        if source.exists():
            yield source, part.config.get("level") or None
        elif op is own:
            return
