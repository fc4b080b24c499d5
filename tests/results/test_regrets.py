"""The regret of impl="auto", and the preferences that are made from such records."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moe_routing_bench.cli import app
from moe_routing_bench.ops.preference import Preference
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.regrets import read_regrets
from repository import ROOT
from sample_runs import add_cell

MAKER = runpy.run_path(str(ROOT / "measurements/preferences.py"))


def cell(session: Session, name: str, implementations: dict[str, Any], **changes: Any) -> None:
    add_cell(session, implementations, experiment__case=f"regret/{name}", **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Auto is native: the fastest in one cell, 1.25 times the fastest in another, a tie in the third."""
    with Session.start(tmp_path / "results") as session:
        cell(session, "a", {"native": 1.0, "frozen(native)": 0.5, "hf_eager": 1.4})
        cell(session, "b", {"native": 1.0, "staged": 0.8, "hf_eager": 0.9, "frozen(native)": 0.4})
        cell(session, "c", {"sort": 1.0, "native": 0.999}, experiment__span="topk")
        cell(session, "d", {"native": "OOM", "staged": 1.0})
        cell(session, "e", {"native": "NO_TIME", "frozen(native)": 1.0, "staged": 1.2, "hf_eager": 1.4})
        add_cell(session, {"native": 1.0, "staged": 0.1}, experiment__case="another suite")
    return tmp_path / "results"


def test_regret_is_autos_time_over_the_fastest(folder: Path) -> None:
    found = read_regrets(folder)
    by_group = {group.group: group for group in found.groups}
    (unfrozen,) = [name for name in by_group if name.endswith("unfrozen")]
    (frozen,) = [name for name in by_group if name.endswith(" frozen")]
    plain = by_group[unfrozen]
    assert (plain.cells, plain.over, plain.undecided, plain.worst_cell) == (2, 1, 0, "regret/b")
    assert plain.worst == pytest.approx(1.25, rel=0.02) and plain.slower_than_transformers == 1
    # frozen weights are held to all: nothing is faster
    assert by_group[frozen].worst == 1 and by_group[frozen].slower_than_transformers == 0
    (tie,) = [one for one in found.cells if one.picked == "sort"]
    assert tie.regret == pytest.approx(1, abs=0.01) and not tie.shown and tie.transformers is None
    assert by_group["all"].cells == 5
    assert [one.partition(":")[0] for one in found.without] == ["regret/d", "regret/e"]


def test_transformers_is_faster_only_if_that_is_decided(tmp_path: Path) -> None:
    with Session.start(tmp_path) as session:
        cell(session, "faster", {"native": 1.0, "staged": 0.8, "hf_eager": 0.9, "hf_batched_mm": 0.95})
        noise = [0.01 * (0.9 + 0.17 * (n % 2)) for n in range(40)]
        cell(session, "perhaps", {"native": [0.01] * 40, "hf_eager": noise})
    one, other = read_regrets(tmp_path).cells
    assert one.loses and one.transformers == pytest.approx(1 / 0.9, rel=0.02)
    assert other.transformers is not None and other.transformers > 1 and not other.loses
    group = read_regrets(tmp_path).groups[-1]
    assert (group.slower_than_transformers, group.slower_undecided) == (2, 1)


def test_the_newest_run_of_a_case_counts(tmp_path: Path) -> None:
    with Session.start(tmp_path) as session:
        cell(session, "a", {"sort": 1.0, "native": 0.5}, created_at="2026-11-14T00:00:00Z")
        cell(session, "a", {"native": 1.0, "sort": 2.0}, created_at="2026-11-15T00:00:00Z")
    (only,) = read_regrets(tmp_path).cells
    assert (only.picked, only.regret) == ("native", 1)


def test_the_command_says_the_same(folder: Path, tmp_path: Path) -> None:
    document = json.loads(CliRunner().invoke(app, ["results", "regret", str(folder), "--json"]).stdout)
    assert [one["cells"] for one in document["groups"]][-1] == 5
    assert {"picked", "fastest", "regret", "shown", "over_transformers"} <= document["cells"][0].keys()
    text = CliRunner().invoke(app, ["results", "regret", str(folder)]).stdout
    assert "regret/b" in text and "without a regret: regret/d" in text
    with Session.start(tmp_path / "other") as session:
        add_cell(session, {"native": 1.0, "staged": 0.1})
    refused = CliRunner().invoke(app, ["results", "regret", str(tmp_path / "other")])
    assert refused.exit_code == 2 and "mrb sweep regret" in refused.stderr


# ---- the preferences made from them


def made(dtype: torch.dtype, rows: float, gradients: bool = False, **regrets: float) -> Any:
    return MAKER["Cell"](dtype, rows, int(rows * 1000), gradients, regrets)


def rules(op: str, cells: list[Any]) -> list[Preference]:
    return MAKER["found_rules"](MAKER["get_op"](op), cells)


def test_one_rule_is_enough_if_it_is_within_the_limits() -> None:
    cells = [made(torch.float32, rows, native=1.02, expert_loop=1.0) for rows in (1, 2, 4)]
    (only,) = rules("grouped_gemm", [*cells, made(torch.float32, 8, native=1.0, expert_loop=3.0)])
    assert only.order == ("native",) and only.always


def test_a_rule_by_dtype_and_rows_is_found() -> None:
    many = [made(torch.bfloat16, rows, native=1.0, expert_loop=1.5) for rows in (0.5, 1, 8, 64)]
    wide = [made(torch.float32, rows, native=1.5, expert_loop=1.0) for rows in (0.5, 1)]
    wide += [made(torch.float32, rows, native=1.0, expert_loop=1.3) for rows in (8, 64)]
    first, last = rules("grouped_gemm", many + wide)
    assert (first.order, first.dtype, last.order) == (("expert_loop",), torch.float32, ("native",))
    assert first.most_rows is not None and 1 < first.most_rows < 8 and last.always


def test_what_auto_may_not_run_is_never_preferred() -> None:
    cells = [
        made(torch.float32, 1, sort=2.0, torch_topk=1.0),
        made(torch.float32, 8, sort=1.5, torch_topk=1.0),
    ]
    assert [rule.order for rule in rules("topk", cells)] == [("sort",)]
    theirs = [made(torch.float32, 1, hf_eager=1.0, eager_loop=1.4)]
    assert [rule.order for rule in rules("expert_ffn", theirs)] == [("eager_loop",)]


def test_rows_for_what_the_sweep_does_not_vary_stay_first() -> None:
    table = MAKER["import_module"]("moe_routing_bench.ops.attention.preferences").PREFERENCES
    new = Preference(machines=("vnni",), order=("sdpa",), evidence="measurements/a.txt")
    rows = MAKER["joined"]([new], table, ("vnni",))
    assert rows[:3] == [*table[:2], new] and (table[0].gradients, table[1].most_queries) == (True, 8)
    assert [row.machines for row in rows if "vnni" in row.machines] == [*(r.machines for r in rows[:3])]


def test_an_operation_over_the_limits_is_named() -> None:
    assert MAKER["excess"]("topk", [1.0, 1.02, 1.09]) is None
    said = MAKER["excess"]("topk", [1.04, 1.04, 1.3])
    assert said.startswith("topk EXCEEDS THE LIMITS") and "1.04 at the median, 1.30" in said


def test_cells_are_made_of_records(folder: Path) -> None:
    made = [MAKER["cell_of"](one) for one in read_regrets(folder).cells]
    assert {cell.dtype for cell in made} == {torch.float32} and made[0].regrets["native"] == 1


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    own = Preference(
        machines=("vnni",),
        order=("native",),
        evidence="measurements/a.txt",
        dtype=torch.float32,
        most_rows=2.5,
    )
    kept = MAKER["import_module"]("moe_routing_bench.ops.topk.preferences").PREFERENCES[-1]
    path = tmp_path / "preferences.py"
    path.write_text(MAKER["written"]([own, kept], "topk"))
    assert runpy.run_path(str(path))["PREFERENCES"] == (own, kept)
    assert "machines=GPUS" in path.read_text()
