"""Workers: the one way to start them, ask them, limit them, and say in words how they ended.

Every answer of a child is validated: it is JSON of bounded size, never unpickled. A child that is late, dead
or sends anything else is killed with all processes it started. It dies with its parent
(core/fork_server.py: settle).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from pydantic import ValidationError

from moe_routing_bench.bench.hosts.filtering import is_filtered, landlock_version
from moe_routing_bench.bench.hosts.freezing import GoneError
from moe_routing_bench.bench.hosts.holding import Tree
from moe_routing_bench.bench.hosts.messages import Prepared, Ready, Reply, Timed
from moe_routing_bench.bench.hosts.sandbox import SandboxedProcess
from moe_routing_bench.bench.loaded import mapped_by
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.untrusted import receive
from moe_routing_bench.core.fork_server import (
    OTHER_SETTINGS,
    Settings,
    expected_settings,
    fork_server,
    settings_of,
    without_main_module,
)
from moe_routing_bench.core.text import ending, printable
from moe_routing_bench.workloads.experiment import Experiment

MAX_ANSWER_BYTES = 2**20
LOG_TAIL = 2_000
# what holds code from outside where the system has all of it; as records from before Landlock say it
HELD, HELD_BEFORE = "ptrace + seccomp + landlock", "ptrace + seccomp"
_now_ns = time.perf_counter_ns
A = TypeVar("A", bound=Reply)


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """Vitals(rss_bytes=300_000_000, peak_bytes=512_000_000, threads=1): memory now, and its peak so far."""

    rss_bytes: int
    peak_bytes: int
    threads: int


class Child:
    """A child process: Child(experiment, (1,), serve).ready().ask("describe", Described, place=0).

    serve: its main function, which gets a pipe, the experiment, its scratch folder, its cores, and `more`
    held: it runs code from outside, so this process holds it and all it starts (holding.py); it waits for
    that before it loads anything (shared_worker.py: wait_until_held)
    """

    def __init__(
        self, experiment: Experiment, cores: tuple[int, ...], serve: Callable[..., None], *more: str,
        sandbox: bool = False, fds: Sequence[int] = (), held: bool = False,
    ):  # fmt: skip
        self.experiment, self.cores = experiment, cores
        self.called: set[int] = set()  # places of implementations that have made calls here
        self.scratch, self._began = Path(tempfile.mkdtemp(prefix="mrb-")), time.time()
        # the log's name may lead elsewhere later, so it is only read through this
        self._log = os.open(self.scratch / "log", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._close_log = weakref.finalize(self, os.close, self._log)  # also if a sweep is abandoned
        context = fork_server()
        ours, theirs = context.Pipe()
        self._pipe = ours
        self.limit = experiment.step_seconds
        self._asked = "load"
        self._settings: Settings | None = None
        self._expected = expected_settings(cores)
        args = (experiment.to_json(), str(self.scratch), cores, *more)
        self._process: Any
        if sandbox:
            self._process = SandboxedProcess(serve, theirs.fileno(), args, self.scratch, fds)
        else:
            self._process = context.Process(target=serve, args=(theirs, *args), daemon=True)
            with without_main_module():
                self._process.start()
        theirs.close()
        self._tree: Tree | None = None
        if held:
            try:
                self._tree = Tree(self.pid)
                self._send({"do": "begin"})
            except (GoneError, ImplementationError):
                self.close()
                raise ImplementationError(Status.CRASHED, "its process ended before it began") from None

    @property
    def held(self) -> str:
        """By what: HELD, or a part of it and what this system lacks."""
        filtered = is_filtered(dict(re.findall(r"^(\w+):\s+(.*)$", self._status(), re.M)))
        parts = ["ptrace"] * (self._tree is not None) + ["seccomp"] * filtered
        if landlock_version():  # then it is in a domain, or it has no filter
            return " + ".join([*parts, *["landlock"] * filtered])
        return f"{' + '.join(parts)}, no landlock"

    def mapped(self) -> list[str]:
        """Libraries from elsewhere than Python, the system and this package, by the system's list."""
        return mapped_by(self.pid, self.scratch, self._began)

    def left_running(self) -> int:
        """How many processes it has started that still run, if it is held."""
        if self._tree is None:
            return 0
        self._tree.serve()
        return self._tree.others()

    def ready(self, meanwhile: Callable[[], None] = lambda: None) -> Self:
        """Waits until the child has made its inputs, which takes seconds for a model, and does `meanwhile`
        until then."""
        try:
            meanwhile()
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        self._answer(Ready)
        self._check_settings()

    def _check_settings(self) -> None:
        self._settings = settings_of(self.pid)
        mine, expected = self._settings, self._expected
        if mine is not None and expected is not None and not mine.fits(expected):
            raise ImplementationError(Status.SUSPECT, f"its process {OTHER_SETTINGS} before its first call")
        self.threads = self.count_threads()
        self._alone, self._before = self.vitals().rss_bytes, 0

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def harm(self) -> str:
        """Says what was done to it while it was not its turn; empty if nothing."""
        if not self._process.is_alive():
            return "ended"
        if self._settings is not None and settings_of(self.pid) not in (self._settings, None):
            return OTHER_SETTINGS
        return "was stopped" if self._is_stopped() else ""

    def _is_stopped(self) -> bool:
        return bool(re.search(r"^State:\s+T", self._status(), re.M))

    def _status(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return ""

    def ask(self, what: str, answer_type: type[A], **details: Any) -> A:
        """The answer to a request, as `answer_type`; ImplementationError if there is no valid one."""
        self._asked = what
        self._send({"do": what, **details})
        return self._answer(answer_type)

    def next_cell(self, experiment: Experiment) -> None:
        """From here on it measures another experiment, with the same policy and weights."""
        self.ask("next_cell", Reply, experiment=experiment.to_json())
        self.experiment, self.called = experiment, set()

    def sample(self, **details: Any) -> tuple[Timed, float]:
        """Times a span by two clocks. The child's clock is precise. This process's clock includes the time in
        the pipe, and the child cannot change it."""
        if (reason := self.ask("prepare", Prepared, **details).unsupported) is not None:
            raise ImplementationError(Status.UNSUPPORTED, reason)
        started = _now_ns()
        timed = self.ask("go", Timed)
        seen = (_now_ns() - started) * 1e-9
        if timed.seconds > seen:
            raise ImplementationError(
                Status.SUSPECT, f"it says a sample took {timed.seconds:g} s, longer than the {seen:g} s seen"
            )
        return timed, seen

    def file(self, name: str) -> Path:
        return self.scratch / f"{name}.safetensors"

    def count_threads(self) -> int:
        """Its threads and those of all processes it started, by the system's count."""
        try:
            process = psutil.Process(self.pid)
            return sum(p.num_threads() for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    def vitals(self) -> Vitals:
        """Memory and threads of the child itself, cheap to read; zeros if the system does not report them."""
        fields = dict(re.findall(r"^(VmRSS|VmHWM|Threads):\s+(\d+)", self._status(), re.M))
        return Vitals(
            rss_bytes=1024 * int(fields.get("VmRSS", 0)),
            peak_bytes=1024 * int(fields.get("VmHWM", 0)),
            threads=int(fields.get("Threads", 0)),
        )

    def begin_watch(self) -> None:
        """From here on, threads and memory count as those of the next implementation."""
        self.threads = self.count_threads()
        self._before = self.vitals().rss_bytes
        with contextlib.suppress(OSError):  # without it the peak is that of the whole process
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int | None:
        """The peak memory since begin_watch, as if the implementation had its own process; None if
        unknown."""
        peak = self.vitals().peak_bytes
        return self._alone + max(0, peak - self._before) if peak else None

    def log_tail(self) -> str:
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace")
        return printable(text, keep="\n")

    def _join(self, seconds: float) -> None:
        """Wait for its end, of which the system tells its holder first."""
        deadline = time.monotonic() + seconds
        while self._tree is not None and self._process.is_alive() and time.monotonic() < deadline:
            self._tree.serve()
            self._process.join(1e-3)
        self._process.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self._tree is not None:
            self._tree.end()
        if self._process.is_alive():
            # kill its whole group, which it made when it started: no forked child may stay
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(self.pid) == self.pid:
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
        self._join(10)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._pipe.close()
        self._close_log()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._died() from None

    def _answer(self, answer_type: type[A]) -> A:
        return self._read(self._message(), answer_type)

    def _message(self) -> bytes:
        try:
            fds = self._pipe.fileno(), self._process.sentinel
            serve = None if self._tree is None else self._tree.serve
            return receive(*fds, seconds=self.limit, most_bytes=MAX_ANSWER_BYTES, serve=serve)
        except TimeoutError:
            raise self._late() from None
        except (EOFError, ConnectionError):
            raise self._died() from None
        except ValueError:
            raise self._wrote_nonsense() from None

    def _late(self) -> ImplementationError:
        status = Status.TIMEOUT if self.limit >= self.experiment.step_seconds else Status.NO_TIME
        return ImplementationError(status, f"it did not answer within {self.limit:.3g} s and was stopped")

    def _wrote_nonsense(self) -> ImplementationError:
        self._join(0.2)
        if not self._process.is_alive():  # it died in the middle of a message
            return self._died()
        return ImplementationError(Status.SUSPECT, "it wrote into the pipe of the benchmark")

    def _read(self, message: bytes, answer_type: type[A]) -> A:
        try:
            answer = json.loads(message)
        except ValueError:
            raise self._wrote_nonsense() from None
        if isinstance(answer, dict) and "error" in answer:
            raise _error(self._asked, str(answer["error"])[:4000], str(answer.get("error_type")))
        try:
            return answer_type.model_validate(answer)
        except ValidationError:
            raise ImplementationError(Status.SUSPECT, f"its answer to {self._asked} is not valid") from None

    def _died(self) -> ImplementationError:
        self._join(5)
        code = self._process.exitcode
        if code is None:
            return ImplementationError(
                Status.CRASHED, "it closed the pipe of the benchmark and went on without answering"
            )
        return ImplementationError(Status.CRASHED, f"its process {ending(code)}")


def _error(asked: str, message: str, error_type: str) -> ImplementationError:
    # an absent library raises when the implementation is loaded, and run_kit if no case is supported; later
    # this is an ordinary error
    if error_type == "NotImplementedError" and asked in ("describe", "kit"):
        return ImplementationError(Status.UNSUPPORTED, message.partition(": ")[2] or message)
    if (
        error_type in ("MemoryError", "OutOfMemoryError")  # the second is torch's, of a GPU
        or "can't allocate memory" in message
        or "Cannot allocate memory" in message
    ):
        return ImplementationError(
            Status.OOM, f"it needed more memory than the cap: {message.splitlines()[0][:300]}"
        )
    return ImplementationError(Status.RUNTIME_ERROR, f"raised {message}")
