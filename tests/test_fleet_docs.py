"""What docs/fleet.md says was seen is what measurements/fleet holds."""

from __future__ import annotations

import json
from collections import Counter

from repository import ROOT

PAGE = (ROOT / "docs/fleet.md").read_text()


def measured(name: str) -> dict:
    return json.loads((ROOT / "measurements/fleet" / name).read_text())


def test_kills():
    runs = measured("engines.json")["runs"]
    assert all(r["records"] == 120 and not r["twice"] and r["same as the first"] for r in runs)
    killed = sum((Counter(r["kill -9"]) for r in runs), Counter())
    assert f"at random moments, {sum(bool(r['kill -9']) for r in runs)} runs" in PAGE
    for words, what in (
        ("drivers ({} times", "driver"),
        ("workers ({})", "worker"),
        ("raylets ({})", "raylet"),
        ("slurmd ({},", "slurmd"),
        ("tasks of Slurm ({})", "task of Slurm"),
    ):
        assert words.format(killed[what]) in PAGE
    runs = measured("kills.json")["runs"]
    assert all(r["cells"] == 60 and not r["double"] and not r["lost"] and not r["said twice"] for r in runs)
    killed = sum((Counter(r["killed"]) for r in runs), Counter())
    assert f"({killed['worker']} times) and of the S3 server ({killed['server']} times" in PAGE
    assert f"in {len(runs)} runs" in PAGE


def test_overhead():
    local, *others = measured("overhead.json")["engines"]
    assert f"`local` takes {local['seconds a cell']:.2f} s a cell and {local['once']:.0f} s once" in PAGE
    for row in others:
        assert f"| {row['engine']} | {row['more than local']:.2f} | {row['once']:.0f} |" in PAGE


def test_growth():
    for power, row in zip((6, 7, 8), measured("growth.json")["records"], strict=True):
        assert row["records"] == 10**power
        newest = row.get("the newest record of each cell")
        cells = (
            f"{row['aggregate query']['warm']:.1f} s",
            f"{row['resume: which of 60,000 cells are there']['warm']:.1f} s",
            f"{newest['warm']:.1f} s" if newest else "not measured",
            f"{row['mrb results, the whole command']:.1f} s",
        )
        assert any(
            line.startswith(f"  | 10^{power} ") and line.endswith(f"| {' | '.join(cells)} |")
            for line in PAGE.splitlines()
        )
        assert f"takes {row['aggregate query']['MiB of the process']} MiB" in PAGE
