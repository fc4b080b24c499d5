"""The table of faults that measurements/gpu/kernel_mutations.py plants fits the kernels as they are now."""

from __future__ import annotations

import ast
import json
import runpy
import tomllib
from collections import Counter

from repository import ROOT, SOURCE

OPS = SOURCE / "ops"
SCRIPT = runpy.run_path(str(ROOT / "measurements" / "gpu" / "kernel_mutations.py"))
MUTATIONS = SCRIPT["mutations"]()
CUTE = tomllib.loads((ROOT / "tests" / "data" / "cute_mutations.toml").read_text())["mutation"]
KERNELS = {str(path.relative_to(OPS)) for path in [*OPS.rglob("triton_*.py"), *OPS.glob("gpu*.py")]}
KINDS = {
    "out_of_bounds", "missing_mask", "race", "double_write", "wrong_order", "wrong_index", "precision",
    "lost_update", "gradient",
}  # fmt: skip


def test_each_text_occurs_once_and_python_can_read_what_it_becomes() -> None:
    planted = [(one.file, one.old, one.new) for one in MUTATIONS]
    for file, old, new in planted + [(one["file"], one["old"], one["new"]) for one in CUTE]:
        text = (OPS / file).read_text()
        assert text.count(old) == 1, f"{file}: {old}: change the row in tests/data/*_mutations.toml"
        assert ast.dump(ast.parse(text.replace(old, new))) != ast.dump(ast.parse(text)), (file, old)


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


def test_the_faults_noticed_in_cute_kernels_are_those_of_the_table() -> None:
    lines = (ROOT / "measurements" / "gpu" / "cute_mutations.txt").read_text().splitlines()
    rows = [line for line in lines if line.partition(".py ")[1]]
    wanted = [(one["file"], one["kind"]) for one in CUTE]
    assert {str(path.relative_to(OPS)) for path in OPS.glob("*/cute_*.py")} == {file for file, _ in wanted}
    wanted += [(file, "no fault") for file in {file for file, _ in wanted}]
    assert len(rows) == len(wanted)
    for file, kind in wanted:
        (row,) = [line for line in rows if line.startswith(f"{file:28} {kind:50} ")]
        assert row.endswith("nothing") == (kind == "no fault"), row
