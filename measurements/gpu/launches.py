"""Every launch that the Triton implementations ask for, compiled for eight GPUs, none of which is here.

    python measurements/gpu/launches.py                hours on 2 cores; stopped and run again, it goes on
    python measurements/gpu/launches.py --minutes 30   the sizes of a model first, then those of the kit

Asked for by `studies.launches.ask`: the sizes of Qwen3-30B-A3B and those of the conformance kit, on fake
tensors, as the launcher of each implementation does it for each architecture. Writes launches.json.xz (a row
for each launch and architecture; null if it is not compiled yet) and launches.txt (counts, what is refused
and why, what is wrong).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import lzma
import multiprocessing
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.ops.targets import TARGETS, Target
from moe_routing_bench.studies.launches import Asked, Launch, ask
from moe_routing_bench.studies.triton_code import compile_kernel

HERE = Path(__file__).parent
TABLE = HERE / "launches.json.xz"
MODEL = "qwen3-30b-a3b"


def read(path: Path = TABLE) -> dict[str, Any]:
    return json.loads(lzma.decompress(path.read_bytes()))


def source_of(kernel: str) -> str:
    """The text of a kernel, as a short hash: rows of another text are made again."""
    module, _, name = kernel.rpartition(".")
    function = getattr(importlib.import_module(f"moe_routing_bench.ops.{module}"), name)
    return hashlib.sha256(function.src.encode()).hexdigest()[:12]


def compiled(task: tuple[str, Launch]) -> tuple[str, str, dict[str, Any]]:
    arch, launch = task
    target = Target.named(arch)
    code = compile_kernel(launch.compilation(target), target)
    row = {
        "registers": code.registers, "spill_bytes": code.spill_bytes, "shared_bytes": code.shared_bytes,
        "wrong": list(code.wrong),
    }  # fmt: skip
    return arch, str(launch), {name: value for name, value in row.items() if value}


def recorded(arch: str) -> Asked:
    torch.set_num_threads(1)
    return ask(Target.named(arch), MODEL)


def in_turns(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of every kernel, dtype and choice of options, then another of each, and so on."""
    turn: Counter[str] = Counter()
    order = []
    for launch in launches:
        kind = f"{launch.kernel} {[kind for _, kind in launch.signature if kind[0] == '*']} {launch.options}"
        order.append((turn[kind], launch))
        turn[kind] += 1
    return [launch for _, launch in sorted(order, key=lambda pair: pair[0])]


def tasks(asked: dict[str, Asked], known: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Launch]]:
    """For all architectures side by side; a model's come first, as they do in `asked`."""
    queues = {arch: in_turns(found.launches) for arch, found in asked.items()}
    for place in range(max(map(len, queues.values()))):
        for arch, queue in queues.items():
            if place < len(queue) and known[arch][str(queue[place])] is None:
                yield arch, queue[place]


def summary(table: dict[str, Any]) -> str:
    lines = [
        f"{table['command']}; triton {table['triton']}, torch {table['torch']}, {table['machine']}",
        "compiled ahead of time, not run: see docs/gpu.md",
        "",
        f"{'GPU':8} {'cells':>6} {'refused':>8} {'launches':>9} {'compiled':>9} {'wrong':>6} "
        f"{'most shared KiB':>16} {'of':>5} {'most registers':>15}",
    ]
    for arch, rows in ((arch, table["launches"][arch]) for arch in TARGETS):
        asked, made = table["asked"][arch], [row for row in rows.values() if row is not None]
        most = {
            name: max((row.get(name, 0) for row in made), default=0) for name in ("shared_bytes", "registers")
        }
        lines.append(
            f"{arch:8} {asked['cells']:6} {sum(asked['refused'].values()):8} {asked['launches']:9} "
            f"{len(made):9} {sum('wrong' in row for row in made):6} {most['shared_bytes'] / 1024:16.1f} "
            f"{TARGETS[arch].shared_per_program // 1024:5} {most['registers']:15}"
        )
    wrong: Counter[str] = Counter()
    for arch, rows in ((arch, table["launches"][arch]) for arch in TARGETS):
        for launch, row in rows.items():
            for sentence in (row or {}).get("wrong", ()):
                wrong[f"{arch}: {launch.partition(' |')[0]}: {sentence}"] += 1
    lines += [
        "",
        "wrong:" if wrong else "nothing wrong",
        *(f"{n:5} {what}" for what, n in sorted(wrong.items())),
    ]
    lines += ["", "refused by unsupported(), cells:"]
    refused: dict[str, dict[str, int]] = {}
    for arch, asked in ((arch, table["asked"][arch]) for arch in TARGETS):
        for sentence, count in asked["refused"].items():
            refused.setdefault(sentence, {})[arch] = count
    for sentence, counts in sorted(refused.items()):
        lines.append(f"  {sentence} [{', '.join(f'{arch} {count}' for arch, count in counts.items())}]")
    return "\n".join(lines) + "\n"


def write(table: dict[str, Any]) -> None:
    TABLE.write_bytes(lzma.compress(json.dumps(table, separators=(",", ":"), sort_keys=True).encode()))
    TABLE.with_name("launches.txt").write_text(summary(table))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    pool = multiprocessing.get_context("spawn").Pool(options.jobs)
    asked = dict(zip(TARGETS, pool.map(recorded, TARGETS, chunksize=1), strict=True))
    sources = {launch.kernel: source_of(launch.kernel) for one in asked.values() for launch in one.launches}
    before = read() if TABLE.exists() else {}
    fresh = before.get("triton") == triton.__version__
    known: dict[str, dict[str, Any]] = {}
    for arch, found in asked.items():
        old = before.get("launches", {}).get(arch, {}) if fresh else {}
        keep = {str(launch): launch.kernel for launch in found.launches}
        known[arch] = {
            key: old.get(key) if before.get("sources", {}).get(kernel) == sources[kernel] else None
            for key, kernel in keep.items()
        }
    table = {
        "command": shlex.join(["python", "measurements/gpu/launches.py", *sys.argv[1:]]),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "machine": this_machine().name,
        "model": MODEL,
        "sources": sources,
        "asked": {
            arch: {"cells": one.cells, "launches": len(one.launches), "refused": one.refused}
            for arch, one in asked.items()
        },
        "launches": known,
    }
    todo = list(tasks(asked, known))
    print(f"{len(todo)} of {sum(map(len, known.values()))} to compile", flush=True)
    write(table)
    with pool:
        for number, (arch, key, row) in enumerate(pool.imap_unordered(compiled, todo), 1):
            known[arch][key] = row
            if number % 50 == 0:
                write(table)
                print(f"{number} of {len(todo)}, {time.perf_counter() - started:.0f} s", flush=True)
            if time.perf_counter() - started > 60 * options.minutes:
                break
    write(table)
    print(summary(table))


if __name__ == "__main__":
    main()
