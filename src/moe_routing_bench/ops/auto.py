"""The one place where impl="auto" becomes a name: the measured winner if decisions are on, else the default.

Decisions are on only when somebody says so, with the environment variable MRB_DECISIONS=<file> or with
use_decisions(<file>); no file is looked for anywhere else.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moe_routing_bench.machine import this_machine
from moe_routing_bench.ops.decisions import Decisions, Facts, read_decisions
from moe_routing_bench.ops.registry import Implementation, Op

VARIABLE = "MRB_DECISIONS"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Choice(spec="staged", why="the default of expert_ffn: decisions are off", warning=None)"""

    spec: str
    why: str
    warning: str | None = None
    decisions: Decisions | None = None  # those that named it; None: it is the default


@dataclass
class _State:
    """What use_decisions said, and what the environment's file held when it was last read."""

    told: bool = False  # by use_decisions, which outranks the environment
    decisions: Decisions | None = None
    read: tuple[tuple[str, int, int], Decisions] | None = None
    warned: set[str] = field(default_factory=set)


_state = _State()


def use_decisions(path: Path | str | None) -> None:
    """From now on impl="auto" follows the file that `mrb decide` wrote; None: the named defaults again,
    whatever MRB_DECISIONS says. Layers that are already built keep what they have."""
    _state.decisions = None if path is None else read_decisions(path)
    _state.told = True
    _state.warned.clear()


def resolve(op: Op, impl: str, shape: Facts | None = None) -> Implementation:
    """`impl` as given; for "auto" the measured winner for this shape, or the op's named default.

    Layers resolve once, when they are built, so a compiled forward holds no choice and a record can name what
    ran. Without a shape, as in a call of a single operation, "auto" is the default.
    """
    if impl != "auto":
        return op.get(impl)
    if shape is None:
        return op.get(op.default)
    choice = choose(op, shape)
    if choice.warning is not None and choice.warning not in _state.warned:
        _state.warned.add(choice.warning)
        warnings.warn(choice.warning, UserWarning, stacklevel=3)
    return op.get(choice.spec)


def why(op: Op, shape: Facts | None = None) -> str:
    """Why "auto" is what it is, as part of a sentence."""
    return choose(op, shape).why


def choose(op: Op, shape: Facts | None = None) -> Choice:
    """What "auto" means for this shape, and why. Says nothing aloud: `warning` is for the caller to give."""
    default = f"the default of {op.name}"
    decisions = _decisions()
    if decisions is None:
        return Choice(spec=op.default, why=f"{default}: decisions are off")
    if shape is None:
        return Choice(spec=op.default, why=f"{default}: a choice without sizes follows no decisions")
    if (mismatch := _mismatch(decisions)) is not None:
        advice = (
            f'{mismatch}, so impl="auto" uses the defaults; make decisions here with `mrb decide`, '
            f"or switch these off (unset {VARIABLE}, or use_decisions(None))"
        )
        return Choice(spec=op.default, why=f"{default}: {mismatch}", warning=advice)
    entry = decisions.find(op.name, shape, torch.get_num_threads())
    if entry is None:
        return Choice(spec=op.default, why=f"{default}: no measured decision for these sizes ({shape})")
    spec, measured_T = entry.winner(shape.tokens)
    try:
        op.get(spec)
    except NotImplementedError:
        pass  # it exists, and a library it needs is absent: resolve raises that, `mrb explain` shows it
    except ValueError as error:
        raise ValueError(
            f"the decisions in {decisions.path} name {op.name}.{spec}, which cannot be used: {error}; "
            "make them anew with `mrb decide`"
        ) from None
    at = "over all measured T" if measured_T is None else f"at T={measured_T}"
    threads = "1 thread" if entry.threads == 1 else f"{entry.threads} threads"
    return Choice(
        spec=spec,
        why=f"measured winner for {entry.facts}, {at}, {entry.workload}, {threads}, on this machine, "
        f"from {decisions.source}",
        decisions=decisions,
    )


def _decisions() -> Decisions | None:
    if _state.told:
        return _state.decisions
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return read_decisions(path)  # says in words what is wrong with it
    version = (path, status.st_mtime_ns, status.st_size)
    if _state.read is None or _state.read[0] != version:
        _state.read = (version, read_decisions(path))
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
