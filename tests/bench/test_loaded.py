"""What a kernel from outside loads is in the resume key, or it gets no time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from command_line import mrb, mrb_json
from moe_routing_bench.bench.loaded import _places, is_under
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KERNEL = '''"""Computes with what lies in another file."""

import ctypes
import importlib.util
import json
import sys
from pathlib import Path

from moe_routing_bench.ops.combine import gather_sum

WHERE = Path({where!r})
{load}

def run(y_RD, gate_TK, plan):
    return gather_sum.run(y_RD, gate_TK, plan) * factor
'''
LOADS = {
    "import": "sys.path.insert(0, str(WHERE))\nfrom parts_of_mine import factor",
    # WHERE is a package with a module that imports its neighbour
    "relative import": "sys.path.insert(0, str(WHERE.parent))\n"
    "factor = importlib.import_module(f'{WHERE.name}.user').factor",
    "spec_from_file_location": "from importlib.util import module_from_spec, spec_from_file_location\n"
    "spec = spec_from_file_location('mine', WHERE / 'parts_of_mine.py')\n"
    "mine = module_from_spec(spec)\nspec.loader.exec_module(mine)\nfactor = mine.factor",
    "text": "exec((WHERE / 'parts.txt').read_text())",
    "json": "factor = json.loads((WHERE / 'parts.json').read_text())['factor']",
    "library": "ctypes.CDLL(str(WHERE / 'libparts.so'))\nfactor = 1.0",
}
# and a worker that says it loaded nothing: the system knows better
LOADS["library, denied"] = (
    LOADS["library"] + "\nfrom moe_routing_bench.bench import loaded\n"
    "loaded.LoadedFiles.found = lambda self: []"
)


def helpers(folder: Path, factor: float = 1.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts_of_mine.py").write_text(f"factor = {factor}\n")
    (folder / "__init__.py").touch()
    (folder / "user.py").write_text("from .parts_of_mine import factor\n")
    (folder / "parts.txt").write_text(f"factor = {factor}\n")
    (folder / "parts.json").write_text(json.dumps({"factor": factor}))
    library = next(
        path for line in Path("/proc/self/maps").read_text().splitlines()
        if (path := line.partition("/")[2]) and "libm.so" in path
    )  # fmt: skip
    shutil.copyfile(f"/{library}", folder / "libparts.so")


def status_of(folder: Path) -> tuple[Status, str]:
    experiment = Experiment(
        case="own/x",
        span="combine",
        T=8,
        D=16,
        F=16,
        E=4,
        K=2,
        dtype="float32",
        workload="uniform",
        implementations=(ImplementationRef(name="gather_sum"), ImplementationRef(name="mine")),
        min_rounds=8,
        max_rounds=8,
        checked=1,
        max_seconds=300,
        include=(str(folder),),
    )
    mine = run_cell(experiment).implementations[1]
    return mine.status, mine.reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernels" / "combine").mkdir(parents=True)
    return tmp_path / "kernels"


def write(folder: Path, load: str, where: Path) -> None:
    (folder / "combine" / "mine.py").write_text(KERNEL.format(where=str(where), load=load))


def test_what_lies_in_the_folder_may_be_loaded(folder: Path) -> None:
    helpers(folder / "lib")
    write(folder, "\n".join(LOADS.values()), folder / "lib")
    assert status_of(folder) == (Status.PASSED, "")


@pytest.mark.parametrize("how", LOADS)
def test_what_lies_elsewhere_is_named_and_gets_no_time(folder: Path, tmp_path: Path, how: str) -> None:
    helpers(tmp_path / "elsewhere")
    write(folder, LOADS[how], tmp_path / "elsewhere")
    status, reason = status_of(folder)
    assert status is Status.SUSPECT and str(tmp_path / "elsewhere") in reason


@pytest.mark.parametrize("name", ["mine/table.json", ".local/share/mine.json", ".config/mine.json"])
def test_a_users_own_files_are_no_cache(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert not is_under(f"/home/somebody/{name}", _places())
    assert is_under("/home/somebody/.cache/torch/x.so", _places())


def test_a_changed_helper_is_measured_again(folder: Path, tmp_path: Path) -> None:
    """It was reported as measured already, though it returned zeros."""
    helpers(folder / "lib")
    write(folder, LOADS["text"], folder / "lib")
    words = [
        "sweep", "combine", "--tokens", "8", "--width", "16", "--experts", "4", "--topk", "2", "--dtype",
        "float32", "--impl", "gather_sum,mine", "--include-path", folder, "--out", tmp_path / "out",
        "--threads", "1", "--rounds", "8", "--checked", "1", "--seconds", "200",
    ]  # fmt: skip
    mrb(*words)
    assert mrb_json(*words, "--dry-run")["to_do"] == 0
    helpers(folder / "lib", factor=0.0)
    assert mrb_json(*words, "--dry-run")["to_do"] == 1
    mrb(*words, code=1)  # also the kit's memory knows better
