"""The command that measures one record again."""

from __future__ import annotations

import shlex

from moe_routing_bench.core.published import MODELS
from moe_routing_bench.workloads.axes import defaults_of, option_words, values_of
from moe_routing_bench.workloads.cases import SUITES, cases
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef


def repro_command(experiment: Experiment, implementation: ImplementationRef) -> str:
    """`mrb bench ...` for the implementation beside the baseline, with every choice spelled out."""
    words = ["mrb", "bench", experiment.span, *_sizes(experiment)]
    words += ["--direction", experiment.direction] if experiment.direction != "forward" else []
    words += ["--workload", experiment.workload] if experiment.workload else []
    words += ["--seed", str(experiment.seed)]
    words += ["--ranks", str(experiment.W)] if experiment.W > 1 else []
    shown = dict.fromkeys((experiment.implementations[0], implementation))
    for name in dict.fromkeys(f"{one.text} @ {one.layout}" for one in shown):
        words += ["--impl", name]
    for option, names in (
        ("--router", [one.router for one in shown]),
        ("--layer-kind", [one.layer for one in shown]),
    ):
        for name in dict.fromkeys(names):
            words += [option, name] if name else []
    # the command's default for threads is the machine's
    words += option_words(experiment, "how", beside=defaults_of(experiment, "how"), always=("threads",))
    for folder in experiment.include:
        words += ["--include-path", folder]
    return shlex.join(words)


def _sizes(case: Experiment) -> list[str]:
    """Returns the sizes as options, by a name if there is one. That needs fewer options and gives the same
    name in the key."""
    s = case.shape
    if case.checkpoint:
        return ["--checkpoint", case.checkpoint, "--layer", str(case.checkpoint_layer), "--tokens", str(s.T)]
    name = _unstored(case.scaled_from if case.fewer_tokens else case.case, case.store)
    if (known := _known(name)) is not None:
        beside = values_of(known)
        if known.shape == s:
            return ["--case", name, "--full", *option_words(case, "what", beside=beside)]
        if case.fewer_tokens:
            words = option_words(case, "what", beside=beside | {"sequences": case.sequences})
            model = name.partition("/")[0]
            few = ["--model", model, "--tokens", str(s.T)] if model in MODELS else ["--case", name]
            return [*few, *words]
    sizes = (("tokens", s.T), ("width", s.D), ("hidden", s.F), ("experts", s.E), ("topk", s.K))
    return [
        *(word for letter, size in sizes for word in (f"--{letter}", str(size))),
        *option_words(case, "what"),
    ]


def _unstored(name: str, store: str) -> str:
    """Returns the name without the format that --store adds to it."""
    return name.removesuffix(f"-{store}") if store else name


def _known(name: str) -> Experiment | None:
    if name.partition("/")[0] not in {*SUITES, *MODELS}:
        return None
    try:
        (known,) = cases(name)
    except ValueError:
        return None
    return known
