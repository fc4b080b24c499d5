"""Kernels in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpreted, in a process of its own.

Interpreted and compiled kernels cannot share a process, so without that variable nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

READY = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if READY else ["test_*.py"]


def pytest_report_header() -> str:
    return "" if READY else "tests/interpreted: not collected; they need triton and TRITON_INTERPRET=1"


@pytest.fixture
def watched() -> Iterator[object]:
    """Inside the test: bfloat16 is right, memory is watched, programs run in random order."""
    from moe_routing_bench.conformance.instrumented import instrumented

    with instrumented(order="random") as seen:
        yield seen
