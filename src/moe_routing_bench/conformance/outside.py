"""Files from outside: which there are, and questions to them in a process of its own.

Code from outside may exit, hang, crash, print or allocate without end. So the process has its own group, a
limit on memory and on the time between two answers, and everything it prints goes to a file; an answer is one
line of JSON, of bounded size and validated. Whatever else happens is an IsolatedError with a sentence.

The workers of the benchmark hold a conversation about one experiment and keep time. Here is one question and
a stream of answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from moe_routing_bench.core.fork_server import fork_server, settle, without_main_module
from moe_routing_bench.core.names import MistakeError
from moe_routing_bench.core.text import ending, printable
from moe_routing_bench.ops.registry import BUILT_IN, NO_IMPLEMENTATIONS, all_ops, files_of
from moe_routing_bench.routers.router import built_in_names, include_folder

ROUTERS = "routers"
SECONDS = 60.0  # between two answers
MEMORY_BYTES = 8 << 30  # on top of what the process has when it starts
MAX_ANSWER_BYTES = 1 << 20
LOG_LETTERS = 300
# text that reaches a terminal
Shown = Annotated[str, Field(max_length=4_000), AfterValidator(lambda text: printable(text))]


class Answer(BaseModel):
    """One line of an answer from that process: nothing but the fields of its kind."""

    model_config = ConfigDict(extra="forbid")


A = TypeVar("A", bound=Answer)


class IsolatedError(Exception):
    """Why there is no valid answer, in a sentence about the code from outside."""


def answers(
    function: Callable[..., Iterator[Any]], *arguments: Any, answer: type[A], include: Sequence[Path] = (),
    seconds: float = SECONDS, most_bytes: int = MAX_ANSWER_BYTES,
) -> Iterator[A]:  # fmt: skip
    """Yields what `function(*arguments)` yields in a process of its own, as `answer`. MistakeError if it
    raised one.

    function: a top-level one of ours, which yields what JSON can hold
    include: folders that the process includes
    seconds, most_bytes: limits between two answers, and of one
    """
    scratch = Path(tempfile.mkdtemp(prefix="mrb-isolated-"))
    context = fork_server(__name__)
    ours, theirs = context.Pipe(duplex=False)
    folders = [str(folder.resolve()) for folder in include]
    process = context.Process(
        target=_serve,
        args=(theirs, function, arguments, folders, str(scratch), torch.get_num_threads()),
        daemon=True,
    )
    try:
        with without_main_module():
            process.start()
        theirs.close()
        for line in _lines(ours, process, scratch, seconds, most_bytes):
            try:
                given = json.loads(line)
                if isinstance(given, dict) and given.keys() == {"ended"}:
                    return
                if isinstance(given, dict) and given.keys() == {"error", "mistake"}:
                    kind = MistakeError if given["mistake"] is True else IsolatedError
                    raise kind(printable(given["error"], 2_000))
                one = answer.model_validate(given)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, ValidationError):
                raise IsolatedError("it wrote something of its own where its answer belongs") from None
            yield one
    finally:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(10)
        ours.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _lines(pipe: Connection, process: Any, scratch: Path, seconds: float, most_bytes: int) -> Iterator[bytes]:
    """Lines as they come; IsolatedError if there is none in time, or no more before the answer has ended."""
    pending, deadline = b"", time.monotonic() + seconds
    os.set_blocking(pipe.fileno(), False)
    while True:
        ready = wait([pipe, process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise IsolatedError(f"it did not answer within {seconds:g} s and was stopped")
        try:
            piece = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:  # it has ended, and all that it wrote was read
            piece = b""
        if not piece:
            process.join(5)
            code = process.exitcode
            how = "closed the pipe for its answer and went on" if code is None else ending(code)
            raise IsolatedError(f"its process {how}{_last_words(scratch)}")
        *lines, pending = (pending + piece).split(b"\n")
        if len(pending) > most_bytes or any(len(line) > most_bytes for line in lines):
            raise IsolatedError("its answer is too long")
        for line in lines:
            deadline = time.monotonic() + seconds
            yield line


def _last_words(scratch: Path) -> str:
    try:
        fd = os.open(scratch / "log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size = os.fstat(fd).st_size
            text = os.pread(fd, 4 * LOG_LETTERS, max(0, size - 4 * LOG_LETTERS)).decode(errors="replace")
        finally:
            os.close(fd)
    except OSError:
        return ""
    words = printable(" ".join(text.split()))[-LOG_LETTERS:]
    return f"; its last words: {words}" if words else ""


def _serve(
    pipe: Connection,
    function: Callable[..., Iterator[Any]],
    arguments: Any,
    include: list[str],
    scratch: str,
    threads: int,
) -> None:
    fd = os.dup(pipe.fileno())
    _settle(Path(scratch), fd)
    torch.set_num_threads(threads)

    def send(message: Any) -> None:
        data = json.dumps(message, default=str).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    try:
        for folder in include:
            include_folder(folder)
        for one in function(*arguments):
            send(one)
        send({"ended": True})
    except BaseException as error:  # also SystemExit, which would end this process in silence
        mistake = isinstance(error, MistakeError)
        text = str(error) if mistake else f"{type(error).__name__}: {error}"
        send({"error": text[:2_000], "mistake": mistake})
    os._exit(0)  # whatever threads and exit handlers the code left behind


def _settle(scratch: Path, pipe: int) -> None:
    """Settles the process, and limits its memory and its log."""
    settle(scratch, (pipe,))
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))  # the log of what prints without end


@dataclass(frozen=True, kw_only=True)
class OutsideFile:
    """OutsideFile(op="combine", name="mine", path=.../combine/mine.py); its op is `routers` for a router, its
    name `op` for a new operation."""

    op: str
    name: str
    path: Path

    @property
    def origin(self) -> str:
        return f"file {self.path}"


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The folders of --include-path and their files. Nothing in them is loaded here."""

    folders: tuple[Path, ...]
    files: tuple[OutsideFile, ...]

    @property
    def ops(self) -> list[OutsideFile]:
        """The new operations."""
        return [file for file in self.files if file.name == "op" and file.op != ROUTERS]

    def of(self, op_pattern: str) -> Iterator[OutsideFile]:
        """Implementations of the operations that match, or routers."""
        for file in self.files:
            if fnmatchcase(file.op, op_pattern) and (
                file.name not in NO_IMPLEMENTATIONS or file.op == ROUTERS
            ):
                yield file


def found_outside(folders: Sequence[Path] | None) -> Outside:
    """ValueError if a name exists twice."""
    ops = all_ops()
    taken = {(name, spec): op.origin(spec) for name, op in ops.items() for spec in op.names()}
    taken |= {(ROUTERS, name): BUILT_IN for name in built_in_names()}
    files = []
    for path in files_of(folders or ()):
        file = OutsideFile(op=path.parent.name, name=path.stem, path=path)
        if file.name == "op" and file.op in ops:
            raise ValueError(f"{path}: there is an operation {file.op} already; rename the folder")
        if (other := taken.setdefault((file.op, file.name), file.origin)) != file.origin:
            raise ValueError(f"{file.op}.{file.name} exists twice: {other} and {file.origin}; rename one")
        files.append(file)
    return Outside(folders=tuple(folders or ()), files=tuple(files))
