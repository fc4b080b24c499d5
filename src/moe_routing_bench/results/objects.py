"""Reads and writes objects at a URL with obstore: file://, S3 (s3://), Google (gs://) or Azure (az://).

A store needs few calls: put an object that does not exist yet, get, list, delete. obstore reads the server
and the keys from the environment, with the names of each provider (AWS_ACCESS_KEY_ID, ...). It refuses a
server without https unless AWS_ALLOW_HTTP=true.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from moe_routing_bench.core.text import one_line

SCHEMES = ("file", "s3", "gs", "az")
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/+(.+)")  # as a Path, s3://bucket is s3:/bucket
RETRY_SECONDS = 300
REQUESTS = 16  # at a time
MAX_OBJECT_BYTES = 2 << 30
T = TypeVar("T")


class StoreError(OSError, ValueError):
    """A server cannot be reached or refuses a request."""


@dataclass(frozen=True)
class Listed:
    """modified: by the clock of the server."""

    name: str
    size: int
    modified: datetime


def url_of(place: Path | str) -> str | None:
    """Returns the URL, or None if it is not one: url_of(Path("s3://bucket/runs")) -> "s3://bucket/runs"."""
    if not (address := ADDRESS.fullmatch(str(place))):
        return None
    scheme, rest = address.groups()
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest.rstrip('/')}"


class Objects:
    """Objects("s3://bucket/runs").put_new("a/b", b"...") -> False if a/b is there already.

    Raises StoreError if the server cannot be reached or refuses, FileNotFoundError if there is no such
    object. If a server has answered once, calls are repeated for RETRY_SECONDS.
    """

    def __init__(self, place: Path | str, *, make: bool = False):
        url = url_of(place)
        if url is None:
            raise ValueError(f"{place} is not the URL of a store: {', '.join(f'{s}://' for s in SCHEMES)}")
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
            from obstore.store import from_url
        except ImportError:
            raise ValueError(
                f"{url} is read and written by obstore, which is not installed: "
                "pip install 'moe-routing-bench[store]'"
            ) from None
        self.url, self._obstore, self._exists, self._errors = url, obstore, AlreadyExistsError, BaseError
        self._passing, self._answered = GenericError, False
        options: dict[str, Any] = {"retry_config": {"max_retries": 0}}  # see _again
        if url.startswith("file:"):
            if not make and not Path(url.removeprefix("file://")).is_dir():
                raise ValueError(f"there is no store at {url}; mrb sweep --out {url} makes one")
            options = {"mkdir": make}
        try:
            self._store = from_url(url, **options)
        except (BaseError, ValueError, OSError) as error:
            raise ValueError(f"{url} cannot be opened: {_first_words(error)}") from None

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes all of it or nothing, and only if there is no such object. Returns False if there is another
        one. The same bytes are ours: a request may have succeeded although its answer was lost."""

        def put() -> bool:
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except self._exists:
                return bytes(self._obstore.get(self._store, name).bytes()) == data
            return True

        try:
            return self._again("write", name, put)
        except FileNotFoundError:  # another one was there, and was deleted
            return False

    def get(self, name: str) -> bytes:
        def get() -> bytes:
            answer = self._obstore.get(self._store, name)
            if answer.meta["size"] > MAX_OBJECT_BYTES:
                raise ValueError(f"{name} has {answer.meta['size']:,} bytes, which nothing here has")
            return bytes(answer.bytes())

        return self._again("read", name, get)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return self._again(
            "read", name, lambda: bytes(self._obstore.get_range(self._store, name, start=start, end=stop))
        )

    def exists(self, name: str) -> bool:
        try:
            self._again("read", name, lambda: self._obstore.head(self._store, name))
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Sequence[Listed]:
        """Returns the objects sorted by name."""

        def listed() -> Sequence[Listed]:
            pages = self._obstore.list(self._store, prefix)
            listed = [Listed(o["path"], o["size"], o["last_modified"]) for page in pages for o in page]
            return sorted(listed, key=lambda found: found.name)

        return self._again("list", prefix, listed)

    def delete(self, names: Iterable[str]) -> None:
        def delete(name: str) -> None:
            with suppress(FileNotFoundError):
                self._again("delete", name, lambda: self._obstore.delete(self._store, name))

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(delete, names))  # also to see their errors

    def _again(self, what: str, name: str, call: Callable[[], T]) -> T:
        """Repeats a call until it succeeds, if the server has answered before: it may be restarting."""
        pause, deadline = 0.1, time.monotonic() + RETRY_SECONDS
        while True:
            try:
                answer = call()
            except FileNotFoundError:
                self._answered = True
                raise
            except self._errors as error:
                if not (isinstance(error, self._passing) and self._answered) or time.monotonic() > deadline:
                    raise StoreError(f"cannot {what} {name} in {self.url}: {_first_words(error)}") from None
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
                continue
            self._answered = True
            return answer


def _first_words(error: Exception) -> str:
    """Shortens a server's answer, which may be a whole page, to its first sentence."""
    words = one_line(re.split(r"Debug source|<\?xml|\n\n", str(error))[0], 300)
    if "http://" in words and "builder error" in words:  # all that obstore says
        words += "; a server without https is used only with AWS_ALLOW_HTTP=true in the environment"
    return words
