"""Decisions: which implementation was measured to be fastest, read from a file of `mrb tune decide`.

The file comes from outside: its size is limited, every value is checked, and the implementations it names
must exist here. Nothing in it is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.text import printable

SCHEMA = "moe-routing-bench decisions"
VERSION = 1
MAX_BYTES = 16 << 20
MAX_ENTRIES = 10_000
MAX_TOKEN_COUNTS = 1_000
MAX_TIES = 100
MAX_TEXT = 1_000
MAX_SIZE = 2**40


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

    def __str__(self) -> str:
        sizes = f"D={self.D} F={self.F} E={self.E} K={self.K}"
        return f"{sizes} {self.dtype} {self.layout} {self.activation} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Winner(T=16, impl="staged", ties=("eager_loop",), ratio=0.81): at 16 tokens it takes 0.81 of the
    baseline's time, and eager_loop is about as fast."""

    T: int
    impl: str
    ties: tuple[str, ...]
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class DecisionEntry:
    """The winners of one operation at one size of layer.

    Entry(op="expert_ffn", facts=Facts(D=2048, ...), threads=1, workload="zipf(1.2)", overall="staged",
          regret_median=0.0, regret_worst=0.04, by_tokens=(Winner(T=16, impl="eager_loop", ...),))
    Using `overall` for every T instead of each T's winner costs nothing at the median and 4 % at worst.
    """

    op: str
    facts: Facts
    threads: int
    workload: str
    overall: str
    regret_median: float | None
    regret_worst: float | None
    by_tokens: tuple[Winner, ...]

    @property
    def bounds(self) -> list[int]:
        """For each measured T but the largest: up to how many tokens it is the nearest one, by ratio."""
        measured = sorted(winner.T for winner in self.by_tokens)
        return [math.isqrt(few * many) for few, many in pairwise(measured)]

    def winner(self, tokens: int) -> tuple[str, int | None]:
        """The implementation, and the T at which it was measured; None for the overall one."""
        if not self.by_tokens:
            return self.overall, None
        nearest = min(self.by_tokens, key=lambda winner: abs(math.log(winner.T / max(tokens, 1))))
        return nearest.impl, nearest.T


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """A file of winners, good for one machine and one version of torch.

    Decisions(path=Path("decisions.json"), machine="xeon-2-cores-24-gib-1f3a9c02", torch="2.13.0+cpu",
              made_at="2026-11-14T10:00:00Z", source="results/monday", entries=(Entry(op="expert_ffn", ...),))
    """

    path: Path
    machine: str
    torch: str
    made_at: str
    source: str  # the folder of results it was made from
    entries: tuple[DecisionEntry, ...]

    def find(self, op: str, facts: Facts, threads: int) -> DecisionEntry | None:
        """The entry for exactly these sizes, dtype, layout, activation and device. Of several, measured with
        different threads or workloads, the first with this many threads, else the first in the file."""
        fits = [entry for entry in self.entries if entry.op == op and entry.facts == facts]
        return min(fits, key=lambda entry: entry.threads != threads, default=None)


def read_decisions(path: Path | str) -> Decisions:
    """Read and check a file; ValueError with a sentence if anything about it is wrong."""
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


def _decisions(path: Path, document: Any) -> Decisions:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"its version is {_short(version)}, and this library reads {VERSION}")
    known = ("schema", "version", "machine", "torch", "made_at", "from", "entries")
    _only(document, "the file", known)
    entries = tuple(
        _entry(one, f"entry {i}") for i, one in enumerate(_list(document, "entries", "the file", MAX_ENTRIES))
    )
    seen: set[object] = set()
    for i, entry in enumerate(entries):
        key = (entry.op, entry.facts, entry.threads, entry.workload)
        if key in seen:
            raise ValueError(f"entry {i} repeats an earlier one")
        seen.add(key)
    return Decisions(
        path=path,
        machine=_text(document, "machine", "the file"),
        torch=_text(document, "torch", "the file"),
        made_at=_text(document, "made_at", "the file"),
        source=_text(document, "from", "the file"),
        entries=entries,
    )


def _entry(value: Any, where: str) -> DecisionEntry:
    sizes = ("D", "F", "E", "K")
    words = ("op", "dtype", "layout", "activation", "workload", "overall")
    known = (*sizes, *words, "threads", "regret_median", "regret_worst", "by_tokens", "device")
    _only(value, where, known)
    given = {name: _text(value, name, where) for name in words}
    by_tokens = tuple(
        _winner(one, f"by_tokens {i} of {where}")
        for i, one in enumerate(_list(value, "by_tokens", where, MAX_TOKEN_COUNTS))
    )
    if len({one.T for one in by_tokens}) < len(by_tokens):
        raise ValueError(f"{where} has two winners for the same T")
    return DecisionEntry(
        op=given["op"],
        facts=Facts(
            **{letter: _whole(value, letter, where) for letter in sizes},
            dtype=given["dtype"],
            layout=str(Layout.parse(given["layout"])),
            activation=given["activation"],
            device=_text(value, "device", where) if "device" in value else "cpu",
        ),
        threads=_whole(value, "threads", where),
        workload=given["workload"],
        overall=given["overall"],
        regret_median=_figure(value, "regret_median", where),
        regret_worst=_figure(value, "regret_worst", where),
        by_tokens=by_tokens,
    )


def _winner(value: Any, where: str) -> Winner:
    _only(value, where, ("T", "impl", "ties", "ratio"))
    ties = _list(value, "ties", where, MAX_TIES)
    return Winner(
        T=_whole(value, "T", where),
        impl=_text(value, "impl", where),
        ties=tuple(_text({"ties": one}, "ties", where) for one in ties),
        ratio=_figure(value, "ratio", where),
    )


def _only(value: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_short(value)}, not an object")
    if unknown := [name for name in value if name not in known]:
        raise ValueError(f"{where} has an unknown field {_short(unknown[0])}")


def _text(value: Mapping[str, Any], name: str, where: str) -> str:
    def good(it: Any) -> bool:
        # printable, because it is shown in terminals
        return type(it) is str and 0 < len(it) <= MAX_TEXT and it.isprintable()

    return _checked(value, name, where, "a line of text", good)


def _whole(value: Mapping[str, Any], name: str, where: str) -> int:
    wanted = f"a whole number from 1 to {MAX_SIZE:,}"
    return _checked(value, name, where, wanted, lambda it: type(it) is int and 1 <= it <= MAX_SIZE)


def _figure(value: Mapping[str, Any], name: str, where: str) -> float | None:
    def good(it: Any) -> bool:
        return it is None or (type(it) in (int, float) and 0 <= it <= MAX_SIZE)

    return _checked(value, name, where, "a number from 0, or null", good)


def _list(value: Mapping[str, Any], name: str, where: str, most: int) -> list[Any]:
    wanted = f"a list of at most {most:,}"
    return _checked(value, name, where, wanted, lambda it: type(it) is list and len(it) <= most)


def _checked(
    value: Mapping[str, Any], name: str, where: str, wanted: str, good: Callable[[Any], bool]
) -> Any:
    if name not in value:
        raise ValueError(f"{where} has no {name}")
    if not good(value[name]):
        raise ValueError(f"{name} of {where} is {_short(value[name])}, not {wanted}")
    return value[name]


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
