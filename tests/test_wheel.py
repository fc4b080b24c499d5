"""Libraries in a wheel: hatch_build.py makes them, core/cpp.py finds them.

.ci/without_compiler tries a whole wheel."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from child_process import python
from moe_routing_bench.bench import sources
from moe_routing_bench.core import cpp
from repository import ROOT
from tiny_layers import needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler]

TEXT = """#include <omp.h>
extern "C" int answer() { int n = 0;
#pragma omp parallel reduction(+ : n)
n += 42 / omp_get_num_threads();
return n; }
"""
COUNT = """
import sys; from pathlib import Path; from moe_routing_bench.core import cpp
cpp.PREBUILT, cpp._build = Path(sys.argv[1]), None
assert cpp.load(Path(sys.argv[2]), cpp.best_level()).answer() == 42
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
print(*(len([path for path in mapped if part in path]) for part in ("/libgomp", sys.argv[1])))
"""


@pytest.fixture
def hook() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


@pytest.fixture
def source(hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A C++ file and, in PREBUILT, its library for this processor; there is no compiler after that."""
    source = tmp_path / "an_op" / "native.cpp"
    source.parent.mkdir()
    source.write_text(TEXT)
    (tmp_path / "prebuilt").mkdir()
    hook.build(source, cpp.best_level(), tmp_path / "prebuilt", os.environ.get("CXX", "g++"))
    monkeypatch.setattr(cpp, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    forget()
    yield source
    monkeypatch.undo()
    forget()


def forget() -> None:
    for question in (cpp.missing_tool, cpp._in_wheel, cpp._load, cpp._why_not_loaded):
        question.cache_clear()


@pytest.mark.parametrize("wanted", ["", "0"])
def test_nothing_is_built_unless_asked_for(hook: Any, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRB_PREBUILD", wanted)
    hook.CustomBuildHook(ROOT, {}, None, None, "", "wheel").initialize("standard", made := {})
    assert made == {}


@pytest.mark.parametrize(
    ("wanted", "compiler", "words"),
    [("sse", "g++", "not sse"), ("1", "no-such-compiler", "CXX"), ("1", "false", "ended with 1")],
)
def test_what_cannot_be_built_is_a_sentence(
    hook: Any, wanted: str, compiler: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRB_PREBUILD", wanted)
    monkeypatch.setenv("CXX", compiler)
    build = hook.CustomBuildHook(ROOT, {}, None, None, "", "wheel")
    with pytest.raises(SystemExit, match=words):
        build.initialize("standard", {})
    if wanted == "1":
        build.scratch.cleanup()


def test_no_compiler_is_needed(source: Path) -> None:
    assert cpp.compiler() is None and cpp.why_not() is None and cpp.compiled(source)
    assert cpp.load(source)["answer"]() == 42
    assert not list(source.parents[1].glob("compiled/*/*"))


def test_a_result_names_the_compiler_of_the_wheel(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PREBUILT", cpp.PREBUILT)
    (cpp.PREBUILT / "compiler.txt").write_text("g++ 1.2.3")
    assert sources.compiler_version.__wrapped__() == "g++ 1.2.3"


def test_there_is_one_libgomp(source: Path) -> None:
    assert python(COUNT, cpp.PREBUILT, source).stdout.split() == ["1", "1"]


def test_a_changed_file_is_compiled_and_needs_a_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text(TEXT.replace("42", "43"))
    with pytest.raises(NotImplementedError, match="compiler"):
        cpp.load(source)
    monkeypatch.delenv("CXX")
    forget()
    assert cpp.load(source)["answer"]() == 43


def test_a_library_that_cannot_be_loaded_is_a_reason(source: Path) -> None:
    (library,) = cpp.PREBUILT.iterdir()
    library.write_bytes(b"of another system")
    with pytest.raises(NotImplementedError, match="cannot be loaded"):
        cpp.load(source)


def test_without_libraries_for_this_processor_a_compiler_is_needed(source: Path) -> None:
    (library,) = cpp.PREBUILT.iterdir()
    library.rename(library.with_name(library.name.replace(str(cpp.best_level()), "other")))
    assert "compiler" in str(cpp.why_not())
