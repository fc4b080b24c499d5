"""Output: text for a terminal or a pipe, JSON, and one sentence for each mistake of the user."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from moe_routing_bench.names import no_such

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def pick(what: str, name: str, choices: Iterable[str]) -> str:
    """`name` if it is one of the choices, else an error that suggests one."""
    choices = list(choices)
    if name not in choices:
        fail(str(no_such(what, name, choices)))
    return name


def pick_all(what: str, names: str, choices: Iterable[str]) -> list[str]:
    """The same for names separated by commas."""
    choices = list(choices)
    return [pick(what, name.strip(), choices) for name in names.split(",")]


def say(sentence: str) -> None:
    """On stderr, beside the output."""
    console(stderr=True).print(Text.assemble(("mrb: ", "bold red"), sentence))


def fail(sentence: str) -> NoReturn:
    say(sentence)
    raise typer.Exit(2)


class MistakeError(ValueError):
    """A sentence about the user's input, from code that may also raise ValueErrors of its own."""


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Use only around code that reads the user's input: a ValueError there is the user's mistake."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


def console(*, stderr: bool = False) -> Console:
    # error messages are full of brackets, so nothing is read as markup
    shown = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not shown.is_terminal:
        shown.width = 1000  # lines are not wrapped in a pipe
    return shown


def show(*things: RenderableType) -> None:
    out = console()
    if out.is_terminal:
        out.print(*things, sep="\n")
        return
    with out.capture() as captured:
        out.print(*things, sep="\n")
    # tables fill their last column with spaces
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def heading(name: str, summary: str) -> Text:
    meaning, _, shapes = summary.partition("   ")
    return Text.assemble((name, "bold cyan"), ": ", meaning, "   ", (shapes, "dim"))


def two_columns(first_width: int | None = None) -> Table:
    """A name and what is said of it. On a terminal a name takes at most half of a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    screen = console()
    most = max(screen.width // 2, first_width or 0) if screen.is_terminal else None
    table.add_column(min_width=first_width, max_width=most, overflow="fold", no_wrap=most is None)
    table.add_column(overflow="fold")
    return table


def show_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))
