"""What impl="auto" means: which implementation runs these arguments, and why. The candidates are, in order:

1. The measured winner, if decisions are on and were made for this machine, torch and these sizes.
2. What the op prefers on this class of machine (`ops/<op>/preferences.py`), and last its default.

The first candidate that can run the arguments is chosen, at every call, because tokens, dtype, device and the
need for gradients may change from call to call. `Choice.why` names the candidates that could not run.
Decisions are off unless the environment variable MRB_DECISIONS=<file> or use_decisions(<file>) turns them on;
no file is looked for anywhere else. The variable and its file are read once, at the first choice.

A call looks up rows that were ranked before, compares the sizes with the conditions of a row, and asks the
chosen implementation whether it can run: about 2 us on a CPU.
"""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from moe_routing_bench.core import cpp
from moe_routing_bench.core.dtypes import name_of
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.decisions import DecisionEntry, Decisions, Facts, read_decisions
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.preference import (
    PLAIN,
    Preference,
    fits,
    leading,
    machine_of,
    preferences,
    timed_level,
)
from moe_routing_bench.ops.registry import Op, get_op
from moe_routing_bench.ops.stand_ins import StandIns
from moe_routing_bench.ops.targets import assumed
from moe_routing_bench.ops.tracing import while_tracing

VARIABLE = "MRB_DECISIONS"
MANY = 2**40  # more tokens than any call has
PROBED = tuple(2**n for n in range(13))  # tokens for which `describe` looks at what runs


class Choice(NamedTuple):
    """Choice(implementation=<expert_ffn.native>, why="preferred on amx (decisions are off): ...")"""

    implementation: Implementation
    why: str
    warning: str | None = None  # for the caller to issue: what was expected cannot run


class Auto:
    """impl="auto" of one op. It is called like an Implementation, and chooses at every call.

    `weights` returns the weights of its layer, for an op that does not take them: their sizes select the
    measured decision. batch_invariant=True: only those that promise it, and one for every number of tokens.
    """

    label = "auto"
    config: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, op: Op, weights: Callable[[], ExpertWeights] | None = None, batch_invariant: bool = False
    ):
        self.op, self.weights, self.batch_invariant = op, weights, batch_invariant

    def choice(self, *args: Any) -> Choice:
        if self.batch_invariant:
            return _choose_invariant(self.op, args)
        return _choose(self.op, args, self.weights)

    def __call__(self, *args: Any) -> Any:
        choice = self.choice(*args) if self.batch_invariant else _choose(self.op, args, self.weights)
        if choice.warning is not None:
            _say(choice.warning)
        return choice.implementation.run(*args)


def describe(part: Implementation | Auto, weights: ExpertWeights, K: int, layout: Layout) -> str:
    """What runs in a layer of these sizes; for "auto" also why, and for how many tokens if that matters."""
    if isinstance(part, Implementation):
        return f"{part.op}.{part.label}"
    op = part.op

    @cache
    def at(T: int) -> Choice:
        return part.choice(*op.arguments(StandIns(weights, K, layout, T)).values())

    def label(T: int) -> str:
        return at(T).implementation.label

    edges = []  # the last T before another one runs
    for few, many in pairwise(PROBED):
        if label(few) != label(many):
            changed = [label(T) != label(few) for T in range(few, many)]
            edges.append(few + bisect_left(changed, True) - 1)
    spans = zip((PROBED[0], *(edge + 1 for edge in edges)), (*edges, PROBED[-1]), strict=True)
    return ", ".join(f"{op.name}.{label(a)}{_span(a, b)} (auto: {at(a).why})" for a, b in spans)


def _span(first: int, last: int) -> str:
    if last < PROBED[-1]:
        return f" up to T={last}"
    return "" if first == PROBED[0] else f" from T={first}"


def resolve(
    op: Op, impl: str, weights: Callable[[], ExpertWeights] | None = None, *, batch_invariant: bool = False
) -> Implementation | Auto:
    """The implementation called `impl`, or an Auto. ValueError if it must be batch-invariant and is not."""
    if impl == "auto":
        return Auto(op, weights, batch_invariant=batch_invariant)
    named = op.get(impl)
    if batch_invariant and not named.batch_invariant:
        those = ", ".join(invariant_names(op))
        raise ValueError(f"{op.name}.{named.label} is not batch-invariant; these are: {those}")
    return named


def invariant_names(op: Op) -> list[str]:
    """The implementations that say BATCH_INVARIANT, with the configurations a tuner may try."""
    entries = ((entry.spec, entry.implementation) for entry in find_all(op, configs=True))
    return [spec for spec, one in entries if one is not None and one.batch_invariant]


def _made_invariant(op: Op, spec: str) -> Implementation:
    plain = op.get(spec)  # and the options that make it batch-invariant
    return op.get(replace(plain, config={**plain.config, **plain.invariant_with}).label)


@cache  # listing the folders takes milliseconds
def _promising(op: Op, machine: str) -> dict[str, Implementation]:
    order = [spec for row in preferences(op, machine) if row.always for spec in row.order]
    preferred = [one for one in (_made_invariant(op, spec) for spec in order) if one.batch_invariant]
    return {one.label: one for one in (*preferred, *map(op.get, invariant_names(op)))}


def _choose_invariant(op: Op, args: tuple[Any, ...]) -> Choice:
    """Decisions are not followed: they may differ by the number of tokens, and then so would the bits."""
    for value in args:
        if isinstance(value, ExpertWeights) and isinstance(value.w_in_EDG, Frozen):
            return _frozen(op, args, _made_invariant(op, value.w_in_EDG.form.label))
    machine, passed = machine_of(leading(args).device), ""
    for spec, one in _promising(op, machine).items():
        if (reason := one.why_not(*args)) is None:
            why = f"the first on {machine} that is batch-invariant, for any number of tokens{passed}"
            return Choice(one, why)
        passed += f"; {spec} cannot run: {reason}"
    raise NotImplementedError(f"{op.name}: nothing that is batch-invariant can run this{passed}")


def pick(op: Op, impl: str, args: tuple[Any, ...], weights: ExpertWeights | None = None) -> Choice:
    """What runs these arguments for `impl`, a name or "auto", and why. Raises NotImplementedError with the
    reason if nothing does."""
    if impl == "auto":
        choice = choose(op, args, weights)
        if choice.warning is not None:
            _say(choice.warning)
        return choice
    named = op.get(impl)
    if (reason := named.why_not(*args)) is not None:
        raise NotImplementedError(f"{op.name}.{named.label}: {reason}")
    return Choice(implementation=named, why="asked for by name")


def choose(op: Op, args: tuple[Any, ...], weights: ExpertWeights | None = None) -> Choice:
    """What "auto" picks for these arguments, and why. Issues no warning. Without weights, given or among the
    arguments, no measured decision can be found."""
    return _choose(op, args, None if weights is None else lambda: weights)


def _choose(op: Op, args: tuple[Any, ...], weights: Callable[[], ExpertWeights] | None) -> Choice:
    for value in args:
        if type(value) is ExpertWeights and isinstance(value.w_in_EDG, Frozen):
            return _frozen(op, args, op.get(value.w_in_EDG.form.label))
    for row in _rows(op, args, weights):
        if row.always or _fits(row, args):
            break
    passed, tracing = "", is_dynamo_compiling()
    for spec, choice in row.candidates:
        # torch.compile follows an implementation only if the op holds it
        implementation = op.get(spec) if tracing else choice.implementation
        if (reason := implementation.why_not(*args)) is None:
            if not passed and not tracing:
                return choice
            warning = _passed_over(op, passed) if passed and row.measured else choice.warning
            return Choice(implementation, choice.why + passed, warning)
        passed += f"; {spec} cannot run: {reason}"
    raise NotImplementedError(f"{op.name}: nothing can run this{passed}")


def _frozen(op: Op, args: tuple[Any, ...], implementation: Implementation) -> Choice:
    """Frozen weights exist only as one implementation packed them."""
    if (reason := implementation.why_not(*args)) is not None:
        label = implementation.label
        raise NotImplementedError(
            f"{op.name}: the weights are frozen for {label}, which cannot run: {reason}"
        )
    return Choice(implementation=implementation, why="the weights are frozen for it, packed once")


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The candidates for some calls, in order: by the name in the table, each with its reason."""

    most_tokens: int | None  # the next measured number of tokens is nearer
    preference: Preference
    candidates: tuple[tuple[str, Choice], ...]
    measured: bool  # the first is a measured winner
    always: bool  # it has no condition


def _fits(row: _Row, args: tuple[Any, ...]) -> bool:
    return (row.most_tokens is None or _tokens(args) <= row.most_tokens) and fits(row.preference, args)


@dataclass
class _State:
    """The decisions in use, and what was ranked with them."""

    known: bool = False  # use_decisions was called, or the environment was read
    decisions: Decisions | None = None
    on_cpu: dict[str, tuple[_Row, ...]] = field(default_factory=dict)  # by op, without decisions
    ranked: dict[tuple[object, ...], tuple[_Row, ...]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


_state = _State()


def use_decisions(path: Path | str | None) -> None:
    """From now on impl="auto" follows this file of `mrb tune decide`; None: only the ops' preferences,
    whatever MRB_DECISIONS says. A forward that torch.compile has compiled keeps its choices.

    >>> mrb.use_decisions(None)
    """
    decisions = None if path is None else read_decisions(path)
    _state.known, _state.decisions = True, decisions
    _state.on_cpu.clear()
    _state.ranked.clear()
    _state.warned.clear()


def _rows(op: Op, args: tuple[Any, ...], weights: Callable[[], ExpertWeights] | None) -> tuple[_Row, ...]:
    """The candidates by size of call; the last row is for any."""
    first = leading(args)
    if first.is_cpu and not is_dynamo_compiling() and (rows := _state.on_cpu.get(op.name)) is not None:
        return rows
    follows = _follows_decisions()
    sizes = _sizes(args, None if weights is None else weights()) if follows else None
    return _ranked(op.name, first.device, sizes)


@while_tracing
def _follows_decisions() -> bool:
    if not _state.known:
        path = os.environ.get(VARIABLE)
        _state.decisions = read_decisions(path) if path else None
        _state.known = True
    return _state.decisions is not None


@while_tracing
def _ranked(op_name: str, device: torch.device, sizes: tuple[int | str, ...] | None) -> tuple[_Row, ...]:
    decisions = _state.decisions
    threads = torch.get_num_threads() if decisions else 0
    key = (op_name, device, sizes, threads, assumed())
    if (rows := _state.ranked.get(key)) is None:
        facts = None if sizes is None else Facts(*sizes)  # type: ignore[arg-type]
        rows = _state.ranked[key] = _rank(get_op(op_name), device, facts, decisions, threads)
        if decisions is None and device.type == "cpu":
            _state.on_cpu[op_name] = rows
    return rows


@while_tracing
def _say(warning: str) -> None:
    if warning not in _state.warned:
        _state.warned.add(warning)
        warnings.warn(warning, UserWarning, stacklevel=4)


def _rank(
    op: Op, device: torch.device, facts: Facts | None, decisions: Decisions | None, threads: int
) -> tuple[_Row, ...]:
    entry, because, warning = None, "decisions are off", None
    if decisions is not None:
        because = "a choice without sizes follows no decisions"
        if (mismatch := _mismatch(decisions)) is not None:
            because = mismatch
            warning = (
                f'{mismatch}, so impl="auto" goes by the preferences of the ops; make decisions here with '
                f"`mrb tune decide`, or switch these off (unset {VARIABLE}, or use_decisions(None))"
            )
        elif facts is not None and (entry := decisions.find(op.name, facts, threads)) is None:
            because = f"no measured decision for these sizes ({facts})"
    machine = machine_of(device)
    table = list(preferences(op, machine))
    tool = cpp.missing_tool() if device.type == "cpu" else None
    if tool is not None and next(preferences(op, timed_level() or PLAIN)).order != table[0].order:
        because = f"{because}; {tool}"
        warning = warning or f'impl="auto" would run compiled C++ here; until then plain torch: {tool}'

    rows = []
    for edge, preferred in product((*(entry.bounds if entry else ()), None), table):
        wanted = _winner(op, decisions, entry, edge or MANY) if decisions and entry else {}
        for spec in preferred.order:
            wanted.setdefault(spec, f"preferred on {machine} ({because}): {preferred.evidence}")
        wanted.setdefault(op.default, f"the last resort of {op.name} ({because})")
        found, passed = {}, ""
        for spec, why in wanted.items():
            try:
                found[spec] = op.get(spec), why + passed
            except NotImplementedError as absent:
                passed += f"; {spec} cannot run: {str(absent).partition(': ')[2]}"
        lost = entry is not None and next(iter(found)) != next(iter(wanted))
        said = _passed_over(op, passed) if lost else warning
        rows.append(
            _Row(
                most_tokens=edge,
                preference=preferred,
                candidates=tuple((spec, Choice(*one, said)) for spec, one in found.items()),
                measured=entry is not None and not lost,
                always=edge is None and preferred.always,
            )
        )
    return tuple(rows)


def _winner(op: Op, decisions: Decisions, entry: DecisionEntry, tokens: int) -> dict[str, str]:
    """The measured winner, and the measurement behind it."""
    spec, measured_T = entry.winner(tokens)
    try:
        op.get(spec)
    except NotImplementedError:
        pass  # it exists, but a library it needs is absent
    except ValueError as error:
        raise ValueError(
            f"the decisions in {decisions.path} name {op.name}.{spec}, which cannot be used: {error}; "
            "make them anew with `mrb tune decide`"
        ) from None
    at = "over all measured T" if measured_T is None else f"at T={measured_T}"
    threads = "1 thread" if entry.threads == 1 else f"{entry.threads} threads"
    where = f"{entry.workload}, {threads}, on this machine, from {decisions.source}"
    return {spec: f"measured winner for {entry.facts}, {at}, {where}"}


def _passed_over(op: Op, passed: str) -> str:
    return f"{op.name}: the measured winner is passed over{passed}"


def _mismatch(decisions: Decisions) -> str | None:
    here = this_machine()
    if decisions.machine != here.name:
        return (
            f"the decisions in {decisions.path} were made on {decisions.machine}, this machine is {here.name}"
        )
    if decisions.torch != here.torch:
        return (
            f"the decisions in {decisions.path} were made with torch {decisions.torch}, this is {here.torch}"
        )
    return None


def _tokens(args: tuple[Any, ...]) -> int:
    for value in args:
        if isinstance(value, (Routing, RoutingPlan)):
            return value.num_tokens
    return args[0].shape[0]


def _sizes(args: tuple[Any, ...], weights: ExpertWeights | None) -> tuple[int | str, ...] | None:
    """Facts as a plain tuple, which torch.compile treats as constant; None if not all are known."""
    K = layout = None
    for value in args:
        if isinstance(value, ExpertWeights):
            weights = value
        elif isinstance(value, Layout):
            layout = value
        elif isinstance(value, Routing):
            K = value.num_choices
        elif isinstance(value, RoutingPlan):
            K, layout = value.num_choices, value.layout
    if weights is None or K is None:
        return None
    like = weights.w_in_EDG
    dtype = name_of(like.dtype)
    sizes = (weights.D, weights.F, weights.num_experts, K)
    return (*sizes, dtype, str(layout), weights.activation, like.device.type)
