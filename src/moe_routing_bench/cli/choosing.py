"""From the words of a command to cells: which case, which implementations, how to measure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moe_routing_bench.bench.cell import Cell, Policy, Subject
from moe_routing_bench.bench.device import VIEWS
from moe_routing_bench.bench.spans import Span, span_named
from moe_routing_bench.plan import Layout
from moe_routing_bench.published import model
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import DECODE_TOKENS, BenchCase, cases, scaled
from moe_routing_bench.workloads.workload import check_name

MODEL_TOKENS = 128
ON_A_GPU = ("gpu-quick",)  # suites that are measured there unless somebody says otherwise
# left out of them unless named: C++ for CPUs, and what is known to be slow anywhere
NOT_QUICK = re.compile(r"native|hf_|one_hot|dense_all_experts|eager_loop")
WORKLOAD = "zipf(1.2)"  # uniform routing flatters every kernel


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
    return found if full else scaled_once(found)


def scaled_once(found: Sequence[BenchCase]) -> list[BenchCase]:
    """The cases, or their twins where they are too big; of twins that differ only by name, the first."""
    kept: dict[BenchCase, BenchCase] = {}
    for twin in map(scaled, found):
        nameless = replace(twin, name="", scaled_from="", sequences=1)
        kept.setdefault(nameless if twin.scaled_from else twin, twin)
    return list(kept.values())


def chosen_device(device: str | None, suite: str) -> dict[str, str]:
    """The fields of a Policy that say where; a device that does not exist is the Policy's to refuse."""
    name = device or ("cuda" if suite.partition("/")[0] in ON_A_GPU else "cpu")
    return {"device": name, "view": VIEWS.get(name, ("",))[0]}


def check_device(policy: Policy) -> None:
    if policy.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no GPU here; --dry-run says what would be done, --device pretend takes the same "
            "steps on the CPU, and --device cpu measures the CPU"
        )


def chosen_subjects(
    span: Span, case: BenchCase, impls: Sequence[str], layouts: Sequence[str]
) -> tuple[Subject, ...]:
    """Implementations as asked for, `name` or `name @ layout`, in every layout; all there are without any.
    The layout `case` is the case's own."""
    named = [one for text in impls for one in split_words(text)]
    words = [one for text in layouts for one in split_words(text)] or ["case"]
    rules = [str(Layout.parse(case.layout if word == "case" else word)) for word in words]
    quick = case.name.partition("/")[0] in ON_A_GPU
    everything = [spec for spec in span.specs() if not (quick and NOT_QUICK.search(spec))]
    found: list[Subject] = []
    for text in named or everything:
        spec, at, layout = (part.strip() for part in text.partition("@"))
        span.origins(spec)  # raises if there is no such implementation
        own = [str(Layout.parse(case.layout if layout == "case" else layout))] if at else rules
        for rule in own:
            found.append(Subject(spec=spec, layout=rule))
    return tuple(dict.fromkeys(found))


def made_cells(
    found: Sequence[BenchCase],
    *,
    workloads: Sequence[str] | None,
    impls: Sequence[str] | None,
    layouts: Sequence[str] | None,
    seed: int,
    ranks: int,
    policy: Policy,
    include: Sequence[Path] | None,
) -> list[Cell]:
    """Every case under every workload."""
    names = [word for text in workloads or [WORKLOAD] for word in split_words(text)]
    for name in names:
        check_name(name)
    return [
        Cell(
            case=case,
            workload=name,
            subjects=chosen_subjects(span_named(case.span), case, impls or (), layouts or ()),
            seed=seed,
            W=ranks,
            policy=policy,
            include=tuple(str(folder.resolve()) for folder in include or ()),
        )
        for case in found
        for name in names
    ]


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
