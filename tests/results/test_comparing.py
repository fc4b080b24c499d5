"""Two runs side by side: like with like, the right method, verdicts, and what broke or is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_routing_bench.results.compare import LIKE, Change, RunComparison, compare_runs
from moe_routing_bench.results.folder import Session, read_run
from moe_routing_bench.results.read import LeftOut
from sample_runs import ENVIRONMENT, OTHER_MACHINE, OTHER_TORCH, ROUNDS, add_cell, make_run

pytestmark = pytest.mark.slow


def by_name(comparison: RunComparison) -> dict[str, Change]:
    return {change.implementation: change for change in comparison.changes}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_run(tmp_path / "a", {"base": 1.0, "fast": 0.8})


def test_a_change_is_found_although_the_machine_drifted(a: Path, tmp_path: Path) -> None:
    # everything takes 1.3 times as long, and `fast` 1.1 times beyond that
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.88}, drift=1.3, seed=1, sources={"fast": "new"})
    changes = by_name(compare_runs(a, b))
    fast, base = changes["fast"], changes["base"]
    assert fast.method == "ratio to baseline" and fast.verdict == "SLOWER"
    assert fast.ratio == pytest.approx(1.1, rel=0.01)
    assert fast.interval and fast.interval[0] < 1.1 < fast.interval[1] and not fast.same_code
    assert fast.repro.startswith("mrb bench expert_ffn ") and "--impl 'fast @ compact'" in fast.repro
    # the baseline has only its times, and its code is the same
    assert base.method == "times" and base.ratio == pytest.approx(1.3, rel=0.05) and base.same_code
    assert base.verdict == "UNDECIDED" and "unchanged code" in base.reason
    assert [change.implementation for change in compare_runs(a, b).changes] == ["fast", "base"]


def test_swapping_the_runs_turns_the_answer_round(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.88}, seed=1)
    there, back = by_name(compare_runs(a, b)), by_name(compare_runs(b, a))
    assert (there["fast"].verdict, back["fast"].verdict) == ("SLOWER", "FASTER")
    assert there["fast"].ratio * back["fast"].ratio == pytest.approx(1)


def test_the_same_again_is_the_same(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8}, seed=1)
    comparison = compare_runs(a, b)
    assert by_name(comparison)["fast"].verdict == "SAME"
    assert comparison.count("SLOWER") == comparison.count("FASTER") == 0
    assert comparison.geometric_mean == pytest.approx(1, rel=0.05)


def test_a_baseline_with_other_code_is_no_yardstick(a: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8}, sources={"base": "rewritten"})
    assert by_name(compare_runs(a, other))["fast"].method == "times"
    swapped = make_run(tmp_path / "c", {"fast": 0.8, "base": 1.0})
    changes = by_name(compare_runs(a, swapped))
    assert {change.method for change in changes.values()} == {"times"}
    moved = make_run(tmp_path / "d", {"base": 1.0, "fast": 0.8}, layouts={"base": "block(64)"})
    assert by_name(compare_runs(a, moved))["fast"].method == "times"


def test_a_noisy_run_decides_nothing_within_its_noise(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.84}, seed=1)
    noisy = make_run(tmp_path / "noisy", {"base": 1.0, "fast": 0.84}, seed=1, floor=0.08)
    assert by_name(compare_runs(a, b))["fast"].verdict == "SLOWER"
    for one, other in ((a, noisy), (noisy, a)):
        change = by_name(compare_runs(one, other))["fast"]
        assert change.verdict == "UNDECIDED" and "8.0 %" in change.reason


def test_few_samples_decide_nothing(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / n, {"base": [t] * 3}, twin=False) for n, t in (("a", 0.01), ("b", 0.09))]
    (change,) = compare_runs(*runs).changes
    assert change.verdict == "UNDECIDED" and "5 samples" in change.reason
    assert change.interval is None and change.ratio == pytest.approx(9)


def test_constant_samples_need_no_luck(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / n, {"base": [t] * 30}) for n, t in (("a", 0.01), ("b", 0.01), ("c", 0.011))]
    assert compare_runs(runs[0], runs[1]).changes[0].verdict == "SAME"
    changed = make_run(tmp_path / "d", {"base": [0.011] * 30}, sources={"base": "new"})
    assert compare_runs(runs[0], changed).changes[0].verdict == "SLOWER"
    assert compare_runs(runs[0], runs[2]).changes[0].verdict == "UNDECIDED"


def test_by_times_a_change_must_go_beyond_the_drift_of_unchanged_code(a: Path, tmp_path: Path) -> None:
    # the baseline was rewritten, so there is no yardstick; `fast` was not, and shows the drift of 5 %
    for folder, factor, verdict in (("b", 1.0, "UNDECIDED"), ("c", 1.04, "SLOWER")):
        new = {"base": factor, "fast": 0.8}
        b = make_run(tmp_path / folder, new, sources={"base": "new"}, drift=1.05, seed=0)
        changes = by_name(compare_runs(a, b))
        assert (changes["base"].method, changes["base"].verdict) == ("times", verdict)
        assert changes["fast"].verdict == "UNDECIDED"
    alone = make_run(tmp_path / "alone", {"base": 1.1}, sources={"base": "new"})
    (change,) = compare_runs(make_run(tmp_path / "before", {"base": 1.0}), alone).changes
    assert change.verdict == "SLOWER" and "no unchanged code" in change.reason
    # with another version of torch allowed, what has the same source is a fair question again
    b = make_run(tmp_path / "e", {"base": 1.3}, environment=OTHER_TORCH)
    (change,) = compare_runs(a, b, allow=["torch"]).changes
    assert change.verdict == "SLOWER"


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "machine": ({"environment": OTHER_MACHINE}, "the machines differ: a is xeon-2-cores, b is laptop"),
    "torch": ({"environment": OTHER_TORCH}, "versions of torch differ: a is 2.13.0+cpu, b is 2.14.0"),
    "python": (
        {"environment": {**ENVIRONMENT, "machine": {**ENVIRONMENT["machine"], "python": "3.13"}}},
        "versions of Python differ: a is 3.12.3, b is 3.13",
    ),
    "settings": ({"environment": {**ENVIRONMENT, "settings": {}}}, "a is OMP_NUM_THREADS=1, b is none"),
    "span": ({"experiment__span": "layer"}, "the spans differ: a is expert_ffn, b is layer"),
    "direction": ({"experiment__direction": "train"}, "the directions differ: a is forward, b is train"),
    "contract": ({"implementation__contract_hash": "f" * 64}, "a is 0123456789ab, b is ffffffffffff"),
    "dtype": ({"experiment__dtype": "bfloat16"}, "the dtypes differ: a is float32, b is bfloat16"),
    "store": ({"experiment__store": "int8"}, "the formats of weights differ: a is none, b is int8"),
    "routing": ({"routing__checksum": "f" * 64}, "the routed experts differ"),
    "device": ({"experiment__device": "cuda"}, "the devices differ: a is cpu, b is cuda"),
    "threads": ({"experiment__threads": 2}, "the numbers of threads differ: a is 1, b is 2"),
    "cache": ({"experiment__cache": "cold"}, "the cache policies differ: a is hot, b is cold"),
    "view": ({"experiment__view": "cuda events"}, "the timer views differ: a is host_wall, b is cuda events"),
    "inputs": ({"protocol__fresh_inputs": "never"}, "rules for fresh inputs differ"),
}


def test_every_dimension_has_a_case() -> None:
    assert {*UNLIKE} == {*LIKE}


@pytest.mark.parametrize("dimension", UNLIKE)
def test_unlike_is_not_compared_unless_told(a: Path, tmp_path: Path, dimension: str) -> None:
    options, words = UNLIKE[dimension]
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8}, **options)
    with pytest.raises(ValueError) as caught:
        compare_runs(a, b)
    assert words in str(caught.value) and f"add --allow {dimension} to compare" in str(caught.value)
    other = next(name for name in LIKE if name != dimension)
    with pytest.raises(ValueError, match=f"--allow {dimension}"):
        compare_runs(a, b, allow=[other])
    comparison = compare_runs(a, b, allow=[dimension])
    assert len(comparison.changes) == 2 and any(words in note for note in comparison.notes)


SWITCH = {"implementation__label": "fast", "implementation__spec": "fast", "implementation__router": "switch"}
CHAIN = {**SWITCH, "implementation__router": "", "implementation__layer": "chain(iterations=2)"}


@pytest.mark.parametrize("other", [SWITCH, CHAIN], ids=["router", "layer"])
def test_another_router_or_layer_is_another_implementation(tmp_path: Path, other: dict[str, Any]) -> None:
    """Also in one cell, beside the same implementation with the default."""
    both = {"base": 1.0, "fast": 0.8, "fast again": 0.4}
    a = make_run(tmp_path / "a", both, each={"fast again": other})
    b = make_run(tmp_path / "b", {**both, "fast again": 0.8}, each={"fast again": other}, seed=1)
    assert len(read_run(a, LeftOut()).cells[0].records) == 4
    changes = {change.title: change for change in compare_runs(a, b).changes}
    name = f"fast | compact | {other['implementation__router'] or other['implementation__layer']}"
    assert {"base | compact", "fast | compact", name} == {*changes}
    assert changes["fast | compact"].ratio == pytest.approx(1, rel=0.02)
    assert changes[name].ratio == pytest.approx(2, rel=0.02)
    router, layer = changes[name].router, changes[name].layer
    assert (router, layer) == (other["implementation__router"], other.get("implementation__layer", ""))
    # and alone it is not what the other run has
    alone = make_run(tmp_path / "c", {"fast again": 0.4}, each={"fast again": other}, twin=False)
    default = make_run(tmp_path / "d", {"fast": 0.8}, twin=False)
    with pytest.raises(ValueError, match=re.escape(name)):
        compare_runs(default, alone)


def test_the_default_router_is_what_older_records_ran(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8}, seed=1, implementation__router="softmax_topk")
    changes = by_name(compare_runs(a, b))
    assert changes["fast"].method == "ratio to baseline" and changes["fast"].verdict == "SAME"


def test_a_baseline_with_another_router_is_no_yardstick(a: Path, tmp_path: Path) -> None:
    b = make_run(
        tmp_path / "b", {"base": 1.0, "fast": 0.8}, each={"base": {"implementation__router": "switch"}}
    )
    (change,) = compare_runs(a, b).changes
    assert (change.title, change.method) == ("fast | compact", "times")


def test_names_tell_the_direction(tmp_path: Path) -> None:
    runs = [
        make_run(
            tmp_path / name, {"base": 1.0}, experiment__direction="backward", implementation__router="switch"
        )
        for name in "ab"
    ]
    (change,) = compare_runs(*runs).changes
    assert change.where.startswith("expert_ffn backward seed-fused/") and change.title.endswith("| switch")


def test_of_many_only_the_like_are_compared(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, threads in zip(folders, ((1, 2), (1,)), strict=True):
        for number in threads:
            make_run(folder, {"base": 1.0}, experiment__threads=number)
    comparison = compare_runs(*folders)
    assert len(comparison.changes) == 1 and len(comparison.only_a) == 1 and not comparison.only_b


def test_two_differences_are_both_named(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0}, environment=OTHER_MACHINE, experiment__threads=2)
    with pytest.raises(ValueError, match="--allow machine --allow threads"):
        compare_runs(a, b)


def test_an_unknown_dimension_is_told(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0})
    with pytest.raises(ValueError, match=r"'machin'.*'machine'"):
        compare_runs(a, b, allow=["machin"])


def test_environments_that_are_absent_are_told_apart_by_their_hash(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8}, environment=OTHER_MACHINE)
    for path in (b / "environments").iterdir():
        path.write_text(json.dumps(ENVIRONMENT))  # like A's, but not what the file's name says
    with pytest.raises(ValueError, match=r"xeon-2-cores.* not known"):
        compare_runs(a, b)
    for path in (a / "environments").iterdir():
        path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"machines.* not known"):
        compare_runs(a, b)


def test_the_newest_run_of_a_cell_counts(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 2.0})
    make_run(b, {"base": 1.0, "fast": 0.8}, seed=2)
    assert by_name(compare_runs(a, b))["fast"].verdict == "SAME"
    # also if its code changed in between, so that the cell has another key
    make_run(b, {"base": 1.0, "fast": 1.6}, sources={"fast": "new"}, created_at="2026-11-16T00:00:00Z")
    comparison = compare_runs(a, b)
    assert by_name(comparison)["fast"].ratio == pytest.approx(2, rel=0.02) and not comparison.only_b


def test_records_of_two_sessions_are_never_one_run(a: Path) -> None:
    make_run(a, {"base": 1.0, "fast": 0.8}, seed=2)
    newest = max(a.glob("session=*/records.jsonl"))
    newest.write_bytes(newest.read_bytes().splitlines(keepends=True)[1])  # `fast` alone is left
    (cell,) = read_run(a, LeftOut()).cells
    assert [record.implementation.label for record in cell.records] == ["fast"]
    assert f"session={cell.session}" == newest.parent.name and cell.baseline_of(cell.records[0]) is None


def test_what_broke_what_was_fixed_and_what_is_missing(a: Path, tmp_path: Path) -> None:
    make_run(a, {"base": 1.0, "late": "OOM"}, experiment__T=64)
    make_run(a, {"base": 1.0}, experiment__T=128)
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": "WRONG_VALUE"})
    make_run(b, {"base": 1.0, "late": 0.5}, experiment__T=64)
    make_run(b, {"base": 1.0}, experiment__T=256)
    comparison = compare_runs(a, b)
    assert [(one.status, one.reason) for one in comparison.broken] == [("WRONG_VALUE", "why")]
    assert "fast" in comparison.broken[0].name and "--impl 'fast @ compact'" in comparison.broken[0].repro
    assert [one.status for one in comparison.fixed] == ["OOM"]
    assert len(comparison.only_a) == len(comparison.only_b) == 1
    assert {change.implementation for change in comparison.changes} == {"base"}


def test_a_worker_that_died_early_is_still_recognised(a: Path, tmp_path: Path) -> None:
    dead = {"routing": None, "work": None}
    with Session.start(tmp_path / "b") as session:
        for name in ("base", "fast"):
            add_cell(session, {name: "CRASHED"}, twin=False, **dead, implementation__spec=name)
    comparison = compare_runs(a, tmp_path / "b")
    assert [one.status for one in comparison.broken] == ["CRASHED"] * 2 and not comparison.changes


def test_the_twin_is_no_implementation(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8})
    assert [change.implementation for change in compare_runs(a, b).changes].count("base") == 1


def test_changed_samples_are_not_used(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8})
    (path,) = b.glob("session=*/samples.f64")
    path.write_bytes(np.full(3 * ROUNDS, 1e-6).tobytes())
    with pytest.raises(ValueError, match=r"valid record.*samples"):
        compare_runs(a, b)


def test_a_torn_line_is_left_out_and_told(a: Path, tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", {"base": 1.0, "fast": 0.8})
    (path,) = b.glob("session=*/records.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:500])
    comparison = compare_runs(a, b)
    assert comparison.left_out.count == 1 and "cut off" in comparison.left_out.first[0]
    assert len(comparison.changes) == 1 and len(comparison.only_a) == 1


def test_folders_with_nothing_to_compare_get_a_sentence(a: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    strangers = make_run(tmp_path / "b", {"other": 1.0})
    failures = make_run(tmp_path / "c", {"base": "OOM"}, twin=False, experiment__T=7)
    for folder, named in (
        (tmp_path / "absent", "no results folder"),
        (empty, "no records"),
        (a, "itself"),
        (strangers, "base.*other"),
        (failures, "passed"),
    ):
        with pytest.raises(ValueError, match=named):
            compare_runs(a, folder)


def test_the_same_code_is_seldom_called_different(tmp_path: Path) -> None:
    """Runs without drift between them; with drift only the ratio to the baseline can keep this promise."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        with Session.start(folder) as session:
            for cell in range(40):
                drift = 1 + number * 0.1
                add_cell(
                    session,
                    {"base": 1.0, "x": 0.9},
                    seed=1000 * number + cell,
                    experiment__seed=cell,
                    drift=drift,
                )
    changes = [change for change in compare_runs(*folders).changes if change.implementation == "x"]
    assert len(changes) == 40 and {change.method for change in changes} == {"ratio to baseline"}
    assert sum(change.verdict in ("FASTER", "SLOWER") for change in changes) == 0
