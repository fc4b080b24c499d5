"""Names people write: the hint for one that does not exist, and names with options."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'gather_sum'? ` for "gathersum", or nothing if no known name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def one_of(what: str, name: str, choices: Iterable[str]) -> str:
    """`name` if it is one of the choices; else ValueError with all of them and the nearest."""
    choices = list(choices)
    if name not in choices:
        raise ValueError(
            f"there is no {what} {name!r}; {did_you_mean(name, choices)}there are {', '.join(choices)}"
        )
    return name


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """A name with options: "top_p(p=0.8,most=4)" is ("top_p", {"p": 0.8, "most": 4}). A value that is no
    Python literal is text: "staged(combine=native(level=avx2))" has the option combine "native(level=avx2)".
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise ValueError(
            f"cannot read {spec!r}; write a name, or a name with options: name(option=value,...)"
        )
    options: dict[str, Any] = {}
    for word in _words(match[2] or ""):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise ValueError(f"cannot read {word!r} in {spec!r}; write option=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            options[key] = value
    return match[1], options


def by_numbers(text: str) -> tuple[tuple[int, int, str], ...]:
    """The key to sort names by: T=16 before T=128."""
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def short_label(label: str) -> str:
    """The label without parts that are defaults: staged(combine=gather_sum,...) is plain staged."""
    for default in ("combine=gather_sum", "dispatch=index_select", "grouped_gemm=expert_loop"):
        label = label.replace(f"{default},", "").replace(f",{default}", "").replace(f"({default})", "")
    return label


def slots_of(router: str, *, T: int, E: int, K: int, sequences: int) -> str:
    """What Soft-MoE computes instead of K experts for each token, so that its time is not read alone:
    "128 slots, 25 % of the pairs" of soft_moe(slots_per_expert=8) with T=256, E=16, K=2. Else ""."""
    if (match := re.match(r"soft_moe\b(?:.*\bslots_per_expert=(\d{1,9})\b)?", router)) is None:
        return ""
    slots = sequences * E * int(match[1] or 1)
    return f"{slots:,} slots, {100 * slots / max(1, T * K):.3g} % of the pairs"


def _words(text: str) -> list[str]:
    """Split at commas outside brackets, whatever their depth."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word.strip()]
