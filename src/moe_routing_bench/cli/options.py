"""Options that several commands share, each group a dataclass; `with_options` gives them to a command.

One sentence and an exit code for a mistake of the user.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from moe_routing_bench.bench.cores import core_count, idle_count
from moe_routing_bench.core.names import one_of
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import FULL
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.report.console import say, spinner
from moe_routing_bench.routers.router import include_folder
from moe_routing_bench.workloads.axes import Axis, Group, axes_of, defaults_of, explained
from moe_routing_bench.workloads.experiment import DIRECTIONS, VIEWS, WORKLOAD, Experiment

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
IncludePath = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Also use the implementations in DIR/<op>/<name>.py and the routers in DIR/routers/<name>.py. "
        "Repeatable.",
    ),
]


def pick(what: str, name: str, choices: Iterable[str]) -> str:
    """`name` if it is one of the choices, else an error that suggests one."""
    with user_mistakes():
        return one_of(what, name, choices)


def pick_all(what: str, names: str, choices: Iterable[str]) -> list[str]:
    """The same for names separated by commas."""
    choices = list(choices)
    return [pick(what, name.strip(), choices) for name in names.split(",")]


def fail(sentence: str) -> NoReturn:
    say(sentence)
    raise typer.Exit(2)


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Use only around code that reads the user's input: a ValueError there is the user's mistake."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


@contextmanager
def reading() -> Iterator[Callable[[str], None]]:
    """Around code that reads results: a spinner on a terminal, and one sentence for a mistake."""
    try:
        with spinner("reading") as doing:
            yield doing
    except ValueError as error:
        fail(printable(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        if error.errno in FULL:
            fail(printable(f"the disk is full, so nothing can be written{where}"))
        fail(printable(f"cannot read the results{where}: {error.strerror or error}"))


def show_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))


def include_all(folders: list[Path] | None) -> None:
    with user_mistakes():
        for folder in folders or ():
            include_folder(folder)
        for op in all_ops().values():
            op.names()  # raises if a name exists twice


SECONDS = 60.0
ON_A_GPU = ("gpu-quick",)  # suites that are measured there unless somebody says otherwise
Words = list[str] | None  # each may hold several, split at commas


_option, _list = typer.Option, partial(typer.Option, metavar="LIST")


def options_of(group: Group) -> Any:
    """A field for all the axes of a group that have an option; it holds those that have a value."""
    return field(default_factory=dict, metadata={"axes": group})


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
    checkpoint: Annotated[
        Path | None, _option(metavar="DIR", help="Use weights and router of a saved model.")
    ] = None
    layer: Annotated[int, _option(help="With --checkpoint: which layer, from 0.")] = 0
    full: Annotated[bool, _option("--full", help="Full size, even if too big for a laptop.")] = False
    axes: Mapping[str, Any] = options_of("what")  # what was given, by the name of a field

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
    direction: Annotated[Words, _list(help=explained(DIRECTIONS))] = None
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
    """How it is measured."""

    axes: Mapping[str, Any] = options_of("how")

    @property
    def threads(self) -> int | None:
        return self.axes.get("threads")

    @property
    def device(self) -> str | None:
        return self.axes.get("device")

    @property
    def seconds(self) -> float | None:
        return self.axes.get("max_seconds")

    def seconds_for(self, experiments: Sequence[Experiment]) -> float:
        """Of a command that measures these together."""
        return max(SECONDS, SECONDS / 3 * len(experiments)) if self.seconds is None else self.seconds

    def settled(self, suite: str = "", *, adapt: bool = False) -> dict[str, Any]:
        """All axes that say how, by name. adapt: by default use only the cores that are idle now. A sweep
        does not: it must find its cells again when it is resumed."""
        device = self.device or ("cuda" if suite.partition("/")[0] in ON_A_GPU else "cpu")
        given = {**defaults_of(Experiment, "how"), **self.axes}
        return given | {
            "device": device,
            "view": VIEWS.get(device, ("",))[0],
            "threads": chosen_threads(self.threads, adapt),
            "min_rounds": min(given["min_rounds"], given["max_rounds"]),
        }


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
        parameters += parameters_of(groups[name])

    def expanded(**given: Any) -> None:
        made = {name: group_of(group, given) for name, group in groups.items()}
        command(**made, **given)

    expanded.__doc__, expanded.__name__ = command.__doc__, command.__name__
    required_first = sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
    expanded.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]
    expanded.__annotations__ = {one.name: one.annotation for one in parameters}
    return expanded


def parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    """The options of a group: one for each field, and for each axis that has one."""
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        if (among := one.metadata.get("axes")) is None:
            yield inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name]
            )
            continue
        types = get_type_hints(Experiment)
        for axis, facts in axes_of(Experiment, among):
            if facts.flag:
                kind = types[axis.name] | None if facts.asks else types[axis.name]
                yield inspect.Parameter(
                    _option_name(facts),
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None if facts.asks else axis.default,
                    annotation=Annotated[kind, _option(facts.flag, help=facts.help)],
                )


def group_of(group: Any, given: dict[str, Any]) -> Any:
    """A group made of options by name, which are taken out of `given`; those that are absent or None have
    their default."""
    values: dict[str, Any] = {}
    for one in fields(group):
        if (among := one.metadata.get("axes")) is not None:
            found = axes_of(Experiment, among)
            named = {axis.name: _option_name(facts) for axis, facts in found if facts.flag}
            asked = {axis: given.pop(option, None) for axis, option in named.items()}
            values[one.name] = {axis: value for axis, value in asked.items() if value is not None}
        elif one.name in given:
            values[one.name] = given.pop(one.name)
    return group(**values)


def _option_name(facts: Axis) -> str:
    """min_rounds of --min-rounds"""
    return facts.flag.partition("/")[0].lstrip("-").replace("-", "_")


def _numbers(letter: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"cannot read {letter} = {text!r}; write one or more numbers: 128,512") from None
