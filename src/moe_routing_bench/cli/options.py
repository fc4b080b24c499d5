"""Options that several commands share. Each group is a dataclass, and `with_options` gives it to a command.

A mistake of the user becomes one sentence and an exit code.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from moe_routing_bench.bench.choosing import INCLUDE, Flag, group_of, parameters_of
from moe_routing_bench.core.names import ArgumentError, one_of
from moe_routing_bench.core.text import printable
from moe_routing_bench.core.whole_files import FULL
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.report.console import say, spinner
from moe_routing_bench.routers.router import include_folder

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
IncludePath = Annotated[list[Path] | None, typer.Option(metavar=INCLUDE.metavar, help=INCLUDE.help)]
SPELLED = {"top_k": "--topk", "save": "--no-save"}  # options that are not spelled like the argument


def pick(what: str, name: str, choices: Iterable[str]) -> str:
    """Returns `name` if it is one of the choices, else fails and suggests one."""
    with user_mistakes():
        return one_of(what, name, choices)


def pick_all(what: str, names: str, choices: Iterable[str]) -> list[str]:
    """Does the same for names separated by commas."""
    choices = list(choices)
    return [pick(what, name.strip(), choices) for name in names.split(",")]


def fail(sentence: str) -> NoReturn:
    say(sentence)
    raise typer.Exit(2)


def sentence_of(error: ValueError) -> str:
    """Returns the message of an error, with arguments spelled as options."""
    if not isinstance(error, ArgumentError):
        return str(error)
    return error.spelled(lambda name: SPELLED.get(name, f"--{name.replace('_', '-')}"))


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turns a ValueError into one sentence. Use it only around code that reads the user's input."""
    try:
        yield
    except ValueError as error:
        fail(sentence_of(error))


@contextmanager
def reading() -> Iterator[Callable[[str], None]]:
    """Shows a spinner while results are read, and turns a mistake into one sentence."""
    try:
        with spinner("reading") as doing:
            yield doing
    except ValueError as error:
        fail(printable(sentence_of(error)))
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


def _typed(hint: Any) -> Any:
    """Returns the type of a field with its option in the form that typer needs."""
    for flag in hint.__metadata__:
        if isinstance(flag, Flag):
            option = typer.Option(*flag.names, help=flag.help, metavar=flag.metavar)
            return Annotated[hint.__origin__, option]
    return hint


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each group in a command's parameters by its fields, one option each."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
            continue
        parameters += [one.replace(annotation=_typed(one.annotation)) for one in parameters_of(groups[name])]

    def expanded(**given: Any) -> None:
        made = {name: group_of(group, given) for name, group in groups.items()}
        command(**made, **given)

    expanded.__doc__, expanded.__name__ = command.__doc__, command.__name__
    required_first = sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
    expanded.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]
    expanded.__annotations__ = {one.name: one.annotation for one in parameters}
    return expanded
