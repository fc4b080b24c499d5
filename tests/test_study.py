"""The study says what the records say: its text, figures and PDFs were made from them."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest

from repository import ROOT

STUDY = ROOT / "docs" / "study"


@pytest.fixture(scope="module")
def build() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        patch.syspath_prepend(ROOT / "measurements")
        yield importlib.import_module("build")


@pytest.fixture(scope="module")
def facts(build: Any) -> Any:
    return importlib.import_module("facts")


def test_the_records_give_every_number_of_the_study(build: Any) -> None:
    assert "{{" not in build.page()


def test_the_sources_state_no_measured_number() -> None:
    """What looks like a result ("2.2x", "31 % more", "5 ms") must be a placeholder."""
    for name in ("study.md", "slides.md", "summary.md"):
        text = (STUDY / name).read_text().partition("## References")[0]
        stated = re.findall(r"\d[\d.]*x\b|\d[\d.]* ms\b|\d[\d.]* % (?:more|less|faster|slower)", text)
        assert not stated, (name, stated)


def test_figures_and_pdfs_were_made_from_these_records(build: Any) -> None:
    built, now = json.loads(build.BUILT.read_text()), build.sources()
    changed = sorted(name for name in built.keys() | now.keys() if built.get(name) != now.get(name))
    assert not changed, f"{changed} changed since: run python docs/study/build.py"
    assert all((STUDY / name).read_bytes().startswith(b"%PDF") for name in build.PDFS)


def test_sentences_hold_beside_their_numbers(facts: Any) -> None:
    broken = [sentence for sentence, holds in facts.claims().items() if not holds]
    assert not broken, f"the records no longer say: {broken}"


def test_a_number_that_no_record_gives_is_refused(facts: Any) -> None:
    with pytest.raises(ValueError, match="no record gives"):
        facts.fill("It takes {{no_such_number}} times as long.")


def test_another_record_would_be_noticed(build: Any, facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.page()
    monkeypatch.setitem(facts.standings("routers")["switch"], "step_ratio", 9.99)
    monkeypatch.setattr(facts, "facts", facts.facts.__wrapped__)
    assert "899 % more time" in build.page() and build.page() != before


def test_references_are_cited_and_linked() -> None:
    text, references = (STUDY / "study.md").read_text().split("## References")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", references, re.M)]
    cited = {int(one) for group in re.findall(r"\[([\d, ]+)\](?!\()", text) for one in group.split(",")}
    assert numbers == list(range(1, len(numbers) + 1)) and set(numbers) == cited
    assert len(re.findall(r"\]\(https://arxiv\.org/abs/\d{4}\.\d{5}\)", references)) == len(numbers)
