"""Makes ops/<op>/preferences.py from the records of `mrb sweep regret`: what impl="auto" prefers, and when.

    mrb sweep regret --out regret --seconds 20 --target 0.02      on a machine of the class, about 45 minutes
    python measurements/preferences.py vnni,avx512 regret measurements/records/regret.tar.xz

The second command shows the rules; with --write it writes them. For each operation it looks for the shortest
list of rules whose regret is at most 1.03 at the median and 1.10 at the 95th percentile. A rule names one
implementation, for one dtype, at most so many rows per expert or elements, or gradients; the last is for all
other calls. Rows of other machines stay as they are, and before the rules those with a condition that the
sweep does not vary: most_queries, and gradients that were not timed.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_routing_bench.ops import preference
from moe_routing_bench.ops.preference import Preference
from moe_routing_bench.ops.registry import Op, get_op
from moe_routing_bench.results.regrets import CellRegret, read_regrets

MEDIAN, P95 = 1.03, 1.10
MAX_RULES = 4
CONSTANTS = {getattr(preference, name): name for name in ("COMPILED", "GPUS", "NO_GPU", "NO_WAITING")}
BY_ROWS = ("expert_ffn", "grouped_gemm")  # other operations take no weights: their elements decide


@dataclass(frozen=True)
class Cell:
    """Cell(dtype=torch.float32, rows=0.5, elements=8192, gradients=False, regrets={"native": 1.0, ...})"""

    dtype: torch.dtype
    rows: float
    elements: int
    gradients: bool
    regrets: dict[str, float]


def cell_of(one: CellRegret) -> Cell:
    w = one.record.experiment
    pairs = w.T * w.K
    elements = {"topk": w.T * w.E, "make_plan": pairs, "combine": pairs * w.D, "grouped_gemm": pairs * w.D}
    best = one.contest.ratios[one.contest.winner]
    return Cell(
        dtype=getattr(torch, w.dtype),
        rows=pairs / w.E,
        elements=elements.get(w.span, w.T * w.D),
        gradients=w.direction != "forward",
        regrets={name: ratio / best for name, ratio in one.contest.ratios.items()},
    )


def fits(rule: Preference, cell: Cell) -> bool:
    return (
        rule.dtype in (None, cell.dtype)
        and (rule.most_rows is None or cell.rows <= rule.most_rows)
        and (rule.most_elements is None or cell.elements <= rule.most_elements)
        and rule.gradients in (None, cell.gradients)
    )


def regrets_of(rules: Sequence[Preference], cells: Sequence[Cell]) -> list[float]:
    chosen = [next(rule for rule in rules if fits(rule, cell)).order[0] for cell in cells]
    return [cell.regrets.get(spec, math.inf) for spec, cell in zip(chosen, cells, strict=True)]


def badness(rules: Sequence[Preference], cells: Sequence[Cell]) -> tuple[float, ...]:
    """First what is over the limits, then the mean of the logarithms."""
    regrets = regrets_of(rules, cells)
    median, p95 = float(np.median(regrets)), float(np.quantile(regrets, 0.95, method="higher"))
    over = max(median / MEDIAN, 1) * max(p95 / P95, 1)
    return over, float(np.mean(np.log(regrets)))


def conditions(op: str, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    def edges(values: set[float]) -> list[float]:
        return [math.sqrt(few * many) for few, many in pairwise(sorted(values))]

    dtypes = [{}, *({"dtype": dtype} for dtype in {cell.dtype for cell in cells})]
    sizes: list[dict[str, Any]] = [
        {"most_elements": int(edge)} for edge in edges({c.elements for c in cells})
    ]
    if op in BY_ROWS:
        sizes = [{"most_rows": float(f"{edge:.2g}")} for edge in edges({cell.rows for cell in cells})]
    kinds = [{"gradients": True}] if {cell.gradients for cell in cells} == {True, False} else []
    for one, other in product(dtypes, [{}, *sizes, *kinds]):
        if one or other:
            yield {**one, **other}


def found_rules(op: Op, cells: Sequence[Cell]) -> list[Preference]:
    def rule(spec: str, **when: Any) -> Preference:
        return Preference(machines=(), order=(spec,), evidence="", **when)

    specs = sorted({spec for cell in cells for spec in cell.regrets if may_run(op, spec)})
    rules = min(([rule(spec)] for spec in specs), key=lambda rules: badness(rules, cells))
    while badness(rules, cells)[0] > 1 and len(rules) < MAX_RULES:
        more = (
            [*rules[:place], rule(spec, **when), *rules[place:]]
            for spec, when in product(specs, conditions(op.name, cells))
            for place in range(len(rules))
        )
        best = min(more, key=lambda rules: badness(rules, cells))
        if badness(best, cells) >= badness(rules, cells):
            break
        rules = best
    return rules


def may_run(op: Op, spec: str) -> bool:
    """As tests/ops/test_auto.py asks of a table; what needs Transformers is no choice of ours."""
    if spec.startswith(("hf_", "frozen(")):
        return False
    found = op.get(spec)
    return not (found.forward_only or found.reuses_output or found.stored) and found.ties != "any"


def joined(made: list[Preference], table: Sequence[Preference], those: Sequence[str]) -> list[Preference]:
    """The new table: what the sweep does not vary, the rules that were made, the rows of other machines."""
    first = [row for row in table if row.most_queries or (row.gradients and row.evidence.startswith("not "))]
    left = [
        replace(row, machines=tuple(m for m in row.machines if m not in those))
        for row in table
        if row not in first
    ]
    return [*first, *made, *(row for row in left if row.machines)]


def excess(op: str, regrets: Sequence[float]) -> str | None:
    """A sentence about an operation whose rules leave its regret above a limit."""
    median, p95 = float(np.median(regrets)), float(np.quantile(regrets, 0.95, method="higher"))
    if median <= MEDIAN and p95 <= P95:
        return None
    return (
        f"{op} EXCEEDS THE LIMITS of {MEDIAN:.2f} and {P95:.2f}: "
        f"{median:.2f} at the median, {p95:.2f} at the 95th percentile"
    )


def written(rows: Sequence[Preference], op: str) -> str:
    def value(it: Any) -> str:
        if it in CONSTANTS:
            return CONSTANTS[it]
        if isinstance(it, str):  # in lines that fit
            *lines, last = textwrap.wrap(it, 80, break_on_hyphens=False)
            return " ".join([*(repr(f"{line} ") for line in lines), repr(last)])
        return "(PLAIN,)" if it == (preference.PLAIN,) else repr(it)

    lines = []
    for row in rows:
        given = {name: it for name, it in vars(row).items() if it is not None}
        lines.append(f"Preference({', '.join(f'{name}={value(it)}' for name, it in given.items())}),")
    table = "\n".join(lines)
    names = [
        name for name in ("COMPILED", "GPUS", "NO_GPU", "NO_WAITING", "PLAIN", "Preference") if name in table
    ]
    by = "see ops/preference.py. Made by measurements/preferences.py."
    parts = [f'"""What impl="auto" prefers for {op}: {by}"""']
    parts += ["import torch"] if "torch." in table else []
    parts += [f"from moe_routing_bench.ops.preference import {', '.join(names)}"]
    return "\n\n".join([*parts, f"PREFERENCES = (\n{table}\n)\n"])


def main(machines: str, folder: str, evidence: str, write: bool) -> None:
    those = tuple(machines.split(","))
    assert set(those) <= set(preference.COMPILED), f"machines are of {preference.COMPILED}"
    by_op: dict[str, list[Cell]] = {}
    for one in read_regrets(folder).cells:
        if not one.group.endswith(" frozen"):  # frozen weights have one implementation
            by_op.setdefault(one.record.experiment.span, []).append(cell_of(one))
    for name, cells in by_op.items():
        op = get_op(name)
        rules = found_rules(op, cells)
        regrets = regrets_of(rules, cells)
        p95 = np.quantile(regrets, 0.95, method="higher")
        numbers = f"{np.median(regrets):.2f} at the median, {p95:.2f} at the 95th percentile, "
        numbers += f"{max(regrets):.2f} at worst of {len(cells)} cells"
        made = [replace(r, machines=those, evidence=f"{evidence}: regret {numbers}") for r in rules]
        for row in made:
            print(name, row)
        if (sentence := excess(name, regrets)) is not None:
            print(sentence)
        if write:
            path = Path(op.file).with_name("preferences.py")
            table = import_module(f"{op.package}.preferences").PREFERENCES
            path.write_text(written(joined(made, table, those), name))
            subprocess.run(["ruff", "format", "-q", str(path)], check=True)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[4:] not in ([], ["--write"]):
        sys.exit(__doc__)
    main(*sys.argv[1:4], write=len(sys.argv) == 5)
