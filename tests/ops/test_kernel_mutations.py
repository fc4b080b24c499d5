"""The table of faults that measurements/gpu/kernel_mutations.py plants fits the kernels as they are now."""

from __future__ import annotations

import ast
import json
import runpy
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
