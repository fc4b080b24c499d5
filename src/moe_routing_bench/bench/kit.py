"""An implementation gets a time only if it passes the kit's hard cases for its operations, dtype and layout.

The benchmark's own inputs are all alike: full batches, choices without gaps. The kit's are not (`mrb check`).
What passed is remembered by the hash of the code that runs, versions and settings, so what changed is
checked again. Code from
outside could write the file that remembers, so it is checked again by every command. The kit runs in the
worker, where it finds mistakes in words; code from outside also hands over its results, which the parent
judges itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from moe_routing_bench.bench.calls import Result, named_tensors, result_from, wrong_type
from moe_routing_bench.bench.device import memory_place
from moe_routing_bench.bench.identity import digest_of, settings, versions
from moe_routing_bench.bench.sources import PACKAGE, Code, compiler_version
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.untrusted import read_file
from moe_routing_bench.conformance.arguments import fresh_arguments
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import Outcome, cells_of, check, result_of
from moe_routing_bench.conformance.judging import judge_output, reference_of
from moe_routing_bench.core.machine import this_machine, torch_threads
from moe_routing_bench.core.names import base_name
from moe_routing_bench.core.paths import home
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef, device_kind

MAX_RESULT_BYTES = 2**28
MAX_BYTES = 2**20  # of the file; a fuller one is begun anew


def kit_cells(experiment: Experiment, implementation: ImplementationRef) -> list[KitCell]:
    """Loads what the implementation names and returns its kit cells. There are none for another library's
    layer."""
    parts = span_named(experiment.span).parts(implementation.name)
    return [one for part in parts for one in _cells(experiment, implementation, part.op, part.label)]


def _cells(experiment: Experiment, implementation: ImplementationRef, op: str, name: str) -> list[KitCell]:
    device, layout = memory_place(experiment.device), base_name(implementation.layout)
    return [
        one
        for one in cells_of(op, name, (experiment.dtype,), device)
        # batches are for `mrb check`: they start a second thread, and a worker counts its threads
        if not one.case.batches and (not all_ops()[op].has_layout or base_name(one.layout) == layout)
    ]


def kit_results(
    experiment: Experiment, implementation: ImplementationRef
) -> tuple[dict[str, Tensor], list[str]]:
    """What it returns for each cell that it supports, by name, for the judge; and the cells that it refuses.
    In a worker."""
    tensors: dict[str, Tensor] = {}
    refused = []
    with torch_threads(1):
        for cell in kit_cells(experiment, implementation):
            out = result_of(cell)
            if out is None:
                refused.append(_name(cell))
            elif not wrong_type(out):
                named = named_tensors(Result(out=out))
                tensors |= {f"{_name(cell)}{name}": tensor for name, tensor in named.items()}
    return tensors, refused


def can_judge_kit(experiment: Experiment, implementation: ImplementationRef) -> bool:
    """True if what is right is known without loading anything of it: not for operations from outside, nor if
    it stores weights in a format of its own."""
    ops = {op for op, _ in span_named(experiment.span).named(implementation.name)}
    ours = all(Path(all_ops()[op].file).is_relative_to(PACKAGE) for op in ops)
    return ours and "store=" not in implementation.name and experiment.device == "cpu"


def judge_kit(
    path: Path, experiment: Experiment, implementation: ImplementationRef, ties: str, refused: Collection[str]
) -> None:
    """Judges what code from outside handed over, in the parent, which loads nothing of it and decides what
    has to be answered. ImplementationError unless every cell has a right result or is refused, and every
    operation has a result."""
    tensors = load(read_file(path, MAX_RESULT_BYTES))
    for op, name in span_named(experiment.span).named(implementation.name):
        judged = 0
        for cell in _cells(experiment, implementation, op, name):
            start, where = _name(cell), f"{cell.case.name}, {cell.layout}"
            own = {
                key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)
            }
            if not own and start in refused:
                continue
            if not own:
                reason = f"it neither handed over a result of a hard case nor refused it: {where}"
                raise ImplementationError(Status.SUSPECT, reason)
            judged += 1
            host_args = fresh_arguments(cell.op, cell.case, cell.layout, cell.dtype)
            result = result_from(own, Result(out=reference_of(cell).baseline))
            for sentence in judge_output(None, cell, result.out, host_args, ties):
                reason = f"it fails a hard case that it says it passes: {where}: {sentence}"
                raise ImplementationError(Status.WRONG_VALUE, reason)
        if not judged:
            raise ImplementationError(Status.UNSUPPORTED, _ran_none(experiment, implementation, op, name))


def _ran_none(experiment: Experiment, implementation: ImplementationRef, op: str, name: str) -> str:
    return (
        f"the kit ran 0 cases of {op}.{name}: it supports none of the hard cases for "
        f"{experiment.dtype} in the layout {implementation.layout} (`mrb check`)"
    )


def _name(cell: KitCell) -> str:
    return f"{cell.op}/{cell.case.name}/{cell.layout}/"


def run_kit(experiment: Experiment, implementation: ImplementationRef) -> tuple[int, int, str]:
    """Returns the cells passed, the cells failed, and the first failure in words. NotImplementedError if an
    implementation supports none of its cells, because then nothing is known about it. It runs in a worker."""
    with torch_threads(1), torch.enable_grad():  # the cases are tiny
        outcomes = [_check(one) for one in kit_cells(experiment, implementation)]
    ran = [outcome for outcome in outcomes if outcome.status != "unsupported"]
    tried, known = ({(one.cell.op, one.cell.spec) for one in some} for some in (outcomes, ran))
    for op, name in sorted(tried - known):
        raise NotImplementedError(_ran_none(experiment, implementation, op, name))
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
        where = (device_kind(self.experiment.device), this_machine().name, compiler_version())
        title = replace(implementation, frozen=False).title
        return digest_of([title, source, kit, self.experiment.dtype, *where, versions(), settings()])


def _read(path: Path) -> set[str]:
    try:
        keys = json.loads(path.read_text()) if path.stat().st_size <= MAX_BYTES else []
    except (OSError, ValueError):
        return set()
    return {key for key in keys if isinstance(key, str)} if isinstance(keys, list) else set()
