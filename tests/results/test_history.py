"""A metric over commits: steps that are there, steps that are not, and what they are put down to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import mrb, mrb_json, refused
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.history import CommitPoint, _steps, history
from sample_records import HASH
from sample_runs import ENVIRONMENT, add_cell

torch.set_num_threads(1)


def points(values: Any, error: float = 0.0) -> list[CommitPoint]:
    return [
        CommitPoint(
            commit=f"{n:040x}", dirty=False, day="", value=float(value), error=error, floor=0.0, runs=1,
            source=str(n), method=(), place=(), repro="",
        )
        for n, value in enumerate(values)
    ]  # fmt: skip


def test_noise_has_no_steps() -> None:
    rng = np.random.default_rng(0)
    series = [points(np.exp(rng.normal(0, sigma, 50))) for sigma in (0.005, 0.02, 0.05) for _ in range(100)]
    assert sum(bool(_steps(one)) for one in series) <= 3


@pytest.mark.parametrize("size", [1.05, 0.95])
def test_a_step_is_found_where_it_is(size: float) -> None:
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(30):
        values = np.exp(rng.normal(0, 0.01, 30))
        values[18:] *= size
        steps = _steps(points(values))
        found += len(steps) == 1 and abs(steps[0].at - 18) <= 1 and abs(steps[0].ratio - size) < 0.015
    assert found >= 28


def test_two_steps_and_an_outlier() -> None:
    values = np.array([1.0] * 8 + [1.2] * 8 + [0.9] * 8) * np.exp(
        np.random.default_rng(2).normal(0, 0.005, 24)
    )
    values[3] = 1.5
    assert [step.at for step in _steps(points(values))] == [8, 16]


def test_levels_far_apart_do_not_hide_one_another() -> None:
    values = [1.0, 0.999, 1.001, 1.0, 1.002, 1.12, 1.119, 1.121, 1.12, 1.118, 0.8, 0.801, 0.799, 0.8]
    assert [step.at for step in _steps(points(values, error=0.001))] == [5, 10]


def test_the_newest_point_alone_is_no_step() -> None:
    assert not _steps(points([1.0, 1.001, 0.999, 1.0, 1.002, 1.4]))


def test_wide_intervals_hide_a_step() -> None:
    values = [1.0, 1.0, 1.0, 1.1, 1.1, 1.1]
    assert _steps(points(values)) and not _steps(points(values, error=0.05))


def commits(folder: Path, **later: Any) -> Path:
    """Eight commits; the last four take 1.2 times as long, with another source unless `later` says more."""
    for n in range(8):
        commit = {"source": {"commit": f"{n + 1}abc".ljust(40, "0"), "dirty": n == 2}}
        options: dict[str, Any] = {"sources": {"mine": "old" if n < 4 else "new"}}
        options |= later if n >= 4 else {}
        environment = {**ENVIRONMENT, **options.pop("environment", {}), **commit}
        with Session.start(folder) as session:
            add_cell(
                session, {"base": 1.0, "mine": 1.0 if n < 4 else 1.2}, seed=n, environment=environment,
                created_at=f"2026-11-{n + 1:02d}T00:00:00Z", **options,
            )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("later", "kind"),
    [
        ({}, "regression"),
        ({"sources": {"mine": "old"}}, "noise"),
        ({"harness_hash": HASH[::-1]}, "method change"),
        ({"environment": {"machine": {**ENVIRONMENT["machine"], "torch": "3.0"}}}, "other machine"),  # type: ignore[dict-item]
    ],
)
def test_a_step_is_put_down_to_something(tmp_path: Path, later: dict[str, Any], kind: str) -> None:
    found = history(commits(tmp_path / "r", **later))
    ((series, step),) = found.steps
    assert series.implementation.startswith("mine") and step.kind == kind
    assert series.points[step.at].commit.startswith("5abc") and step.ratio == pytest.approx(1.2, rel=0.02)
    assert series.method_changes == ([4] if kind == "method change" else [])


def test_the_command_shows_draws_and_writes(tmp_path: Path) -> None:
    folder = commits(tmp_path / "r")
    ran = mrb("results", "history", folder, "--html", tmp_path / "h.html", "-o", tmp_path / "h.png")
    assert "regression" in ran.stdout and "Series: 1, steps: 1" in ran.stdout
    html = (tmp_path / "h.html").read_text()
    assert "Measurements over commits" in html and "<svg" in html and "5abc000000" in html
    assert (tmp_path / "h.png").stat().st_size > 10_000
    document = mrb_json("results", "history", folder, "--metric", "ms", "--impl", "base")
    assert len(document["series"]) == 1 and len(document["series"][0]["points"]) == 8


def test_an_installed_package_has_a_history_by_its_code(tmp_path: Path) -> None:
    """As after pip install: no record names a commit."""
    for n in range(8):
        took, code = {"base": 1.0, "mine": 1.0 if n < 4 else 1.2}, {"mine": f"{n}"}
        with Session.start(tmp_path / "r") as session:
            add_cell(session, took, seed=n, sources=code, created_at=f"2026-11-{n + 1:02d}T00:00:00Z")
    found = history(tmp_path / "r")
    ((series, step),) = found.steps
    assert step.at == 4 and step.kind == "regression" and len(series.points) == 8 and found.without == 16
    assert mrb("results", "history", tmp_path / "r").stdout.count("regression") == 1


def test_cases_that_differ_in_one_axis_are_two_series(tmp_path: Path) -> None:
    """10 ms without biases and 20 ms with them are not one point of 15 ms."""
    for n, (bias, drift) in enumerate(((False, 1.0), (True, 2.0))):
        with Session.start(tmp_path / "r") as session:
            add_cell(session, {"base": 1.0, "mine": 1.1}, seed=n, drift=drift, experiment__bias=bias)
    found = history(tmp_path / "r", "ms")
    assert sorted(round(one.points[0].value / 10) for one in found.series) == [1, 1, 2, 2]
    assert len({(one.where, one.implementation) for one in found.series}) == 4
    assert len(mrb_json("results", "-f", tmp_path / "r")["best"]) == 2


def test_without_times_there_is_no_history(tmp_path: Path) -> None:
    Session.start(tmp_path / "r").close()
    refused("results", "history", tmp_path / "r")
