"""A disk that is full, a folder that cannot be written to: one sentence, and no cell is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import refused
from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.core.whole_files import NotWrittenError, write_whole, written_whole
from moe_routing_bench.fleet import sweep
from moe_routing_bench.fleet.executor import LocalExecutor, check_scratch
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.results.folder import OwnFile, Session, iterate
from moe_routing_bench.results.record import Record, parse_record
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from sample_records import failed, line
from sample_runs import add_cell

pytestmark = pytest.mark.slow

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(*_: object, **__: object) -> None:
    raise FULL


def a_cell() -> Experiment:
    case = Experiment(case="own/x", span="combine", T=8, D=16, F=16, E=4, K=2)
    return replace(case, workload="uniform", implementations=(ImplementationRef(name="gather_sum"),))


def record_of(session: Session) -> Record:
    return parse_record(line(failed("OOM", session=session.id, record_id=session.new_record_id())))


class Measured:
    """An executor whose outcome is only a name."""

    name = "made up"

    def run(self, cells: Any, **_: Any) -> Iterator[Any]:
        for experiment in cells:
            yield namedtuple("Outcome", "experiment environment")(experiment, None)


def test_a_cell_that_cannot_be_written_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "record_outcome", refuse)
    seen: list[CellOutcome] = []
    with pytest.raises(ValueError, match=r"own/x uniform could not be written .*No space left on device"):
        for outcome in run_sweep([a_cell()], tmp_path / "results", Measured()):
            seen.append(outcome)
    assert len(seen) == 1


@pytest.mark.parametrize("place", ["file", "file/inside"])
def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write into .*file"):
        next(run_sweep([a_cell()], tmp_path / place, Measured()))


def test_a_write_that_failed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = OwnFile._write
    with Session.start(tmp_path) as session:
        session.append([record_of(session)])
        monkeypatch.setattr(OwnFile, "_write", refuse)
        with pytest.raises(OSError, match="No space"):
            session.append([record_of(session)])
        monkeypatch.setattr(OwnFile, "_write", write)
        session.append([record_of(session)])
        assert session.tampered(thorough=True) is None
    assert not session.repairs and len(list(iterate(tmp_path))) == 2


def test_the_end_of_a_session_on_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session.start(tmp_path) as session:
        session.append([record_of(session)])
        monkeypatch.setattr(OwnFile, "sync", refuse)
        monkeypatch.setattr("moe_routing_bench.results.folder.fold", refuse)
    (repair,) = session.repairs
    assert "No space left on device" in repair
    assert len(list(iterate(tmp_path))) == 1


def test_a_full_folder_for_temporary_files_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(2**20, 2**20, 0))
    with pytest.raises(ValueError, match=r"0 MiB free.*set TMPDIR"):
        next(LocalExecutor().run([a_cell()], roofs=None, on_progress=lambda *_: None, watch=lambda: None))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(2**40, 0, 2**40))
    check_scratch(a_cell())


FULL_DEVICE = Path("/dev/full")  # every write to it finds no space


@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("IO Error: No space left on device"), KeyboardInterrupt()]
)
def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "r.html"
    target.write_text("as before")
    with pytest.raises(type(error) if isinstance(error, KeyboardInterrupt) else NotWrittenError) as raised:
        with written_whole(target) as part:
            part.write_text("half")
            raise error
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"] and target.read_text() == "as before"
    if not isinstance(error, KeyboardInterrupt):
        assert str(raised.value) == f"cannot write {target}: the disk is full"


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    with written_whole(target) as first, written_whole(target) as second:
        first.write_text("first")
        second.write_text("second")
        assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"] and target.read_text() == "first"


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(NotWrittenError, match="No such file"):
        write_whole(tmp_path / "absent" / "file", b"")
    with pytest.raises(KeyError), written_whole(tmp_path / "file"):
        raise KeyError
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "file"):
        (tmp_path / "what is read").read_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="needs a device that is always full")
def test_a_report_on_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session.start(tmp_path / "results") as session:
        add_cell(session, {"base": 1.0, "mine": 0.9})
    opened = Path.open
    monkeypatch.setattr(
        Path, "open",
        lambda self, mode="r", *more, **named: opened(
            FULL_DEVICE if ".html" in self.name and "w" in mode else self, mode, *more, **named
        ),
    )  # fmt: skip
    sentence = refused("results", "report", tmp_path / "results", "-o", tmp_path / "r.html")
    assert "the disk is full" in sentence and "r.html" in sentence and "read" not in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
