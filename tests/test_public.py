"""The public names: few, loaded when they are asked for, each with an example that runs."""

from __future__ import annotations

import doctest
import inspect
import io
from pathlib import Path

import pytest
import torch

import moe_routing_bench as mrb
from child_process import python
from repository import ROOT

MEASURES = {"bench", "check", "sweep", "train", "tune"}  # they start processes or train
DROPPED = ("LETTERS", "Counts", "Routings", "Verdict", "LoadStatistics", "include_routers")


def runs(name: str) -> pytest.ParameterSet:  # type: ignore[name-defined]
    return pytest.param(name, marks=pytest.mark.slow if name in MEASURES else ())


@pytest.mark.parametrize("name", [runs(name) for name in mrb.__all__])
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for there in ("examples", "measurements"):
        (tmp_path / there).symlink_to(ROOT / there)
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(mrb, name)) or ""
    test = doctest.DocTestParser().get_doctest(text, {"mrb": mrb, "torch": torch}, name, None, 0)
    assert test.examples, f"{name} has no example"
    said = io.StringIO()
    ran = doctest.DocTestRunner(verbose=False).run(test, out=said.write)
    assert ran.failed == 0, said.getvalue()


def test_there_are_few() -> None:
    public = [name for name in dir(mrb) if not name.startswith("_")]
    assert public == sorted(mrb.__all__) and len(public) <= 41


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    heavy = ("torch", "duckdb", "typer", "rich", "pandas", "moe_routing_bench.api", "moe_routing_bench.bench")
    python(f"import sys, moe_routing_bench; assert not {set(heavy)!r} & set(sys.modules)")
    light = (
        "import sys, moe_routing_bench as mrb; mrb.MoE; mrb.include; mrb.moe_forward; "
        f"assert not {set(heavy[1:])!r} & set(sys.modules)"
    )
    python(light)


@pytest.mark.parametrize("first", ["mrb.bench", "import moe_routing_bench.bench.runner"])
def test_a_folder_and_a_function_have_one_name(first: str) -> None:
    """Whichever is used first."""
    python(
        "import inspect, moe_routing_bench as mrb\n"
        f"{first}\n"
        "import moe_routing_bench.bench.runner as runner, moe_routing_bench.train.settings as settings\n"
        "assert callable(mrb.bench) and callable(mrb.train) and mrb.bench.runner is runner\n"
        "assert 'tokens' in inspect.signature(mrb.bench).parameters and 'fastest' in mrb.bench.__doc__\n"
        "from moe_routing_bench.api import bench, train\n"
        "assert inspect.signature(mrb.train) == inspect.signature(train)"
    )


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_name_warns(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"{name} leaves the public names"):
        assert getattr(mrb, name) is not None
    assert name not in dir(mrb)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Mixture'"):
        mrb.Mixture  # noqa: B018


def test_include_takes_kernels_and_routers(tmp_path: Path) -> None:
    for place in ("combine/mine.py", "routers/mine.py"):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_text("raise RuntimeError('loaded too early')\n")
    mrb.include(tmp_path)
    assert "mine" in mrb.all_ops()["combine"].names()
    with pytest.raises(ValueError, match="loaded too early"):
        mrb.all_routers()
