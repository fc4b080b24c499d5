from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_routing_bench.core import cpp
from moe_routing_bench.core.paths import home
from moe_routing_bench.ops import registry
from moe_routing_bench.routers import router as routers

# what the person at the keyboard has measured, or likes to look at, must not choose what is tested
FORGOTTEN = (
    "MRB_DECISIONS", "MRB_NODES", "COLUMNS", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the first process; others inherit it
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(home() / "compiled"))  # compile once
        os.environ["MRB_HOME"] = tempfile.mkdtemp(prefix="mrb-home-")
    # the shapes are tiny: a second thread beside another busy process costs 10x
    torch.set_num_threads(1)
    for name in FORGOTTEN:
        os.environ.pop(name, None)
    if cpp.missing_tool() is not None:  # on such a machine every layer says so; test_auto.py sees to it
        config.addinivalue_line("filterwarnings", 'ignore:impl="auto" would run compiled C')


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["MRB_HOME"], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m "not slow ..." a file that is slow as a whole is not even imported."""
    if not config.getoption("markexpr").startswith("not slow") or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = \[?pytest\.mark\.slow", collection_path.read_text(), re.M)) or None


@pytest.fixture
def usual_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a usual CPU, not for what other tests leave of this one: two threads may wait minutes."""
    from moe_routing_bench.bench import estimate  # here: most tests need no benchmark

    usual = estimate.Speed(flops=2e11, bytes=8e9, jitter=0.03)
    monkeypatch.setattr(estimate, "probe", lambda threads, dtype: usual)


@pytest.fixture(autouse=True)
def _as_if_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same random numbers for every test, and no folder that another one included."""
    torch.manual_seed(0)
    monkeypatch.setattr(registry, "_included", [])
    monkeypatch.setattr(routers, "_included", [])
    yield
    if registry._included:
        for op in registry.all_ops().values():
            vars(op._ready).clear()
    if routers._included:
        routers._load.cache_clear()
