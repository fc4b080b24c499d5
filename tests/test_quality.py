"""docs/quality.md has the numbers of the studies that are committed."""

from __future__ import annotations

import sys

from repository import ROOT

sys.path.insert(0, str(ROOT / "measurements"))

import marked
import quality


def test_the_table_is_that_of_the_studies() -> None:
    text = quality.DOCUMENT.read_text()
    assert marked.filled(text, {"studies": quality.studies_table()}) == text, (
        "run python measurements/quality.py"
    )


def test_every_study_is_in_the_table() -> None:
    folders = {path.parent.name for path in quality.RUNS.glob("*/pareto.json")}
    assert folders == {*quality.STUDIES, "which_router"}  # docs/which_router.md has that one
