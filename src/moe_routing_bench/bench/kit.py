"""An implementation gets a time only if it passes the kit's hard cases for its operations, dtype and layout.

The benchmark's own inputs are all alike: full batches, choices without gaps. The kit's are not (`mrb check`).
What passed is remembered by the hash of the code that runs, so only changed code is checked again. Code from
outside could write the file that remembers, so it is checked again by every command. The kit runs in the
worker: it finds mistakes. Code that lies about it gains nothing, since its results are judged.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from moe_routing_bench.bench.device import memory_place
from moe_routing_bench.bench.identity import digest_of
from moe_routing_bench.bench.sources import PACKAGE, Code
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import Outcome, cells_of, check
from moe_routing_bench.core.machine import this_machine, torch_threads
from moe_routing_bench.core.names import base_name
from moe_routing_bench.core.paths import home
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef, device_kind

MAX_BYTES = 2**20  # of the file; a fuller one is begun anew


def kit_cells(experiment: Experiment, implementation: ImplementationRef) -> list[KitCell]:
    """Loads what the implementation names and returns its kit cells. There are none for another library's
    layer."""
    device, layout = memory_place(experiment.device), base_name(implementation.layout)
    return [
        one
        for part in span_named(experiment.span).parts(implementation.name)
        for one in cells_of(part.op, part.label, (experiment.dtype,), device)
        # batches are for `mrb check`: they start a second thread, and a worker counts its threads
        if not one.case.batches and (not all_ops()[part.op].has_layout or base_name(one.layout) == layout)
    ]


def run_kit(experiment: Experiment, implementation: ImplementationRef) -> tuple[int, int, str]:
    """Returns the cells passed, the cells failed, and the first failure in words. NotImplementedError if an
    implementation supports none of its cells, because then nothing is known about it. It runs in a worker."""
    with torch_threads(1), torch.enable_grad():  # the cases are tiny
        outcomes = [_check(one) for one in kit_cells(experiment, implementation)]
    ran = [outcome for outcome in outcomes if outcome.status != "unsupported"]
    tried, known = ({(one.cell.op, one.cell.spec) for one in some} for some in (outcomes, ran))
    for op, name in sorted(tried - known):
        raise NotImplementedError(
            f"the kit ran 0 cases of {op}.{name}: it supports none of the hard cases for "
            f"{experiment.dtype} in the layout {implementation.layout} (`mrb check`)"
        )
    failed = [outcome for outcome in ran if outcome.status == "failed"]
    first = [f"{one.cell.case.name}, {one.cell.layout}: {one.sentences[0]}" for one in failed[:1]]
    return len(ran) - len(failed), len(failed), "".join(first)


@cache  # implementations of several parts share them
def _check(one: KitCell) -> Outcome:
    return check(one)


_passed_here: set[str] = set()  # code from outside, for as long as this process lives


class PassedKits:
    """Which code has passed: PassedKits(experiment, outside=False).knows(implementation, source)."""

    def __init__(self, experiment: Experiment, *, outside: bool):
        self.experiment, self.path = experiment, None if outside else home() / "kit.json"
        self._keys = _passed_here if self.path is None else _read(self.path)

    def knows(self, implementation: ImplementationRef, source: str) -> bool:
        return self._key(implementation, source) in self._keys

    def add(self, implementation: ImplementationRef, source: str) -> None:
        self._keys.add(self._key(implementation, source))
        if self.path is None:
            return
        with suppress(OSError):  # if it cannot be written, it is checked again next time
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(sorted(self._keys)))

    def _key(self, implementation: ImplementationRef, source: str) -> str:
        kit = Code.of([PACKAGE / "conformance" / "check.py"]).hash
        where = (device_kind(self.experiment.device), this_machine().name, torch.__version__)
        return digest_of(
            [replace(implementation, frozen=False).title, source, kit, self.experiment.dtype, *where]
        )


def _read(path: Path) -> set[str]:
    try:
        keys = json.loads(path.read_text()) if path.stat().st_size <= MAX_BYTES else []
    except (OSError, ValueError):
        return set()
    return {key for key in keys if isinstance(key, str)} if isinstance(keys, list) else set()
