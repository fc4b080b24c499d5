"""The resume key: the same for the same question, another if anything that could change the answer does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest

from moe_routing_bench.bench import identity
from moe_routing_bench.bench.identity import cell_key, code_of, key_fields
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.sources import PACKAGE
from moe_routing_bench.bench.spans.layer import span as layer_span
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.ops import registry
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

pytestmark = pytest.mark.slow

KERNEL = '''"""A kernel from outside."""


def run(y_RD, gate_TK, plan):
    return (y_RD[plan.row_TK] * gate_TK.unsqueeze(-1)).sum(1)
'''


@pytest.fixture
def kernels(tmp_path: Path):
    (tmp_path / "combine").mkdir()
    (tmp_path / "combine" / "mine.py").write_text(KERNEL)
    registry.include(tmp_path)
    return tmp_path


def a_cell() -> Experiment:
    return Experiment(
        case="own/x",
        span="combine",
        T=8,
        D=16,
        F=16,
        E=4,
        K=2,
        workload="zipf(1.2)",
        implementations=(ImplementationRef(name="gather_sum"), ImplementationRef(name="mine")),
    )


def key_of(experiment: Experiment) -> str:
    return cell_key(experiment, this_machine())


def test_the_same_question_has_the_same_key(kernels):
    assert key_of(a_cell()) == key_of(a_cell())
    assert set(key_fields(a_cell(), this_machine())) == {
        "experiment", "suite", "recorded", "contract", "implementations", "harness", "versions", "machine",
        "settings",
    }  # fmt: skip


CHANGES = {
    "sizes": lambda c: replace(c, T=9),
    "dtype": lambda c: replace(c, dtype="float32"),
    "span": lambda c: replace(c, span="dispatch", implementations=(ImplementationRef(name="index_select"),)),
    "activation": lambda c: replace(c, activation="gelu"),
    "workload": lambda c: replace(c, workload="zipf(1.3)"),
    "seed": lambda c: replace(c, seed=1),
    "ranks": lambda c: replace(c, W=2),
    "layout": lambda c: replace(
        c, implementations=tuple(replace(s, layout="block(16)") for s in c.implementations)
    ),
    "implementations": lambda c: replace(c, implementations=c.implementations[:1]),
    "baseline": lambda c: replace(c, implementations=c.implementations[::-1]),
    "threads": lambda c: replace(c, threads=2),
    "cache": lambda c: replace(c, cache="cold"),
    "rounds": lambda c: replace(c, max_rounds=99),
    "processes": lambda c: replace(c, processes=2),
}


@pytest.mark.parametrize("limit", ["max_seconds", "step_seconds", "memory_gib"])
def test_limits_of_effort_are_no_part_of_the_key(kernels, limit: str) -> None:
    """What had no time is measured again anyway."""
    experiment = a_cell()
    assert key_of(replace(experiment, **{limit: 7.0})) == key_of(experiment)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_cell_changes_the_key(kernels, what):
    assert key_of(CHANGES[what](a_cell())) != key_of(a_cell())


def test_another_recording_under_the_same_name_changes_the_key(kernels, tmp_path):
    experiment = replace(a_cell(), workload=f"trace({tmp_path / 'one, two.safetensors'},layer=3)")
    keys = [key_of(experiment)]
    for content in (b"first", b"second"):
        (tmp_path / "one, two.safetensors").write_bytes(content)
        keys.append(key_of(experiment))
    assert len(set(keys)) == 3
    assert key_of(replace(a_cell(), workload="maxvio(3)"))  # an alias of a family that is drawn


def test_a_change_of_source_changes_the_key(kernels):
    before = key_of(a_cell())
    path = kernels / "combine" / "mine.py"
    path.write_text(KERNEL.replace("sum(1)", "sum(dim=1)"))
    assert key_of(a_cell()) != before
    path.write_text(KERNEL)
    assert key_of(a_cell()) == before
    (kernels / "combine" / "_parts.py").write_text("x = 1\n")  # a file it may import
    assert key_of(a_cell()) != before


@pytest.mark.parametrize(
    "name", ["combine/_parts.py", "combine/parts.json", "lib/parts.py", "parts.so", "combine/cl/parts.cl"]
)
def test_a_change_of_anything_in_the_folder_changes_the_key(kernels, name):
    """It may be imported, read, run as text or loaded as a library."""
    keys = [key_of(a_cell())]
    (kernels / name).parent.mkdir(exist_ok=True)
    for content in (b"one", b"two", b"\xff\0"):
        (kernels / name).write_bytes(content)
        keys.append(key_of(a_cell()))
    assert len(set(keys)) == 4


def test_what_cannot_be_loaded_does_not_change_the_key(kernels):
    before = key_of(a_cell())
    for name in ("combine/__pycache__/mine.pyc", ".git/index", "results/session=1/records.jsonl"):
        (kernels / name).parent.mkdir(parents=True)
        (kernels / name).write_bytes(b"x")
    assert key_of(a_cell()) == before
    builtin = replace(a_cell(), implementations=(ImplementationRef(name="gather_sum"),))
    alone = key_of(builtin)
    (kernels / "combine" / "mine.py").write_text(KERNEL.replace("sum(1)", "sum(dim=1)"))
    assert key_of(builtin) == alone


def test_a_big_file_counts_by_size_and_time(kernels, monkeypatch):
    monkeypatch.setattr("moe_routing_bench.bench.sources.BIG_BYTES", 100)
    big = kernels / "weights.bin"
    big.write_bytes(bytes(200))
    os.utime(big, ns=(10**18, 10**18))
    before = key_of(a_cell())
    os.utime(big, ns=(10**18, 2 * 10**18))
    assert key_of(a_cell()) != before


def test_a_folder_of_too_much_is_refused(kernels, monkeypatch):
    monkeypatch.setattr("moe_routing_bench.bench.sources.MAX_FILES", 0)
    with pytest.raises(ValueError, match="files"):
        key_of(a_cell())


# what no answer can hang on, with the reason
CANNOT_MATTER = {
    "__main__.py": "starts the command line",
    "bench/choosing.py": "which cells and implementations a command means",
    "bench/commit.py": "which commit it was, for readers",
    "bench/estimate.py": "how long a sweep may take",
    "bench/repro.py": "a command in words",
    "bench/warming.py": "compiles before; what is timed calls anew",
    "core/callable_folder.py": "makes mrb.bench a function and a folder",
    "bench/roofs.cpp": "measures the roofs of a machine; a cell reads those that are stored",
    "cli/": "reads words and shows results",
    "api.py": "the functions for Python",
    "fleet/": "which cells run where, and where records go; what runs a cell is noticed",
    "planner/": "predicts times",
    "report/": "shows results",
    "results/": "keeps results",
    "studies/": "looks at results, or at something else than a cell",
    "conformance/": "the kit's tests of other things; what the harness uses of it is noticed",
    "controllers/": "step between optimiser steps, which no timed call does",
    "layouts/": "proves what tiles and copies do; no timed call runs it",
    "models/convert.py": "no span runs a converted model",
    "models/gguf.py": "reads experts out of a file, which no span runs",
    "models/hub_folder.py": "writes a folder for others",
    "models/torchtitan.py": "the override",
    "models/vllm.py": "the plug-in",
    "ops/*/preferences.py": "what it makes auto pick is in the key by name",
    "public.py": "imports the public names",
    "moe/presets.py": "routers by the names of models; an implementation names the rule",
    "moe/statistics.py": "describes a routing afterwards",
    "moe/forward.py": "the layer for readers; no timed call runs it",
    "tuning/": "which settings are timed next; each race is a cell of its own",
    "train/": "trains models, which no cell does",
    "workloads/serving.py": "reads what engines recorded",
    "workloads/trace_": "describes, checks and compares traces",
}
# run in a copy of the package: every file in turn is changed, and the keys of all kinds of cells looked at
CHANGE_EACH_FILE = """
import json
from moe_routing_bench.bench.identity import HARNESS, key_fields, code_of
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.sources import PACKAGE, Code
from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.bench.spans.layer import span as layer_span
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.routers.router import all_routers
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

def cell(span, spec, **more):
    sizes = {"T": 8, "D": 32, "F": 16, "E": 8, "K": 2}
    return Experiment(span=span, **sizes, implementations=(ImplementationRef.read(spec, **more),))

ops, machine = all_ops(), this_machine()
names = {name: ops[name].names() if name in ops else span_named(name).all_names() for name in span_names()}
cells = [cell(span, spec) for span, specs in names.items() for spec in specs]
cells += [cell("layer", "staged", router=rule) for rule in all_routers()]
harness = Code.of(PACKAGE / name for name in HARNESS).files
needed = {
    id(c): {*harness, *code_of(span_named(c.span), c.implementations[0], Inputs(c)).files} for c in cells
}
unnoticed = []
for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
    one = next((c for c in cells if path in needed[id(c)]), cells[0])
    before, text = key_fields(one, machine), path.read_bytes()
    path.write_bytes(text + b"\\n")
    if key_fields(one, machine) == before:
        unnoticed.append(path.relative_to(PACKAGE).as_posix())
    path.write_bytes(text)
print(json.dumps(unnoticed))
"""


def covers(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or name.startswith(pattern)


@pytest.mark.timeout(600)
def test_a_change_of_any_file_that_can_matter_changes_a_key(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    ran = subprocess.run(
        [sys.executable, "-c", CHANGE_EACH_FILE], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    unnoticed = [name for name in json.loads(ran.stdout) if not name.endswith("__init__.py")]
    unexplained = [name for name in unnoticed if not any(map(partial(covers, name), CANNOT_MATTER))]
    assert not unexplained, "no resume key notices a change of these files"
    unused = [start for start in CANNOT_MATTER if not any(covers(name, start) for name in unnoticed)]
    assert not unused, "these are noticed after all"


def files_of(span: str, spec: str, **more: str) -> set[str]:
    implementation = ImplementationRef(name=spec, **more)
    case = Experiment(case="own/x", span=span, T=8, D=32, F=16, E=8, K=2)
    experiment = replace(case, workload="uniform", implementations=(implementation,))
    code = code_of(span_named(experiment.span), implementation, Inputs(experiment))
    return {path.relative_to(PACKAGE).as_posix() for path in code.files}


@pytest.mark.parametrize(
    ("span", "spec", "files"),
    [
        ("combine", "native", ["ops/combine/native.cpp", "ops/numbers.h", "core/cpp.py"]),
        ("combine", "native_reused", ["ops/combine/native.cpp", "ops/rows.py"]),
        ("dispatch", "index_select_reused", ["ops/rows.py"]),
        ("combine", "triton_gather_sum", ["ops/gpu.py", "ops/combine/triton_gather_sum.py"]),
        ("expert_ffn", "hf_eager", ["ops/hf.py"]),
        ("expert_ffn", "staged(combine=index_add)", ["ops/combine/index_add.py", "ops/combine/op.py"]),
        ("layer", "staged", ["ops/topk/op.py", "ops/make_plan/op.py", "routers/router.py"]),
        ("block", "ours(impl=staged)", ["models/decoder.py", "ops/topk/op.py"]),
        ("model", "ours(impl=staged)", ["models/transformers.py", "models/linears.py", "models/decoder.py"]),
    ],
)  # fmt: skip
def test_files_of_a_implementation(span, spec, files):
    assert set(files) <= files_of(span, spec)


def test_files_of_what_auto_picks_for_a_layer_matter(monkeypatch):
    for plan in ("argsort", "counting"):
        monkeypatch.setattr(type(layer_span), "resolved", lambda *a, plan=plan: [("make_plan", plan)])
        assert f"ops/make_plan/{plan}.py" in files_of("layer", "staged")


def test_files_of_what_auto_picks_for_a_block_matter(monkeypatch):
    monkeypatch.setattr("moe_routing_bench.bench.spans.block.auto_label", lambda op, source: "eager_loop")
    assert "ops/expert_ffn/eager_loop.py" in files_of("block", "ours")
    assert "ops/expert_ffn/eager_loop.py" not in files_of("block", "ours(impl=staged)")


def test_files_of_another_implementation_do_not_matter():
    assert "ops/combine/index_add.py" not in files_of("combine", "gather_sum")
    assert "routers/switch.py" not in files_of("layer", "staged", router="softmax_topk")
    assert "routers/switch.py" in files_of("layer", "staged", router="switch")


def test_versions_of_what_a_implementation_imports_are_in_the_key():
    def versions_of(spec: str) -> dict[str, str]:
        case = Experiment(case="own/x", span="expert_ffn", T=8, D=32, F=16, E=8, K=2)
        experiment = replace(case, workload="uniform", implementations=(ImplementationRef(name=spec),))
        return key_fields(experiment, this_machine())["versions"]

    assert "transformers" in versions_of("hf_eager") and "transformers" not in versions_of("eager_loop")
    assert versions_of("native")["compiler"] and "compiler" not in versions_of("eager_loop")


def test_decisions_that_pick_another_plan_change_the_key(monkeypatch):
    case = Experiment(case="own/x", span="layer", T=8, D=32, F=16, E=8, K=2)
    experiment = replace(case, workload="uniform", implementations=(ImplementationRef(name="staged"),))
    before = key_of(experiment)
    picked = [("topk", "sort"), ("make_plan", "counting")]
    monkeypatch.setattr(type(span_named("layer")), "resolved", lambda *a: picked)
    assert key_of(experiment) != before


OUTSIDE = {
    "contract": lambda m: m.setattr(identity, "contract_hash", lambda span, implementation: "0" * 64),
    "harness": lambda m: m.setattr(identity, "HARNESS", ("bench/status.py",)),
    "torch": lambda m: m.setattr("torch.__version__", "9.9.9"),
    "python": lambda m: m.setattr("sys.version", "3.99.0 (main)"),
    "numpy": lambda m: m.setattr(identity, "distribution_version", lambda name: "9.9.9"),
    "setting": lambda m: m.setenv("OMP_WAIT_POLICY", "active"),
    "nodes": lambda m: m.setenv("MRB_NODES", "0;1"),
    "libraries": lambda m: m.setenv("LD_LIBRARY_PATH", "/opt/mine/lib"),
    "C library": lambda m: m.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_ibt=off"),
    "OpenBLAS": lambda m: m.setenv("OPENBLAS_CORETYPE", "Haswell"),
    "Numba": lambda m: m.setenv("NUMBA_NUM_THREADS", "3"),
    "headers": lambda m: m.setenv("CPATH", "/opt/mine/include"),
    "compiler": lambda m: m.setenv("CXX", "clang++"),
    "suite": lambda m: m.setattr(identity, "SUITE_VERSION", 99),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_change_around_it_changes_the_key(kernels, monkeypatch, what):
    before = key_of(a_cell())
    OUTSIDE[what](monkeypatch)
    assert key_of(a_cell()) != before


@pytest.mark.parametrize("name", identity.SETTINGS_WITHOUT_EFFECT)
def test_what_a_launcher_sets_does_not_change_the_key(kernels, monkeypatch, name):
    """Ray sets OMP_NUM_THREADS=1 for its tasks; a worker uses the experiment's threads all the same."""
    before = key_of(a_cell())
    monkeypatch.setenv(name, "1")
    assert key_of(a_cell()) == before
    assert key_of(replace(a_cell(), threads=2)) != before


def test_another_machine_has_another_key(kernels):
    here = this_machine()
    assert cell_key(a_cell(), here) != cell_key(a_cell(), replace(here, cores=here.cores + 1))


def test_the_parent_never_loads_code_from_outside(kernels):
    (kernels / "combine" / "mine.py").write_text(KERNEL + "\nraise SystemExit('loaded in the parent')\n")
    assert len(key_of(a_cell())) == 64


def test_what_auto_picks_is_asked_once_a_implementation(monkeypatch):
    asked = []
    resolved = type(layer_span).resolved
    monkeypatch.setattr(type(layer_span), "resolved", lambda *args: asked.append(args) or resolved(*args))
    case = Experiment(case="own/x", span="layer", T=8, D=32, F=16, E=8, K=2)
    implementations = (ImplementationRef(name="staged", router="switch"), ImplementationRef(name="staged"))
    key_of(replace(case, workload="uniform", implementations=implementations))
    assert len(asked) == len(implementations)


def test_a_plan_looks_at_code_once_and_finds_the_same_keys(kernels, monkeypatch):
    names = [("gather_sum", "mine"), ("gather_sum", "index_add")]
    cells = [
        replace(
            a_cell(), T=T, workload=workload, implementations=tuple(ImplementationRef(name=n) for n in some)
        )
        for T in (8, 9, 10, 11)
        for workload in ("uniform", "zipf(1.2)")
        for some in names
    ]
    alone = [{key_of(cell)} for cell in cells]
    assert len({key for keys in alone for key in keys}) == len(cells)
    looks, of = [], identity.Code.of
    monkeypatch.setattr(identity.Code, "of", lambda roots: looks.append(1) or of(roots))
    assert LocalExecutor().keys(cells) == alone
    assert len(looks) == 3 + 1 + 1  # of implementations, of the baseline's contract, of the harness
    (kernels / "combine" / "mine.py").write_text(KERNEL + "# changed\n")
    changed = [keys != before for keys, before in zip(LocalExecutor().keys(cells), alone, strict=True)]
    assert changed == [True, False] * 8
