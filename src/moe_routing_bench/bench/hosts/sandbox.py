"""A worker under bubblewrap. It has no network, cannot write files outside its scratch folder, and sees no
other process.

It is a new Python process instead of a fork, so it starts in seconds. `command` builds the line; the rest
makes it look like a process of multiprocessing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MISSING = "--sandbox needs bubblewrap: `apt install bubblewrap` (or your system's package of that name)"
# what compiles while it is loaded may keep files of its own, for as long as it lives
OWN_FOLDERS = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME")


def check_sandbox() -> None:
    """ValueError if there is no bubblewrap."""
    if shutil.which("bwrap") is None:
        raise ValueError(MISSING)


def command(scratch: Path, words: Sequence[str]) -> list[str]:
    """Returns the command line that runs `words` in a sandbox where only the scratch folder can be
    written."""
    own = [word for name in OWN_FOLDERS for word in ("--setenv", name, str(scratch))]
    return [
        "bwrap", "--die-with-parent", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
        "--as-pid-1", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm",
        "--bind", str(scratch), str(scratch), *own, "--chdir", str(scratch), "--", *words,
    ]  # fmt: skip


class SandboxedProcess:
    """The part of multiprocessing.Process that a Worker uses. fds: open files that the worker gets."""

    def __init__(
        self, serve: Callable[..., None], pipe: int, args: Sequence[Any], scratch: Path, fds: Sequence[int]
    ):
        check_sandbox()
        words = [sys.executable, "-m", "moe_routing_bench.bench.hosts.inside_sandbox"]
        task = json.dumps([serve.__module__, pipe, list(args)])
        self._outer = subprocess.Popen(
            command(scratch, words), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=(pipe, *fds),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert self._outer.stdin is not None
        self._outer.stdin.write(task.encode())
        self._outer.stdin.close()
        self.sentinel = os.pidfd_open(self._outer.pid)
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The process id of the worker itself, not of bubblewrap around it."""
        until = time.monotonic() + 10
        while self._pid is None and time.monotonic() < until:
            file = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
            children = file.read_text().split() if file.exists() else []
            self._pid = int(children[0]) if children else None
        return self._pid if self._pid is not None else self._outer.pid

    def is_alive(self) -> bool:
        return self._outer.poll() is None

    @property
    def exitcode(self) -> int | None:
        code = self._outer.poll()
        return 128 - code if code is not None and code > 128 else code

    def kill(self) -> None:
        self._outer.kill()

    def join(self, seconds: float) -> None:
        try:
            self._outer.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
