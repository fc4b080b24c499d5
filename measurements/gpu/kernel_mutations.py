"""Do our tests notice every fault in a GPU kernel? This script plants faults one at a time, and looks.

    PACKAGES=/where/triton/is python measurements/gpu/kernel_mutations.py   50 minutes; go on after Ctrl-C
    ... --only 'gpu.py' --again                                             those of one file, once more
    ... --language cute                                                     the CuTe kernels, 6 minutes

The faults stand in tests/data/LANGUAGE_mutations.toml. For each, the sources are copied and the fault is put
in. A process of its own runs the kernels on the CPU: Triton's are interpreted, with watched memory and
programs in random order; CuTe's threads run one after another (ops/cute_threads.py). It runs the conformance
kit's cells of that implementation, every case once, cheap ones first, then every case in another dtype or
layout, and so on. If the kit notices nothing, it runs the tests of that family. It ends at the first failure.
`first` in the table names tests to begin with, where it is known that the kit's small cases cannot notice.
Every implementation is also run without any fault, and must pass.

Writes LANGUAGE_mutations.json (what is in there is not run again) and a .txt beside it. Needs triton or
nvidia-cutlass-dsl, in the environment or in the folder PACKAGES.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OPS = Path("src/moe_routing_bench/ops")
MAX_SECONDS = 900.0
TESTS = {
    "dispatch": "test_moving_kernels.py",
    "combine": "test_moving_kernels.py",
    "grouped_gemm": "test_gemm_kernels.py",
    "expert_ffn": "test_ffn_kernels.py",
    "topk": "test_routing_kernels.py",
    "score_topk": "test_routing_kernels.py",
    "make_plan": "test_routing_kernels.py",
    "attention": "test_dense_kernels.py",
    "rms_norm": "test_dense_kernels.py",
}
FAR = "test_far_kernels.py"  # places past 2^31, of all kernels
# these start processes of their own, which do not run on the CPU
LEFT_OUT = "not compil and not on_a_gpu and not registered"
Language = Literal["kernel", "cute"]  # kernel: Triton
TITLES: dict[Language, str] = {"kernel": "Triton", "cute": "CuTe"}
ON_CPU: dict[Language, dict[str, str]] = {
    "kernel": {"TRITON_INTERPRET": "1"},
    "cute": {"MRB_CUTE_ON_CPU": "1"},
}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One fault. Mutation(file="topk/triton_select.py", kind="out_of_bounds", old="token_t < T",
    new="token_t <= T", look="topk.triton_select"); without a fault, `old` and `new` are empty."""

    file: str
    kind: str
    old: str
    new: str
    look: str
    first: str = field(default="", repr=False)

    def key(self) -> str:
        return sha256(repr(self).encode()).hexdigest()[:12]


def results_of(language: Language) -> Path:
    return HERE / f"{language}_mutations.json"


def mutations(language: Language) -> list[Mutation]:
    rows = tomllib.loads((ROOT / "tests" / "data" / f"{language}_mutations.toml").read_text())["mutation"]
    return [Mutation(**{"look": _implementation(row["file"]), **row}) for row in rows]


def controls(language: Language) -> list[Mutation]:
    looks = dict.fromkeys(mutation.look for mutation in mutations(language))
    return [Mutation(file="", kind="no_fault", old="", new="", look=look) for look in looks]


def _implementation(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def plant(mutation: Mutation, folder: Path) -> None:
    """The repository's sources and tests in a folder, with the fault."""
    skipped = shutil.ignore_patterns("__pycache__")
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutation.old:
        path = folder / OPS / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(
                f"{mutation.file} has {text.count(mutation.old)} times, not once: {mutation.old}"
            )
        path.write_text(text.replace(mutation.old, mutation.new))


def look_for(language: Language, mutation: Mutation) -> dict[str, Any]:
    """What became of a fault: {"caught": True, "by": "kit", "cells": 3, "told": "raised RaceError: ..."}."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        plant(mutation, Path(name))
        paths = [os.environ.get("PACKAGES", ""), f"{name}/src"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **ON_CPU[language],
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(HERE / "kernel_mutations.py"), "--look", mutation.look]
        command += ["--language", language]
        command += ["--first", mutation.first] if mutation.first else []
        try:
            done = subprocess.run(
                command, cwd=name, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS
            )
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if done.returncode == 0 else _ended(done)
        except subprocess.TimeoutExpired:
            found = {"caught": True, "by": "time", "cells": 0, "told": f"no end in {MAX_SECONDS} s"}
    return {**asdict(mutation), **found, "seconds": round(time.perf_counter() - started, 1)}


def _ended(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Python's own mistakes are ours; a signal is the kernel's, which touched memory that is not there."""
    if done.returncode > 0:
        raise RuntimeError(f"{done.args}: {done.stderr[-2000:]}")
    return {"caught": True, "by": "signal", "cells": 0, "told": f"signal {-done.returncode}"}


def look_here(language: Language, look: str, first: str) -> dict[str, Any]:
    """In the process that runs the kernels: cells, then tests, until one fails."""
    import moe_routing_bench
    from moe_routing_bench.conformance.check import cells, check
    from moe_routing_bench.core.dtypes import DTYPES

    watched: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    if language == "kernel":
        from moe_routing_bench.conformance.instrumented import instrumented

        watched = partial(instrumented, order="random", seed=1)
    folder = Path("tests/interpreted" if language == "kernel" else "tests/cute")
    assert moe_routing_bench.__file__ is not None
    assert Path(moe_routing_bench.__file__).is_relative_to(Path.cwd()), moe_routing_bench.__file__
    if first and (found := _tests(folder, first))["caught"]:
        return {"cells": 0, **found}
    op, _, spec = look.partition(".")
    dtypes = tuple(DTYPES) if language == "kernel" else ("bfloat16",)
    kit = [cell for cell in cells(op, spec.partition("(")[0], dtypes) if _wanted(cell, spec)]
    met: Counter[Any] = Counter()
    order = {}
    for cell in kit:
        cost = cell.case.T * cell.case.D * cell.case.F
        order[cell] = ("(" in cell.spec, met[cell.spec, cell.case], cost)
        met[cell.spec, cell.case] += 1
    kit.sort(key=order.__getitem__)
    ran: Counter[str] = Counter()
    for number, cell in enumerate(kit, 1):
        with watched():
            outcome = check(cell)
        ran[outcome.status] += 1
        if outcome.status == "failed":
            told = outcome.sentences[0].replace("\n", " ")[:300]
            return {"caught": True, "by": "kit", "cells": number, "cell": str(cell), "told": told}
    # an implementation that cannot be loaded says so politely; that is no pass
    if not ran["passed"]:
        return {"caught": True, "by": "kit", "cells": len(kit), "told": "no cell passed"}
    files = (TESTS[op], FAR) if language == "kernel" else ("test_moving.py",)
    return {"cells": len(kit), **_tests(folder, *files)}


def _wanted(cell: Any, spec: str) -> bool:
    if "(" not in cell.spec:
        return True
    few = cell.case.name in ("plain", "odd_widths", "ragged_rows", "biased")
    few = few and cell.dtype == "bfloat16" and cell.layout == cell.case.layouts[-1]
    return few and (cell.spec == spec or "(" not in spec)


def _tests(folder: Path, *files: str) -> dict[str, Any]:
    import pytest

    for file in files:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            arguments = [str(folder / file), "-x", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
            code = pytest.main(arguments)
        if code == pytest.ExitCode.TESTS_FAILED:
            failed = [line for line in told.getvalue().splitlines() if line.startswith("FAILED")]
            return {"caught": True, "by": f"{folder}/{file}", "told": failed[0][:300]}
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(told.getvalue()[-2000:])
    return {"caught": False, "by": "nothing", "told": ""}


def summary(language: Language, results: list[dict[str, Any]]) -> str:
    faults = [row for row in results if row["kind"] != "no_fault"]
    caught = [row for row in faults if row["caught"]]
    lines = [f"{len(caught)} of {len(faults)} faults planted in the {TITLES[language]} kernels were noticed"]
    for by, number in Counter(row["by"] for row in caught).most_common():
        lines.append(f"  {number:4}  by {by}")
    for what in ("kind", "file"):
        lines += ["", f"noticed by {what}"]
        for name in sorted({row[what] for row in faults}):
            rows = [row for row in faults if row[what] == name]
            lines.append(f"  {name:32} {sum(row['caught'] for row in rows):3} of {len(rows)}")
    clean = [row for row in results if row["kind"] == "no_fault"]
    lines += ["", "without any fault"]
    lines += [f"  {r['look']:32} {'FAILED' if r['caught'] else 'passed'} {r['cells']} cells" for r in clean]
    for title, rows in (
        ("not noticed", [r for r in faults if not r["caught"]]),
        ("noticed", caught),
    ):
        lines += ["", title]
        for row in rows:
            lines.append(
                f"  {row['file']}, {row['kind']}: {_one_line(row['old'])}  ->  {_one_line(row['new'])}"
            )
            if row["caught"]:
                took = f", {row['seconds']} s" if "seconds" in row else ""
                lines.append(
                    f"      {row['by']}, {row['cells']} cells{took}: {row.get('cell', '')} {row['told']}"
                )
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines())


def write(language: Language, done: dict[str, dict[str, Any]]) -> None:
    known = {mutation.key(): mutation for mutation in [*mutations(language), *controls(language)]}
    rows = {key: done[key] for key in known if key in done}
    about = {
        "command": f"python measurements/gpu/kernel_mutations.py --language {language}",
        "machine": platform.platform(),
        "python": platform.python_version(),
    }
    results = results_of(language)
    draft = results.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")
    draft.replace(results)
    results.with_suffix(".txt").write_text(summary(language, list(rows.values())))


def main(
    look: Annotated[str, typer.Option(help="run one implementation's cells here: for its own use")] = "",
    first: Annotated[str, typer.Option(help="tests to begin with, with --look")] = "",
    only: Annotated[str, typer.Option(help="files or implementations with *")] = "*",
    again: Annotated[bool, typer.Option(help="those that are in the results too")] = False,
    survivors: Annotated[bool, typer.Option(help="again those that nothing noticed")] = False,
    control: Annotated[bool, typer.Option(help="also without any fault")] = True,
    language: Annotated[Language, typer.Option(help="kernel: those in Triton")] = "kernel",
) -> None:
    if look:
        print(json.dumps(look_here(language, look, first)))
        return
    results = results_of(language)
    for mutation in [*mutations(language), *(controls(language) if control else [])]:
        if not (fnmatchcase(mutation.file, only) or fnmatchcase(mutation.look, only)):
            continue
        # read anew: several of these commands may be at work
        done = json.loads(results.read_text())["results"] if results.exists() else {}
        before = done.get(mutation.key())
        if before is not None and not again and not (survivors and not before["caught"]):
            continue
        found = look_for(language, mutation)
        done = json.loads(results.read_text())["results"] if results.exists() else {}
        write(language, done | {mutation.key(): found})
        what = f"{mutation.look:28} {mutation.kind:14}"
        print(f"{found['seconds']:6} s  {what} by {found['by']}, {found['cells']} cells")
        if not found["caught"] and mutation.old:
            print(f"    NOT NOTICED: {_one_line(mutation.old)}  ->  {_one_line(mutation.new)}")


if __name__ == "__main__":
    typer.run(main)
