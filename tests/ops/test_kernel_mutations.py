"""The table of faults that measurements/gpu/kernel_mutations.py plants fits the kernels as they are now."""

from __future__ import annotations

import ast
import json
import runpy
import tomllib
from collections import Counter

import pytest

from repository import ROOT, SOURCE

OPS = SOURCE / "ops"
SCRIPT = runpy.run_path(str(ROOT / "measurements" / "gpu" / "kernel_mutations.py"))
MUTATIONS = SCRIPT["mutations"]()
KERNELS = {str(path.relative_to(OPS)) for path in [*OPS.rglob("triton_*.py"), *OPS.glob("gpu*.py")]}
KINDS = {
    "out_of_bounds", "missing_mask", "race", "double_write", "wrong_order", "wrong_index", "precision",
    "lost_update", "gradient",
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.kind}-{m.key()}")
def test_the_text_occurs_once_and_python_can_read_what_it_becomes(mutation) -> None:
    text = (OPS / mutation.file).read_text()
    assert text.count(mutation.old) == 1, "change the row in tests/data/kernel_mutations.toml"
    mutated = text.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))


def test_every_kernel_file_has_faults_of_every_kind_somewhere() -> None:
    found = Counter(mutation.file for mutation in MUTATIONS)
    assert {file for file in KERNELS if found[file] >= 4} == KERNELS
    assert {mutation.kind for mutation in MUTATIONS} == KINDS
    assert len({mutation.key() for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        op, _, name = mutation.look.partition("(")[0].partition(".")
        assert (OPS / op / f"{name}.py").exists()


def test_the_results_are_those_of_this_table_and_nothing_survived() -> None:
    results = json.loads(SCRIPT["RESULTS"].read_text())["results"]
    assert results.keys() == {mutation.key() for mutation in [*MUTATIONS, *SCRIPT["controls"]()]}
    assert [row for row in results.values() if row["caught"] == (row["kind"] == "no_fault")] == []
    assert SCRIPT["RESULTS"].with_suffix(".txt").read_text() == SCRIPT["summary"](list(results.values()))


CUTE = tomllib.loads((ROOT / "tests" / "data" / "cute_mutations.toml").read_text())["mutation"]


@pytest.mark.parametrize("mutation", CUTE, ids=lambda m: f"{m['file']}-{m['kind']}")
def test_faults_of_the_cute_kernels_fit_them(mutation) -> None:
    text = (OPS / mutation["file"]).read_text()
    assert text.count(mutation["old"]) == 1, "change the row in tests/data/cute_mutations.toml"
    ast.parse(text.replace(mutation["old"], mutation["new"]))


def test_every_fault_that_was_planted_in_a_cute_kernel_was_noticed() -> None:
    lines = (ROOT / "measurements" / "gpu" / "cute_mutations.txt").read_text().splitlines()
    for path in OPS.glob("*/cute_*.py"):
        rows = [line for line in lines if line.startswith(str(path.relative_to(OPS)))]
        planted = [line for line in rows if "no fault" not in line]
        assert len(planted) >= 8 and not [line for line in planted if line.endswith("nothing")]
