"""Which records of two runs answer the same question, and what must agree before they are compared."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from moe_routing_bench.bench.status import Status
from moe_routing_bench.names import did_you_mean
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.runs import CellRun, Run
from moe_routing_bench.results.same_case import SIZES
from moe_routing_bench.workloads.axes import CaseAxes, PolicyAxes, axes_of, names_of


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One implementation of a run, in the latest run of its cell."""

    run: Run
    cell: CellRun
    record: Record

    @property
    def passed(self) -> bool:
        return self.record.correctness.status is Status.PASSED

    @property
    def place(self) -> tuple[object, ...]:
        """Sizes and setting, without the routing, which a worker that died early may not have reported."""
        names = (*SIZES, *names_of(CaseAxes, "row"))
        return (*(getattr(self.record.workload, name) for name in names), *self.record.what.setting)

    @property
    def identity(self) -> tuple[object, ...]:
        return (*self.place, self.cell.workload, self.record.implementation.label)

    @property
    def where(self) -> str:
        """expert_ffn seed-fused/32x7168 float32 zipf(1.2), and if not forward: expert_ffn train ..."""
        w, what = self.record.workload, self.record.what
        span = what.span if what.direction == "forward" else f"{what.span} {what.direction}"
        spec, seed = self.cell.workload or ("routing unknown", 0)
        return f"{span} {w.case} {w.dtype} {spec}{f' seed {seed}' if seed else ''}"

    @property
    def name(self) -> str:
        return f"{self.where}: {self.record.contender}"


Agreement = tuple[str, Callable[[Measured], str]]


def _agreeing(part: str, declared: type) -> dict[str, Agreement]:
    """The axes of this part of a record that must agree."""

    def value(name: str) -> Callable[[Measured], str]:
        return lambda m: str(getattr(getattr(m.record, part), name)) or "none"

    return {
        one.name: (facts.plural, value(one.name))
        for one, facts in axes_of(declared)
        if facts.compare == "agree"
    }


# what must agree: the name for --allow, in words, and its value
LIKE: dict[str, Agreement] = {
    "machine": ("machines", lambda m: m.run.environment(m.record).machine),
    "torch": ("versions of torch", lambda m: m.run.environment(m.record).torch),
    "python": ("versions of Python", lambda m: m.run.environment(m.record).python),
    "settings": ("settings of the environment", lambda m: m.run.environment(m.record).settings),
    "span": ("spans", lambda m: m.record.what.span),
    "direction": ("directions", lambda m: m.record.what.direction),
    "contract": ("contracts", lambda m: m.record.what.contract_hash[:12]),
    **_agreeing("workload", CaseAxes),
    "routing": ("routed experts", lambda m: m.record.routing.checksum[:12] if m.record.routing else ""),
    **_agreeing("protocol", PolicyAxes),
    "inputs": ("rules for fresh inputs", lambda m: m.record.protocol.fresh_inputs),
}


def latest(run: Run) -> list[Measured]:
    """The newest record of everything that was measured, whatever came of it; twins are no contenders."""
    newest: dict[object, Measured] = {}
    for cell in run.cells:
        for record in cell.records:
            if record.implementation.role in ("twin", "beside"):
                continue
            one = Measured(run=run, cell=cell, record=record)
            key = (one.identity, _likeness(one))
            if key not in newest or _age(newest[key]) < _age(one):
                newest[key] = one
    return sorted(newest.values(), key=_age)


def _age(one: Measured) -> tuple[object, str]:
    return one.record.created_at, one.record.record_id


def _likeness(one: Measured) -> tuple[str, ...]:
    return tuple(value(one) for _, value in LIKE.values())


def question(one: Measured) -> tuple[object, ...]:
    """What a user asked for, whatever the versions: a run that answers it with others lacks nothing."""
    versions = ("torch", "python", "settings", "contract", "routing")
    asked = tuple(value(one) for name, (_, value) in LIKE.items() if name not in versions)
    return (*one.identity, *asked)


def match(
    all_a: list[Measured],
    all_b: list[Measured],
    allow: Collection[str],
    apart: list[tuple[Measured, Measured]] | None = None,
) -> tuple[list[tuple[Measured, Measured]], list[str]]:
    """Pairs of records of A and B, and notes. Those that agree in everything are paired first, then those
    that differ only in what is allowed. If some differ in anything else: they go to `apart`, or ValueError
    where it is not given."""
    for name in allow:
        if name not in LIKE:
            raise ValueError(
                f"there is no dimension {name!r}; {did_you_mean(name, LIKE)}there are {', '.join(LIKE)}"
            )
    exact = {(a.identity, _likeness(a)): a for a in all_a}
    pairs, left_b = [], []
    for b in all_b:
        a = exact.pop((b.identity, _likeness(b)), None)
        if a is None:
            left_b.append(b)
        else:
            pairs.append((a, b))
    by_identity: dict[object, list[Measured]] = {}
    for a in exact.values():
        by_identity.setdefault(a.identity, []).append(a)
    notes: dict[str, None] = {}
    failed_b = []
    for b in reversed(left_b):
        others = by_identity.get(b.identity, [])
        if not others:
            failed_b += [] if b.passed else [b]
            continue
        a = min(reversed(others), key=lambda one: len(differences(one, b)))
        differing = differences(a, b)
        refused = [name for name in differing if name not in allow]
        if refused and apart is not None:
            others.remove(a)
            apart.append((a, b))
            continue
        if refused:
            sentence = "; ".join(difference(name, a, b) for name in refused)
            options = " ".join(f"--allow {name}" for name in refused)
            raise ValueError(f"{sentence}; add {options} to compare all the same (seen at {b.name})")
        notes |= dict.fromkeys(f"compared all the same: {difference(name, a, b)}" for name in differing)
        others.remove(a)
        pairs.append((a, b))
    left_a = [a for others in by_identity.values() for a in others if a.passed]
    return pairs + _match_failed(left_a, failed_b), list(notes)


def _match_failed(left_a: list[Measured], failed_b: list[Measured]) -> list[tuple[Measured, Measured]]:
    """A worker that died early may have reported neither routing nor full label: match spec and place."""
    pairs = []
    for a in left_a:
        for b in failed_b:
            same_routing = b.cell.workload in (None, a.cell.workload)
            same_code = a.record.implementation.spec == b.record.implementation.spec
            if same_routing and same_code and a.place == b.place and not differences(a, b):
                pairs.append((a, b))
                failed_b.remove(b)
                break
    return pairs


def differences(a: Measured, b: Measured) -> list[str]:
    values = {name: (value(a), value(b)) for name, (_, value) in LIKE.items()}
    if a.record.routing is None or b.record.routing is None:
        del values["routing"]  # one of them died before it was known
    return [name for name, (of_a, of_b) in values.items() if of_a != of_b]


def difference(name: str, a: Measured, b: Measured) -> str:
    """the machines differ: a is laptop, b is server"""
    words, value = LIKE[name]
    return f"the {words} differ: a is {value(a)}, b is {value(b)}"
