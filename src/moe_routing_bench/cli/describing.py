"""What `mrb list` says of an operation, an implementation and a router. Files from outside are asked in a
process of their own (`answers` below).

Calls a function of ours in a process of its own, because it loads code from outside.

That code may exit, hang, crash, print or allocate without end. So the process has its own group, a limit on
memory and on the time between two answers, and everything it prints goes to a file; an answer is one line of
JSON, of bounded size and validated. Whatever else happens is an ApartError with a sentence.

The workers of the benchmark (bench/hosts/children.py) hold a conversation about one cell and keep time.
Here is one question and a stream of answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from moe_routing_bench.bench.fork_server import fork_server, without_main_module
from moe_routing_bench.cli.options import ROUTERS, Outside, OutsideFile
from moe_routing_bench.cli.terminal import MistakeError
from moe_routing_bench.core.text import ending, printable
from moe_routing_bench.ops.catalog import Listing, find, find_all
from moe_routing_bench.ops.preference import machine_of, preferences
from moe_routing_bench.ops.registry import BUILT_IN, Op, get_op
from moe_routing_bench.routers.router import GROUPS, Router, include_folder, router_named

SECONDS = 60.0  # between two answers
MEMORY_BYTES = 8 << 30  # on top of what the process has when it starts
MAX_ANSWER_BYTES = 1 << 20
LOG_LETTERS = 300
A = TypeVar("A", bound=BaseModel)


# text that reaches a terminal
Shown = Annotated[str, Field(max_length=4_000), AfterValidator(lambda text: printable(text))]


class ApartError(Exception):
    """Why there is no valid answer, in a sentence about the code from outside."""


def answers(
    function: Callable[..., Iterator[Any]], *arguments: Any, include: Sequence[Path], answer: type[A]
) -> Iterator[A]:
    """What `function(*arguments)` yields, as `answer`, with the folders `include` included. The function is a
    top-level one of ours, and yields what JSON can hold. MistakeError if it raised one."""
    scratch = Path(tempfile.mkdtemp(prefix="mrb-apart-"))
    context = fork_server("moe_routing_bench.cli")
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
        for line in _lines(ours, process, scratch):
            try:
                given = json.loads(line)
                if isinstance(given, dict) and given.keys() == {"ended"}:
                    return
                if isinstance(given, dict) and given.keys() == {"error", "mistake"}:
                    kind = MistakeError if given["mistake"] is True else ApartError
                    raise kind(printable(given["error"], 2_000))
                one = answer.model_validate(given)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, ValidationError):
                raise ApartError("it wrote something of its own where its answer belongs") from None
            yield one
    finally:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(10)
        ours.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _lines(pipe: Connection, process: Any, scratch: Path) -> Iterator[bytes]:
    """Lines as they come; ApartError if there is none in time, or no more before the answer has ended."""
    pending, deadline = b"", time.monotonic() + SECONDS
    os.set_blocking(pipe.fileno(), False)
    while True:
        ready = wait([pipe, process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ApartError(f"it did not answer within {SECONDS:g} s and was stopped")
        try:
            piece = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:  # it has ended, and all that it wrote was read
            piece = b""
        if not piece:
            process.join(5)
            code = process.exitcode
            how = "closed the pipe for its answer and went on" if code is None else ending(code)
            raise ApartError(f"its process {how}{_last_words(scratch)}")
        *lines, pending = (pending + piece).split(b"\n")
        if len(pending) > MAX_ANSWER_BYTES or any(len(line) > MAX_ANSWER_BYTES for line in lines):
            raise ApartError("its answer is too long")
        for line in lines:
            deadline = time.monotonic() + SECONDS
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
    """Its own process group and log, a memory cap; it dies when its parent dies, and holds no other file."""
    os.setsid()
    if sys.platform == "linux":
        for other in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
            if other > 2 and other != pipe:
                with contextlib.suppress(OSError):
                    os.close(other)
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for place, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, place)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))  # the log of what prints without end


# where the parameters of routers are counted
ROUTER_SIZES = {"D": 2048, "E": 64}
# the layouts that take the rows of a rule as they come; padded drops rows unless its groups are equal
LAYOUTS = {
    "uneven": ["compact", "block", "padded, with drops"],
    "equal": ["compact", "block", "padded, without drops or waste"],
    "dense": ["compact", "block", "padded, without drops or waste"],
}


def described(file: OutsideFile, outside: Outside, row: type[BaseModel]) -> dict[str, Any]:
    """What a file from outside says of itself, asked in a process of its own."""
    try:
        (answer,) = answers(describe_file, str(file.path), include=outside.folders, answer=row)
    except (ApartError, ValueError) as reason:
        return broken_row(row, file, str(reason))
    return {**answer.model_dump(), "origin": file.origin}


def broken_row(row: type[BaseModel], file: OutsideFile, reason: str) -> dict[str, Any]:
    return {**dict.fromkeys(row.model_fields), "state": "broken", "reason": reason, "origin": file.origin}


def describe_file(path: str) -> Iterator[dict[str, Any]]:
    """Runs where files from outside are loaded."""
    name, op = Path(path).stem, Path(path).parent.name
    if op == ROUTERS:
        yield describe_router(router_named(name))
    elif name == "op":
        described = describe_op(get_op(op))
        yield {**described, "implementations": {}, "state": "ready", "reason": None, "origin": ""}
    else:
        yield describe(get_op(op), find(get_op(op), name))


class ImplementationRow(BaseModel):
    """What describe says."""

    model_config = ConfigDict(extra="forbid")
    state: Literal["ready", "absent", "broken"]
    reason: Shown | None
    origin: Shown
    default: bool
    summary: Shown | None
    options: list[Shown] | None
    configs: list[dict[Shown, Any]] | None
    forward_only: bool | None
    host_sync: Shown | None
    deterministic: bool | None
    batch_invariant: bool | None
    reuses_output: bool | None
    ties: Shown | None


class OpRow(BaseModel):
    """What describe_op says."""

    model_config = ConfigDict(extra="forbid")
    state: Literal["ready", "broken"]
    reason: Shown | None
    origin: Shown
    summary: Shown
    parameters: list[Shown]
    default: Shown
    preferred: list[dict[str, Any]]
    implementations: dict[str, Any]


class RouterRow(BaseModel):
    """What describe_router says."""

    model_config = ConfigDict(extra="forbid")
    state: Literal["ready", "broken"]
    reason: Shown | None
    summary: Shown
    origin: Shown
    causal: bool
    batch_dependent: bool
    experts_per_token: Shown
    fixed_K: int | None
    gate_sum: Shown
    groups: Literal[tuple(GROUPS)]  # type: ignore[valid-type]
    layouts: list[Shown]
    parameters: dict[Shown, int]
    parameters_at: dict[str, int]
    balance_state: list[Shown]
    controller: Shown | None
    host_sync: Shown | None
    losses: list[Shown]
    paper: Shown


def describe_op(op: Op) -> dict[str, Any]:
    machine = machine_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows = [asdict(row) for row in preferences(op, machine) if row.order]
    return {
        "summary": op.summary.removeprefix(f"{op.name}: "),
        "parameters": op.parameters(),
        "default": op.default,
        "preferred": [{**row, "machines": [machine]} for row in rows],
        "implementations": {
            entry.spec: describe(op, entry)
            for entry in find_all(op, configs=False)
            if not entry.origin.startswith("file ")
        },
    }


def describe(op: Op, entry: Listing) -> dict[str, Any]:
    """The same keys for every implementation; null where a file that could not be loaded would say."""
    one = entry.implementation
    options = None if one is None else [*inspect.signature(one.run).parameters][len(op.parameters()) :]
    return {
        "state": entry.state,
        "reason": entry.reason or None,
        "origin": entry.origin,
        "default": entry.spec == op.default,
        "summary": one and one.summary,
        "options": options,
        "configs": one and [dict(config) for config in one.configs],
        "forward_only": one and one.forward_only,
        "host_sync": one and (one.host_sync or None),
        "deterministic": one and one.deterministic,
        "batch_invariant": one and one.batch_invariant,
        "reuses_output": one and one.reuses_output,
        "ties": one and one.ties,
    }


def describe_router(rule: type[Router]) -> dict[str, Any]:
    module = sys.modules[rule.__module__]
    router = rule(ROUTER_SIZES["D"], ROUTER_SIZES["E"], rule.fixed_K or 1)
    built_in = rule.__module__.startswith(f"{Router.__module__.rpartition('.')[0]}.")
    return {
        "state": "ready",
        "reason": None,
        "summary": (inspect.getdoc(module) or "").partition("\n")[0],
        "origin": BUILT_IN if built_in else f"file {module.__file__}",
        "causal": rule.causal,
        "batch_dependent": rule.batch_dependent,
        "experts_per_token": rule.experts_per_token,
        "fixed_K": rule.fixed_K,
        "gate_sum": rule.gate_sum,
        "groups": rule.groups,
        "layouts": LAYOUTS[rule.groups],
        "parameters": {name: value.numel() for name, value in router.named_parameters()},
        "parameters_at": ROUTER_SIZES,
        "balance_state": [name for name, _ in router.named_buffers()],
        "controller": rule.controller,
        "host_sync": getattr(rule, "host_sync", None),
        "losses": [*rule.loss_names],
        "paper": rule.paper,
    }
