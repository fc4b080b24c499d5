"""A results folder as runs of cells: which records were timed together, and on what machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_routing_bench.results.lines import LeftOut
from moe_routing_bench.results.record import Record
from moe_routing_bench.results.store import environments, iterate
from moe_routing_bench.text import one_line


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment(machine="xeon-2-cores-24-gib-1f3a9c02", torch="2.13.0+cpu", python="3.12.3",
    settings="OMP_NUM_THREADS=1"); known is False if the folder lacks the document; the fields then say so."""

    machine: str
    torch: str
    python: str
    settings: str
    known: bool = True


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """The records of one cell in the last session that measured it: their samples are paired by round."""

    key: str
    session: str
    records: tuple[Record, ...]

    @cached_property
    def workload(self) -> tuple[str, int] | None:
        """Spec and seed; None if every worker died before they were known."""
        known = [(r.routing.spec, r.routing.seed) for r in self.records if r.routing is not None]
        return known[0] if known else None

    @cached_property
    def aa_floor(self) -> float:
        """How far the baseline was from its own twin; 0 if no record says."""
        return max((r.comparison.aa_floor for r in self.records if r.comparison is not None), default=0.0)

    def baseline_of(self, record: Record) -> Record | None:
        """The record of the baseline it was compared with; None for the baseline, or if it is not here."""
        if record.comparison is None:
            return None
        baselines = [r for r in self.records if r.implementation.role == "baseline" and r.timing is not None]
        named = [r for r in baselines if r.implementation.label == record.comparison.baseline]
        return named[0] if len(named) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    cells: tuple[CellRun, ...]
    environments: dict[str, Environment] = field(repr=False)

    def environment(self, record: Record) -> Environment:
        unknown = f"not known (environment {record.environment[:12]} is not in the folder)"
        nothing = Environment(machine=unknown, torch=unknown, python=unknown, settings=unknown, known=False)
        return self.environments.get(record.environment, nothing)


def read_run(folder: Path | str, left_out: LeftOut) -> Run:
    """The newest run of every cell. Those records are held in memory; older ones are dropped. ValueError if
    all lines were left out."""
    newest: dict[str, str] = {}
    by_cell: dict[str, dict[object, Record]] = {}
    for record in iterate(folder, left_out):  # oldest session first
        one, key = record.implementation, record.cell_key
        if newest.get(key) != record.session:
            newest[key], by_cell[key] = record.session, {}
        if one.role != "beside":
            by_cell[key][one.label, one.spec, one.role, record.what.setting] = record
    if not by_cell and left_out.first:
        raise ValueError(f"no line of {folder} is a valid record. {left_out.first[0]}")
    cells = [
        CellRun(key=key, session=newest[key], records=tuple(records.values()))
        for key, records in by_cell.items()
    ]
    return Run(folder=Path(folder), cells=tuple(cells), environments=_environments(Path(folder)))


def _environments(folder: Path) -> dict[str, Environment]:
    known = {}
    for key, document, machine in environments(folder):
        settings = document.get("settings")
        given = settings if isinstance(settings, dict) else {}
        texts = {k: v for k, v in given.items() if isinstance(v, str)}
        known[key] = Environment(
            machine=_text(machine, "name"),
            torch=_text(machine, "torch"),
            python=_text(machine, "python"),
            settings=one_line(" ".join(f"{k}={v}" for k, v in sorted(texts.items()))) or "none",
        )
    return known


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    return one_line(value, 300) if isinstance(value, str) else "not known"
