"""Decisions: which implementation was measured to be fastest, read from a file of `mrb tune`.

A decision is for one machine, torch, operation, code, size of layer, dtype, number of threads, range of
tokens and class of load. There is none outside the numbers of tokens that were measured. If only one class of
load was measured, it decides for the other too, and the reason of the choice says so.

The file comes from outside: its size is limited, every value is checked, and the implementations it names
must exist here. Nothing in the file is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.text import printable

SCHEMA = "moe-routing-bench decisions"
VERSION = 2
MAX_BYTES = 16 << 20
MAX_ENTRIES = 10_000
MAX_TOKEN_COUNTS = 1_000
MAX_TIES = 100
MAX_TEXT = 1_000
MAX_SIZE = 2**40


LOADS = ("even", "skewed")


def load_of(most_rows: float, pairs: int, experts: int) -> str:
    """The class of a load, by the rows of the busiest expert: even routing gives it hardly more than the mean
    and five standard deviations."""
    mean = pairs / max(experts, 1)
    return LOADS[most_rows > mean + 5 * math.sqrt(mean) + 2]


class Facts(NamedTuple):
    """What a choice depends on, besides the number of tokens: Facts(D=2048, F=768, E=128, K=8,
    dtype="bfloat16", layout="compact", activation="swiglu", device="cpu")"""

    D: int
    F: int
    E: int
    K: int
    dtype: str
    layout: str
    activation: str
    device: str = "cpu"
    frozen: bool = False  # the weights are packed; then only settings of the kernel that packed them differ

    def __str__(self) -> str:
        sizes = f"D={self.D} F={self.F} E={self.E} K={self.K}"
        frozen = " frozen" if self.frozen else ""
        return f"{sizes} {self.dtype} {self.layout} {self.activation} on {self.device}{frozen}"


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Winner(T=16, impl="staged", ties=("eager_loop",), ratio=0.81, low=0.79, high=0.84, source="1f3a...")

    At 16 tokens it takes 0.81 of the baseline's time, and eager_loop is about as fast. Who is not shown to be
    faster than the baseline is no winner: a tie keeps the baseline."""

    T: int
    impl: str
    ties: tuple[str, ...]
    ratio: float | None
    low: float | None  # the 99 % interval of the ratio
    high: float | None
    source: str  # Op.source_hash of the code that was measured


@dataclass(frozen=True, kw_only=True)
class DecisionEntry:
    """The winners of one operation at one size of layer.

    DecisionEntry(op="expert_ffn", facts=Facts(D=2048, ...), threads=1, workload="zipf(1.2)", load="skewed",
                  overall="staged", regret_median=0.0, regret_worst=0.04, by_tokens=(Winner(T=16, ...),))
    Using `overall` for every T instead of each T's winner costs nothing at the median and 4 % at worst.
    """

    op: str
    facts: Facts
    threads: int
    workload: str
    load: str  # one of LOADS
    overall: str
    regret_median: float | None
    regret_worst: float | None
    by_tokens: tuple[Winner, ...]

    @property
    def spans(self) -> list[tuple[int | None, Winner | None]]:
        """The most tokens of each range, and its winner: the one measured nearest by ratio. There is none
        below the least and above the largest number of tokens that was measured."""
        measured = sorted(self.by_tokens, key=lambda winner: winner.T)
        if not measured:
            return [(None, None)]
        ends = [math.isqrt(few.T * many.T) for few, many in pairwise(measured)]
        inside = zip([*ends, measured[-1].T], measured, strict=True)
        return [(measured[0].T - 1, None), *inside, (None, None)]


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """A file of winners, valid for one machine and one version of torch.

    Decisions(path=Path("decisions.json"), machine="xeon-2-cores-24-gib-1f3a9c02", torch="2.13.0+cpu",
              made_at="2026-11-14T10:00:00Z", source="results/monday", entries=(DecisionEntry(...),))
    """

    path: Path
    machine: str
    torch: str
    made_at: str
    source: str  # the folder of results it was made from
    entries: tuple[DecisionEntry, ...]

    def find(self, op: str, facts: Facts, threads: int, load: str = LOADS[0]) -> DecisionEntry | None:
        """The entry for exactly these sizes, dtype, layout, activation, device and threads. If there are
        several: the first with this class of load, else the first in the file."""
        fits = self._like(op, facts, threads)
        return min(fits, key=lambda entry: entry.load != load, default=None)

    def loads(self, entry: DecisionEntry) -> set[str]:
        """The classes of load that were measured for the sizes and threads of this entry."""
        return {one.load for one in self._like(entry.op, entry.facts, entry.threads)}

    def _like(self, op: str, facts: Facts, threads: int) -> list[DecisionEntry]:
        wanted = (op, facts, threads)
        return [entry for entry in self.entries if (entry.op, entry.facts, entry.threads) == wanted]


def read_decisions(path: Path | str) -> Decisions:
    """Reads and checks a file; raises ValueError with a sentence if anything in it is wrong."""
    path = Path(path)
    try:
        if not path.is_file():
            raise ValueError(f"there is no file of decisions {path}; `mrb tune decide` writes one")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read the decisions {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} has over {MAX_BYTES:,} bytes, too many for a file of decisions")
    try:
        document = json.loads(content, parse_constant=_no_constant, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        raise ValueError(
            f"{path} is not JSON, or names something twice; make it anew with `mrb tune decide`"
        ) from None
    try:
        return _decisions(path, document)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a file of decisions: {error}; make it anew with `mrb tune decide`"
        ) from None


# what a field of the file may hold: in words, and as a test
Check: TypeAlias = tuple[str, Callable[[Any], bool]]


def _list_of(most: int) -> Check:
    return f"a list of at most {most:,}", lambda it: type(it) is list and len(it) <= most


# printable, because texts are shown in terminals
TEXT: Check = "a line of text", lambda it: type(it) is str and 0 < len(it) <= MAX_TEXT and it.isprintable()
WHOLE: Check = f"a whole number from 1 to {MAX_SIZE:,}", lambda it: type(it) is int and 1 <= it <= MAX_SIZE
FIGURE: Check = (
    "a number from 0, or null",
    lambda it: it is None or (type(it) in (int, float) and 0 <= it <= MAX_SIZE),
)
LOAD: Check = f"one of {', '.join(LOADS)}", lambda it: type(it) is str and it in LOADS
FLAG: Check = "true or false", lambda it: type(it) is bool
FILE = {**dict.fromkeys(("machine", "torch", "made_at", "from"), TEXT), "entries": _list_of(MAX_ENTRIES)}
FACTS = {
    **dict.fromkeys(("D", "F", "E", "K"), WHOLE),
    **dict.fromkeys(("dtype", "layout", "activation"), TEXT),
}
ENTRY = {
    **FACTS, **dict.fromkeys(("op", "workload", "overall"), TEXT), "threads": WHOLE, "load": LOAD,
    "regret_median": FIGURE, "regret_worst": FIGURE, "by_tokens": _list_of(MAX_TOKEN_COUNTS),
}  # fmt: skip
WINNER = {
    "T": WHOLE, "impl": TEXT, "ties": _list_of(MAX_TIES), "source": TEXT,
    **dict.fromkeys(("ratio", "low", "high"), FIGURE),
}  # fmt: skip


def _decisions(path: Path, document: Any) -> Decisions:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"its version is {_short(version)}, and this library reads {VERSION}")
    fields = _checked({k: v for k, v in document.items() if k not in ("schema", "version")}, "the file", FILE)
    entries = tuple(_entry(entry, f"entry {i}") for i, entry in enumerate(fields.pop("entries")))
    keys = [(entry.op, entry.facts, entry.threads, entry.workload) for entry in entries]
    if len(set(keys)) < len(keys):
        raise ValueError("an entry repeats an earlier one")
    return Decisions(path=path, source=fields.pop("from"), entries=entries, **fields)


def _entry(value: Any, where: str) -> DecisionEntry:
    fields = _checked(value, where, ENTRY, device=TEXT, frozen=FLAG)
    winners = [
        _winner(winner, f"by_tokens {i} of {where}") for i, winner in enumerate(fields.pop("by_tokens"))
    ]
    if len({winner.T for winner in winners}) < len(winners):
        raise ValueError(f"{where} has two winners for the same T")
    facts = {name: fields.pop(name) for name in (*FACTS, "device", "frozen") if name in fields}
    facts["layout"] = str(Layout.parse(facts["layout"]))
    return DecisionEntry(facts=Facts(**facts), by_tokens=tuple(winners), **fields)


def _winner(value: Any, where: str) -> Winner:
    fields = _checked(value, where, WINNER)
    for tie in fields["ties"]:
        _checked({"ties": tie}, where, {"ties": TEXT})
    return Winner(**{**fields, "ties": tuple(fields["ties"])})


def _checked(value: Any, where: str, checks: Mapping[str, Check], **optional: Check) -> dict[str, Any]:
    """The fields of an object of the file, each of which passed its check."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_short(value)}, not an object")
    if unknown := [name for name in value if name not in {**checks, **optional}]:
        raise ValueError(f"{where} has an unknown field {_short(unknown[0])}")
    if missing := [name for name in checks if name not in value]:
        raise ValueError(f"{where} has no {missing[0]}")
    for name, field in value.items():
        wanted, good = {**checks, **optional}[name]
        if not good(field):
            raise ValueError(f"{name} of {where} is {_short(field)}, not {wanted}")
    return dict(value)


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    return printable(ascii(value), 60)


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name twice")
    return fields
