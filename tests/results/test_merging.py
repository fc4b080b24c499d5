"""Shards of a sweep, and one folder from many."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.fleet.shards import Shard
from moe_routing_bench.results.folder import ENVIRONMENTS, iterate
from moe_routing_bench.results.merge import PARTS, merge
from moe_routing_bench.results.read import RECORDS
from sample_runs import make_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("of", "cells"), [(1, 7), (3, 7), (4, 60), (8, 5)])
def test_shards_are_a_partition(of: int, cells: int) -> None:
    parts = [Shard(number=number, of=of).part(range(cells)) for number in range(1, of + 1)]
    assert sorted(cell for part in parts for cell in part) == list(range(cells))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


SLURM = {
    "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_COUNT": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        ("2/8", {}, "2/8"),
        ("1/1", SLURM, "1/1"),
        ("auto", SLURM, "3/4"),  # 1, 3, 5, 7
        ("auto/4", SLURM, "3/4"),
        ("auto", SLURM | {f"SLURM_ARRAY_TASK_{name}": "1" for name in ("ID", "MAX", "COUNT")}, "1/1"),
        ("auto/3", {"JOB_COMPLETION_INDEX": "2"}, "3/3"),
    ],
)  # fmt: skip
def test_a_shard_is_read(text: str, environment: dict[str, str], shard: str) -> None:
    assert str(Shard.parse(text, environment)) == shard


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("0/4", {}, "1/4"),
        ("5/4", {}, "5/4"),
        ("1/0", {}, "1/0"),
        ("1/1000000", {}, "at most 100,000"),
        ("half", {}, "a shard is I/N"),
        ("-1/4", {}, "a shard is I/N"),
        ("auto", {}, "neither"),
        ("auto", {"JOB_COMPLETION_INDEX": "2"}, "--shard auto/8"),
        ("auto/2", {"JOB_COMPLETION_INDEX": "2"}, "3/2"),
        ("auto/2", {"JOB_COMPLETION_INDEX": "x"}, "'x'"),
        ("auto/5", SLURM, "Slurm array"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_MAX": "17"}, "evenly spaced"),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "9"}, "evenly spaced"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "1"}, "needs SLURM_ARRAY_TASK_MIN"),
    ],
)
def test_what_is_no_shard_is_said(text: str, environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shard.parse(text, environment)


def test_a_sweep_in_shards_plans_every_cell_once(tmp_path: Path, usual_speed: None) -> None:
    words = ["sweep", "layer", "--tokens", "16,24,32", "--width", "32", "--hidden", "16", "--experts", "4,8",
             "--out", tmp_path, "--dry-run"]  # fmt: skip
    whole = mrb_json(*words)["todo"]
    parts = [mrb_json(*words, "--shard", f"{number}/4")["todo"] for number in range(1, 5)]
    assert len(whole) == 6 and sorted(cell for part in parts for cell in part) == sorted(whole)
    assert "1/4" in refused(*words, "--shard", "0/4")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / f"part{number}", {"base": 1.0, "fast": 0.5 + 0.1 * number}, seed=number)
        for number in range(3)
    ]


def lines_of(folder: Path) -> Path:
    (path,) = folder.glob(f"session=*/{RECORDS}")
    return path


def all_lines(*folders: Path) -> list[bytes]:
    return sorted(
        line for folder in folders for path in folder.glob(f"session=*/{RECORDS}")
        for line in path.read_bytes().splitlines()
    )  # fmt: skip


def test_every_record_is_there_once_however_often_it_is_merged(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all"
    assert len(merge(folders[:2], out).copied) == 2
    merged = merge([*folders, folders[0]], out)
    assert (len(merged.copied), len(merged.there), merged.refused) == (1, 3, [])
    assert all_lines(out) == all_lines(*folders)
    assert len(list(iterate(out))) == sum(len(list(iterate(folder))) for folder in folders)
    text = mrb("results", "merge", out, "--out", tmp_path / "again").stdout
    assert text.startswith("3 sessions merged into ") and all_lines(tmp_path / "again") == all_lines(out)
    assert mrb_json("results", "--folder", out)


def test_a_line_cut_off_by_a_kill_costs_that_line_only(folders: list[Path], tmp_path: Path) -> None:
    path = lines_of(folders[0])
    path.write_bytes(path.read_bytes()[:-20])
    merged = merge(folders[:1], tmp_path / "all")
    assert len(merged.copied) == 1 and not merged.refused


def changed_byte(folder: Path) -> None:
    path = next(folder.glob("session=*/samples.f64"))
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def forged_time(folder: Path) -> None:
    path = lines_of(folder)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    record = json.loads(first)
    record["timing"]["mean"] *= 0.99
    path.write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))


def no_environment(folder: Path) -> None:
    shutil.rmtree(folder / ENVIRONMENTS)


def other_session(folder: Path) -> None:
    path = lines_of(folder)
    path.parent.rename(path.parent.with_name("session=20261115T024734123-1f3a9c02"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (changed_byte, "samples.f64"),
        (forged_time, "samples say"),
        (no_environment, "whose description"),
        (other_session, "belongs to"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(
    folders: list[Path], tmp_path: Path, damage, words: str
) -> None:
    damage(folders[1])
    out = tmp_path / "all"
    ran = mrb("results", "merge", *folders, "--out", out, code=1)
    assert words in ran.stderr and str(folders[1]) in ran.stderr and PARTS not in ran.stderr
    assert all_lines(out) == all_lines(folders[0], folders[2])
    assert not list(out.glob(f"{PARTS}*"))


def test_two_sessions_of_one_name_are_not_mixed(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all"
    merge(folders[:1], out)
    path = lines_of(folders[0])
    path.write_bytes(path.read_bytes().replace(b"fast", b"slow"))
    merged = merge(folders[:1], out)
    assert not merged.copied and "different session" in merged.refused[0]


def test_a_session_that_is_still_written_is_merged_again(folders: list[Path], tmp_path: Path) -> None:
    out, path = tmp_path / "all", lines_of(folders[0])
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1 + 100])
    assert len(merge(folders[:1], out).copied) == 1 and len(list(iterate(out))) == 1
    path.write_bytes(whole)
    assert len(merge(folders[:1], out).copied) == 1
    assert all_lines(out) == all_lines(folders[0]) and len(list(iterate(out))) == whole.count(b"\n")
    path.write_bytes(whole[:-50])  # the older copy
    assert len(merge(folders[:1], out).there) == 1 and all_lines(out) == sorted(whole.splitlines())


def test_links_are_not_followed(folders: list[Path], tmp_path: Path) -> None:
    (folders[0] / "session=20261115T024734123-1f3a9c02").symlink_to(lines_of(folders[1]).parent)
    assert len(merge(folders[:1], tmp_path / "all").copied) == 1


def test_an_interrupted_merge_goes_on(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, left = tmp_path / "all", os.fsync, [4]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(fd)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", fsync)
        merge(folders, out)
    assert all_lines(out) in (all_lines(folders[0]), [])
    assert not merge(folders, out).refused and all_lines(out) == all_lines(*folders)


def test_a_wrong_folder_is_said_before_anything_is_written(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all"
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        assert str(tmp_path / name) in refused("results", "merge", folders[0], tmp_path / name, "--out", out)
        assert not out.exists()
    assert "both a source and the target" in refused("results", "merge", folders[0], "--out", folders[0])
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused("results", "merge", folders[0], "--out", tmp_path / "file")
