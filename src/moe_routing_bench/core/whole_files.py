"""Writes files completely or not at all: first under another name, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_SPACE = os.strerror(errno.ENOSPC)


class NotWrittenError(OSError, ValueError):
    """str(error): "cannot write report.html: the disk is full". It is also a ValueError: the user can fix
    it."""

    def __str__(self) -> str:
        why = "the disk is full" if self.errno in FULL else self.strerror
        return f"cannot write {self.filename}: {why}"


@contextmanager
def written_whole(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Gives a path in the same folder to write to. At the end it is renamed to `path`. If anything fails, it
    is removed and `path` is unchanged. Two writers never share a path. sync: the file is on the disk when
    this returns.

    with written_whole(target) as part: part.write_text(text)
    """
    part = path.with_name(f"{path.name}.part-{secrets.token_hex(6)}")
    try:
        try:
            yield part
            if sync:
                _sync(part)
            part.replace(path)
            if sync:
                sync_folder(path.parent)
        except NotWrittenError:
            raise
        except Exception as error:
            if NO_SPACE in str(error):  # also in errors of other writers: safetensors, DuckDB
                raise NotWrittenError(errno.ENOSPC, NO_SPACE, str(path)) from None
            if not isinstance(error, OSError) or error.filename not in (None, str(part), part):
                raise
            raise NotWrittenError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str, *, sync: bool = False) -> None:
    with written_whole(path, sync=sync) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def sync_folder(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
