"""Output: text for a terminal or a pipe, JSON, and one sentence for each mistake of the user."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from moe_routing_bench.names import one_of

_recording: ContextVar[Console | None] = ContextVar("_recording", default=None)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def pick(what: str, name: str, choices: Iterable[str]) -> str:
    """`name` if it is one of the choices, else an error that suggests one."""
    with user_mistakes():
        return one_of(what, name, choices)


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
    if not stderr and (recorder := _recording.get()) is not None:
        return recorder
    # error messages are full of brackets, so nothing is read as markup
    shown = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not shown.is_terminal:
        shown.width = 1000  # lines are not wrapped in a pipe
    return shown


@contextmanager
def recorded(width: int) -> Iterator[Console]:
    """Inside, the console keeps what is shown and prints nothing; see its export_text and export_html."""
    plain = {"markup": False, "emoji": False, "highlight": False, "force_jupyter": False}
    recorder = Console(file=io.StringIO(), record=True, width=width, force_terminal=False, **plain)
    token = _recording.set(recorder)
    try:
        yield recorder
    finally:
        _recording.reset(token)


def show(*things: RenderableType) -> None:
    out = console()
    if out.is_terminal or out.record:
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
