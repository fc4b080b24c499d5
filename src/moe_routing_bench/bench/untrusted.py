"""Reads what code from outside may have written: messages with a deadline, files that are really files."""

from __future__ import annotations

import os
import select
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

FIRST_WAIT, LONGEST_WAIT = 1e-3, 1e-2  # seconds between two looks at what else happens


def receive(
    pipe: int, sentinel: int, *, seconds: float, most_bytes: int, serve: Callable[[], bool] | None = None
) -> bytes:
    """Reads one message of multiprocessing's format. It never waits longer than `seconds`, not even for the
    second half of a message.

    sentinel: becomes readable when the sender's process has ended.
    serve: called now and then while waiting, more often as long as it says that there was something to do.
    Raises TimeoutError, EOFError if the sender is gone, ValueError if it is no such message.
    """
    deadline = time.monotonic() + seconds
    (length,) = struct.unpack("!i", _exactly(4, pipe, sentinel, deadline, serve))
    if not 0 <= length <= most_bytes:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(length, pipe, sentinel, deadline, serve)


def _exactly(
    wanted: int, pipe: int, sentinel: int, deadline: float, serve: Callable[[], bool] | None
) -> bytes:
    poll, parts, wait = select.poll(), [], FIRST_WAIT
    for fd in (pipe, sentinel):
        poll.register(fd, select.POLLIN)
    while wanted:
        left = max(0.0, deadline - time.monotonic())
        ready = dict(poll.poll(1000 * (min(left, wait) if serve else left)))
        if not ready and left > 0 and serve:
            wait = FIRST_WAIT if serve() else min(2 * wait, LONGEST_WAIT)
            continue
        if not ready:
            raise TimeoutError
        if pipe not in ready:
            raise EOFError
        part = os.read(pipe, min(wanted, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts)


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. ValueError for a link, a pipe, a device or a file that is too long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError("no result was handed over") from None
    except OSError as error:
        raise ValueError(f"the result is not a file: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("the result is not a file")
        if facts.st_size > most_bytes:
            raise ValueError(f"the result is {facts.st_size} bytes, far more than expected")
        return file.read(facts.st_size)
