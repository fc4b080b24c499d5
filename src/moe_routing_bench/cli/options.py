"""Options that several commands share, each group a dataclass; `with_options` gives them to a command.

Ops and routers by name, and folders of --include-path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moe_routing_bench.bench.cores import core_count, idle_count
from moe_routing_bench.cli.terminal import user_mistakes
from moe_routing_bench.ops.registry import BUILT_IN, NO_IMPLEMENTATIONS, all_ops, files_of
from moe_routing_bench.routers.router import Router, all_routers, built_in_names, include_folder
from moe_routing_bench.workloads.axes import Axis, Group, axes_of, defaults_of, explained
from moe_routing_bench.workloads.experiment import DIRECTIONS, VIEWS, WORKLOAD, Experiment

IncludePath = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Also use the implementations in DIR/<op>/<name>.py and the routers in DIR/routers/<name>.py. "
        "Repeatable.",
    ),
]
ROUTERS = "routers"


def include_all(folders: list[Path] | None) -> None:
    with user_mistakes():
        for folder in folders or ():
            include_folder(folder)
        for op in all_ops().values():
            op.names()  # raises if a name exists twice


@dataclass(frozen=True, kw_only=True)
class OutsideFile:
    """OutsideFile(op="combine", name="mine", path=.../combine/mine.py); its op is `routers` for a router, its
    name `op` for a new operation."""

    op: str
    name: str
    path: Path

    @property
    def origin(self) -> str:
        return f"file {self.path}"


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The folders of --include-path and their files. Nothing in them is loaded here (describing.py)."""

    folders: tuple[Path, ...]
    files: tuple[OutsideFile, ...]

    @property
    def ops(self) -> list[OutsideFile]:
        """The new operations."""
        return [file for file in self.files if file.name == "op" and file.op != ROUTERS]

    def of(self, op_pattern: str) -> Iterator[OutsideFile]:
        """Implementations of the operations that match, or routers."""
        for file in self.files:
            if fnmatchcase(file.op, op_pattern) and (
                file.name not in NO_IMPLEMENTATIONS or file.op == ROUTERS
            ):
                yield file


def found_outside(folders: Sequence[Path] | None) -> Outside:
    """ValueError if a name exists twice."""
    ops = all_ops()
    taken = {(name, spec): op.origin(spec) for name, op in ops.items() for spec in op.names()}
    taken |= {(ROUTERS, name): BUILT_IN for name in built_in_names()}
    files = []
    for path in files_of(folders or ()):
        file = OutsideFile(op=path.parent.name, name=path.stem, path=path)
        if file.name == "op" and file.op in ops:
            raise ValueError(f"{path}: there is an operation {file.op} already; rename the folder")
        if (other := taken.setdefault((file.op, file.name), file.origin)) != file.origin:
            raise ValueError(f"{file.op}.{file.name} exists twice: {other} and {file.origin}; rename one")
        files.append(file)
    return Outside(folders=tuple(folders or ()), files=tuple(files))


def routers_found() -> dict[str, type[Router]]:
    """Every router. An error in an included folder is shown as the user's mistake."""
    with user_mistakes():
        return all_routers()


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
