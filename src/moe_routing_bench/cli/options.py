"""Options that several commands share, each group a dataclass; `with_options` gives them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moe_routing_bench.bench.cell import CACHES, Cell, Policy
from moe_routing_bench.bench.cores import core_count, idle_count
from moe_routing_bench.bench.device import VIEWS
from moe_routing_bench.cli.finding import IncludePath
from moe_routing_bench.workloads.cases import DIRECTIONS

SECONDS = 60.0
ON_A_GPU = ("gpu-quick",)  # suites that are measured there unless somebody says otherwise
WORKLOAD = "zipf(1.2)"  # the default; uniform routing flatters every kernel
Words = list[str] | None  # each may hold several, split at commas


_option, _list = typer.Option, partial(typer.Option, metavar="LIST")


def _explained(choices: dict[str, str]) -> str:
    return ". ".join(f"{name}: {meaning}" for name, meaning in choices.items()) + "."


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes: of a model, of a named case, of a checkpoint, or given one by one."""

    model: Annotated[str | None, _option(help="Sizes of a published model (`mrb list models`).")] = None
    case: Annotated[str | None, _option(help="A case or suite by name (`mrb list cases`).")] = None
    tokens: Annotated[str | None, _list(help="T, tokens in the batch; 128,512 measures both.")] = None
    width: Annotated[str | None, _list(help="D, width of the model.")] = None
    hidden: Annotated[str | None, _list(help="F, hidden width of an expert.")] = None
    experts: Annotated[str | None, _list(help="E, experts of the layer.")] = None
    topk: Annotated[str | None, _list("--topk", "--choices", help="K, experts per token.")] = None
    dtype: Annotated[str | None, _option(help="float32, bfloat16 or float16.")] = None
    store: Annotated[
        str | None, _option(help="For expert_ffn: weights in this format, int8 or int4_g32 (`mrb formats`).")
    ] = None
    activation: Annotated[str | None, _option(help="Of the experts: swiglu, gelu, ...")] = None
    bias: Annotated[bool, _option("--bias/--no-bias", help="Give the experts biases.")] = False
    shared: Annotated[int, _option(help="Hidden width of a shared expert; 0: none.")] = 0
    checkpoint: Annotated[
        Path | None, _option(metavar="DIR", help="Use weights and router of a saved model.")
    ] = None
    layer: Annotated[int, _option(help="With --checkpoint: which layer, from 0.")] = 0
    full: Annotated[bool, _option("--full", help="Full size, even if too big for a laptop.")] = False

    def lists(self) -> dict[str, list[int]]:
        """The sizes that were given, by letter."""
        given = {
            "T": self.tokens, "D": self.width, "F": self.hidden, "E": self.experts, "K": self.topk
        }  # fmt: skip
        return {letter: _numbers(letter, text) for letter, text in given.items() if text is not None}


@dataclass(frozen=True, kw_only=True)
class WhatOptions:
    """What is measured for these sizes; options with a list can also be repeated."""

    impl: Annotated[
        Words,
        _list(
            help="Implementations, the baseline first; `name @ block(64)` fixes the layout, `auto` is what a "
            "layer would use, `all` every one there is. Default: the few that matter."
        ),
    ] = None
    workload: Annotated[
        Words, _list(help=f"Routing, such as uniform (`mrb list workloads`). Default: {WORKLOAD}.")
    ] = None
    layout: Annotated[
        Words, _list(help="compact, padded(capacity_factor=2) or block(64). Default: the case's own.")
    ] = None
    router: Annotated[
        Words, _list(help="For layer: routers to compare, such as switch,top_p(p=0.8) (`mrb list routers`).")
    ] = None
    layer_kind: Annotated[
        Words, _list(help="For layer: moe, chain(iterations=2) or perft(kind=R,rank=8).")
    ] = None
    direction: Annotated[Words, _list(help=_explained(DIRECTIONS))] = None
    only: Annotated[
        str | None,
        _option(help="batch-invariant: those that promise it, beside the fastest of the usual ones."),
    ] = None
    seed: Annotated[int, _option(help="Random seed of routing and data.")] = 0
    ranks: Annotated[
        Words,
        _list(help="W, ranks that share the experts; `mrb bench parallel` starts as many. Default: 1."),
    ] = None
    include_path: IncludePath = None


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How it is measured: the fields of a Policy."""

    device: Annotated[
        str | None,
        _option(
            help="cpu, cuda (AMD's GPUs too), or pretend: a GPU's steps on the CPU. Default: cuda for "
            "gpu-quick, else cpu.",
            show_default=False,
        ),
    ] = None
    threads: Annotated[
        int | None,
        _option(help="Threads (of a rank), pinned to cores. Default: all physical cores that are idle."),
    ] = None
    cache: Annotated[str, _option(help=_explained(CACHES))] = "hot"
    processes: Annotated[int, _option(help="Repeat in this many processes; 3 for a published figure.")] = 1
    rounds: Annotated[int, _option(help="Most rounds of a case.")] = 1000
    min_rounds: Annotated[int, _option(help="Fewest rounds of a case.")] = 20
    seconds: Annotated[
        float | None,
        _option(
            help="Seconds for the whole command, in `mrb sweep` for each case; kernels are built before. "
            "Default: 60, or 20 a case.",
            show_default=False,
        ),
    ] = None
    target: Annotated[float, _option(help="Stop when every ratio is known this precisely.")] = 0.01
    limit: Annotated[float, _option(help="Seconds after which a call counts as hanging.")] = 120.0
    memory: Annotated[float, _option(help="GiB that a worker may allocate.")] = 12.0
    checked: Annotated[int, _option(help="Timed results to check, for each implementation.")] = 3
    stages: Annotated[bool, _option("--stages", help="Also time the stages.")] = False
    sandbox: Annotated[
        bool,
        _option("--sandbox", help="Run code from outside under bubblewrap: no network, nothing written."),
    ] = False
    all: Annotated[
        bool, _option("--all", help="All rounds also for what is 5 times slower than the best.")
    ] = False

    def seconds_for(self, cells: Sequence[Cell]) -> float:
        """Of a command that measures these together."""
        return max(SECONDS, SECONDS / 3 * len(cells)) if self.seconds is None else self.seconds

    def policy(self, suite: str = "", *, adapt: bool = False) -> Policy:
        """adapt: by default use only the cores that are idle now. A sweep does not: it must find its cells
        again when it is resumed."""
        device = self.device or ("cuda" if suite.partition("/")[0] in ON_A_GPU else "cpu")
        return Policy(
            device=device,
            view=VIEWS.get(device, ("",))[0],
            threads=chosen_threads(self.threads, adapt),
            cache=self.cache,
            processes=self.processes,
            max_rounds=self.rounds,
            min_rounds=min(self.min_rounds, self.rounds),
            max_seconds=SECONDS if self.seconds is None else self.seconds,
            target=self.target,
            step_seconds=self.limit,
            memory_gib=self.memory,
            checked=self.checked,
            stages=self.stages,
            sandbox=self.sandbox,
            all=self.all,
        )


def chosen_threads(threads: int | None, adapt: bool) -> int:
    cores = core_count()
    if threads is None:
        return idle_count() if adapt else cores
    if threads > cores:
        raise ValueError(f"--threads {threads}, but this process may use {cores} cores")
    return threads


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each group among a command's parameters by its fields, one option each."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
            continue
        inside = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=inside[field.name]
            )
            for field in fields(groups[name])
        ]

    def expanded(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    expanded.__doc__, expanded.__name__ = command.__doc__, command.__name__
    required_first = sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
    expanded.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]
    expanded.__annotations__ = {one.name: one.annotation for one in parameters}
    return expanded


def _numbers(letter: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"cannot read {letter} = {text!r}; write one or more numbers: 128,512") from None
