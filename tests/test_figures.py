"""README's figures are what the committed records say, and the sweeps behind them can be run as they are."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from command_line import mrb
from moe_routing_bench.results.folder import iterate, samples_of
from repository import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "measurements")
        yield importlib.import_module("figures")


@pytest.fixture(scope="module")
def records(figures: ModuleType) -> Any:
    return figures.read()


def test_documents_have_the_figures_of_the_records(figures: ModuleType, records: Any) -> None:
    assert figures.differences(records) == [], "run python measurements/figures.py"


@pytest.mark.parametrize(
    "topic, place", [("grid", "README.md"), ("grid", "docs/figures.md"), ("default", "docs/experts.png")]
)
def test_another_record_would_be_noticed(figures: ModuleType, records: Any, topic: str, place: str) -> None:
    """The ratios of Transformers are others; every document hangs on them."""
    rows = tuple(
        {**row, "ratio": 2 * row["ratio"], "high": 2 * row["high"]}
        if row["impl"].startswith((figures.HF, "hf_"))
        else row
        for row in records[topic].rows
    )
    forged = {**records, topic: replace(records[topic], rows=rows)}
    assert any(sentence.startswith(place) for sentence in figures.differences(forged))


def test_times_are_the_medians_of_their_samples(figures: ModuleType, tmp_path: Path) -> None:
    sweeps = importlib.import_module("sweeps")
    timed = 0
    for archive in sorted(sweeps.RECORDS.glob("*.tar.xz")):
        folder = sweeps.unpack(archive, tmp_path / archive.name)
        for record in iterate(folder):
            if record.timing is not None:
                assert record.timing.median == pytest.approx(median(samples_of(folder, record)), rel=1e-9)
                timed += 1
    assert timed > 0


def test_what_was_not_measured_is_said(figures: ModuleType, tmp_path: Path) -> None:
    nothing = figures.read(tmp_path)
    assert not any(one.rows for one in nothing.values())
    assert figures.readme_part(nothing).count("not measured yet") == 8
    assert figures.document(nothing).count("Not measured yet.") >= len(nothing)
    figures.draw(nothing, tmp_path / "empty.png")


def test_records_of_another_sweep_are_said_to_be_a_sample(figures: ModuleType, records: Any) -> None:
    """In README, until the sweeps were run as they are listed."""
    topic = figures.TOPICS["topk"]
    as_listed = [{**row, "suite": topic.suite, "threads": 2} for row in records["topk"].rows]
    assert "A SAMPLE" not in figures.source({"topk": figures.Records(tuple(as_listed))})
    for change in ({"suite": "topk-grid/4096-e64-k4"}, {"threads": 1}):
        other = figures.Records((*as_listed, {**as_listed[0], **change}))
        assert "A SAMPLE, NOT THE SWEEPS AS LISTED" in figures.source({"topk": other})


def test_ratios_in_words(figures: ModuleType) -> None:
    rows = [{"ratio": ratio, "verdict": verdict} for ratio, verdict in ((1.0, "SAME"), (4.0, "SLOWER"))]
    assert figures.times(rows) == "2.00 times as long (geometric mean of 2 cells, 1.00 to 4.00)"
    assert figures.decided(rows) == "SLOWER in 1, SAME in 1 of 2"


def test_records_come_out_of_an_archive_as_they_went_in(figures: ModuleType, tmp_path: Path) -> None:
    sweeps = importlib.import_module("sweeps")
    archive = sweeps.RECORDS / "grid.tar.xz"
    folder = sweeps.unpack(archive, tmp_path / "once")
    (folder / "records.parquet").write_bytes(b"a copy is not kept")
    sweeps.pack(folder, tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == archive.read_bytes()


@pytest.mark.parametrize(
    "topic", ["grid", "decode", "skew", "training", "layouts", "pack", "plain", "topk", "routing", "soft"]
)
def test_a_sweep_can_be_planned(figures: ModuleType, topic: str, tmp_path: Path, usual_speed: None) -> None:
    sweeps = importlib.import_module("sweeps")
    assert set(sweeps.TOPICS) == set(figures.TOPICS) and topic in sweeps.TOPICS
    words = sweeps.TOPICS[topic].command(tmp_path / "out")
    assert words[0] == "mrb"
    assert "cells to measure" in mrb(*words[1:], "--dry-run").stdout
