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
MUTATIONS, CUTE = SCRIPT["mutations"]("kernel"), SCRIPT["mutations"]("cute")
KERNELS = {str(path.relative_to(OPS)) for path in [*OPS.rglob("triton_*.py"), *OPS.glob("gpu*.py")]}
KINDS = {
    "out_of_bounds", "missing_mask", "race", "double_write", "wrong_order", "wrong_index", "precision",
    "lost_update", "gradient",
}  # fmt: skip


def test_each_text_occurs_once_and_python_can_read_what_it_becomes() -> None:
    for one in [*MUTATIONS, *CUTE]:
        text = (OPS / one.file).read_text()
        assert text.count(one.old) == 1, f"{one.file}: {one.old}: change its row in tests/data"
        assert ast.dump(ast.parse(text.replace(one.old, one.new))) != ast.dump(ast.parse(text)), one


def test_every_kernel_file_has_faults_of_every_kind_somewhere() -> None:
    found = Counter(mutation.file for mutation in MUTATIONS)
    assert {file for file in KERNELS if found[file] >= 4} == KERNELS
    assert {mutation.kind for mutation in MUTATIONS} == KINDS
    assert {str(path.relative_to(OPS)) for path in OPS.glob("*/cute_*.py")} == {one.file for one in CUTE}
    assert len({mutation.key() for mutation in [*MUTATIONS, *CUTE]}) == len(MUTATIONS) + len(CUTE)
    for mutation in [*MUTATIONS, *CUTE]:
        op, _, name = mutation.look.partition("(")[0].partition(".")
        assert (OPS / op / f"{name}.py").exists()


@pytest.mark.parametrize("language", ["kernel", "cute"])
def test_the_results_are_those_of_this_table_and_nothing_survived(language: str) -> None:
    path = SCRIPT["results_of"](language)
    results = json.loads(path.read_text())["results"]
    planted = [*SCRIPT["mutations"](language), *SCRIPT["controls"](language)]
    assert results.keys() == {mutation.key() for mutation in planted}
    assert [row for row in results.values() if row["caught"] == (row["kind"] == "no_fault")] == []
    assert path.with_suffix(".txt").read_text() == SCRIPT["summary"](language, list(results.values()))
