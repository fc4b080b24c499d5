"""CuTe kernels, their threads run on the CPU, and QuACK's references in the place of its kernels:
MRB_CUTE_ON_CPU=1 MRB_QUACK_ON_CPU=1 pytest tests/cute
"""

from __future__ import annotations

import importlib.util
import os

CUTE = importlib.util.find_spec("cutlass") is not None and os.environ.get("MRB_CUTE_ON_CPU") == "1"
QUACK = importlib.util.find_spec("quack") is not None and os.environ.get("MRB_QUACK_ON_CPU") == "1"
collect_ignore = ([] if CUTE else ["test_kit.py", "test_moving.py", "test_code.py"]) + (
    [] if QUACK else ["test_quack.py"]
)


def pytest_report_header() -> str:
    if CUTE and QUACK:
        return ""
    needs = "the extra [cutedsl], MRB_CUTE_ON_CPU=1 and MRB_QUACK_ON_CPU=1"
    return f"tests/cute: {', '.join(collect_ignore)} not collected; they need {needs}"
