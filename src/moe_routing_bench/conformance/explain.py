"""What would run for these sizes and why, and why not the others. Nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_routing_bench.conformance.outside import Answer, IsolatedError, Outside, Shown, answers
from moe_routing_bench.core.dtypes import DTYPES, name_of
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.names import MistakeError
from moe_routing_bench.core.plan import Layout, RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.auto import choose
from moe_routing_bench.ops.catalog import Listing, find, find_all
from moe_routing_bench.ops.registry import Op, get_op
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.ops.stand_ins import StandIns, weights_without_values
from moe_routing_bench.ops.targets import TARGETS, Target, as_if

SHOWN = {**DTYPES, "float64": torch.float64}


def explained_isolated(asked: dict[str, Any], impl: str, outside: Outside) -> tuple[dict[str, Any], bool]:
    """The same with code from outside, each file in a process of its own; and is one of them broken?"""
    (explanation,) = answers(explained, asked, impl, include=outside.folders, answer=Explanation)
    document, died = explanation.model_dump(), False
    for file in outside.of(asked["op"]):
        try:
            others = [
                one.model_dump()
                for one in answers(
                    answers_of, asked, file.origin, include=outside.folders, answer=ImplementationAnswer
                )
            ]
        except (IsolatedError, ValueError) as reason:
            died = True
            row = {"implementation": file.name, "spec": file.name, "origin": file.origin}
            others = [{**row, "answer": "broken", "reason": str(reason)}]
        chosen = document["chosen"]["implementation"]
        document["others"] += [one for one in others if one["implementation"] != chosen]
    rows = [document["chosen"], *document["others"]]
    return document, died or any(one["answer"] == "broken" for one in rows)


class ImplementationAnswer(Answer):
    """What _answer says."""

    implementation: Shown
    spec: Shown
    origin: Shown
    answer: Literal["could run", "no", "broken", "cannot tell"]
    reason: Shown | None


class Explanation(Answer):
    """What explained says."""

    op: Shown
    summary: Shown
    arguments: dict[Shown, Shown]
    device: Shown
    arch: Shown
    train: bool
    asked_for: Shown
    chosen: ImplementationAnswer
    why_chosen: Shown
    others: list[ImplementationAnswer]
    caution: Shown | None


def explained(asked: dict[str, Any], impl: str) -> Iterator[dict[str, Any]]:
    """What is chosen, and all others but files from outside."""
    with _arguments(asked) as (op, source, args):
        spec, why = impl, "asked for by name"
        try:
            if impl == "auto":
                choice = choose(op, tuple(args.values()), source.weights)
                spec, why = choice.implementation.label, choice.why
            chosen = find(op, spec)
        except ValueError as mistake:
            raise MistakeError(str(mistake)) from None
        known = [name for name in op.names() if not op.origin(name).startswith("file ")]
        origins = dict.fromkeys(op.origin(name) for name in known)
        others = [entry for origin in origins for entry in find_all(op, configs=True, only=origin)]
        place = torch.device(asked["device"])
        yield {
            "op": op.name,
            "summary": op.summary.removeprefix(f"{op.name}: "),
            "arguments": {name: _describe(value) for name, value in args.items()},
            "device": str(place),
            "arch": asked["arch"],
            "train": asked["train"],
            "asked_for": impl,
            "chosen": _answer(chosen, args),
            "why_chosen": why,
            "others": [_answer(entry, args) for entry in others if not _same(entry, chosen)],
            "caution": _caution(place, asked["arch"]),
        }


def answers_of(asked: dict[str, Any], origin: str) -> Iterator[dict[str, Any]]:
    """Runs where a file from outside is loaded: what it answers, for each of its configurations."""
    with _arguments(asked) as (op, _, args):
        for entry in find_all(op, configs=True, only=origin):
            yield _answer(entry, args)


@contextmanager
def _arguments(asked: dict[str, Any]) -> Iterator[tuple[Op, StandIns, dict[str, Any]]]:
    """The op and its arguments in these sizes."""
    op = get_op(asked["op"])
    try:
        shape = MoEShape(**{letter: asked[letter] for letter in "TDFEK"})
        layout = Layout.parse(asked["layout"])
    except ValueError as mistake:
        raise MistakeError(str(mistake)) from None
    try:
        place = torch.device(asked["device"])
    except RuntimeError:
        raise MistakeError(
            f"cannot read the device {asked['device']!r}; write cpu, cuda, cuda:1, xpu, mps, ..."
        ) from None
    dtype, bias, train = SHOWN[asked["dtype"]], asked["bias"], asked["train"]
    target = as_if(Target.named(asked["arch"])) if asked["arch"] else nullcontext()
    with _without_memory(shape, place), target:
        try:
            source = _shapes(shape, layout, dtype, place, asked["activation"], bias=bias, train=train)
            args = op.arguments(source)
        except NotImplementedError as reason:
            raise MistakeError(str(reason)) from None
        except RuntimeError as error:
            raise MistakeError(
                f"cannot describe tensors of these sizes on {place}: {str(error).splitlines()[0]}"
            ) from None
        yield op, source, args


def _without_memory(shape: MoEShape, place: torch.device) -> AbstractContextManager[Any]:
    """Tensors that cost nothing. On the CPU plain ones whose memory is never touched, because some kernels
    take no others; elsewhere, or if they are too large for this machine, fake ones without memory."""
    s = shape
    numbers = 3 * s.E * s.D * s.F + 4 * s.T * (s.K + 1) * (s.D + s.F) + s.T * s.E
    plain = place.type == "cpu" and 8 * numbers < 2**30 * this_machine().memory_gib
    return nullcontext() if plain else FakeTensorMode()


def _shapes(
    shape: MoEShape,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    activation: str,
    *,
    bias: bool,
    train: bool,
) -> StandIns:
    """The arguments of operations as a layer of this shape would pass them: sizes and types, no values."""
    weights = weights_without_values(shape, activation, bias=bias, train=train, dtype=dtype, device=device)
    return StandIns(weights, shape.K, layout, shape.T, train=train, rule=ScoreRule())


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{' x '.join(map(str, value.shape))} {name_of(value.dtype)}"
    if isinstance(value, Routing):
        sizes = f"{value.num_tokens} tokens, {value.num_choices} choices of {value.num_experts} experts"
        return f"{sizes}, gates {_describe(value.gate_TK)}"
    if isinstance(value, RoutingPlan):
        return f"{value.layout}: {value.num_rows} rows for {value.row_TK.numel()} pairs"
    if isinstance(value, ExpertWeights):
        parts = [f"{name} {_describe(tensor)}" for name, tensor in value.tensors().items()]
        return f"{value.activation}, {', '.join(parts)}"
    return "none" if value is None else str(value)


def _answer(entry: Listing, args: dict[str, Any]) -> dict[str, Any]:
    answer, reason = "could run", None
    if entry.implementation is None:
        answer, reason = ("no" if entry.state == "absent" else "broken"), entry.reason
    else:
        try:
            reason = entry.implementation.why_not(*args.values())
            answer = "could run" if reason is None else "no"
        except Exception as error:  # it may ask a device that is not here
            answer, reason = "cannot tell", f"it raised {type(error).__name__}: {error}"
    return {
        "implementation": entry.implementation.label if entry.implementation else entry.spec,
        "spec": entry.spec,
        "origin": entry.origin,
        "answer": answer,
        "reason": reason,
    }


def _same(entry: Listing, chosen: Listing) -> bool:
    if entry.implementation is None or chosen.implementation is None:
        return entry.spec == chosen.spec
    return entry.implementation.label == chosen.implementation.label


def _caution(device: torch.device, arch: str) -> str | None:
    if device.type == "cpu":
        return None
    if arch:
        return (
            f"Nothing was run. The answers follow from what is known about {arch} ({TARGETS[arch].usual}: "
            "ops/targets.py), sizes, dtypes, layout and the libraries of this machine."
        )
    module = getattr(torch, device.type, None)
    if module is not None and hasattr(module, "is_available") and module.is_available():
        return None
    return (
        f"There is no {device.type} device here. The answers follow from sizes, dtypes, layout and the "
        "libraries of this machine; they cannot know what depends on the device itself."
    )
