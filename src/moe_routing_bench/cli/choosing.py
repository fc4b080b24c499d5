"""From the words of a command to cells: which case, which implementations, how to measure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from moe_routing_bench.bench.cases import BenchCase, cases, scaled
from moe_routing_bench.bench.cell import Subject
from moe_routing_bench.bench.models import DECODE_TOKENS, model
from moe_routing_bench.bench.spans import Span, span_named
from moe_routing_bench.plan import Layout
from moe_routing_bench.shapes import MoEShape

MODEL_TOKENS = 128


def chosen_cases(
    span: str,
    *,
    model_name: str | None,
    case_name: str | None,
    sizes: dict[str, int | None],
    dtype: str | None,
    activation: str | None,
    bias: bool,
    shared: int,
    full: bool,
) -> list[BenchCase]:
    """The cases asked for by a model, a name or sizes; those too big for here as their scaled twins."""
    given = {letter: value for letter, value in sizes.items() if value is not None}
    if model_name and case_name:
        raise ValueError("give either --model or --case, not both")
    if case_name:
        found = [replace(case, span=span) for case in cases(case_name)]
        if given:
            raise ValueError(f"--case {case_name} fixes all sizes; leave out the others, or use --model")
    elif model_name:
        preset = model(model_name)
        T = given.pop("T", MODEL_TOKENS)
        if given:
            raise ValueError(f"--model {model_name} fixes all sizes but --tokens")
        kind = "decode" if T <= max(DECODE_TOKENS) else "prefill"
        found = [
            BenchCase(
                name=f"{preset.name}/{kind}-{T}", span=span, shape=preset.shape(T),
                activation=preset.activation, bias=preset.bias, shared_F=preset.shared_F,
            )
        ]  # fmt: skip
    else:
        shape = MoEShape(**{"T": 128, "D": 512, "F": 256, "E": 16, "K": 2, **given})
        name = f"own/{shape.T}x{shape.D}x{shape.F}-e{shape.E}-k{shape.K}"
        found = [BenchCase(name=name, span=span, shape=shape, bias=bias, shared_F=shared)]
    if dtype:
        found = [replace(case, dtype=dtype) for case in found]
    if activation:
        found = [replace(case, activation=activation) for case in found]
    return found if full else [scaled(case) for case in found]


def chosen_subjects(
    span: Span, case: BenchCase, impls: Sequence[str], layouts: Sequence[str]
) -> tuple[Subject, ...]:
    """Implementations as asked for, `name` or `name @ layout`, in every layout; all there are without any."""
    named = [one for text in impls for one in split_words(text)]
    rules = [str(Layout.parse(one)) for text in layouts for one in split_words(text)] or [case.layout]
    found: list[Subject] = []
    for text in named or span.specs():
        spec, at, layout = (part.strip() for part in text.partition("@"))
        span.split(spec)
        for rule in [str(Layout.parse(layout))] if at else rules:
            found.append(Subject(spec=spec, layout=rule))
    return tuple(dict.fromkeys(found))


def split_words(text: str) -> list[str]:
    """Split at commas outside brackets: "a,b(x=1,y=2)" is a and b(x=1,y=2)."""
    words, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append(text[start:place])
            start = place + 1
    words.append(text[start:])
    return [word.strip() for word in words if re.search(r"\S", word)]


def span_of(name: str) -> Span:
    return span_named(name)
