"""Two runs as a page: changes by kind, and nothing that was measured unlike has a ratio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import mrb, mrb_json
from moe_routing_bench.report.page import render
from moe_routing_bench.report.two_runs import two_runs
from moe_routing_bench.results.compare import RunComparison, compare_runs
from moe_routing_bench.results.folder import Session
from sample_records import HASH
from sample_runs import OTHER_MACHINE, add_cell, make_run

torch.set_num_threads(1)
NEW = {"mine": "another source"}


def compared(folder: Path, **options: Any) -> RunComparison:
    """B takes 1.3 times as long."""
    make_run(folder / "a", {"base": 1.0, "mine": 1.0})
    make_run(folder / "b", {"base": 1.0, "mine": 1.3}, **options)
    return compare_runs(folder / "a", folder / "b", keep_unlike=True, allow=("torch",))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"sources": NEW}, "regression"),
        ({}, "noise"),
        ({"sources": NEW, "harness_hash": HASH[::-1]}, "method change"),
        (
            {
                "sources": NEW,
                "environment": {
                    "machine": {"name": "xeon-2-cores", "torch": "2.14.0", "python": "3.12.3"},
                    "settings": {"OMP_NUM_THREADS": "1"},
                },
            },
            "other machine",
        ),
    ],
)
def test_a_confirmed_change_has_a_kind(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    runs = compared(tmp_path, **options)
    (change,) = [one for one in runs.changes if one.implementation == "mine"]
    assert (change.verdict, change.kind) == ("SLOWER", kind)
    html = render(two_runs(runs, "a", "b", ""))
    assert f"<caption>{kind}</caption>" in html and "1.3" in html


def test_unlike_runs_stand_side_by_side_without_a_ratio(tmp_path: Path) -> None:
    runs = compared(tmp_path, environment=OTHER_MACHINE)
    assert not runs.changes and len(runs.apart) == 2
    html = render(two_runs(runs, "a", "b", ""))
    assert "Measured unlike: side by side" in html and "the machines differ" in html
    assert "B / A" not in html
    with pytest.raises(ValueError, match="the machines differ"):
        compare_runs(tmp_path / "a", tmp_path / "b")


def test_the_command_writes_the_page_and_says_the_same(tmp_path: Path) -> None:
    for name, times in (("a", (1.0, 0.7)), ("b", (1.3, 0.701))):
        with Session.start(tmp_path / name) as session:
            add_cell(
                session,
                {"base": 1.0, "mine": times[0], "other": times[1]},
                sources=NEW if name == "b" else {},
            )
            add_cell(session, {"base": 1.0, "fails": "OOM" if name == "b" else 1.0}, experiment__T=64)
    ran = mrb("results", "compare", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "c.html")
    assert "regression" in ran.stdout
    html = (tmp_path / "c.html").read_text()
    for words in ("regression: 1", "Broken: passed in A and not in B", "The same within the limit", "<svg"):
        assert words in html, words
    found = mrb_json("results", "compare", tmp_path / "a", tmp_path / "b")
    assert {one["kind"] for one in found["changes"]} >= {"regression"} and found["apart"] == []


def test_names_stay_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>\u202e"
    for folder, time in (("a", 1.0), ("b", 1.4)):
        make_run(tmp_path / folder, {"base": 1.0, name: time}, sources={name: folder})
    html = render(two_runs(compare_runs(tmp_path / "a", tmp_path / "b"), name, name, name))
    assert "<img" not in html and "\u202e" not in html and "&lt;img" in html
