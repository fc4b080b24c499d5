"""The resume key: the same for the same question, another if anything that could change the answer does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moe_routing_bench.bench import identity
from moe_routing_bench.bench.cell import Cell, Subject
from moe_routing_bench.bench.identity import cell_key, key_fields
from moe_routing_bench.machine import this_machine
from moe_routing_bench.ops import registry
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import BenchCase

KERNEL = '''"""A kernel from outside."""


def unsupported(y_RD, gate_TK, plan):
    return None


def run(y_RD, gate_TK, plan):
    return (y_RD[plan.row_TK] * gate_TK.unsqueeze(-1)).sum(1)
'''


@pytest.fixture
def kernels(tmp_path: Path):
    (tmp_path / "combine").mkdir()
    (tmp_path / "combine" / "mine.py").write_text(KERNEL)
    registry.include(tmp_path)
    return tmp_path


def a_cell() -> Cell:
    return Cell(
        case=BenchCase(name="own/x", span="combine", shape=MoEShape(T=8, D=16, F=16, E=4, K=2)),
        workload="zipf(1.2)",
        subjects=(Subject(spec="gather_sum"), Subject(spec="mine")),
    )


def key_of(cell: Cell) -> str:
    return cell_key(cell, this_machine())


def test_the_same_question_has_the_same_key(kernels):
    assert key_of(a_cell()) == key_of(a_cell())
    assert set(key_fields(a_cell(), this_machine())) == {
        "case", "contract", "workload", "subjects", "policy", "harness", "versions", "machine", "settings",
    }  # fmt: skip


CHANGES = {
    "sizes": lambda c: replace(c, case=replace(c.case, shape=replace(c.case.shape, T=9))),
    "dtype": lambda c: replace(c, case=replace(c.case, dtype="float32")),
    "span": lambda c: replace(
        c, case=replace(c.case, span="dispatch"), subjects=(Subject(spec="index_select"),)
    ),
    "activation": lambda c: replace(c, case=replace(c.case, activation="gelu")),
    "workload": lambda c: replace(c, workload="zipf(1.3)"),
    "seed": lambda c: replace(c, seed=1),
    "ranks": lambda c: replace(c, W=2),
    "layout": lambda c: replace(c, subjects=tuple(replace(s, layout="block(16)") for s in c.subjects)),
    "implementations": lambda c: c.only(c.subjects[:1]),
    "baseline": lambda c: c.only(c.subjects[::-1]),
    "threads": lambda c: replace(c, policy=replace(c.policy, threads=2)),
    "cache": lambda c: replace(c, policy=replace(c.policy, cache="cold")),
    "rounds": lambda c: replace(c, policy=replace(c.policy, max_rounds=99)),
    "processes": lambda c: replace(c, policy=replace(c.policy, processes=2)),
    "memory cap": lambda c: replace(c, policy=replace(c.policy, memory_gib=1)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_cell_changes_the_key(kernels, what):
    assert key_of(CHANGES[what](a_cell())) != key_of(a_cell())


def test_another_recording_under_the_same_name_changes_the_key(kernels, tmp_path):
    cell = replace(a_cell(), workload=f"trace({tmp_path / 'one, two.safetensors'},layer=3)")
    keys = [key_of(cell)]
    for content in (b"first", b"second"):
        (tmp_path / "one, two.safetensors").write_bytes(content)
        keys.append(key_of(cell))
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


def test_a_change_inside_a_composed_implementation_changes_the_key(monkeypatch):
    cell = Cell(
        case=BenchCase(name="own/x", span="expert_ffn", shape=MoEShape(T=8, D=16, F=16, E=4, K=2)),
        workload="uniform",
        subjects=(Subject(spec="staged(combine=index_add)"),),
    )
    before = key_of(cell)
    real = identity._source
    monkeypatch.setattr(
        identity, "_source", lambda op, name: "other" if name == "index_add" else real(op, name)
    )
    assert key_of(cell) != before


@pytest.mark.parametrize(
    "op,spec,file",
    [
        ("combine", "native", "ops/combine/native.py"),
        ("combine", "native", "ops/combine/native.cpp"),
        ("combine", "native_reused", "ops/combine/native.cpp"),
        ("combine", "native", "ops/numbers.h"),
        ("combine", "native", "native.py"),
        ("combine", "triton_gather_sum", "ops/gpu.py"),
        ("combine", "triton_gather_sum", "ops/combine/triton_gather_sum.py"),
    ],
)
def test_a_change_of_any_file_it_is_made_of_changes_the_source(monkeypatch, tmp_path, op, spec, file):
    copy = tmp_path / "package"
    shutil.copytree(identity.PACKAGE, copy)
    monkeypatch.setattr(identity, "PACKAGE", copy)
    before = identity._source(registry.all_ops()[op], spec)
    (copy / file).write_text((copy / file).read_text() + "\n")
    assert identity._source(registry.all_ops()[op], spec) != before


OUTSIDE = {
    "contract": lambda m: m.setattr(identity, "contract_hash", lambda span: "0" * 64),
    "harness": lambda m: m.setattr(identity, "harness_hash", lambda: "0" * 64),
    "torch": lambda m: m.setattr("torch.__version__", "9.9.9"),
    "python": lambda m: m.setattr("sys.version", "3.99.0 (main)"),
    "numpy": lambda m: m.setattr("numpy.__version__", "9.9.9"),
    "setting": lambda m: m.setenv("OMP_NUM_THREADS", "7"),
    "suite": lambda m: m.setattr(identity, "SUITE_VERSION", 99),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_change_around_it_changes_the_key(kernels, monkeypatch, what):
    before = key_of(a_cell())
    OUTSIDE[what](monkeypatch)
    assert key_of(a_cell()) != before


def test_another_machine_has_another_key(kernels):
    here = this_machine()
    assert cell_key(a_cell(), here) != cell_key(a_cell(), replace(here, cores=here.cores + 1))


def test_the_parent_never_loads_code_from_outside(kernels):
    (kernels / "combine" / "mine.py").write_text(KERNEL + "\nraise SystemExit('loaded in the parent')\n")
    assert len(key_of(a_cell())) == 64
