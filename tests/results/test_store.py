"""The results folder: what is written survives kills, and what somebody else writes does not count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_routing_bench.results.folder import Session, iterate, samples_of
from moe_routing_bench.results.read import LeftOut
from moe_routing_bench.results.record import Record, Timing, parse_record
from sample_records import document, failed, line, with_times

pytestmark = pytest.mark.slow

SAMPLES = [0.010, 0.011, 0.012, 0.013]


def record_of(session: Session, **changes: Any) -> Record:
    """A failed cell: no samples needed."""
    return parse_record(line(failed("OOM", session=session.id, record_id=session.new_record_id(), **changes)))


def timed_record(session: Session, samples: list[float]) -> Record:
    timing = Timing.of(samples, 0.2, session.put_samples(samples), {})
    given = document(session=session.id, record_id=session.new_record_id())
    return parse_record(line(with_times(given, timing)))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session.start(tmp_path / "results") as opened:
        opened.append([timed_record(opened, SAMPLES), record_of(opened)])
        yield opened


def records_file(session: Session) -> Path:
    return session.folder / "records.jsonl"


def read(session: Session) -> tuple[list[str], LeftOut]:
    left_out = LeftOut()
    return [record.record_id for record in iterate(session.root, left_out)], left_out


def test_what_is_appended_is_read_back(session: Session) -> None:
    ids, left_out = read(session)
    assert ids == [f"{session.id}-000001", f"{session.id}-000002"] and not left_out.count
    first = next(iterate(session.root))
    assert samples_of(session.root, first).tolist() == SAMPLES
    assert (session.folder / "samples.f64").read_bytes() == np.array(SAMPLES, dtype="<f8").tobytes()


def test_sessions_sort_by_time_and_do_not_meet(tmp_path: Path) -> None:
    made = [Session.start(tmp_path) for _ in range(20)]
    assert len({session.id for session in made}) == 20
    stamps = [session.id.partition("-")[0] for session in made]
    assert stamps == sorted(stamps)
    for number, session in enumerate(made):
        session.append([record_of(session, cell_key=f"{number:064x}")])
        session.close()
    assert len(list(iterate(tmp_path))) == 20


def test_one_cell_is_one_write(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(len(data)) or write(fd, data))
    session.append([record_of(session) for _ in range(5)])
    assert len(writes) == 1


def test_files_are_not_handed_to_child_processes(session: Session) -> None:
    ours = {session._records._fd, session._samples._fd}
    assert not any(os.get_inheritable(fd) for fd in ours)


def test_a_full_disk_leaves_no_half_line(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
    with pytest.raises(OSError, match="No space left"):
        session.append([record_of(session)])
    monkeypatch.undo()
    session.append([record_of(session)])
    ids, left_out = read(session)
    assert len(ids) == 3 and not left_out.count and not session.repairs


def test_a_torn_tail_is_left_out_and_told(session: Session) -> None:
    session.close()
    whole = records_file(session).read_bytes()
    for cut in (len(whole) - 1, len(whole) - 700):
        records_file(session).write_bytes(whole[:cut])
        ids, left_out = read(session)
        assert ids == [f"{session.id}-000001"]
        assert left_out.count == 1 and "cut off" in left_out.first[0]
    with Session.start(session.root) as other:
        other.append([record_of(other)])
    assert len(read(session)[0]) == 2


KILLED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_store import record_of
from moe_routing_bench.results.folder import Session
session = Session.start(Path(sys.argv[1]))
print(session.id, flush=True)
while True:
    session.append([record_of(session), record_of(session)])
    print("cell", flush=True)
"""


def test_kill_9_loses_at_most_the_cell_in_flight(tmp_path: Path) -> None:
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(10):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    cells = 10 + process.stdout.read().count("cell")
    process.wait()
    process.stdout.close()
    assert len(list(iterate(tmp_path))) in (2 * cells, 2 * cells + 1, 2 * cells + 2)


def test_bad_lines_and_strangers_are_told(session: Session) -> None:
    session.close()
    good = records_file(session).read_bytes()
    bad = b"no json\n" + line(document(work__share_of_roof=2.0)) + line(failed("OOM"))
    records_file(session).write_bytes(bad + b"x" * 200_000 + b"\n" + good)
    ids, left_out = read(session)
    assert len(ids) == 2 and left_out.count == 4
    for words, sentence in zip(
        ("JSON", "share_of_roof", "belongs to", "65,536"), left_out.first, strict=True
    ):
        assert words in sentence and "\n" not in sentence


def forge(session: Session) -> bytes:
    """The first line with a time a hundred times better."""
    first = json.loads(records_file(session).read_bytes().splitlines()[0])
    for name, value in first["timing"].items():
        if isinstance(value, float):
            first["timing"][name] = value / 100
    return json.dumps(first, separators=(",", ":")).encode() + b"\n"


def appended(session: Session) -> None:
    with records_file(session).open("ab") as file:
        file.write(forge(session))


def torn(session: Session) -> None:
    with records_file(session).open("ab") as file:
        file.write(b'{"half')


def truncated(session: Session) -> None:
    os.truncate(records_file(session), 100)


def emptied(session: Session) -> None:
    os.truncate(records_file(session), 0)


def edited(session: Session) -> None:
    whole = records_file(session).read_bytes()
    with records_file(session).open("r+b") as file:
        file.write(forge(session).ljust(whole.index(b"\n"))[: whole.index(b"\n")])


def edited_and_dated_back(session: Session) -> None:
    before = records_file(session).stat()
    with records_file(session).open("r+b") as file:
        file.seek(40)  # inside a date: write what was not there
        other = b"8" if file.read(1) == b"7" else b"7"
        file.seek(40)
        file.write(other)
    os.utime(records_file(session), ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(session: Session) -> None:
    other = session.folder / "other"
    other.write_bytes(forge(session))
    other.replace(records_file(session))


def removed(session: Session) -> None:
    records_file(session).unlink()


def linked(session: Session) -> None:
    records_file(session).rename(session.folder / "elsewhere")
    records_file(session).symlink_to("elsewhere")


def doubled(session: Session) -> None:
    records_file(session).write_bytes(records_file(session).read_bytes() * 2)


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (appended, "added"),
        (torn, "added"),
        (truncated, "was cut"),
        (emptied, "was cut"),
        (edited, "was edited"),
        (edited_and_dated_back, "was edited"),
        (replaced, "was replaced"),
        (removed, "was removed"),
        (linked, "was replaced"),
        (doubled, "added"),
    ],
)
@pytest.mark.parametrize("how", ["asked", "append", "close"])
def test_tampering_is_found_and_undone(session: Session, tamper: Any, words: str, how: str) -> None:
    assert session.tampered() is None and session.tampered(thorough=True) is None
    own = records_file(session).read_bytes().splitlines(keepends=True)
    tamper(session)
    more = 0
    if how == "asked":
        sentence = session.tampered()
        assert sentence is not None and words in sentence
        session.repair()
    elif how == "append":
        session.append([record_of(session)])
        more = 1
    else:
        session.close()
    kept = records_file(session).read_bytes().splitlines(keepends=True)
    assert kept[: len(own)] == own and len(kept) == len(own) + more
    assert len(session.repairs) == 1 and words in session.repairs[0]
    assert (session.folder / "records.jsonl.tampered-1").is_file() == (tamper is not removed)
    if how != "close":
        assert session.tampered(thorough=True) is None
        session.append([record_of(session)])
    assert not read(session)[1].count


def test_a_touched_file_is_not_an_alarm(session: Session) -> None:
    os.utime(records_file(session))
    records_file(session).chmod(0o600)
    assert session.tampered() is None


def test_a_second_repair_has_its_own_name(session: Session) -> None:
    for _ in range(2):
        appended(session)
        session.repair()
    assert (session.folder / "records.jsonl.tampered-2").is_file()


def test_samples_are_guarded_too(session: Session) -> None:
    more = timed_record(session, [0.5, 0.6])
    session.append([more])
    whole_before = samples_of(session.root, next(iterate(session.root))).tolist()
    path = session.folder / "samples.f64"
    with path.open("r+b") as file:
        file.write(np.array([1e-9]).tobytes())
    sentence = session.tampered()
    assert sentence is not None and "samples.f64" in sentence
    session.repair()
    assert "restored" in session.repairs[0]
    assert samples_of(session.root, next(iterate(session.root))).tolist() == whole_before
    assert samples_of(session.root, more).tolist() == [0.5, 0.6]


def test_a_thorough_look_does_not_trust_stamps(session: Session) -> None:
    appended(session)
    session._records._stamp = session._records._look()  # as if the clock had stood still
    assert session.tampered() is None
    assert session.tampered(thorough=True) is not None


def test_samples_are_checked_when_read(session: Session) -> None:
    first, second = iterate(session.root)
    with pytest.raises(ValueError, match="no samples"):
        samples_of(session.root, second)
    path = session.folder / "samples.f64"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="ends before"):
        samples_of(session.root, first)
    path.unlink()
    with pytest.raises(ValueError, match="samples file"):
        samples_of(session.root, first)
    (session.root / "secret").write_bytes(whole)
    path.symlink_to(session.root / "secret")
    with pytest.raises(ValueError, match="samples file"):
        samples_of(session.root, first)


def test_an_environment_is_stored_once(session: Session) -> None:
    names = {
        session.put_environment({"name": "a", "cores": 2}),
        session.put_environment({"cores": 2, "name": "a"}),
    }
    assert len(names) == 1
    (path,) = (session.root / "environments").iterdir()
    assert path.stem in names and json.loads(path.read_text()) == {"name": "a", "cores": 2}


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results folder"):
        list(iterate(tmp_path / "nowhere"))


def test_pipes_and_links_are_not_read(session: Session, tmp_path: Path) -> None:
    pipe = session.root / "session=pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "records.jsonl")
    (session.root / "session=link").symlink_to(session.folder)
    assert len(read(session)[0]) == 2
