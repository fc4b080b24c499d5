"""Options that several commands share, each group a dataclass; `with_options` gives them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moe_routing_bench.bench.cell import CACHES, Policy
from moe_routing_bench.bench.device import VIEWS
from moe_routing_bench.cli.finding import IncludePath
from moe_routing_bench.workloads.cases import DIRECTIONS

ON_A_GPU = ("gpu-quick",)  # suites that are measured there unless somebody says otherwise
Words = list[str] | None  # each may hold several, split at commas


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Which sizes: of a model, a named case or a checkpoint, or given one by one."""

    model: Annotated[str | None, _option(help="Sizes of a published model (`mrb list models`).")] = None
    case: Annotated[str | None, _option(help="A named case or suite (`mrb list cases`).")] = None
    tokens: Annotated[str | None, _option(help="T, tokens in the batch; 128,512 measures both")] = None
    width: Annotated[str | None, _option(help="D, the model's width; a list too")] = None
    hidden: Annotated[str | None, _option(help="F, an expert's hidden width; a list too")] = None
    experts: Annotated[str | None, _option(help="E, experts of the layer; a list too")] = None
    topk: Annotated[str | None, _option("--topk", "--choices", help="K, experts per token; a list too")] = (
        None
    )
    dtype: Annotated[str | None, _option(help="float32, bfloat16 or float16")] = None
    activation: Annotated[str | None, _option(help="swiglu, gelu, ...")] = None
    bias: Annotated[bool, _option("--bias/--no-bias", help="Experts with biases.")] = False
    shared: Annotated[int, _option(help="Hidden width of a shared expert.")] = 0
    checkpoint: Annotated[
        Path | None, _option(metavar="DIR", help="Weights and router of a saved model.")
    ] = None
    layer: Annotated[int, _option(help="With --checkpoint: which layer, from 0.")] = 0
    full: Annotated[bool, _option("--full", help="Full size even if it is too big for a laptop.")] = False

    def lists(self) -> dict[str, list[int]]:
        """The sizes that were given, by letter."""
        given = {
            "T": self.tokens, "D": self.width, "F": self.hidden, "E": self.experts, "K": self.topk
        }  # fmt: skip
        return {letter: _numbers(letter, text) for letter, text in given.items() if text is not None}


@dataclass(frozen=True, kw_only=True)
class WhatOptions:
    """What is measured for these sizes: the axes of a sweep."""

    impl: Annotated[
        Words,
        _option(
            help="Implementations, first the baseline: a,b or a name with options; `name @ block(64)` fixes "
            "its layout; auto: what a layer would take. Repeatable. Without it: all there are."
        ),
    ] = None
    workload: Annotated[
        Words, _option(help="Routing: zipf(1.2), uniform, ... (`mrb list workloads`). Repeatable.")
    ] = None
    layout: Annotated[
        Words, _option(help="compact, padded(capacity_factor=1.25), block(64), or case: its own. Repeatable.")
    ] = None
    router: Annotated[
        Words, _option(help="layer: rules to compare, switch,top_p(p=0.8) (`mrb list routers`). Repeatable.")
    ] = None
    layer_kind: Annotated[
        Words, _option(help="layer: moe, chain(iterations=2), perft(kind=R,rank=8). Repeatable.")
    ] = None
    direction: Annotated[
        Words, _option(help="; ".join(f"{name}: {what}" for name, what in DIRECTIONS.items()))
    ] = None
    seed: Annotated[int, _option(help="Seed of routing and data.")] = 0
    ranks: Annotated[int, _option("--ranks", help="W, ranks the experts are placed on.")] = 1
    include_path: IncludePath = None


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How it is measured: a Policy in a person's words."""

    device: Annotated[
        str | None,
        _option(
            help="cpu; cuda: a GPU, AMD's too; pretend: a GPU's steps on the CPU. cuda for gpu-quick, else "
            "cpu.",
            show_default=False,
        ),
    ] = None
    threads: Annotated[int, _option(help="Threads, pinned to as many cores.")] = 1
    cache: Annotated[str, _option(help="; ".join(f"{name}: {what}" for name, what in CACHES.items()))] = "hot"
    processes: Annotated[int, _option(help="Repeat in so many processes; 3 for a published figure.")] = 1
    rounds: Annotated[int, _option(help="Rounds at most.")] = 1000
    min_rounds: Annotated[int, _option(help="Rounds at least.")] = 20
    seconds: Annotated[float, _option(help="Seconds of rounds at most, for each case.")] = 15.0
    target: Annotated[float, _option(help="Stop when every ratio is known to this fraction.")] = 0.01
    limit: Annotated[float, _option(help="Seconds until a call counts as hanging.")] = 120.0
    memory: Annotated[float, _option(help="GiB a worker may allocate.")] = 12.0
    checked: Annotated[int, _option(help="Timed results to judge, for each implementation.")] = 3
    stages: Annotated[bool, _option("--stages", help="Also time the stages inside.")] = False

    def policy(self, suite: str = "") -> Policy:
        device = self.device or ("cuda" if suite.partition("/")[0] in ON_A_GPU else "cpu")
        return Policy(
            device=device,
            view=VIEWS.get(device, ("",))[0],
            threads=self.threads,
            cache=self.cache,
            processes=self.processes,
            max_rounds=self.rounds,
            min_rounds=min(self.min_rounds, self.rounds),
            max_seconds=self.seconds,
            target=self.target,
            step_seconds=self.limit,
            memory_gib=self.memory,
            checked=self.checked,
            stages=self.stages,
        )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be groups: each field of a group becomes an option of its own."""
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
        raise ValueError(f"cannot read {letter} = {text!r}; write a number, or several: 128,512") from None
