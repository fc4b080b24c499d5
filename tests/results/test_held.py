"""What a record says is held against its samples, and a copied session counts once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.results import read as held
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.read import RECORDS, LeftOut
from sample_runs import make_run

pytestmark = pytest.mark.slow

TIMES = ("median", "mean", "std", "least", "most", "p05", "p25", "p75", "p95")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "results", {"base": 1.0, "fast": 0.8, "slow": 1.3})


def lines_of(folder: Path) -> Path:
    (path,) = folder.glob(f"session=*/{RECORDS}")
    return path


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = lines_of(folder)
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def without_roofs(record: dict[str, Any]) -> None:
    """As it was written before roofs knew working sets: the share is of the floor."""
    for name in ("roof_seconds", "roof_busy"):
        del record["work"][name]


def counted(folder: Path) -> tuple[int, LeftOut]:
    left_out = LeftOut()
    (rows,) = run_query(folder, "SELECT count(*) FROM records", left_out)[1]
    assert rows[0] == len(list(iterate(folder)))
    return rows[0], left_out


def scaled(record: dict[str, Any]) -> None:
    """Every time of the cell, and what follows from it, a tenth: no record contradicts another."""
    for name in TIMES:
        record["timing"][name] *= 0.1
    for name in ("tokens_per_second", "flops_per_second", "bytes_per_second"):
        record["work"][name] *= 10
    record["work"]["share_of_roof"] = min(1.0, 10 * record["work"]["share_of_roof"])


def better_ratio(record: dict[str, Any]) -> None:
    if record["implementation"]["label"] == "fast":
        for name in ("ratio", "low", "high"):
            record["comparison"][name] *= 0.9


def narrower(record: dict[str, Any]) -> None:
    if (found := record["comparison"]) is not None:
        found["low"] = found["high"] = found["ratio"]


def wider(record: dict[str, Any]) -> None:
    if (found := record["comparison"]) is not None:
        found["low"], found["high"] = 0.5 * found["low"], 2 * found["high"]


def other_verdict(record: dict[str, Any]) -> None:
    if record["implementation"]["label"] == "slow":
        record["comparison"]["verdict"] = "FASTER"


def other_rate(record: dict[str, Any]) -> None:
    record["work"]["tokens_per_second"] *= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled, "samples say"),
        (better_ratio, "says ratio"),
        (narrower, "its samples"),
        (wider, "its samples"),
        (other_verdict, "says FASTER"),
        (other_rate, "tokens_per_second"),
    ],
)
def test_a_record_that_is_not_of_its_samples_is_left_out(
    folder: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    assert counted(folder)[0] == 4
    edit(folder, change)
    rows, left_out = counted(folder)
    assert rows == 0 and left_out.count == 4, "with one record its whole cell is left out"
    assert any(words in sentence for sentence in left_out.first), left_out.first


def test_an_edit_that_changes_no_number_is_fine(folder: Path) -> None:
    for change in (lambda record: None, without_roofs):
        edit(folder, change)
        assert counted(folder) == (4, LeftOut())


def test_without_samples_a_remark_says_so(folder: Path) -> None:
    for name in ("samples.f64", "records.parquet"):
        lines_of(folder).with_name(name).unlink()
    for _ in range(2):  # from the lines, then from the copy
        rows, left_out = counted(folder)
        assert rows == 4 and not left_out.count
        assert left_out.remarks == [
            f"session {lines_of(folder).parent.name[8:]} has no samples.f64: 4 times are not checked"
        ]


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("name", ["00000000", "99999999"])
def test_a_copied_session_counts_once(folder: Path, name: str, renamed: bool) -> None:
    original = lines_of(folder).parent
    copy = shutil.copytree(original, folder / f"session={name}")
    if renamed:
        lines = (copy / RECORDS).read_text()
        (copy / RECORDS).write_text(lines.replace(original.name[8:], name))
    rows, left_out = counted(folder)
    assert rows == 4 and not left_out.count
    (remark,) = left_out.remarks
    assert "a copy" in remark and name in remark and original.name[8:] in remark


def test_the_ends_of_true_intervals_are_possible() -> None:
    draw = np.random.default_rng(3)
    for rounds in (5, 8, 9, 12, 20, 41, 100, 400):
        for times in (
            draw.lognormal(0, 0.05, (2, rounds)),
            np.round(draw.lognormal(0, 1, (2, rounds)), 1) + 1,
        ):
            found = compare(times[0], times[1])
            log = np.sort(np.log(times[1]) - np.log(times[0]))
            assert held._possible(log, *found.interval), (rounds, found)
