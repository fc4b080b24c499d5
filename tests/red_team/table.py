"""Makes verdicts.md, the table of what became of each cheat of classes.py, with an empty home.

python tests/red_team/table.py                        all of them: an hour on a quiet machine
python tests/red_team/table.py combine.wakes_itself   these alone; other rows stay as they were
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch

os.environ["MRB_HOME"] = tempfile.mkdtemp(prefix="mrb-empty-")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from classes import CLASSES  # noqa: E402
from moe_routing_bench.bench.runner import run_cell  # noqa: E402
from moe_routing_bench.core.fork_server import server_pid  # noqa: E402
from test_classes import ALL, cell_of  # noqa: E402
from test_red_team import how_for  # noqa: E402

FILE = Path(__file__).with_name("verdicts.md")
HEAD = """# What became of each cheat

Made by `python tests/red_team/table.py`, as {user}. Time is that of the cheat by that of the baseline beside
it; processes left are those that run when the cell is over. Only PASSED has a verdict.

| kernel | status | verdict | time | held by | processes left | seconds | load | why |
|---|---|---|---|---|---|---|---|---|
"""


def row(name: str) -> str:
    op, _, kernel = name.partition(".")
    began = time.monotonic()
    _, one = run_cell(replace(cell_of(op, kernel), **how_for(ALL[name]))).implementations
    verdict, ratio = (one.comparison.verdict, f"{one.comparison.ratio:.2f}") if one.comparison else ("", "")
    left = len(psutil.Process(server_pid()).children(recursive=True))
    cells = (
        name, str(one.status), verdict, ratio, one.held, str(left),
        f"{time.monotonic() - began:.0f}", f"{os.getloadavg()[0]:.0f}",
        re.sub(r"\s+", " ", one.reason.replace("|", "/"))[:120],
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    order = [name for kind in CLASSES.values() for name in kind]
    known = {line.split(" | ")[0][2:]: line for line in _lines() if line.startswith("| ")}
    for name in names or order:
        known[name] = row(name)
        print(known[name], flush=True)
        user = "root" if os.getuid() == 0 else "an ordinary user"
        rows = [known[name] for name in order if name in known]
        FILE.write_text(HEAD.format(user=user) + "\n".join(rows) + "\n")


def _lines() -> list[str]:
    return FILE.read_text().splitlines() if FILE.exists() else []


if __name__ == "__main__":
    main(sys.argv[1:])
