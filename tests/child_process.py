"""Python in a process of its own, for what one process can only see once."""

from __future__ import annotations

import os
import subprocess
import sys


def python(code: str, *words: object, without: str = "") -> subprocess.CompletedProcess[str]:
    """Runs code that can import what tests can, and must succeed; `without` names a variable to leave out."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(without, None)
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran
