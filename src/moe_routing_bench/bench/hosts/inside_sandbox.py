"""The first code in a sandboxed process: it reads from its input what to serve, and serves it."""

from __future__ import annotations

import importlib
import json
import sys
from multiprocessing.connection import Connection


def main() -> None:
    module, pipe, (cell_json, scratch, cores, *more) = json.load(sys.stdin)
    serve = importlib.import_module(module).serve
    serve(Connection(pipe), cell_json, scratch, tuple(cores), *more)


if __name__ == "__main__":
    main()
