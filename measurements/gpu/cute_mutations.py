"""Does the kit notice faults in the CuTe kernels? Plant them one at a time and run its cells on the CPU.

    python measurements/gpu/cute_mutations.py        3 minutes of one core; writes cute_mutations.txt

Needs nvidia-cutlass-dsl. The faults stand in tests/data/cute_mutations.toml. For each a process is forked
that loads a copy of the kernel's file with the fault in it, and runs the kit's bfloat16 cells of that
implementation, its threads on the CPU, until one fails; then tests/cute/test_moving.py. Each kernel is also
run without a fault: that must pass. "memory" says that the watch of ops/cute_threads.py saw it, "numbers"
that the judge did.
"""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import importlib.util
import io
import multiprocessing
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

os.environ["MRB_CUTE_ON_CPU"] = "1"

import pytest
import torch

from moe_routing_bench.conformance.check import cells_of, check
from moe_routing_bench.ops import cute_threads

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OPS = ROOT / "src/moe_routing_bench/ops"
assert cute_threads.ON_CPU


def look(pipe: Any, file: str, old: str, new: str) -> None:
    """In the forked process: how many cells were run, and what the last one said."""
    torch.set_num_threads(1)
    text = (OPS / file).read_text()
    if old and text.count(old) != 1:
        raise ValueError(f"{file} has {text.count(old)} times, not once: {old}")
    op, spec = file.removesuffix(".py").split("/")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{spec}.py"
        path.write_text(text.replace(old, new) if old else text)
        name = f"moe_routing_bench.ops.{op}.{spec}"
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
        kit = cells_of(op, spec, ["bfloat16"])
        for number, cell in enumerate(kit, 1):
            outcome = check(cell)
            assert outcome.status != "unsupported", outcome.sentences
            if outcome.status == "failed":
                pipe.send((number, outcome.sentences[0].replace("\n", " ")[:150]))
                return
        tests = [
            str(ROOT / "tests/cute/test_moving.py"),
            "-x",
            "-q",
            "-k",
            "not compiles",
            "-p",
            "no:cacheprovider",
        ]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            failed = pytest.main(tests) == pytest.ExitCode.TESTS_FAILED
        told = next((line for line in said.getvalue().splitlines() if line.startswith("FAILED")), "")
        pipe.send((len(kit), f"test {told.partition('::')[2][:100]}" if failed else "nothing"))


def main() -> None:
    started = time.perf_counter()
    lines, noticed, planted = [], 0, 0
    rows = tomllib.loads((ROOT / "tests" / "data" / "cute_mutations.toml").read_text())["mutation"]
    files = dict.fromkeys(row["file"] for row in rows)
    rows += [{"file": file, "kind": "no fault", "old": "", "new": ""} for file in files]
    context = multiprocessing.get_context("fork")
    for row in rows:
        file, what, old, new = row.values()
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=look, args=(theirs, file, old, new))
        process.start()
        theirs.close()
        try:
            cells, told = mine.recv()
        except EOFError:  # it ended without a word: a signal is the kernel's, an exception ours
            process.join()
            assert process.exitcode is not None and process.exitcode < 0, f"{file}, {what}"
            cells, told = 0, f"signal {-process.exitcode}"
        process.join()
        by = "memory" if "KernelMemoryError" in told or "signal" in told else "numbers"
        by = "test" if told.startswith("test") else by
        caught = told != "nothing"
        planted, noticed = planted + bool(old), noticed + bool(old and caught)
        lines.append(f"{file:28} {what:50} {cells:4} cells  {f'{by:8} {told}' if caught else 'nothing'}")
        print(lines[-1], flush=True)
    head = [
        "python measurements/gpu/cute_mutations.py",
        f"nvidia-cutlass-dsl {metadata.version('nvidia-cutlass-dsl')}, {time.perf_counter() - started:.0f} s",
        f"{noticed} of {planted} faults noticed",
    ]
    (HERE / "cute_mutations.txt").write_text("\n".join([*head, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
