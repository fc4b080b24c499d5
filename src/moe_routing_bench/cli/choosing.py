"""From options of a command to experiments: which cases, which implementations, how to measure.

How a command that measures ends: where results are, what has no time, what Ctrl-C leaves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import typer

from moe_routing_bench.bench.cores import core_count
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.bench.spans.span import (
    Span,
    check_measurable,
    is_ours,
    span_named,
    span_names,
    stand_ins,
)
from moe_routing_bench.bench.status import Status
from moe_routing_bench.cli.options import ON_A_GPU, SizeOptions, WhatOptions
from moe_routing_bench.core.names import short_label, split_words
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.formats.named import INT8_ROWS
from moe_routing_bench.models.checkpoint import read_layer
from moe_routing_bench.ops.auto import invariant_names
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.report.console import say
from moe_routing_bench.workloads.cases import cases, fitted, model_cases, stored_as
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.regret_cases import CONTENDERS
from moe_routing_bench.workloads.workload import check_name

MODEL_TOKENS = (128,)
BENCH_TOKENS = (1, 16, 128)  # one token, a few, a prompt: the fastest is another one for each
SIZES = {"T": 128, "D": 512, "F": 256, "E": 16, "K": 2}
# left out of suites for a GPU unless named: C++ for CPUs, and what is known to be slow anywhere
BATCH_INVARIANT = "batch-invariant"
REGRET = "regret"  # a suite whose cases say all: they are measured as they are
NOT_QUICK = re.compile(r"native|hf_|one_hot|dense_all_experts|eager_loop")


def chosen_cases(
    span: Span, sizes: SizeOptions, what: WhatOptions, tokens: Sequence[int] = MODEL_TOKENS
) -> list[Experiment]:
    """The cases that a model, a name, a checkpoint or sizes stand for, in every direction. Those that this
    machine cannot hold are replaced by smaller ones, except with --full. tokens: T of a model or checkpoint
    if nobody says it."""
    given = sizes.lists()
    if sizes.model and sizes.case:
        raise ValueError("give either --model or --case, not both")
    if sizes.case and given:
        raise ValueError(f"--case {sizes.case} fixes all sizes; leave out the others, or use --model")
    if sizes.checkpoint is not None:
        chosen = _of_checkpoint(span, sizes, tokens)
    elif sizes.case:
        chosen = cases(sizes.case)
    elif sizes.model:
        chosen = _of_model(sizes.model, given, tokens)
    elif span.case and not given:
        chosen = cases(span.case)
    else:
        chosen = [
            _own(dict(zip(SIZES, numbers, strict=True)))
            for numbers in product(*({**{n: [v] for n, v in SIZES.items()}, **given}[n] for n in SIZES))
        ]
    chosen = [replace(case, span=span.name, weights=span.weights) for case in chosen]
    chosen = in_directions([_with_axes(case, sizes) for case in chosen], what)
    if sizes.lists():
        _refuse_too_big(chosen)
        return chosen  # what is asked for by number is never replaced
    if sizes.full or sizes.checkpoint is not None:
        return chosen
    return fitted_once(chosen)


def _refuse_too_big(chosen: Sequence[Experiment]) -> None:
    """The judge and a worker each hold the weights, beside a few copies of the rows."""
    room = psutil.virtual_memory().available
    for case in chosen:
        if (needed := 2 * case.held_bytes + 4 * case.activation_bytes) > room:
            raise ValueError(
                f"{case.case} needs about {needed / 2**30:,.0f} GiB of memory and {room / 2**30:.0f} are "
                "free; sizes given by number are not replaced by smaller ones"
            )


def in_directions(chosen: Sequence[Experiment], what: WhatOptions) -> list[Experiment]:
    names = split_all(what.direction)
    return [replace(case, direction=name) for name in names for case in chosen] or list(chosen)


def _with_axes(case: Experiment, sizes: SizeOptions) -> Experiment:
    """The case with what was given; a format of weights is part of its name."""
    given = dict(sizes.axes)
    store = given.pop("store", None)
    return stored_as(replace(case, **given), store)


def _own(shape: dict[str, int]) -> Experiment:
    s = MoEShape(**shape)
    return Experiment(case=f"own/{s.T}x{s.D}x{s.F}-e{s.E}-k{s.K}", span="", **vars(s))


def _of_model(name: str, given: dict[str, list[int]], tokens: Sequence[int]) -> list[Experiment]:
    tokens = given.pop("T", tokens)
    if given:
        raise ValueError(f"--model {name} fixes all sizes but --tokens")
    return model_cases(name, tokens)


def _of_checkpoint(span: Span, sizes: SizeOptions, tokens: Sequence[int]) -> list[Experiment]:
    given, folder = sizes.lists(), sizes.checkpoint
    if not span.weights:
        raise ValueError(f"--checkpoint gives weights, and {span.name} reads none; measure layer")
    if sizes.model or sizes.case or sizes.axes or set(given) - {"T"}:
        raise ValueError("--checkpoint fixes all sizes but --tokens")
    assert folder is not None
    layer = read_layer(folder, sizes.layer)
    weights = layer.weights
    return [
        Experiment(
            case=f"{folder.name} layer {sizes.layer}/{T}",
            span="",
            T=T,
            D=weights.D,
            F=weights.F,
            E=weights.num_experts,
            K=layer.K,
            dtype=str(weights.w_in_EDG.dtype).removeprefix("torch."),
            activation=weights.activation,
            bias=weights.b_in_EG is not None,
            shared_F=0 if layer.shared is None else layer.shared.F,
            workload="",
            checkpoint=str(folder.resolve()),
            checkpoint_layer=sizes.layer,
        )
        for T in given.get("T", tokens)
    ]


def fitted_once(chosen: Sequence[Experiment]) -> list[Experiment]:
    """The cases, or smaller ones if they are too big for this machine; of those that differ only by name, the
    first."""
    kept: dict[Experiment, Experiment] = {}
    room = psutil.virtual_memory().available
    for case in chosen:
        twin = fitted(case, memory_bytes=room)
        nameless = replace(twin, case="", scaled_from="", sequences=1)
        kept.setdefault(nameless if twin.scaled_from else twin, twin)
    return list(kept.values())


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "torch finds no GPU here; --dry-run shows what would be done, --device pretend takes the same "
            "steps on the CPU, and --device cpu measures the CPU"
        )


def chosen_implementations(span: Span, case: Experiment, what: WhatOptions) -> tuple[ImplementationRef, ...]:
    """The implementations of --impl (`name` or `name @ layout`; none given: all), in every layout, router and
    kind of layer. The layout `case` is the case's own."""
    words = split_all(what.layout) or ["case"]
    rules = [str(Layout.parse(case.layout if word == "case" else word)) for word in words]
    routers, layers = split_all(what.router) or [""], split_all(what.layer_kind) or [""]
    named = split_all(what.impl) or _default_specs(span, case, several=len(routers) * len(layers) > 1)
    named = [spec for word in named for spec in (span.specs() if word == "all" else [word])]
    if what.only is not None:
        named = _only(what.only, span, named if what.impl else [])
    subjects = []
    for text, router, layer in product(named, routers, layers):
        spec, at, layout = (part.strip() for part in text.partition("@"))
        own = [str(Layout.parse(case.layout if layout == "case" else layout))] if at else rules
        for rule in own:
            subject = ImplementationRef.read(spec, layout=rule, router=router, layer=layer)
            settled = span.settled(subject, case)
            subjects.append(replace(settled, frozen=settled.frozen and span.has_frozen(settled, case)))
    for subject in subjects:
        span.check(subject)  # raises if there is no such implementation, router or layer
    once: dict[ImplementationRef, ImplementationRef] = {}
    for subject in subjects:
        once.setdefault(_meaning(span, subject), subject)
    return tuple(once.values())


def _only(flag: str, span: Span, named: list[str]) -> list[str]:
    """The specs that promise it, after "auto", the baseline: what they cost beside it."""
    if flag != BATCH_INVARIANT:
        raise ValueError(f"--only takes {BATCH_INVARIANT}, not {flag!r}")
    promising = []
    for spec in named or [one for op in span.ops for one in invariant_names(all_ops()[op])]:
        try:
            parts = span.parts(spec)
        except NotImplementedError:
            continue
        if parts and all(part.batch_invariant for part in parts) and not any(part.stored for part in parts):
            promising.append(spec)
    if not promising:
        raise ValueError(f"nothing of {span.name} that was named is batch-invariant; see `mrb list`")
    return ["auto", *promising]


def _meaning(span: Span, subject: ImplementationRef) -> ImplementationRef:
    """Two subjects with the same meaning are one, such as "auto" and what it picks."""
    if not all(map(is_ours, span.origins(subject.name))):
        return subject  # code from outside is not loaded here
    try:
        labels = "+".join(part.label for part in span.parts(subject.name))
    except NotImplementedError:
        return subject
    return replace(subject, name=labels or subject.name)


def _default_specs(span: Span, case: Experiment, *, several: bool) -> list[str]:
    if several:  # routers or kinds of layer are compared, not implementations
        return ["auto"]
    if case.store:
        return _stored_specs(span, case)
    if _suite(case.case) == REGRET:
        return list(CONTENDERS[span.name])
    quick = _suite(case.case) in ON_A_GPU
    if not quick:
        return span.usual()
    return [spec for spec in span.specs() if not NOT_QUICK.search(spec)]


def _stored_specs(span: Span, case: Experiment) -> list[str]:
    """The weights in the case's dtype, then as they are stored, the fastest first; what else runs here."""
    stored = f"native(store={case.store})"
    source = stand_ins(ImplementationRef(name=stored, layout=case.layout), case)
    asked = all_ops()[span.name].arguments(source).values()
    specs = ["native"]
    rows = f"(store={case.store}{INT8_ROWS})"
    for spec in (f"native{rows}", stored, f"llama_cpp{rows}", "vllm_cpu"):
        try:
            specs += [spec] if spec == stored or span.parts(spec)[0].why_not(*asked) is None else []
        except NotImplementedError:  # a library is absent
            continue
    return specs


def made_experiments(
    chosen: Sequence[Experiment], what: WhatOptions, how: Mapping[str, Any], *, own_threads: bool = False
) -> list[Experiment]:
    """Every case under every workload. own_threads: as many threads as a case of the suite regret says."""
    made = []
    for case in chosen:
        span, given = span_named(case.span), dict(how)
        if own_threads and _suite(case.case) == REGRET:
            given["threads"] = min(case.threads, core_count())
        given["implementations"] = chosen_implementations(span, case, what)
        given["include"] = tuple(str(folder.resolve()) for folder in what.include_path or ())
        for workload, W in product(_workloads(case, what), _ranks(what)):
            made.append(replace(case, workload=workload, seed=what.seed, W=W, **given))
            check_measurable(made[-1])
    return made


def on_shared_threads(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Without --threads, which are those of a rank, all ranks share the machine's."""
    return [
        replace(experiment, threads=max(1, experiment.threads // experiment.W))
        if span_named(experiment.span).grouped
        else experiment
        for experiment in experiments
    ]


def _ranks(what: WhatOptions) -> list[int]:
    words = split_all(what.ranks) or ["1"]
    if not all(re.fullmatch(r"[1-9][0-9]{0,4}", word) for word in words):
        raise ValueError(f"--ranks is {', '.join(words)}; write numbers of ranks: 2,4")
    return [int(word) for word in words]


def _workloads(case: Experiment, what: WhatOptions) -> list[str]:
    names = split_all(what.workload)
    if case.checkpoint:
        if names and span_named(case.span).routed:
            raise ValueError(
                "the checkpoint's own router decides; leave out --workload, or measure expert_ffn"
            )
    for name in names:
        check_name(name)
    return names or [case.workload]


def suite_cases(suite: str, sizes: SizeOptions, what: WhatOptions) -> list[Experiment]:
    """The cases of a sweep: a suite, a model or a case by name, or a span with sizes."""
    if suite in span_names():
        return chosen_cases(span_named(suite), sizes, what)
    if sizes.lists() or sizes.model or sizes.case or sizes.checkpoint:
        raise ValueError(f"{suite} fixes all sizes; give a span instead: mrb sweep layer --tokens 128,512")
    chosen = in_directions([_with_axes(case, sizes) for case in cases(suite)], what)
    return chosen if sizes.full or _suite(suite) == REGRET else fitted_once(chosen)


def _suite(name: str) -> str:
    return name.partition("/")[0]


def split_all(texts: Sequence[str] | None) -> list[str]:
    return [word for text in texts or () for word in split_words(text)]


NOT_TIMED, STOPPED = 1, 130  # exit codes; 2 is a mistake in the command
# of what nobody named: it cannot run here, or its turn did not come
EXCUSED = (Status.UNSUPPORTED, Status.NO_TIME)


def saving_folder(out: Path | None, *, save: bool) -> Path | None:
    """Where results go: `out` if it is given, else the default folder; None if they are not kept."""
    if out is not None:
        if not save:
            raise ValueError(
                "--out names a folder to save in, --no-save saves nothing; leave out one of them"
            )
        return out
    if not save:
        return None
    folder = default_results()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"results are not saved: {folder} cannot be made ({error.strerror}); --out names another folder")
        return None
    if not os.access(folder, os.W_OK):
        say(f"results are not saved: {folder} cannot be written; --out names another folder")
        return None
    return folder


def where_saved(folder: Path) -> str:
    """The last line: where results are and how to read them."""
    named = "" if folder == default_results() else f" --folder {folder}"
    return f"Saved in {folder}; `mrb results{named}` shows what is there."


def end(outcomes: Sequence[CellOutcome], what: WhatOptions) -> None:
    """Exit with NOT_TIMED and a sentence if something that was asked for has no time.

    Whatever --impl names was asked for. What nobody named may be EXCUSED.
    """
    named = [word for word in split_all(what.impl) if word != "all"]
    missing: dict[str, Status] = {}
    for outcome in outcomes:
        for one in outcome.subjects:
            if not one.samples and (named or one.status not in EXCUSED):
                missing.setdefault(f"{short_label(one.label)} @ {one.subject.layout}", one.status)
    nothing = [outcome for outcome in outcomes if not any(one.samples for one in outcome.subjects)]
    if missing:
        names = ", ".join(f"{name} ({status})" for name, status in missing.items())
        say(f"asked for and not timed: {names}")
    elif nothing:
        say(f"nothing was timed in {nothing[0].experiment.title}")
    if missing or nothing:
        raise typer.Exit(NOT_TIMED)


def stopped(done: int, experiments: int, advice: str) -> NoReturn:
    """After Ctrl-C."""
    say(f"stopped; {done} of {experiments} cells {'is' if done == 1 else 'are'} measured. {advice}")
    raise typer.Exit(STOPPED)
