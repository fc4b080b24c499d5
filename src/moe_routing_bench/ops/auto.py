"""impl="auto": chooses the implementation for a call, and says why. The candidates are, in this order:

1. the measured winner, if decisions are on and were made for this machine, torch and these sizes
2. what the op prefers on this class of machine (`ops/<op>/preferences.py`), then the op's default

Every call takes the first candidate that can run its arguments, because tokens, dtype, device and the need
for gradients may change from call to call. `Choice.why` names the candidates that could not run. Decisions
are off unless the environment variable MRB_DECISIONS=<file> or use_decisions(<file>) turns them on. The
variable and its file are read once, at the first choice.

A call finds rows that were ranked before, compares the sizes with the conditions of a row, and asks the
chosen implementation whether it can run. This takes about 2 us on a CPU.
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
from moe_routing_bench.core.names import base_name
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.decisions import (
    LOADS,
    DecisionEntry,
    Decisions,
    Facts,
    Winner,
    load_of,
    read_decisions,
)
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
CHANGED = "; the code of the measured winner has changed since"
PROBED = tuple(2**n for n in range(13))  # numbers of tokens that `describe` tries


class Choice(NamedTuple):
    """Choice(implementation=<expert_ffn.native>, why="preferred on amx (decisions are off): ...")"""

    implementation: Implementation
    why: str
    warning: str | None = None  # for the caller to show: the expected implementation cannot run


class Auto:
    """impl="auto" of one op. It is called like an Implementation and chooses at every call.

    `weights` returns the weights of the layer, for an op that does not take them; their sizes select the
    measured decision. With batch_invariant=True it chooses only implementations that promise this, and the
    same one for every number of tokens.
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
            _warn_once(choice.warning)
        return choice.implementation.run(*args)


def describe(part: Implementation | Auto, weights: ExpertWeights, K: int, layout: Layout) -> str:
    """What runs in a layer of these sizes; for "auto" also why, and for how many tokens if it depends on
    that."""
    if isinstance(part, Implementation):
        return f"{part.op}.{part.label}"
    op = part.op

    @cache
    def at(T: int) -> Choice:
        return part.choice(*op.arguments(StandIns(weights, K, layout, T)).values())

    def label(T: int) -> str:
        return at(T).implementation.label

    edges = []  # the last T before another implementation runs
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
    """Returns the implementation `impl`, or an Auto. Raises ValueError if it must be batch-invariant and is
    not."""
    if impl == "auto":
        return Auto(op, weights, batch_invariant=batch_invariant)
    named = op.get(impl)
    if batch_invariant and not named.batch_invariant:
        others = ", ".join(invariant_names(op))
        raise ValueError(f"{op.name}.{named.label} is not batch-invariant; these are: {others}")
    return named


def invariant_names(op: Op) -> list[str]:
    """The batch-invariant implementations, with the configurations that a tuner may try."""
    entries = find_all(op, configs=True)
    return [e.spec for e in entries if e.implementation is not None and e.implementation.batch_invariant]


def _made_invariant(op: Op, spec: str) -> Implementation:
    """`spec` with the options that make it batch-invariant."""
    plain = op.get(spec)
    return op.get(replace(plain, config={**plain.config, **plain.invariant_with}).label)


@cache  # listing the folders takes milliseconds
def _promising(op: Op, machine: str) -> dict[str, Implementation]:
    order = [spec for row in preferences(op, machine) if row.always for spec in row.order]
    preferred = [impl for impl in (_made_invariant(op, spec) for spec in order) if impl.batch_invariant]
    return {impl.label: impl for impl in (*preferred, *map(op.get, invariant_names(op)))}


def _choose_invariant(op: Op, args: tuple[Any, ...]) -> Choice:
    """The first that can run. Decisions are ignored, because they may depend on the number of tokens."""
    for value in args:
        if isinstance(value, ExpertWeights) and isinstance(value.w_in_EDG, Frozen):
            return _frozen(op, args, _made_invariant(op, value.w_in_EDG.form.label))
    machine, passed = machine_of(leading(args).device), ""
    for spec, implementation in _promising(op, machine).items():
        if (reason := implementation.why_not(*args)) is None:
            why = f"the first on {machine} that is batch-invariant, for any number of tokens{passed}"
            return Choice(implementation, why)
        passed += f"; {spec} cannot run: {reason}"
    raise NotImplementedError(f"{op.name}: no batch-invariant implementation can run this{passed}")


def pick(op: Op, impl: str, args: tuple[Any, ...], weights: ExpertWeights | None = None) -> Choice:
    """What runs these arguments for `impl`, a name or "auto", and why. Raises NotImplementedError with the
    reason if nothing can."""
    if impl == "auto":
        choice = choose(op, args, weights)
        if choice.warning is not None:
            _warn_once(choice.warning)
        return choice
    named = op.get(impl)
    if (reason := named.why_not(*args)) is not None:
        raise NotImplementedError(f"{op.name}.{named.label}: {reason}")
    return Choice(implementation=named, why="asked for by name")


def choose(op: Op, args: tuple[Any, ...], weights: ExpertWeights | None = None) -> Choice:
    """What "auto" chooses for these arguments, and why. It shows no warning. Without weights, given or among
    the arguments, it cannot find a measured decision."""
    return _choose(op, args, None if weights is None else lambda: weights)


def _choose(op: Op, args: tuple[Any, ...], weights: Callable[[], ExpertWeights] | None) -> Choice:
    for value in args:
        if type(value) is ExpertWeights and isinstance(value.w_in_EDG, Frozen):
            return _frozen(op, args, op.get(_tuned(op, args, value.w_in_EDG.form.label)))
    rows = _rows(op, args, weights)
    tokens = 0 if rows[0].most_tokens is None else _tokens(args)
    for row in rows:
        if row.always or _fits(row, args, tokens):
            break
    passed, tracing = "", is_dynamo_compiling()
    for spec, choice in row.candidates:
        # torch.compile traces an implementation only if it is an attribute of the op
        implementation = op.get(spec) if tracing else choice.implementation
        if (reason := implementation.why_not(*args)) is None:
            if not passed and not tracing:
                return choice
            warning = _passed_over(op, passed) if passed and row.measured else choice.warning
            return Choice(implementation, choice.why + passed, warning)
        passed += f"; {spec} cannot run: {reason}"
    raise NotImplementedError(f"{op.name}: no implementation can run this{passed}")


def _tuned(op: Op, args: tuple[Any, ...], label: str) -> str:
    """The measured setting of the kernel that packed the weights; `label` if none is known for this call."""
    if not _follows_decisions():
        return label
    tokens = _tokens(args)
    row = next(row for row in _rows(op, args, None) if row.always or _fits(row, args, tokens))
    spec = row.candidates[0][0]
    return spec if row.measured and base_name(spec) == label else label


def _frozen(op: Op, args: tuple[Any, ...], implementation: Implementation) -> Choice:
    """Only the implementation that packed frozen weights can read them."""
    if (reason := implementation.why_not(*args)) is not None:
        label = implementation.label
        raise NotImplementedError(
            f"{op.name}: the weights are frozen for {label}, which cannot run: {reason}"
        )
    return Choice(implementation=implementation, why="the weights are frozen for it, packed once")


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The candidates for some calls, in order: the name in the table, and the choice with its reason."""

    most_tokens: int | None  # with more tokens another measured number of tokens is nearer
    preference: Preference
    candidates: tuple[tuple[str, Choice], ...]
    measured: bool  # the first candidate is a measured winner
    always: bool  # the row has no condition


def _fits(row: _Row, args: tuple[Any, ...], tokens: int) -> bool:
    return (row.most_tokens is None or tokens <= row.most_tokens) and fits(row.preference, args)


@dataclass
class _State:
    """The decisions in use, and the rows that were ranked with them."""

    known: bool = False  # use_decisions was called, or the environment was read
    decisions: Decisions | None = None
    on_cpu: dict[str, tuple[_Row, ...]] = field(default_factory=dict)  # by op, without decisions
    ranked: dict[tuple[object, ...], tuple[_Row, ...]] = field(default_factory=dict)
    # with decisions, by what is cheap to read of a call: the rows for each class of load
    quick: dict[tuple[object, ...], list[tuple[_Row, ...]]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


_state = _State()


def use_decisions(path: Path | str | None) -> None:
    """Makes impl="auto" follow this file, which `mrb tune decide` wrote; None: only the preferences, even
    if MRB_DECISIONS is set. A forward that torch.compile has already compiled keeps its choices.

    >>> mrb.use_decisions(None)
    """
    decisions = None if path is None else read_decisions(path)
    _state.known, _state.decisions = True, decisions
    _state.on_cpu.clear()
    _state.ranked.clear()
    _state.quick.clear()
    _state.warned.clear()


def _rows(op: Op, args: tuple[Any, ...], weights: Callable[[], ExpertWeights] | None) -> tuple[_Row, ...]:
    """The candidates for each size of call; the last row fits every call."""
    first = leading(args)
    if first.is_cpu and not is_dynamo_compiling() and (rows := _state.on_cpu.get(op.name)) is not None:
        return rows
    if not _follows_decisions():
        return _ranked(op.name, first.device, None)
    known = None if weights is None else weights()
    if is_dynamo_compiling() or not first.is_cpu:  # reading the load would make the host wait
        return _ranked(op.name, first.device, _sizes(args, known))
    plan = None
    for value in args:
        if type(value) is ExpertWeights:
            known = value
        elif type(value) is RoutingPlan:
            plan = value
    if plan is None or known is None:
        return _ranked(op.name, first.device, _sizes(args, known))
    w_in, rule = known.w_in_EDG, plan.layout
    key = (
        op.name, w_in.shape, w_in.dtype, type(w_in), known.activation, plan.row_TK.shape[1],
        torch.get_num_threads(), rule.kind, rule.block_rows, rule.capacity, rule.capacity_factor, rule.drop,
    )  # fmt: skip
    if (found := _state.quick.get(key)) is None:
        sizes = _sizes(args, known)
        found = _state.quick[key] = [_ranked(op.name, first.device, sizes, load) for load in LOADS]
    even, skewed = found
    return even if even is skewed or _load(plan) == LOADS[0] else skewed


def _load(plan: RoutingPlan) -> str:
    return load_of(int(plan.count_E.max()), plan.row_TK.numel(), plan.count_E.numel())


@while_tracing
def _follows_decisions() -> bool:
    if not _state.known:
        path = os.environ.get(VARIABLE)
        _state.decisions = read_decisions(path) if path else None
        _state.known = True
    return _state.decisions is not None


@while_tracing
def _ranked(
    op_name: str, device: torch.device, sizes: tuple[int | str, ...] | None, load: str = LOADS[0]
) -> tuple[_Row, ...]:
    decisions = _state.decisions
    threads = torch.get_num_threads() if decisions else 0
    facts = None if sizes is None else Facts(*sizes)  # type: ignore[arg-type]
    entry = None if decisions is None or facts is None else decisions.find(op_name, facts, threads, load)
    key = (op_name, device, sizes, threads, assumed(), entry and entry.load)
    if (rows := _state.ranked.get(key)) is None:
        rows = _state.ranked[key] = _rank(get_op(op_name), device, facts, decisions, entry)
        if decisions is None and device.type == "cpu":
            _state.on_cpu[op_name] = rows
    return rows


@while_tracing
def _warn_once(warning: str) -> None:
    if warning not in _state.warned:
        _state.warned.add(warning)
        warnings.warn(warning, UserWarning, stacklevel=4)


def _rank(
    op: Op,
    device: torch.device,
    facts: Facts | None,
    decisions: Decisions | None,
    entry: DecisionEntry | None,
) -> tuple[_Row, ...]:
    because, warning = "decisions are off", None
    if decisions is not None:
        because = "a choice without sizes follows no decisions"
        if (mismatch := _mismatch(decisions)) is not None:
            because, entry = mismatch, None
            warning = (
                f'{mismatch}, so impl="auto" uses the preferences of the ops; make decisions on this machine '
                f"with `mrb tune decide`, or turn these off (unset {VARIABLE}, or use_decisions(None))"
            )
        elif facts is not None:
            because = f"no measured decision for these sizes ({facts})"
    machine = machine_of(device)
    table = list(preferences(op, machine))
    tool = cpp.missing_tool() if device.type == "cpu" and cpp.why_not() else None
    if tool is not None and next(preferences(op, timed_level() or PLAIN)).order != table[0].order:
        because = f"{because}; {tool}"
        warning = warning or f'impl="auto" would run compiled C++ here, but runs plain torch: {tool}'

    rows = []
    for (edge, winner), preferred in product(entry.spans if entry else [(None, None)], table):
        wanted = _winner(op, decisions, entry, winner) if decisions and entry and winner else {}
        changed = winner is not None and not wanted
        for spec in preferred.order:
            wanted.setdefault(
                spec, f"preferred on {machine} ({because}{CHANGED * changed}): {preferred.evidence}"
            )
        wanted.setdefault(op.default, f"the default of {op.name} ({because}{CHANGED * changed})")
        found, passed = {}, ""
        for spec, why in wanted.items():
            try:
                found[spec] = op.get(spec), why + passed
            except NotImplementedError as absent:
                passed += f"; {spec} cannot run: {str(absent).partition(': ')[2]}"
        followed = winner is not None and not changed
        lost = followed and next(iter(found)) != next(iter(wanted))
        shown = _passed_over(op, passed) if lost else warning
        rows.append(
            _Row(
                most_tokens=edge,
                preference=preferred,
                candidates=tuple((spec, Choice(*chosen, shown)) for spec, chosen in found.items()),
                measured=followed and not lost,
                always=edge is None and preferred.always,
            )
        )
    return tuple(rows)


def _winner(op: Op, decisions: Decisions, entry: DecisionEntry, winner: Winner) -> dict[str, str]:
    """The measured winner, and a sentence about its measurement; empty if its code has changed since."""
    try:
        op.get(winner.impl)
    except NotImplementedError:
        pass  # it exists, but a library it needs is not installed
    except ValueError as error:
        raise ValueError(
            f"the decisions in {decisions.path} name {op.name}.{winner.impl}, which cannot be used: {error}; "
            "make them anew with `mrb tune decide`"
        ) from None
    if op.source_hash(winner.impl) != winner.source:
        return {}
    threads = "1 thread" if entry.threads == 1 else f"{entry.threads} threads"
    where = f"{entry.workload}, {threads}, on this machine, from {decisions.source}"
    return {winner.impl: f"measured winner for {entry.facts}, at T={winner.T}, {where}"}


def _passed_over(op: Op, passed: str) -> str:
    return f"{op.name}: the measured winner is not used{passed}"


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
    """The Facts as a plain tuple, which torch.compile treats as a constant; None if not all are known."""
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
    w_in = weights.w_in_EDG
    sizes = (weights.D, weights.F, weights.num_experts, K)
    frozen = isinstance(w_in, Frozen)
    return (*sizes, name_of(w_in.dtype), str(layout), weights.activation, w_in.device.type, frozen)
