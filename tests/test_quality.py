"""docs/quality.md has the numbers of the studies that are committed."""

from __future__ import annotations

import sys

from repository import ROOT

sys.path.insert(0, str(ROOT / "measurements"))

import quality


def test_the_tables_are_those_of_the_studies() -> None:
    text = quality.DOCUMENT.read_text()
    assert quality.written(text) == text, "run python measurements/quality.py"
