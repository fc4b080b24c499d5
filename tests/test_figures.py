"""docs/figures.md and docs/formats.md agree with the committed records, and their sweeps can be planned."""

from __future__ import annotations

import importlib
import re
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
    own = 1 + bool(figures.tuned_section())  # the regret and tunings read their own archives
    assert page.count("Not measured yet.") == page.count("\n## ") - own
    figures.draw_stored(nothing, tmp_path / "empty.png")


def test_records_of_another_sweep_are_called_a_sample(figures: ModuleType, records: Any) -> None:
    topic = figures.TOPICS["topk"]
    (suite,) = topic.suites
    as_listed = [{**row, "suite": suite, "threads": 2} for row in records["topk"].rows]
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


def a_row(case: str, impl: str, ratio: float, baseline: str = "plain", **more: Any) -> dict[str, Any]:
    row = {"case": case, "dtype": "float32", "impl": impl, "ratio": ratio, "threads": 1, "T": 8, "D": 4}
    row |= {"baseline": None if ratio == 1 else baseline, "created_at": 1, "max_seconds": 45.0}
    row |= {"verdict": None if ratio == 1 else "FASTER", "low": ratio, "high": ratio, "share_of_roof": 0.5}
    return {**row, "median_ms": 10 * ratio, "copy_bytes": None, **more}


def sections(figures: ModuleType, **rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the tables that are made of these rows, as the page has them."""
    nothing = dict.fromkeys(figures.TOPICS, figures.Records())
    given = {name.replace("_", "-"): figures.Records(tuple(some)) for name, some in rows.items()}
    return figures.document({**nothing, **given}).splitlines()


def test_attention_stands_beside_plain_torch_and_the_best_of_torch(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "source", lambda records: "")
    case = "seed-attention/founding-float32"
    rows = [a_row(case, "plain", 1), a_row(case, "sdpa", 0.5), a_row(case, "flex", 0.4)]
    rows += [a_row(case, "native", 0.1)]
    lines = sections(figures, seed_attention=rows)
    assert "| founding | - | - | - | 1 | 10x | 4.0x | 8.5x over plain |" in lines
    later = [a_row(case, "sdpa", 1, created_at=2), a_row(case, "native", 0.3, "sdpa", created_at=2)]
    lines = sections(figures, seed_attention=[*rows, *later])  # ratios to another baseline stay apart
    assert "| founding | - | - | - | 3 | 10x | 3.3x | 8.5x over plain |" in lines
    alone = a_row(case, "native", 0.1, "sdpa")
    lines = sections(figures, seed_attention=[*rows[:3], alone])
    assert "| founding | - | - | - | 1 | - | - | 8.5x over plain |" in lines
    two_threads = a_row(case, "native", 0.01, threads=2)
    assert not any(line.startswith("| founding") for line in sections(figures, seed_attention=[two_threads]))


def test_the_dense_block_and_its_parts_stand_beside_the_original_plan(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "source", lambda records: "")
    both = {"threads": 2, "T": 64, "flops_per_second": 2e12}
    block = [("torch", 1), ("compiled", 0.8), ("frozen(ours)", 0.4), ("ours", 0.5)]
    linear = [
        ("qkv", "torch", 1),
        ("qkv", "mkl_packed", 0.5),
        ("out", "torch", 1),
        ("out", "mkl_packed", 0.125),
    ]
    lines = sections(
        figures,
        seed_dense=[a_row("seed-dense/1x64", name, ratio, "torch", **both) for name, ratio in block],
        seed_linear=[
            a_row(f"seed-linear/32x256-{one}-float32", name, ratio, "torch") for one, name, ratio in linear
        ],
        seed_rmsnorm=[a_row("seed-rmsnorm/65536x512-float32", "native", 0.3, bytes_per_second=9.8e9)],
    )
    line = next(line for line in lines if line.startswith("| 1x64"))
    assert line.startswith("| 1x64 | float32 | 10 | 8 | - | 4 | 16,000 | 2.00 | 2.0x | 0.470")
    assert "| mkl_packed, float32 | 4.0x | - | - |" in lines
    assert "asked 1.3x and never slower; reached 2.0x." in line_of(lines, "- bfloat16 and float32")
    assert "| H100, by tuning | 1.13x | 1.01x | 1.01x |" in lines
    assert "| native, float32 | 3 | 9.8 |" in lines and "| H100, fp8, staged | - | 4,596 |" in lines


def test_the_planned_experts_stand_beside_plain_torch_and_the_best_of_transformers(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "source", lambda records: "")
    times_of = [("eager_loop", 1), ("hf_eager", 0.5), ("hf_grouped_mm", 0.8), ("native", 0.25)]
    case = "seed-fused/1x7168x256"
    rows = [a_row(case, name, ratio, "eager_loop", threads=2) for name, ratio in times_of]
    line = line_of(sections(figures, seed_fused=rows), "| 1x7168x256")
    assert line == "| 1x7168x256 | - | 4.0x | - | 2.0x | - | 17x |"


def line_of(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_a_gain_needs_a_time_of_every_named_rival(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8x128 had no time of torch.compile, and its gain over torch alone was called that over both."""
    monkeypatch.setattr(figures, "source", lambda records: "")
    both = {"threads": 2, "T": 1024, "flops_per_second": 2e12}
    block = [
        a_row("seed-dense/8x128", name, ratio, "torch", **both)
        for name, ratio in (("torch", 1), ("ours", 0.25))
    ]
    lines = sections(figures, seed_dense=block)
    assert "| - | 0.638/0.520" in line_of(lines, "| 8x128") and "## A dense decoder block" in lines


def test_an_undecided_gain_has_its_mark(figures: ModuleType) -> None:
    case = "seed-attention/founding-float32"
    plain, ours = a_row(case, "plain", 1), a_row(case, "native", 0.5, verdict="TOO_FEW_ROUNDS")
    near, far = a_row(case, "sdpa", 0.6, low=0.4), a_row(case, "sdpa", 0.6)

    def gain(other: str, *rows: dict[str, Any]) -> str:
        return str(figures.gain_over(rows, ["native"], [other]))

    faster = {**ours, "verdict": "FASTER"}
    assert gain("plain", plain, ours) == "2.0x?" and gain("plain", plain, faster) == "2.0x"
    assert gain("sdpa", plain, faster, near) == "1.20x?" and gain("sdpa", plain, faster, far) == "1.20x"
    assert gain("sdpa", plain, ours, far) == "1.20x?"


def test_what_was_asked_stands_beside_what_was_reached(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "source", lambda records: "")
    case, more = "seed-rmsnorm/65536x512-float32", {"bytes_per_second": 9e9, "copy_bytes": 10e9}
    decode = "seed-attention/decode-1024-bfloat16"
    rows = [a_row(decode, "sdpa_folded", 1), a_row(decode, "native", 0.625, "sdpa_folded", share_of_roof=0.4)]
    rows = [{**row, "dtype": "bfloat16"} for row in rows]
    lines = sections(figures, seed_rmsnorm=[a_row(case, "native_reused", 0.3, **more)], seed_attention=rows)
    assert "asked 90 % of a copy; reached 90 % in float32." in line_of(lines, "- RMSNorm")
    assert "a read of the same bytes; reached 1.60x and 40 % of the read." in line_of(lines, "- decoding")
    assert sum("In 45 s a cell" in line for line in lines) == 2


def test_time_per_kept_pair_and_its_correlation_with_load(figures: ModuleType) -> None:
    more = {"E": 8, "K": 2, "layout": "padded(capacity_factor=1.25)"}
    rows = [
        a_row("seed-balance/e8", "native", 1, cv=cv, median_ms=ms, dropped_pairs=dropped, **more)
        for cv, ms, dropped in ((2.0, 1.0, 8), (0.0, 4.0, 0), (1.0, 2.0, 4))
    ]
    for turn, ratio, row in zip((1, 3, 2), (0.5, 1.0, 0.9), rows, strict=True):
        row |= {"created_at": turn, "ratio": ratio}
    assert figures.balance_lines(figures.Records(tuple(rows))) == [
        (8, "padded(1.25)", "25.0 %", "-1.00", "1.00", "-1.00", "-1.00", "250,000", "125,000")
    ]


@pytest.mark.parametrize(
    "topic",
    [
        "grid", "decode", "skew", "training", "layouts", "pack", "plain", "topk", "routing", "soft",
        "seed-attention", "seed-linear", "seed-rmsnorm", "seed-dense", "seed-balance",
        "seed-grid", "seed-qwen", "seed-fused",
    ],
)  # fmt: skip
def test_a_sweep_can_be_planned(figures: ModuleType, topic: str, tmp_path: Path, usual_speed: None) -> None:
    sweeps = importlib.import_module("sweeps")
    assert set(sweeps.TOPICS) == set(figures.TOPICS) and topic in sweeps.TOPICS
    for words in sweeps.TOPICS[topic].commands(tmp_path / "out"):
        assert words[0] == "mrb"
        assert re.search(r"\bcells? to measure", mrb(*words[1:], "--dry-run").stdout)
