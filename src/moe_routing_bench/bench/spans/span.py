"""Span: what is timed together, and everything the harness knows about it. The other files define spans.

A span says what a call reads, what runs it, which result is right, its least cost, its stages and the files
its result depends on. No other code of the harness asks which span it has. Spans with different names are
never compared: comparing a matmul with a whole layer says nothing.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.inputs import Call, Inputs
from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict, judge_gradient, judge_result
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.core.names import base_name, no_such
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.formats.named import INT8_ROWS, coding_of
from moe_routing_bench.ops.auto import choose
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.registry import BUILT_IN, all_ops, get_op
from moe_routing_bench.ops.score_topk.op import PLAIN
from moe_routing_bench.ops.stand_ins import StandIns, weights_without_values
from moe_routing_bench.workloads import stored_cases
from moe_routing_bench.workloads.experiment import ATTENTION, Experiment, ImplementationRef

PACKAGE = Path(__file__).parents[2]
PACKED_ONCE = ", weights packed once"
Stage = tuple[str, Callable[[], Any]]
Load = dict[str, int | float | None]
NO_SPAN = ("span", "op")  # files of this folder that define no span of their name


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Something that computes a call: Computation(run=layer, parameters={"experts.w_in_EDG": ...}).

    run         takes the call's arguments in order
    parameters  tensors that want gradients and are not among the arguments
    runs        what really runs, in words; empty if the implementation's name says it
    owner       the module that computes it, if there is one
    """

    run: Callable[..., Any]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    runs: str = ""
    owner: Any = None


class Span:
    """A span whose implementations name one implementation of each of its ops, joined by +.

    name="pack", ops=("dispatch", "combine"): an implementation is "index_select+gather_sum"
    """

    name: str
    ops: tuple[str, ...]
    included: tuple[str, ...]
    excluded: tuple[str, ...] = ("allocation of weights", "weight conversion")
    weights = False  # do calls read the experts' weights?
    routed = False  # does an implementation have a router?
    grouped = False  # on several ranks, is each a process (hosts/ranks.py)?
    differentiable = True
    exact = False  # is the reference in the dtype itself the oracle?
    widens = False  # does the reference convert the weights itself?
    in_stages = False  # are the stages of a call always timed too?
    decides = ""  # the op whose implementations are compared by comparing its implementations
    case = ""  # the case or suite measured if no size is given

    @property
    def summary(self) -> str:
        """The first line of its file."""
        return (inspect.getdoc(sys.modules[type(self).__module__]) or "").partition("\n")[0]

    # what an implementation is

    def split(self, name: str) -> list[str]:
        """One name for each op of the span; a + inside brackets belongs to an option."""
        names = re.findall(r"(?:[^+()]|\([^()]*(?:\([^()]*\)[^()]*)*\))+", name)
        if len(names) != len(self.ops):
            raise ValueError(
                f"{name!r} names {len(names)} implementations, but {self.name} is {' + '.join(self.ops)}"
            )
        return names

    def parts(self, name: str) -> tuple[Implementation, ...]:
        """The implementation of each op, loaded."""
        ops = all_ops()
        return tuple(ops[op].get(part) for op, part in zip(self.ops, self.split(name), strict=True))

    def compiles(self, name: str) -> bool:
        return any(part.compiles for part in self.parts(name))

    def named(self, name: str) -> list[tuple[str, str]]:
        """(op, name) of the implementation of each op; nothing is loaded."""
        names = [base_name(part) for part in self.split(name)]
        return list(zip(self.ops, names, strict=True))

    def label(self, name: str) -> str:
        """How tables call it: by the implementations it names, with their options."""
        return "+".join(part.label for part in self.parts(name)) or name

    def origins(self, name: str) -> list[str]:
        """Where each implementation comes from; ValueError if there is none of that name."""
        ops = all_ops()
        return [ops[op].origin(part) for op, part in self.named(name)]

    def check(self, implementation: ImplementationRef) -> None:
        """ValueError if the implementation cannot exist."""
        self.origins(implementation.name)

    def settled(self, implementation: ImplementationRef, case: Experiment) -> ImplementationRef:
        """The implementation with "auto" replaced by what it means for this case."""
        if implementation.name != "auto":
            return implementation
        source = stand_ins(implementation, case)
        return replace(implementation, name="+".join(auto_label(name, source) for name in self.ops))

    def has_frozen(self, implementation: ImplementationRef, case: Experiment) -> bool:
        """True if it is measured with weights as they are and, if asked, also with frozen ones."""
        if case.direction != "forward" or not all(map(is_ours, self.origins(implementation.name))):
            return False  # code from outside is not loaded here
        try:
            return any(part.reads_plain and part.stored is None for part in self.parts(implementation.name))
        except NotImplementedError:
            return False

    def all_names(self) -> list[str]:
        """Returns everything worth trying: the defaults first, then one part varied at a time. Code from
        outside is named but not loaded, because only a worker loads it."""
        ops = [all_ops()[name] for name in self.ops]
        defaults = [op.default for op in ops]
        labels = {tuple(part.label for part in self.parts("+".join(defaults))): defaults}
        for place, op in enumerate(ops):
            ours = [one for one in find_all(op, configs=True, only=BUILT_IN) if one.implementation]
            outside = [name for name in op.names() if op.origin(name) != BUILT_IN]
            for name in [*(one.spec for one in ours), *outside]:
                varied = [*defaults[:place], name, *defaults[place + 1 :]]
                full = varied if name in outside else [p.label for p in self.parts("+".join(varied))]
                labels.setdefault(tuple(full), varied)
        return ["+".join(varied) for varied in labels.values()]

    def usual(self) -> list[str]:
        """Returns what people choose between: the baseline first, "auto", and implementations from
        outside."""
        if not self.decides or not all_ops()[self.decides].usual:
            return self.all_names()
        op = all_ops()[self.decides]
        return [*op.usual, *(name for name in op.names() if op.origin(name) != BUILT_IN)]

    def stored_names(self, case: Experiment) -> list[str]:
        """Returns what is compared if weights are stored in the case's format: those who take weights in the
        case's dtype first."""
        raise NotImplementedError

    # one call

    def call(self, implementation: ImplementationRef, inputs: Inputs, number: int, step: int) -> Call:
        return inputs.at(number, step, implementation.layout)

    def arguments(self, call: Call) -> dict[str, Any]:
        """Returns what the call reads, by name, in order."""
        raise NotImplementedError

    def built(self, implementation: ImplementationRef, inputs: Inputs) -> Computation:
        """The implementation, ready to call. In a worker."""
        raise NotImplementedError

    def why_not(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> str | None:
        """A sentence why the implementation cannot compute these arguments; None if it can. In a worker."""
        raise NotImplementedError

    def stages(
        self, implementation: ImplementationRef, inputs: Inputs, args: Mapping[str, Any]
    ) -> Iterator[Stage]:
        """The parts of a call as (name, function to run); each needs the ones before it."""
        return iter(())

    # what is right

    def plain(self, implementation: ImplementationRef, inputs: Inputs, dtype: torch.dtype) -> Computation:
        """The same in plain torch: the oracle in float64, the baseline in the case's dtype."""
        raise NotImplementedError

    def rows(self, implementation: ImplementationRef, inputs: Inputs) -> int:
        """How many rows the experts compute. The errors within one row are not independent."""
        return inputs.experiment.shape.num_pairs

    def judge(self, out: Any, expected: Expected, args: Mapping[str, Any]) -> list[Verdict]:
        return judge_result(out, expected, args)

    def judge_gradient(self, of: GradientOf, gradient: Tensor, expected: Expected) -> list[Verdict]:
        return judge_gradient(of, gradient, expected)

    def upstream(self, d_out: Tensor, args: Mapping[str, Any]) -> Tensor:
        return d_out

    def meaningful(self, out: Any, args: Mapping[str, Any]) -> Any:
        return out

    # what it costs, and what the result depends on

    def facts(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[Cost, Load]:
        """The least work of a forward call on the first inputs, and how they load the experts."""
        raise NotImplementedError

    def wire(self, implementation: ImplementationRef, inputs: Inputs) -> tuple[int, int] | None:
        """Returns the bytes of rows that leave their rank in the first call, both ways, and the least that
        any transport needs in a forward pass. The least is a token once to each rank with one of its experts,
        and one sum back."""
        return None

    def sizes(self, case: Experiment) -> list[str]:
        """Describes the case in one line: its sizes and its routing."""
        s = case.shape
        return [f"T={s.T} D={s.D} F={s.F} E={s.E} K={s.K}", case.workload or "own router"]

    def notes(self, case: Experiment) -> list[str]:
        """Sentences a reader needs about the case as this span measures it."""
        return []

    def bandwidths(self, case: Experiment, seconds: float) -> dict[str, float]:
        """Bytes per second by the usual conventions for this span, by name."""
        return {}

    def roots(self, implementation: ImplementationRef) -> list[Path]:
        """Files the result depends on besides the implementations (sources.py follows their imports)."""
        return [PACKAGE / "bench" / "spans" / f"{self.name}.py"]

    def resolved(self, implementation: ImplementationRef, inputs: Inputs) -> list[tuple[str, str]]:
        """Implementations that run although the implementation does not name them: [("topk", "sort")]."""
        return []


def stand_ins(implementation: ImplementationRef, case: Experiment, K: int | None = None) -> StandIns:
    """Returns arguments of the case's sizes, to ask what "auto" picks for them. Their memory is never
    touched."""
    s, train = case.shape, case.direction != "forward"
    weights = weights_without_values(
        s, case.activation, bias=case.bias, train=train, dtype=DTYPES[case.dtype]
    )
    heads = (case.query_shape, case.key_shape) if case.span == ATTENTION else None
    made = StandIns(
        weights, K or s.K, Layout.parse(implementation.layout), s.T, train=train, rule=PLAIN, heads=heads
    )
    made.causal, made.window = case.causal, case.window
    return made


def auto_label(op: str, source: StandIns) -> str:
    """The implementation "auto" picks for these arguments, with its options."""
    asked = get_op(op)
    args = asked.arguments(source)
    with torch.set_grad_enabled(source.x_TD.requires_grad):
        return choose(asked, tuple(args.values()), source.weights).implementation.label


def is_ours(origin: str) -> bool:
    """True if it is built in or a file of this package."""
    source, _, where = origin.partition(" ")
    return origin == BUILT_IN or (source == "file" and Path(where).is_relative_to(PACKAGE))


def span_names() -> list[str]:
    """Every operation, and every other file of this folder."""
    return [*all_ops(), *_files()]


@cache
def _files() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return [name for name in names if name not in NO_SPAN]


def span_named(name: str) -> Span:
    folder = __name__.rpartition(".")[0]
    if name in _files():
        return importlib.import_module(f"{folder}.{name}").span
    if (op := all_ops().get(name)) is None:
        raise no_such("span", name, span_names())
    return importlib.import_module(f"{folder}.op").OpSpan(op)


def ranked(experiment: Experiment) -> bool:
    """True if each of its ranks is a process (hosts/ranks.py)."""
    return span_named(experiment.span).grouped and experiment.W > 1


def all_threads(experiment: Experiment) -> int:
    """Returns the threads of all ranks together. The experiment says how many each rank has."""
    return experiment.threads * (experiment.W if span_named(experiment.span).grouped else 1)


def check_measurable(experiment: Experiment) -> None:
    """ValueError if there is nothing to measure, or nothing of the kind that is asked for."""
    implementations, span = experiment.implementations, span_named(experiment.span)
    if not implementations:
        raise ValueError(f"{experiment.title} names no implementation to measure")
    if any(one.router or one.layer for one in implementations) and not span.routed:
        raise ValueError(f"{span.name} has no router and no layer to choose; measure layer")


def packed_once(weights: ExpertWeights) -> str:
    """For a record: how the weights are held, if not as they were given."""
    return PACKED_ONCE if isinstance(weights.w_in_EDG, Frozen) else ""


def why_not_one_of(
    parts: Sequence[Implementation], asked: Mapping[str, tuple[Any, ...]], store: str = ""
) -> str | None:
    """Returns the first reason why one of the implementations cannot compute its arguments; None if all can.
    `store` is the format of the case's weights."""
    for part in parts:
        if (reason := why_not_stored(part, store)) is not None:
            return reason
        if (reason := part.why_not(*asked[part.op])) is not None:
            return f"{part.op}.{part.label}: {reason}" if len(parts) > 1 else reason
    return None


def why_not_stored(part: Implementation, store: str) -> str | None:
    """Says why its format of stored weights is not the one the case asks for; None if it is."""
    if part.stored is None:
        return None
    own = str(part.config["store"])
    name = own.removesuffix(INT8_ROWS)
    if not store:
        how = f"; `mrb bench {stored_cases.SPAN} --store {name}` measures it" if _is_format(name) else ""
        return f"{STORED}{how}"
    if name != store:
        return f"it stores weights as {name}, and those of this case are stored as {store}"
    return None


def _is_format(name: str) -> bool:
    try:
        coding_of(name)
    except ValueError:
        return False
    return True


STORED = "it computes with weights stored in another type, so its times cannot be compared"
