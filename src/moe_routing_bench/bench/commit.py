"""Says which source code measured: the commit of the checkout that this package is read from."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
MAX_SECONDS = 5.0


@cache
def source_version(package: Path = PACKAGE) -> dict[str, object]:
    """{"commit": "8070f15...", "dirty": True}: dirty if a file of the package is not as committed.

    The commit is "" if git does not track the package: an installed copy may lie in somebody else's checkout.
    """
    commit = _git(package, "rev-parse", "--verify", "HEAD")
    if not commit or not _git(package, "ls-files", "--", "__init__.py"):
        return {"commit": "", "dirty": False}
    # without an answer nobody can promise that it is as committed
    return {"commit": commit, "dirty": _git(package, "status", "--porcelain", "--", ".") != ""}


def _git(folder: Path, *words: str) -> str | None:
    """Returns git's answer, or None if git is absent, refuses or takes too long. The call writes nothing and
    runs no hook."""
    # inside a hook of another repository GIT_DIR would lead there
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        ran = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=MAX_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.decode(errors="replace").strip() if ran.returncode == 0 else None
