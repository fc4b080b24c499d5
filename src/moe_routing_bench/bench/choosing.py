"""Turns what the user asked for into experiments: which cases, which implementations, how to measure.

What can be asked for is declared here, in three groups of fields: a function has them as arguments, a command
as options.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import psutil

from moe_routing_bench.bench.cores import core_count, idle_count
from moe_routing_bench.bench.device import why_no_gpu
from moe_routing_bench.bench.spans.span import (
    Span,
    check_measurable,
    is_ours,
    span_named,
    span_names,
)
from moe_routing_bench.core.names import ArgumentError, split_words
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.models.checkpoint import read_layer
from moe_routing_bench.ops.auto import invariant_names
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.workloads import gpu_cases
from moe_routing_bench.workloads.axes import Axis, Group, axes_of, defaults_of, explained
from moe_routing_bench.workloads.cases import MINUTE_FLOPS, cases, fitted, model_cases
from moe_routing_bench.workloads.experiment import (
    ATTENTION,
    DIRECTIONS,
    VIEWS,
    WORKLOAD,
    Experiment,
    ImplementationRef,
    check_device_name,
    device_kind,
)
from moe_routing_bench.workloads.gpu_cases import GPU_HOUR
from moe_routing_bench.workloads.regret_cases import IMPLEMENTATIONS
from moe_routing_bench.workloads.workload import check_name

SECONDS = 60.0
# suites that are measured there unless somebody says otherwise, and their view
ON_A_GPU = {"gpu-quick": "cuda_events", GPU_HOUR: "cuda_device"}
LIST = "LIST"  # several values, separated by commas
Words = list[str] | None  # each may hold several, split at commas


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What the command line shows of a field. `names` are the option's names, if they are not the field's
    name with dashes."""

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None


_list = partial(Flag, metavar=LIST)
INCLUDE = Flag(
    metavar="DIR",
    help="Also use the implementations in DIR/<op>/<name>.py and the routers in DIR/routers/<name>.py. "
    "Repeatable.",
)


def options_of(group: Group) -> Any:
    """A field for all the axes of a group that have an option; it holds those that have a value."""
    return field(default_factory=dict, metadata={"axes": group})


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes: of a model, of a named case, of a checkpoint, or given one by one."""

    model: Annotated[str | None, Flag(help="Sizes of a published model (`mrb list models`).")] = None
    case: Annotated[str | None, Flag(help="A case or suite by name (`mrb list cases`).")] = None
    tokens: Annotated[str | None, _list(help="T, tokens in the batch; 128,512 measures both.")] = None
    width: Annotated[str | None, _list(help="D, width of the model.")] = None
    hidden: Annotated[str | None, _list(help="F, hidden width of an expert.")] = None
    experts: Annotated[str | None, _list(help="E, experts of the layer.")] = None
    topk: Annotated[str | None, _list(names=("--topk", "--choices"), help="K, experts per token.")] = None
    checkpoint: Annotated[
        Path | None, Flag(metavar="DIR", help="Use weights and router of a saved model.")
    ] = None
    layer: Annotated[int, Flag(help="With --checkpoint: which layer, from 0.")] = 0
    full: Annotated[bool, Flag(names=("--full",), help="Full size, even if too big for a laptop.")] = False
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
        Flag(help="batch-invariant: those that promise it, beside the fastest of the usual ones."),
    ] = None
    seed: Annotated[int, Flag(help="Random seed of routing and data.")] = 0
    ranks: Annotated[
        Words,
        _list(help="W, ranks that share the experts; `mrb bench parallel` starts as many. Default: 1."),
    ] = None
    include_path: Annotated[list[Path] | None, INCLUDE] = None


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
        """The time limit of a command that measures these cases together."""
        return max(SECONDS, SECONDS / 3 * len(experiments)) if self.seconds is None else self.seconds

    def settled(self, suite: str = "", *, adapt: bool = False) -> dict[str, Any]:
        """All axes that say how to measure, by name. With `adapt`, the default uses only cores that are idle
        now. A sweep does not adapt, because it must find the same cells when it is resumed."""
        usual = ON_A_GPU.get(_suite(suite))
        device = self.device or ("cuda" if usual else "cpu")
        hour = {"max_seconds": gpu_cases.SECONDS} if _suite(suite) == GPU_HOUR else {}
        given = {**defaults_of(Experiment, "how"), **hour, **self.axes}
        check_device_name(device)
        views = VIEWS[device_kind(device)]
        return given | {
            "device": device,
            "view": self.axes.get("view") or (usual if usual in views else views[0]),
            "threads": chosen_threads(self.threads, adapt),
            "min_rounds": min(given["min_rounds"], given["max_rounds"]),
        }


def chosen_threads(threads: int | None, adapt: bool) -> int:
    cores = core_count()
    if threads is None:
        return idle_count() if adapt else cores
    if threads > cores:
        raise ArgumentError(f"{{threads}} is {threads}, but this process may use {cores} cores", "threads")
    return threads


def parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    """The fields of a group as parameters of a function: the group's own, and the axes that have an
    option."""
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
                    annotation=Annotated[kind, Flag(names=(facts.flag,), help=facts.help)],
                )


def group_of(group: Any, given: dict[str, Any]) -> Any:
    """Makes a group from options by name and takes them out of `given`. Options that are absent or None get
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
    """Returns the cases that a model, a name, a checkpoint or sizes stand for, in every direction. A case
    that this machine cannot hold is replaced by a smaller one, except with --full. `tokens` is the default T
    of a model or checkpoint."""
    given = sizes.lists()
    if sizes.model and sizes.case:
        raise ArgumentError("give either {model} or {case}, not both", "model", "case")
    if sizes.case and given:
        raise ArgumentError(
            f"{{case}} {sizes.case} fixes all sizes; leave out the others, or use {{model}}", "case", "model"
        )
    if sizes.checkpoint is not None:
        chosen = _of_checkpoint(span, sizes, tokens)
    elif sizes.case:
        chosen = cases(sizes.case)
    elif sizes.model:
        chosen = _of_model(span, sizes.model, given, tokens)
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
    """ValueError if a case does not fit in memory."""
    room = psutil.virtual_memory().available
    for case in chosen:
        if case.needed_bytes > room:
            raise ValueError(
                f"{case.case} needs about {case.needed_bytes / 2**30:,.0f} GiB of memory and "
                f"{room / 2**30:.0f} are free; sizes given by number are not replaced by smaller ones"
            )


def in_directions(chosen: Sequence[Experiment], what: WhatOptions) -> list[Experiment]:
    names = split_all(what.direction)
    return [replace(case, direction=name) for name in names for case in chosen] or list(chosen)


def _with_axes(case: Experiment, sizes: SizeOptions) -> Experiment:
    """Returns the case with the values that were given. A format of weights becomes part of its name."""
    given = dict(sizes.axes)
    store = given.pop("store", None)
    return stored_as(replace(case, **given), store)


def stored_as(case: Experiment, store: str | None) -> Experiment:
    """The case with its weights in a format, which its name then says; the case itself without one."""
    return replace(case, case=f"{case.case}-{store}", store=store) if store else case


def _own(shape: dict[str, int]) -> Experiment:
    s = MoEShape(**shape)
    return Experiment(case=f"own/{s.T}x{s.D}x{s.F}-e{s.E}-k{s.K}", span="", **vars(s))


def _of_model(span: Span, name: str, given: dict[str, list[int]], tokens: Sequence[int]) -> list[Experiment]:
    tokens = given.pop("T", tokens)
    if given:
        raise ArgumentError(f"{{model}} {name} fixes all sizes but {{tokens}}", "model", "tokens")
    chosen = model_cases(name, tokens)
    if span.name != ATTENTION:
        return chosen
    a = MODELS[name].attention
    return [replace(one, D=a.heads * a.head_dim, heads=a.heads, kv_heads=a.kv_heads) for one in chosen]


def _of_checkpoint(span: Span, sizes: SizeOptions, tokens: Sequence[int]) -> list[Experiment]:
    given, folder = sizes.lists(), sizes.checkpoint
    if not span.weights:
        raise ArgumentError(
            f"{{checkpoint}} gives weights, and {span.name} reads none; measure layer", "checkpoint"
        )
    if sizes.model or sizes.case or sizes.axes or set(given) - {"T"}:
        raise ArgumentError("{checkpoint} fixes all sizes but {tokens}", "checkpoint", "tokens")
    assert folder is not None
    layer = read_layer(folder, sizes.layer)
    weights = layer.weights
    sizes_of_layer: dict[str, Any] = {"D": weights.D, "F": weights.F, "E": weights.num_experts, "K": layer.K}
    return [
        Experiment(
            case=f"{folder.name} layer {sizes.layer}/{T}",
            span="",
            T=T,
            **sizes_of_layer,
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


def fitted_once(chosen: Sequence[Experiment], most_flops: float = MINUTE_FLOPS) -> list[Experiment]:
    """Returns the cases, or smaller ones where a case is too big for this machine. If several differ only by
    name, the first one stays."""
    kept: dict[Experiment, Experiment] = {}
    room = psutil.virtual_memory().available
    for case in chosen:
        twin = fitted(case, memory_bytes=room, most_flops=most_flops)
        nameless = replace(twin, case="", scaled_from="", sequences=twin.sequences if twin.heads else 1)
        kept.setdefault(nameless if twin.scaled_from else twin, twin)
    return list(kept.values())


def check_device(device: str) -> None:
    if device != "cpu" and (reason := why_no_gpu(device)) is not None:
        raise ArgumentError(
            f"torch finds no GPU here ({reason}); {{device}} pretend takes the same steps on the CPU, "
            "{device} cpu measures the CPU, and `mrb sweep --dry-run` shows what would be done",
            "device",
        )


def chosen_implementations(span: Span, case: Experiment, what: WhatOptions) -> tuple[ImplementationRef, ...]:
    """Returns the implementations of --impl (`name` or `name @ layout`), or all of them, in every layout,
    router and kind of layer. The layout `case` is the case's own."""
    words = split_all(what.layout) or ["case"]
    rules = [str(Layout.parse(case.layout if word == "case" else word)) for word in words]
    routers, layers = split_all(what.router) or [""], split_all(what.layer_kind) or [""]
    named = split_all(what.impl) or _default_names(span, case, several=len(routers) * len(layers) > 1)
    named = [name for word in named for name in (span.all_names() if word == "all" else [word])]
    if what.only is not None:
        named = _only(what.only, span, named if what.impl else [])
    implementations = []
    for text, router, layer in product(named, routers, layers):
        name, at, layout = (part.strip() for part in text.partition("@"))
        own = [str(Layout.parse(case.layout if layout == "case" else layout))] if at else rules
        for rule in own:
            implementation = ImplementationRef.read(name, layout=rule, router=router, layer=layer)
            settled = span.settled(implementation, case)
            implementations.append(replace(settled, frozen=settled.frozen and span.has_frozen(settled, case)))
    for implementation in implementations:
        span.check(implementation)  # raises if there is no such implementation, router or layer
    once: dict[ImplementationRef, ImplementationRef] = {}
    for implementation in implementations:
        once.setdefault(_meaning(span, implementation), implementation)
    return tuple(once.values())


def _only(flag: str, span: Span, named: list[str]) -> list[str]:
    """Returns "auto" as the baseline, then the implementations that keep the promise, to show what the
    promise costs."""
    if flag != BATCH_INVARIANT:
        raise ArgumentError(f"{{only}} takes {BATCH_INVARIANT}, not {flag!r}", "only")
    promising = []
    for name in named or [one for op in span.ops for one in invariant_names(all_ops()[op])]:
        try:
            parts = span.parts(name)
        except NotImplementedError:
            continue
        if parts and all(part.batch_invariant for part in parts) and not any(part.stored for part in parts):
            promising.append(name)
    if not promising:
        raise ValueError(f"nothing of {span.name} that was named is batch-invariant; see `mrb list`")
    return ["auto", *promising]


def _meaning(span: Span, implementation: ImplementationRef) -> ImplementationRef:
    """Two implementations with the same meaning are one, such as "auto" and what it picks."""
    if not all(map(is_ours, span.origins(implementation.name))):
        return implementation  # code from outside is not loaded here
    try:
        return replace(implementation, name=span.label(implementation.name))
    except NotImplementedError:
        return implementation


def _default_names(span: Span, case: Experiment, *, several: bool) -> list[str]:
    if several:  # routers or kinds of layer are compared, not implementations
        return ["auto"]
    if case.store:
        return span.stored_names(case)
    if _suite(case.case) == REGRET:
        return list(IMPLEMENTATIONS[span.name])
    if _suite(case.case) == GPU_HOUR:
        return gpu_cases.implementations_of(case)
    if _suite(case.case) not in ON_A_GPU:
        return span.usual()
    return [name for name in span.all_names() if not NOT_QUICK.search(name)]


def made_experiments(
    chosen: Sequence[Experiment], what: WhatOptions, how: Mapping[str, Any], *, own_threads: bool = False
) -> list[Experiment]:
    """Makes an experiment of every case under every workload. With `own_threads`, a case of the suite regret
    decides its number of threads."""
    made = []
    for name in split_all(what.workload):
        check_name(name)
    for case in chosen:
        span, given = span_named(case.span), dict(how)
        if own_threads and _suite(case.case) == REGRET:
            given["threads"] = min(case.threads, core_count())
        given["implementations"] = chosen_implementations(span, case, what)
        given["stages"] |= span.in_stages
        given["include"] = tuple(str(folder.resolve()) for folder in what.include_path or ())
        for workload, W in product(_workloads(case, what), _ranks(what)):
            made.append(replace(case, workload=workload, seed=what.seed, W=W, **given))
            check_measurable(made[-1])
    return made


def on_shared_threads(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Without --threads, which counts the threads of one rank, all ranks share the machine's threads."""
    return [
        replace(experiment, threads=max(1, experiment.threads // experiment.W))
        if span_named(experiment.span).grouped
        else experiment
        for experiment in experiments
    ]


def _ranks(what: WhatOptions) -> list[int]:
    words = split_all(what.ranks) or ["1"]
    if not all(re.fullmatch(r"[1-9][0-9]{0,4}", word) for word in words):
        raise ArgumentError(f"{{ranks}} is {', '.join(words)}; write numbers of ranks: 2,4", "ranks")
    return [int(word) for word in words]


def _workloads(case: Experiment, what: WhatOptions) -> list[str]:
    names = split_all(what.workload)
    if case.checkpoint:
        if names and span_named(case.span).routed:
            raise ArgumentError(
                "the checkpoint's own router decides; leave out {workload}, or measure expert_ffn", "workload"
            )
    return names or [case.workload]


def suite_cases(suite: str, sizes: SizeOptions, what: WhatOptions) -> list[Experiment]:
    """The cases of a sweep: a suite, a model or a case by name, or a span with sizes."""
    if suite in span_names():
        return chosen_cases(span_named(suite), sizes, what)
    if sizes.lists() or sizes.model or sizes.case or sizes.checkpoint:
        raise ArgumentError(
            f"{suite} fixes all sizes; give a span instead, such as layer with {{tokens}} 128,512", "tokens"
        )
    chosen = in_directions([_with_axes(case, sizes) for case in cases(suite)], what)
    if _suite(suite) == GPU_HOUR:  # a GPU has time for them, but this machine's memory holds them too
        return chosen if sizes.full else fitted_once(chosen, most_flops=math.inf)
    return chosen if sizes.full or _suite(suite) == REGRET else fitted_once(chosen)


def _suite(name: str) -> str:
    return name.partition("/")[0]


def split_all(texts: Sequence[str] | None) -> list[str]:
    return [word for text in texts or () for word in split_words(text)]


def bench_experiments(
    span: str, sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions
) -> list[Experiment]:
    how = measure.settled(sizes.case or "", adapt=True)
    experiments = made_experiments(chosen_cases(span_named(span), sizes, what, BENCH_TOKENS), what, how)
    check_device(how["device"])
    return experiments if measure.threads else on_shared_threads(experiments)


def sweep_experiments(
    suite: str, sizes: SizeOptions, what: WhatOptions, measure: MeasureOptions, *, dry_run: bool = False
) -> list[Experiment]:
    """On a pretended GPU gpu-hour is tiny, unless it is only shown."""
    how = measure.settled(suite)
    if _suite(suite) == GPU_HOUR and device_kind(how["device"]) == "pretend" and not dry_run:
        cases = [gpu_cases.rehearsed(case) for case in suite_cases(suite, replace(sizes, full=True), what)]
    else:
        cases = suite_cases(suite, sizes, what)
    if measure.threads is not None:
        return made_experiments(cases, what, how)
    return on_shared_threads(made_experiments(cases, what, how, own_threads=True))
