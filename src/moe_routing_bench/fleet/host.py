"""Describes the machine that cells run on. The description is sent with their outcomes."""

from __future__ import annotations

from dataclasses import replace

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.bench.identity import settings, versions
from moe_routing_bench.bench.roofs import Roofs, roofs_now
from moe_routing_bench.core.machine import Machine, this_machine
from moe_routing_bench.fleet.executor import LocalExecutor


def environment_document(machine: Machine, roofs: Roofs | None = None) -> dict[str, object]:
    """Returns what was the same for all cells of a run. It is stored once, by its hash. The commit is for
    readers only: the resume key, which contains hashes of the files, decides what is measured again."""
    known = {"machine": machine.to_dict(), "versions": versions(), "settings": settings()}
    return {**known, "source": source_version(), "roofs": roofs and roofs.model_dump(mode="json")}


def measured_here(cell_json: str) -> str:
    """Measures a cell from another machine on this one, with the roofs and keys of this machine. Raises
    ValueError if it is not a cell or cannot be measured here."""
    cell, machine = Cell.from_json(cell_json), this_machine()
    roofs = roofs_now(machine, cell.policy.max_seconds)
    (outcome,) = LocalExecutor().run(
        [cell], roofs=roofs, on_progress=lambda cell, progress: None, watch=lambda: None
    )
    return replace(outcome, environment=environment_document(machine, roofs)).to_json()
