"""A bench that is killed leaves no process, whatever code from outside was doing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moe_routing_bench.bench.hosts.holding import can_hold

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_hold(), reason="this system does not let a process trace its children"),
]
KERNEL = '''"""Starts a daemon in a session of its own, and waits."""

import os
import time
import traceback
from pathlib import Path

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD, gate_TK, plan):
    if {worker!r} in str(traceback.extract_stack()):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path({told!r}).write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        time.sleep(600)
    return honest(y_RD, gate_TK, plan)
'''


@pytest.mark.parametrize("worker", ["shared_worker.py", "isolated_worker.py"], ids=["trial", "rounds"])
def test_a_bench_that_is_killed_leaves_no_process(tmp_path: Path, worker: str) -> None:
    told = tmp_path / "pid"
    (tmp_path / "mine" / "combine").mkdir(parents=True)
    (tmp_path / "mine" / "combine" / "waits.py").write_text(KERNEL.format(worker=worker, told=str(told)))
    words = [
        "bench", "combine", "--tokens", "8", "--width", "16", "--experts", "4", "--topk", "2", "--dtype",
        "float32", "--impl", "gather_sum,waits", "--include-path", str(tmp_path / "mine"), "--threads", "1",
        "--seconds", "250",
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "moe_routing_bench", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as bench:
        until = time.monotonic() + 200
        while not (told.exists() and told.read_text()):
            assert bench.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        theirs = [*psutil.Process(bench.pid).children(recursive=True), psutil.Process(int(told.read_text()))]
        bench.kill()
        _, alive = psutil.wait_procs(theirs, timeout=30)
        assert len(theirs) > 2 and not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
