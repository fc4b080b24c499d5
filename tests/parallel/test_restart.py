"""torchrun starts ranks again after one died, and they go on from the checkpoint: the same last bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def ran(folder: Path, ranks: int, *more: str) -> list[str]:
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "1",
    ]
    script = [str(ROOT / "examples/parallel_restart.py"), "--dir", str(folder), *more]
    done = subprocess.run([sys.executable, *launch, *script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


def test_a_killed_rank_changes_nothing(tmp_path: Path) -> None:
    begun, last = ran(tmp_path / "whole", 2)
    assert begun == "from step 0 on 2 ranks" and last.startswith("10 steps, loss ")
    first, again, end = ran(tmp_path / "killed", 2, "--kill-at", "7")
    assert (first, again) == ("from step 0 on 2 ranks", "from step 5 on 2 ranks")
    assert end == last
