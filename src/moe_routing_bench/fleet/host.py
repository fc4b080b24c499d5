"""Describes the machine that cells run on. The description is sent with their outcomes."""

from __future__ import annotations

from dataclasses import replace

from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.bench.identity import settings, versions
from moe_routing_bench.bench.roofs import Roofs, roofs_now
from moe_routing_bench.core.machine import Machine, this_machine
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.workloads.experiment import Experiment


def environment_document(machine: Machine, roofs: Roofs | None = None) -> dict[str, object]:
    """Returns what was the same for all cells of a run. It is stored once, by its hash. The commit is for
    readers only: the resume key, which contains hashes of the files, decides what is measured again."""
    known = {"machine": machine.to_dict(), "versions": versions(), "settings": settings()}
    return {**known, "source": source_version(), "roofs": roofs and roofs.model_dump(mode="json")}


def measured_here(cell_json: str) -> str:
    """A cell from another machine, measured on this one, with this one's roofs and keys. ValueError if it
    is not a cell, or cannot be measured here."""
    experiment, machine = Experiment.from_json(cell_json), this_machine()
    roofs = roofs_now(machine, experiment.max_seconds)
    (outcome,) = LocalExecutor().run(
        [experiment], roofs=roofs, on_progress=lambda experiment, progress: None, watch=lambda: None
    )
    return replace(outcome, environment=environment_document(machine, roofs)).to_json()
