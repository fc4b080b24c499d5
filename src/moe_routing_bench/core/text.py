"""Makes text from files, records, kernels and other programs safe for terminals, messages and figures."""

from __future__ import annotations

import re
import signal
from typing import Any

SHORT = 120  # the most letters of a value in a sentence


def printable(text: object, limit: int | None = None, bad: str = "?", keep: str = "") -> str:
    """Replaces letters that could control a terminal by `bad`, unless they are in `keep`. Text longer than
    `limit` is cut and ends in "...".
    """
    whole = str(text)
    shown = "".join(letter if letter.isprintable() or letter in keep else bad for letter in whole[:limit])
    return shown if limit is None or len(whole) <= limit else f"{shown}..."


def short(value: object) -> str:
    """A value from a file, made safe and short for a sentence."""
    return printable(value, SHORT)


def first_problem(error: Any) -> str:
    """The first problem of a pydantic ValidationError: "implementations.0.spec: Field required"."""
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{short('.'.join(map(str, problem['loc'])) or 'the text')}: {short(problem['msg'])}"


def one_line(text: str, most: int = 2_000) -> str:
    """Makes any text fit a field of a record: letters that cannot be printed become spaces, long text is
    cut."""
    line = re.sub(r"\n+", " ", printable(encodable(text), bad="\n")).strip()
    return line if len(line) <= most else line[: most - 3] + "..."


def ending(code: int) -> str:
    """How a process ended, by its exit code: "was ended by signal SIGKILL"."""
    if code >= 0:
        return f"ended by itself with code {code}, without an answer"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"was ended by signal {name}"


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which UTF-8 cannot write."""
    return text.encode("utf-8", "replace").decode()
