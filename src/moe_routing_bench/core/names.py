"""Reads what people write: names, names with options, lists of numbers; suggests names that exist."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'gather_sum'? ` for "gathersum"; empty if no known name is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def one_of(what: str, name: str, choices: Iterable[str]) -> str:
    """Returns `name` if it is one of the choices; else raises ValueError with all of them and the nearest."""
    choices = list(choices)
    if name not in choices:
        raise no_such(what, name, choices)
    return name


def no_such(what: str, name: str, known: Iterable[str]) -> ValueError:
    """To raise: there is no router 'swich'; did you mean 'switch'? there are hashed, switch"""
    known = list(known)
    return ValueError(f"there is no {what} {name!r}; {did_you_mean(name, known)}there are {', '.join(known)}")


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Reads a name with options: "top_p(p=0.8,most=4)" is ("top_p", {"p": 0.8, "most": 4}). A value that is
    not a Python literal is text: in "staged(combine=native(level=avx2))", combine is "native(level=avx2)".
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise ValueError(
            f"cannot read {spec!r}; write a name, or a name with options: name(option=value,...)"
        )
    options: dict[str, Any] = {}
    for word in split_words(match[2] or ""):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise ValueError(f"cannot read {word!r} in {spec!r}; write option=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            options[key] = value
    return match[1], options


def base_name(spec: str) -> str:
    """The name without options: top_p of "top_p(p=0.8)"."""
    return spec.partition("(")[0].strip()


def split_words(text: str) -> list[str]:
    """Splits at commas outside all brackets: "a,b(x=1,y=2)" is a and b(x=1,y=2)."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [word.strip() for word in found if word.strip()]


def read_numbers(text: str, most: int = 999_999) -> list[int]:
    """ "0,4,8-11" or "0,4,8..11" is 0, 4, 8, 9, 10, 11. An empty text gives no numbers."""
    number = rf"\s*([0-9]{{1,{len(str(most))}}})\s*"
    found: list[int] = []
    for word in text.split(",") if text else []:
        ends = re.fullmatch(rf"{number}(?:(?:-|\.\.){number})?", word)
        if ends is None:
            raise ValueError(f"{word.strip()[:40]!r} is no number and no range")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last <= most:
            raise ValueError(f"{word.strip()} does not rise, or ends past {most}")
        found += range(first, last + 1)
    return found


def option_numbers(argument: str, text: str, example: str, most: int = 999_999) -> list[int]:
    """The same for an argument, which needs at least one number."""
    try:
        if found := read_numbers(text, most):
            return found
        raise ValueError("it names no number")
    except ValueError as why:
        sentence = f"cannot read {{{argument}}} {text[:80]!r}: {why}; write {example}"
        raise ArgumentError(sentence, argument) from None


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 8 is "0-2,8"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def by_numbers(text: str) -> tuple[tuple[int, int, str], ...]:
    """The key to sort names by: T=16 before T=128."""
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def short_label(label: str) -> str:
    """The label without the parts that are defaults: staged(combine=gather_sum,...) becomes staged."""
    for default in ("combine=gather_sum", "dispatch=index_select", "grouped_gemm=expert_loop"):
        label = label.replace(f"{default},", "").replace(f",{default}", "").replace(f"({default})", "")
    return label


def slots_of(router: str, *, T: int, E: int, K: int, sequences: int) -> str:
    """Says what Soft-MoE computes instead of K experts for each token, to show beside its time:
    "128 slots, 25 % of the pairs" for soft_moe(slots_per_expert=8) with T=256, E=16, K=2. Empty for
    others."""
    if (match := re.match(r"soft_moe\b(?:.*\bslots_per_expert=(\d{1,9})\b)?", router)) is None:
        return ""
    slots = sequences * E * int(match[1] or 1)
    return f"{slots:,} slots, {100 * slots / max(1, T * K):.3g} % of the pairs"


class ArgumentError(ValueError):
    """A mistake in arguments, whose names Python and the command line spell differently:
    ArgumentError("give either {model} or {case}", "model", "case")"""

    def __init__(self, sentence: str, *names: str):
        self.sentence, self.names = sentence, names
        super().__init__(self.spelled(str))

    def spelled(self, spell: Callable[[str], str]) -> str:
        text = self.sentence
        for name in self.names:
            text = text.replace(f"{{{name}}}", spell(name))
        return text


class MistakeError(ValueError):
    """A sentence about the user's input, from code that may also raise ValueErrors of its own."""
