"""list, explain and check never load a file from outside themselves: whatever it does becomes one row."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from command_line import mrb, mrb_json
from moe_routing_bench.conformance import outside
from moe_routing_bench.ops import registry

pytestmark = pytest.mark.slow

GOOD = '''"""A good one."""


def run(y_RD, gate_TK, plan):
    from moe_routing_bench.ops.combine.op import op

    return op.reference(y_RD, gate_TK, plan)
'''
# what a file does when it is loaded, and the words people then see
AT_ONCE = {
    "exits": ("import os\nos._exit(0)\n", "code 0"),
    "says_goodbye": ("raise SystemExit(0)\n", "SystemExit(0)"),
    "aborts": ("import os\nos.abort()\n", "ended by signal SIGABRT"),
    "prints": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'garbage\\n')\n"
        "    except OSError:\n        pass\n",
        "wrote something of its own",
    ),
    "hangs": ("import time\ntime.sleep(1000)\n", "did not answer within"),
    "halves": (
        "import os, time\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'{\"spec\": ')\n"
        "    except OSError:\n        pass\ntime.sleep(1000)\n",
        "did not answer within",
    ),
    "forks": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos._exit(3)\n",
        "ended by itself with code 3",
    ),
    "eats": ("x = bytearray(64 << 30)\n", "MemoryError"),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "combine").mkdir()
    (tmp_path / "combine" / "good.py").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("exits", "prints") else [pytest.mark.nightly])
        for name in AT_ONCE
    ],
)
def test_whatever_a_file_does_is_one_row(folder: Path, name: str) -> None:
    source, words = AT_ONCE[name]
    if "did not answer" in words:
        outside.SECONDS = 20.0  # type: ignore[attr-defined]
    (folder / "combine" / f"{name}.py").write_text(source + GOOD.partition("\n")[2])
    here = os.getpid()
    listed = mrb_json("list", "ops", "--include-path", folder, code=1)["ops"]["combine"]["implementations"]
    assert listed["good"]["state"] == "ready" and listed["good"]["summary"] == "A good one."
    assert listed[name]["state"] == "broken" and words in listed[name]["reason"]
    wanted = ["--op", "combine", "--dtype", "float32", "--impl", f"[g{name[0]}]*"]
    document = mrb_json("check", *wanted, "--include-path", folder, code=1)
    rows = {row["implementation"]: row for row in document["results"]}
    assert rows["good"]["verdict"] == rows["gather_sum"]["verdict"] == "passed"
    assert rows[name]["verdict"] == "broken" and words in rows[name]["failures"][0]["sentence"]
    others = {
        one["spec"]: one for one in mrb_json("explain", "combine", "--include-path", folder, code=1)["others"]
    }
    assert others["good"]["answer"] == "could run" and others["gather_sum"]["answer"] == "could run"
    assert others[name]["answer"] == "broken" and words in others[name]["reason"]
    assert os.getpid() == here and not registry._included, "the parent knows nothing of the folder"


def test_what_dies_in_a_case_failed_that_case(folder: Path) -> None:
    dies = GOOD.replace(
        "    from", "    if plan.layout.kind != 'compact':\n        __import__('os').abort()\n    from"
    )
    (folder / "combine" / "dies.py").write_text(dies)
    words = ["check", "--op", "combine", "--impl", "dies", "--dtype", "float32", "--include-path", folder]
    (row,) = mrb_json(*words, code=1)["results"]
    assert row["verdict"] == "failed" and row["passed"]["float32"] >= 1
    (failure,) = row["failures"]
    assert "SIGABRT" in failure["sentence"] and failure["layout"] != "compact" and failure["case"]


def test_a_router_and_an_operation_that_exit_are_rows(folder: Path) -> None:
    for name in ("routers/leaves.py", "new_op/op.py", "new_op/some.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("import os\nos._exit(0)\n")
    listed = mrb_json("list", "--include-path", folder, code=1)
    assert listed["routers"]["leaves"]["state"] == "broken"
    assert listed["routers"]["switch"]["state"] == "ready"
    assert listed["ops"]["new_op"]["implementations"].keys() == {"op.py"}
    text = mrb("list", "--include-path", folder, code=1).stdout
    assert text.count("code 0") == 2
    for op, spec in (("new_op", "op.py"), ("routers", "leaves")):
        words = ["check", "--op", op, "--impl", "*" if op == "new_op" else "leaves", "--include-path", folder]
        (row,) = mrb_json(*words, code=1)["results"]
        assert row["implementation"] == spec and "code 0" in row["failures"][0]["sentence"]
    assert "ended by itself" in mrb("explain", "new_op", "--include-path", folder, code=1).stdout
    assert "could run" in mrb("explain", "combine", "--include-path", folder).stdout


def test_a_named_file_that_exits_is_said_so(folder: Path) -> None:
    (folder / "combine" / "exits.py").write_text("import os\nprint('bye')\nos._exit(0)\n")
    words = ["explain", "combine", "--impl", "exits", "--include-path", folder]
    assert "exits is broken" in mrb(*words, code=1).stdout


def test_text_from_outside_cannot_steer_the_terminal(folder: Path) -> None:
    (folder / "combine" / "good.py").write_text(GOOD.replace("A good one.", "A \x1b[2J good one."))
    text = mrb("list", "ops", "--include-path", folder).stdout
    assert "\x1b" not in text and "A ?[2J good one." in text


def test_nothing_of_it_stays(folder: Path) -> None:
    """Processes that the file started die with its own."""
    pids = folder / "pids"
    (folder / "combine" / "stays.py").write_text(
        "import os, time\nif (pid := os.fork()) == 0:\n    time.sleep(600)\n    os._exit(0)\n"
        f"open({str(pids)!r}, 'a').write(f'{{pid}}\\n')\nos._exit(0)\n"
    )
    mrb("list", "ops", "--include-path", folder, code=1)
    started = [int(line) for line in pids.read_text().split()]
    until = time.monotonic() + 30
    while any(map(psutil.pid_exists, started)) and time.monotonic() < until:
        time.sleep(0.01)
    assert started and not any(map(psutil.pid_exists, started))
