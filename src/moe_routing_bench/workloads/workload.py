"""Routing Suite v1: named workloads, each a pure function of name, seed, step and sizes."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.names import no_such
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.workloads.assignment import Draws, spread_evenly
from moe_routing_bench.workloads.families import FAMILIES, Batch, Choices
from moe_routing_bench.workloads.trace import ids_checksum

# part of every draw: a suite that draws differently is another suite
SUITE_VERSION = 1

# Megatron-LM#7488's names. W1, W2, W3 and W6 carry the same heat on n = E / W experts, placed differently.
# vLLM#57598's maxvio(m) is read as lognormal(maxvio=m).
ALIASES = {
    "W0": "balanced",
    "W1": "khot({n},share={share})",
    "W2": "hot_rank(share={share})",
    "W3": "spread_hot(share={share})",
    "W4": "source_ragged(own={share})",
    "W5": "zero_expert_rank",
    "W6": "rotating({n},share={share})",
    "W7": "burst(8)",
}

# one name of each family, as sentences about mistakes and `mrb list` show it
EXAMPLES = {
    **{family: family for family in FAMILIES},
    "zipf": "zipf(1.2)",
    "lognormal": "lognormal(maxvio=4)",
    "khot": "khot(4)",
    "rotating": "rotating(4)",
    "burst": "burst(8)",
    "correlated": "correlated(0.75)",
    "trace": "trace(routing.safetensors)",
}

_TYPES = {int: "a whole number", float: "a number", str: "a file"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A routing with the words and numbers that made it.

    make_workload("W2", T=512, E=32, K=2, W=8) is hot_rank(share=0.5625): the four experts of one rank are
    chosen 144 times each, the other 28 experts 16 times.
      name      hot_rank(share=0.5625)   canonical: every parameter, no alias
      tokens_W  (64, 64, ..., 64)        how many tokens, in order, start on each rank
      checksum  sha256 of sizes and ids, computed afresh: it shows whether a kernel wrote to its input
    """

    name: str
    seed: int
    step: int
    T: int
    E: int
    K: int
    W: int
    routing: Routing
    tokens_W: tuple[int, ...]

    def statistics(self, plan: RoutingPlan | None = None) -> LoadStatistics:
        return LoadStatistics.of(self.routing, plan, num_ranks=self.W)

    @property
    def checksum(self) -> str:
        return ids_checksum(self.routing.expert_TK, self.E)


def make_workload(name: str, *, T: int, E: int, K: int, W: int = 1, seed: int = 0, step: int = 0) -> Workload:
    """The same arguments give the same ids and gates, on any machine, in any process, in any order."""
    if T < 0 or step < 0:
        raise ValueError(f"T={T} tokens at step={step}; neither may be negative")
    if not 1 <= K <= E:
        raise ValueError(f"K={K} distinct choices among E={E} experts; K must be between 1 and E")
    if W < 1 or E % W:
        raise ValueError(
            f"{E} experts cannot be placed on {W} ranks in equal shares; choose a divisor of {E}"
        )
    family, given = _parse(_plain_name(name, E=E, K=K, W=W))
    name = _canonical(family, given)
    words = (f"moe-routing-suite-v{SUITE_VERSION}", name, seed)
    batch = Batch(
        T=T, E=E, K=K, W=W, seed=seed, step=step,
        steady=Draws(*words, E, K, W),
        draws=Draws(*words, step, T, E, K, W),
    )  # fmt: skip
    choices: Choices = FAMILIES[family](batch, **given)
    gate_TK = choices.gate_TK
    if gate_TK is None:
        gate_TK = _gates(Draws(*words, "gates", step, T, E, K, W), T, K)
    routing = Routing(
        expert_TK=torch.as_tensor(choices.expert_TK), gate_TK=gate_TK, num_experts=E, ragged=False
    )
    tokens_W = choices.tokens_W or tuple(spread_evenly(T, W).tolist())
    return Workload(
        name=name, seed=seed, step=step, T=T, E=E, K=K, W=W, routing=routing, tokens_W=tokens_W
    )  # fmt: skip


def check_name(name: str) -> None:
    """ValueError if no sizes at all could have a workload of this name, or its file does not exist."""
    if name.strip() not in ALIASES:
        _parse(_plain_name(name, E=1, K=1, W=1))
    if (file := file_of(name)) is not None and not file.is_file():
        raise ValueError(f"there is no file {file} to read the workload {name} from")


def parameters_of(family: str) -> list[inspect.Parameter]:
    """Returns what may stand in the brackets behind a family's name."""
    return [*inspect.signature(FAMILIES[family], eval_str=True).parameters.values()][1:]


def type_of(parameter: inspect.Parameter) -> type:
    """int of `int | None`: what is written in the brackets, if anything is."""
    types = [one for one in get_args(parameter.annotation) if one is not type(None)]
    return types[0] if types else parameter.annotation


def file_of(name: str) -> Path | None:
    """The file a workload is read from; None for those that are drawn."""
    return Path(_parse(name)[1]["file"]) if re.match(r"\s*trace\s*\(", name) else None


def with_file(name: str, file: Path | str) -> str:
    """The same workload, read from another file."""
    family, given = _parse(name)
    return _canonical(family, {**given, "file": str(file)})


def _plain_name(name: str, *, E: int, K: int, W: int) -> str:
    """The name without an alias; those with a share spell it out for these sizes."""
    text = ALIASES.get(name.strip(), name)
    if "{share}" in text:
        if W < 2:
            raise ValueError(f"{name.strip()} compares ranks and there is only one; ask for W of at least 2")
        # halfway between an even share and the most that E / W experts can take: reachable at every size
        text = text.format(n=E // W, share=(1 / W + min(1.0, E / W / K)) / 2)
    return re.sub(r"^\s*maxvio\b", "lognormal", text)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """`zipf(1.2)` or `zipf(a=1.2)` as ("zipf", {"a": 1.2}), every parameter present."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise ValueError(f"cannot read the workload {text!r}; write a family and its parameters: zipf(1.2)")
    family, inside = match.groups()
    if family not in FAMILIES:
        raise no_such("workload", family, [*FAMILIES, *ALIASES, "maxvio"])
    allowed = {parameter.name: parameter for parameter in parameters_of(family)}
    one_text = bool(allowed) and type_of(next(iter(allowed.values()))) is str
    words = _file_and_rest(inside or "", [*allowed][1:]) if one_text else (inside or "").split(",")
    given: dict[str, Any] = {}
    for place, word in enumerate(words if inside and inside.strip() else []):
        key, equals, value = word.partition("=")
        if not equals or (one_text and place == 0 and key.strip() != next(iter(allowed))):
            key, value = (*allowed, "")[min(place, len(allowed))], word
        key, value = key.strip(), value.strip()
        if key not in allowed or key in given:
            takes = f"it takes {', '.join(allowed)}, each once" if allowed else "it takes no parameters"
            raise ValueError(f"cannot read {word.strip()!r} in the workload {text.strip()!r}: {takes}")
        given[key] = _read(family, allowed[key], value)
    for key, parameter in allowed.items():
        if key not in given and parameter.default is parameter.empty:
            raise ValueError(
                f"the workload {family} needs {key} ({_TYPES[type_of(parameter)]}): {_example(family)}"
            )
        given.setdefault(key, parameter.default)
    return family, given


def _file_and_rest(inside: str, keys: list[str]) -> list[str]:
    """A path may hold commas and equals signs, so only `,key=...` at the very end is not part of it."""
    words: list[str] = []
    while match := re.fullmatch(rf"(.*),\s*((?:{'|'.join(keys)})\s*=[^,=]*)", inside, re.DOTALL):
        inside, last = match.groups()
        words.insert(0, last)
    return [inside, *words]


def _read(family: str, parameter: inspect.Parameter, value: str) -> Any:
    try:
        read = type_of(parameter)(value)
    except ValueError:
        read = None
    if read is None or read == "" or (isinstance(read, float) and not math.isfinite(read)):
        raise ValueError(
            f"{family}'s {parameter.name} is {value!r}; it must be {_TYPES[type_of(parameter)]}: "
            f"{_example(family)}"
        )
    return read


def _canonical(family: str, given: dict[str, Any]) -> str:
    """Every parameter in the family's order, keywords with their names; without those that are None."""
    words = [
        f"{parameter.name}={_spell(given[parameter.name])}"
        if parameter.kind is parameter.KEYWORD_ONLY
        else _spell(given[parameter.name])
        for parameter in parameters_of(family)
        if given[parameter.name] is not None
    ]
    return f"{family}({','.join(words)})" if words else family


def _spell(value: Any) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _example(family: str) -> str:
    return f"for example {EXAMPLES[family]}"


def _gates(draws: Draws, T: int, K: int) -> Tensor:
    """Positive, largest first as a router's top-k gives them, summing to 1."""
    # 0.1 keeps the smallest gate of K above 1 / (11 K): a combine that loses it is seen in any dtype
    weight_TK = 0.1 + draws.unit(T * K).astype(np.float32).reshape(T, K)
    weight_TK = -np.sort(-weight_TK, axis=1)
    return torch.from_numpy(weight_TK / weight_TK.sum(axis=1, keepdims=True))
