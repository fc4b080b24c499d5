"""docs/figures.md and docs/formats.md agree with the committed records, and their sweeps can be planned."""

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
    ("topic", "place"),
    [
        ("grid", "docs/figures.md"),
        ("default", "docs/figures.md"),
        ("default", "docs/experts.png"),
        ("experts", "docs/formats.png"),
    ],
)
def test_another_record_would_be_noticed(figures: ModuleType, records: Any, topic: str, place: str) -> None:
    """Times are others, and the ratios of all but the baseline."""
    one = records[topic]
    rows = tuple(
        {**row, "median_ms": 3 * row["median_ms"], "ratio": row["ratio"] * (1 + (row["role"] != "baseline"))}
        for row in one.rows
    )
    forged = {**records, topic: replace(one, rows=rows)}
    assert any(sentence.startswith(place) for sentence in figures.differences(forged))


def test_no_time_is_shorter_than_the_roof_allows(figures: ModuleType, records: Any) -> None:
    """A share above 1.05 means that the roof or the time is wrong."""
    shares = [
        row["share_of_roof"]
        for one in records.values()
        for row in one.rows
        if row["share_of_roof"] is not None
    ]
    assert len(shares) > 50 and max(shares) <= figures.MAX_SHARE_OF_ROOF


def test_every_share_of_the_roof_is_in_its_table(figures: ModuleType, records: Any) -> None:
    page = figures.DOCUMENT.read_text()
    for (model, weights), by_T in figures.roof_shares(records).items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {model} | {weights} |"))
        assert all(f"{100 * rows[0]['share_of_roof']:.0f}" in line for rows in by_T.values())


def test_a_gain_is_that_of_the_same_rounds(figures: ModuleType) -> None:
    """int8_a8 was timed beside native in other rounds, so it is compared with that native."""
    row = {"case": "c", "dtype": "bfloat16", "workload": "w", "direction": "forward", "role": "candidate"}
    native = {**row, "T": 1, "impl": "native", "role": "baseline", "ratio": 1, "median_ms": 4.0}
    theirs = {**row, "T": 1, "impl": "hf_eager", "ratio": 3.0, "median_ms": 12.0}
    stored = {**row, "T": 1, "impl": "native(store=int8_a8)", "ratio": 0.5, "median_ms": 2.2}
    records = {
        "default": figures.Records((native, theirs)),
        "default_int8": figures.Records(({**native, "median_ms": 4.4}, stored)),
        "default_int4_g128": figures.Records(),
    }
    found = figures.default_times(records)
    assert found["native"] == {1: (4.0, 3.0)} and found["int8_a8"] == {1: (2.2, 2.0)}


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


def test_a_page_without_records_says_so(figures: ModuleType, tmp_path: Path) -> None:
    nothing = figures.read(tmp_path)
    assert not any(one.rows for one in nothing.values())
    page = figures.document(nothing)
    assert page.count("not measured yet") == len(figures.comparisons(nothing)) + 3
    assert page.count("Not measured yet.") == page.count("\n## ") - 1  # the regret reads its own archive
    figures.draw_stored(nothing, tmp_path / "empty.png")


def test_records_of_another_sweep_are_called_a_sample(figures: ModuleType, records: Any) -> None:
    topic = figures.TOPICS["topk"]
    as_listed = [{**row, "suite": topic.suite, "threads": 2} for row in records["topk"].rows]
    assert "A SAMPLE" not in figures.source({"topk": figures.Records(tuple(as_listed))})
    for change in ({"suite": "topk-grid/4096-e64-k4"}, {"threads": 1}):
        other = figures.Records((*as_listed, {**as_listed[0], **change}))
        assert "A SAMPLE, NOT THE SWEEPS AS LISTED" in figures.source({"topk": other})


def test_ratios_in_words(figures: ModuleType) -> None:
    rows = [{"ratio": ratio, "verdict": verdict} for ratio, verdict in ((1.0, "SAME"), (4.0, "SLOWER"))]
    assert figures.compared(rows) == "2.0x faster (2 cells, 1.00x to 4.0x)"
    assert figures.compared(rows[:1]) == "1.00x faster (1 cell)"
    assert figures.decided(rows) == "1 of 2 cells"
    assert figures.verdicts(rows) == "SAME 1, SLOWER 1"
    assert [figures.times(value) for value in (1.254, 1.996, 9.41, 28.48)] == ["1.25x", "2.0x", "9.4x", "28x"]


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
