"""What impl="auto" means: which implementation runs these arguments, and why. The candidates are, in order:

1. The measured winner, if decisions are on and were made for this machine, torch and these sizes.
2. What the op prefers on this class of machine (`ops/<op>/preferences.py`), and last its default.

The first candidate that can run the arguments is chosen, at every call, because tokens, dtype, device and the
need for gradients may change from call to call. `Choice.why` names the candidates that could not run.
Decisions are off unless the environment variable MRB_DECISIONS=<file> or use_decisions(<file>) turns them on;
no file is looked for anywhere else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from moe_routing_bench import cpp
from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.frozen import Frozen
from moe_routing_bench.machine import this_machine
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.decisions import Decisions, Entry, Facts, read_decisions
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.preference import PLAIN, machine_of, preferences, timed_level
from moe_routing_bench.ops.registry import Op, get_op
from moe_routing_bench.ops.stand_ins import StandIns
from moe_routing_bench.ops.targets import assumed
from moe_routing_bench.ops.tracing import while_tracing
from moe_routing_bench.plan import Layout, RoutingPlan
from moe_routing_bench.routing import Routing

VARIABLE = "MRB_DECISIONS"
PROBED = (1, 16, 256, 4096)  # tokens for which `describe` looks at what runs


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
        choice = self.choice(*args)
        if choice.warning is not None:
            _say(choice.warning)
        return choice.implementation.run(*args)


def describe(part: Implementation | Auto, weights: ExpertWeights, K: int, layout: Layout) -> str:
    """What runs in a layer of these sizes; for "auto" also why, and for how many tokens if that matters."""
    if isinstance(part, Implementation):
        return f"{part.op}.{part.label}"
    op = part.op

    def arguments(T: int) -> tuple[Any, ...]:
        return tuple(op.arguments(StandIns(weights, K, layout, T)).values())

    rows = _rows(op, arguments(1), part.weights)
    edges = [row.most_tokens for row in rows if row.most_tokens is not None]
    tokens = sorted({*PROBED, *edges, *(edge + 1 for edge in edges)})
    choices = [(T, part.choice(*arguments(T))) for T in tokens]
    sentences = []
    for label, group in groupby(choices, key=lambda item: item[1].implementation.label):
        (first, choice), *more = group
        last = more[-1][0] if more else first
        which = f" from T={first}" if last == tokens[-1] else f" up to T={last}"
        which = "" if (first, last) == (tokens[0], tokens[-1]) else which
        sentences.append(f"{op.name}.{label}{which} (auto: {choice.why})")
    return ", ".join(sentences)


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
    order = [spec for row in preferences(op, machine) if row.most_tokens is None for spec in row.order]
    preferred = [one for one in (_made_invariant(op, spec) for spec in order) if one.batch_invariant]
    return {one.label: one for one in (*preferred, *map(op.get, invariant_names(op)))}


def _choose_invariant(op: Op, args: tuple[Any, ...]) -> Choice:
    """Decisions are not followed: they may differ by the number of tokens, and then so would the bits."""
    for value in args:
        if isinstance(value, ExpertWeights) and isinstance(value.w_in_EDG, Frozen):
            return _frozen(op, args, _made_invariant(op, value.w_in_EDG.form.label))
    machine, passed = machine_of(_device(args)), ""
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
        if isinstance(value, ExpertWeights) and isinstance(value.w_in_EDG, Frozen):
            return _frozen(op, args, op.get(value.w_in_EDG.form.label))
    tokens = _tokens(args)
    for row in _rows(op, args, weights):
        if row.most_tokens is None or tokens <= row.most_tokens:
            break
    warning, passed = row.warning, ""
    for spec, why in row.candidates:
        implementation = op.get(spec)
        if (reason := implementation.why_not(*args)) is None:
            return Choice(implementation=implementation, why=why + passed, warning=warning)
        passed += f"; {spec} cannot run: {reason}"
        if row.measured:
            warning = _passed_over(op, passed)
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
    """The candidates for calls of at most `most_tokens` tokens, in order, with the reason for each."""

    most_tokens: int | None
    candidates: tuple[tuple[str, str], ...]
    measured: bool  # the first is a measured winner
    warning: str | None


@dataclass
class _State:
    """What use_decisions set, and the content of the environment's file when it was last read."""

    switched: bool = False  # by use_decisions, which outranks the environment
    decisions: Decisions | None = None
    read: tuple[tuple[str, int, int], Decisions] | None = None
    ranked: dict[tuple[object, ...], tuple[_Row, ...]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


_state = _State()


def use_decisions(path: Path | str | None) -> None:
    """From now on impl="auto" follows this file, written by `mrb decide`; None: only the ops' preferences,
    whatever MRB_DECISIONS says. A forward that torch.compile has compiled keeps its choices."""
    _state.decisions = None if path is None else read_decisions(path)
    _state.switched = True
    _state.ranked.clear()
    _state.warned.clear()


def _rows(op: Op, args: tuple[Any, ...], weights: Callable[[], ExpertWeights] | None) -> tuple[_Row, ...]:
    """The candidates by number of tokens; the last row is for any number."""
    follows = _follows_decisions()
    sizes = _sizes(args, None if weights is None else weights()) if follows else None
    return _ranked(op.name, _device(args), follows, sizes)


@while_tracing
def _follows_decisions() -> bool:
    return _state.decisions is not None if _state.switched else bool(os.environ.get(VARIABLE))


@while_tracing
def _ranked(
    op_name: str, device: torch.device, follows: bool, sizes: tuple[int | str, ...] | None
) -> tuple[_Row, ...]:
    decisions = _decisions() if follows else None
    threads = torch.get_num_threads() if follows else 0
    key = (op_name, device, sizes, threads, assumed())
    if (rows := _state.ranked.get(key)) is None:
        facts = None if sizes is None else Facts(*sizes)  # type: ignore[arg-type]
        rows = _rank(get_op(op_name), device, facts, decisions, threads)
        _state.ranked[key] = rows
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
                f"`mrb decide`, or switch these off (unset {VARIABLE}, or use_decisions(None))"
            )
        elif facts is not None and (entry := decisions.find(op.name, facts, threads)) is None:
            because = f"no measured decision for these sizes ({facts})"
    machine = machine_of(device)
    table = list(preferences(op, machine))
    tool = cpp.missing_tool() if device.type == "cpu" else None
    if tool is not None and next(preferences(op, timed_level() or PLAIN)).order != table[0].order:
        because = f"{because}; {tool}"
        warning = warning or f'impl="auto" would run compiled C++ here; until then plain torch: {tool}'

    edges = sorted({*(row.most_tokens or 0 for row in table), *(entry.bounds if entry else ())} - {0})
    rows = []
    for edge in (*edges, None):
        tokens = edge or (edges[-1] + 1 if edges else 1)
        wanted = _winner(op, decisions, entry, tokens) if decisions and entry else {}
        preferred = next(row for row in table if row.most_tokens is None or tokens <= row.most_tokens)
        for spec in preferred.order:
            wanted.setdefault(spec, f"preferred on {machine} ({because}): {preferred.evidence}")
        wanted.setdefault(op.default, f"the last resort of {op.name} ({because})")
        candidates, passed = [], ""
        for spec, why in wanted.items():
            try:
                op.get(spec)
                candidates.append((spec, why + passed))
            except NotImplementedError as absent:
                passed += f"; {spec} cannot run: {str(absent).partition(': ')[2]}"
        lost = entry is not None and candidates[0][0] != next(iter(wanted))
        rows.append(
            _Row(
                most_tokens=edge,
                candidates=tuple(candidates),
                measured=entry is not None and not lost,
                warning=_passed_over(op, passed) if lost else warning,
            )
        )
    return tuple(rows)


def _winner(op: Op, decisions: Decisions, entry: Entry, tokens: int) -> dict[str, str]:
    """The measured winner, and the measurement behind it."""
    spec, measured_T = entry.winner(tokens)
    try:
        op.get(spec)
    except NotImplementedError:
        pass  # it exists, but a library it needs is absent
    except ValueError as error:
        raise ValueError(
            f"the decisions in {decisions.path} name {op.name}.{spec}, which cannot be used: {error}; "
            "make them anew with `mrb decide`"
        ) from None
    at = "over all measured T" if measured_T is None else f"at T={measured_T}"
    threads = "1 thread" if entry.threads == 1 else f"{entry.threads} threads"
    where = f"{entry.workload}, {threads}, on this machine, from {decisions.source}"
    return {spec: f"measured winner for {entry.facts}, {at}, {where}"}


def _passed_over(op: Op, passed: str) -> str:
    return f"{op.name}: the measured winner is passed over{passed}"


def _decisions() -> Decisions | None:
    if _state.switched:
        return _state.decisions
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return read_decisions(path)  # raises with a sentence that says what is wrong
    version = (path, status.st_mtime_ns, status.st_size)
    if _state.read is None or _state.read[0] != version:
        _state.read = (version, read_decisions(path))
        _state.ranked.clear()
    return _state.read[1]


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


def _device(args: tuple[Any, ...]) -> torch.device:
    first = args[0]
    return first.expert_TK.device if isinstance(first, Routing) else first.device


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
    dtype = str(like.dtype).removeprefix("torch.")
    sizes = (weights.D, weights.F, weights.num_experts, K)
    return (*sizes, dtype, str(layout), weights.activation, like.device.type)
