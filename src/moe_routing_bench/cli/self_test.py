"""mrb doctor --device cuda: the smallest case of every GPU kernel against the oracle.

Each implementation runs in a process of its own: a kernel that reads where it must not spoils all that its
process computes afterwards. `pretend` takes the same steps on the CPU, in
Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from rich.text import Text

from moe_routing_bench.bench.device import memory_place
from moe_routing_bench.cli.terminal import fail, show, two_columns
from moe_routing_bench.conformance.cases import CASES, Case, KitCell, layouts_for
from moe_routing_bench.conformance.check import check, matches
from moe_routing_bench.dtypes import DTYPES
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import BUILT_IN, all_ops, get_op
from moe_routing_bench.ops.targets import target_of

GPU_KERNELS = ("triton_*", "cute_*", "quack_*")
SECONDS = 600  # of one implementation, with compiling
PLAIN = next(case for case in CASES if case.name == "plain")
# for kernels that read whole tiles alone
WHOLE_TILES = Case(name="whole_tiles", guards=PLAIN.guards, D=64, F=64, ragged=False)


class Tried(NamedTuple):
    """Tried(name="combine.triton_gather_sum", answer="right", reason="9 cells: ...")"""

    name: str
    answer: Literal["right", "wrong", "not tried"]
    reason: str


STYLES = {"right": "green", "wrong": "red", "not tried": "yellow"}


def must_exist(device: str) -> None:
    """Says in a sentence why nothing can be tried on a device."""
    if device == "pretend":
        if os.environ.get("TRITON_INTERPRET") != "1":
            fail("--device pretend interprets the kernels on the CPU: set TRITON_INTERPRET=1")
    elif torch.device(device).type != "cuda":
        fail(f"--device {device}: what is tried are GPU kernels; name cuda, cuda:1, ... or pretend")
    elif not torch.cuda.is_available():
        fail(
            "there is no CUDA device here, so no GPU kernel can be tried; `TRITON_INTERPRET=1 mrb doctor "
            "--device pretend` takes the same steps on the CPU, and `mrb explain OP --arch sm_90a` says what "
            "would run"
        )


def try_all(device: str, pattern: str) -> Iterator[Tried]:
    for op in all_ops().values():
        for entry in find_all(op, configs=True, only=BUILT_IN):
            if any(matches(entry.spec, kernels) for kernels in GPU_KERNELS) and matches(entry.spec, pattern):
                name = f"{op.name}.{entry.spec}"
                if entry.implementation is None:
                    yield Tried(name, "not tried", entry.reason)
                else:
                    yield _tried_apart(op.name, entry.spec, device)


def _tried_apart(op: str, spec: str, device: str) -> Tried:
    name = f"{op}.{spec}"
    code = f"from {__name__} import answer; answer({op!r}, {spec!r}, {device!r})"
    try:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Tried(name, "wrong", f"it did not end within {SECONDS} s")
    try:
        return Tried(name, *json.loads(ran.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        words = " ".join(ran.stderr.split())[-300:]
        return Tried(name, "wrong", f"its process ended with code {ran.returncode}: {words}")


def answer(op: str, spec: str, device: str) -> None:
    """Runs in the process of one implementation; the last line is the answer."""
    torch.set_num_threads(1)
    print(json.dumps(tried(op, spec, device)[1:]))


def tried(op: str, spec: str, device: str) -> Tried:
    name, right = f"{op}.{spec}", 0
    reasons: list[str] = []
    for case in (PLAIN, WHOLE_TILES):
        for layout in layouts_for(get_op(op), case):
            for dtype in DTYPES:
                cell = KitCell(
                    op=op, spec=spec, case=case, layout=layout, dtype=dtype, device=memory_place(device)
                )
                outcome = check(cell)
                if outcome.status == "failed":
                    return Tried(name, "wrong", f"{dtype}, {layout}: {outcome.sentences[0]}")
                right += outcome.status == "passed"
                reasons += outcome.sentences[:1]
        if right:
            return Tried(name, "right", f"{right} small cells, forward and backward where it has one")
    return Tried(name, "not tried", reasons[-1])


def show_all(device: str, pattern: str) -> list[Tried]:
    """Prints what is tried as it comes, after what is known about the device."""
    place = torch.device(memory_place(device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said below
        target = target_of(place)
    gpu = "the interpreter" if device == "pretend" else f"{torch.cuda.get_device_name(place)}, {target.name}"
    show(f"Trying the smallest case of every GPU kernel on {gpu}, against the oracle on the CPU")
    if target.unlisted:
        show(Text(target.unlisted, "yellow"))
    tried = []
    for one in try_all(device, pattern):
        tried.append(one)
        row = two_columns(16)
        row.add_row(Text(one.answer, STYLES[one.answer]), f"{one.name}: {one.reason}")
        show(row)
    return tried


def show_summary(tried: list[Tried]) -> None:
    by_answer = {answer: [one.name for one in tried if one.answer == answer] for answer in STYLES}
    wrong, absent = by_answer["wrong"], by_answer["not tried"]
    show("", Text(f"{len(by_answer['right'])} right, {len(wrong)} wrong, {len(absent)} not tried", "bold"))
    if wrong:
        show(Text(f"Do not trust here: {', '.join(wrong)}", "red"))
    if absent:
        show(Text(f"Nothing is known here about: {', '.join(absent)}", "yellow"))
    if not wrong and not absent:
        show(
            Text(
                "Each is right here in its smallest case; `mrb check --device cuda` tries the others", "green"
            )
        )
