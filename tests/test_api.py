"""The Python API: what its names mean, and that a call leaves the process as it was."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_routing_bench as mrb
from command_line import mrb as command
from many_runs import WITH_SOURCE
from moe_routing_bench.api import bench_experiments, options_of
from moe_routing_bench.routers.router import without_included
from repository import ROOT
from sample_runs import make_run

SHAPES: dict[str, Any] = {"width": 32, "hidden": 16, "experts": 4, "top_k": 2, "dtype": "float32"}
QUICK: dict[str, Any] = {"threads": 1, "rounds": 8, "seconds": 60, "checked": 1}
slow = pytest.mark.slow


# axes


def test_a_list_means_each() -> None:
    (options,) = options_of(["a", "b(x=1,y=2)"], {"tokens": [1, 16], "workload": ["uniform", "zipf(1.2)"]})
    sizes, what, _ = options
    assert sizes.lists() == {"T": [1, 16]} and what.impl == ["a", "b(x=1,y=2)"]
    assert what.workload == ["uniform,zipf(1.2)"]
    both = options_of("staged", {"dtype": [torch.float32, "bfloat16"], "threads": [1, 2]})
    assert [(sizes.axes["dtype"], measure.threads) for sizes, _, measure in both] == [
        ("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2),
    ]  # fmt: skip


def test_cells_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(cells: Any, *args: Any, **more: Any) -> list[Any]:
        asked.extend(cells)
        return []

    monkeypatch.setattr("moe_routing_bench.cli.bench.measured", measured)
    words = "--tokens 8,16 --width 32 --hidden 16 --experts 4 --topk 2 --dtype float32 --threads 1 --stages"
    command("bench", "layer", *words.split(), "--impl", "staged,eager_loop", "--layout", "compact,block(16)")
    axes = {**SHAPES, "tokens": [8, 16], "threads": 1, "stages": True, "layout": ["compact", "block(16)"]}
    (options,) = options_of(["staged", "eager_loop"], axes)
    assert bench_experiments("layer", *options) == asked and len(asked) == 2


@pytest.mark.parametrize("call", [mrb.bench, lambda *a, **k: mrb.sweep("topk", "x", *a, **k)])
def test_a_wrong_name_lists_the_right_ones(call: Any) -> None:
    with pytest.raises(TypeError, match=r"no axis 'token'; did you mean 'tokens'\? there are .*top_k.*seed"):
        call(token=16)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: mrb.bench("combin"), "there is no span 'combin'"),
        (lambda: mrb.bench("combine", "gather"), "has no implementation 'gather'"),
        (lambda: mrb.bench("combine", tokens="many"), "cannot read T = 'many'"),
        (lambda: mrb.bench("combine", out="x", save=False), "leave out one of them"),
        (lambda: mrb.sweep("seed-nothing", "x"), "there is no case 'seed-nothing'"),
        (lambda: mrb.check("combin"), "did you mean 'combine'"),
        (lambda: mrb.check("combine", "gather_som"), "did you mean 'gather_sum'"),
        (lambda: mrb.check("combine", dtype="float8"), "there is no dtype 'float8'"),
        (lambda: mrb.check("combine", device="abacus"), "cannot run on 'abacus'"),
        (lambda: mrb.check("combine", tokens="few"), "cannot read tokens 'few'"),
        (lambda: mrb.open("/no/such/folder"), "there is no /no/such/folder"),
        (lambda: mrb.train("swich"), "there is no router 'swich'"),
    ],
)
def test_a_mistake_is_a_value_error(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_cells_say_all() -> None:
    (options,) = options_of("sort", {**SHAPES, **QUICK, "tokens": 4})
    cells = bench_experiments("topk", *options)
    with pytest.raises(TypeError, match="leave out implementations and axes"):
        mrb.bench(cells, tokens=8)
    with pytest.raises(TypeError, match="'bach'; did you mean 'batch'"):
        mrb.train(bach=3)


# results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(
        tmp_path / "results", {"staged": 1.0, "native": 0.5, "eager_loop": "OOM"}, environment=WITH_SOURCE
    )
    return tmp_path / "results"


def test_results_of_a_folder(folder: Path, tmp_path: Path) -> None:
    results = mrb.open(folder)
    assert len(results) == 4 and [one.implementation.role for one in results].count("twin") == 1
    table = results.query("SELECT impl, ratio FROM records WHERE role = 'candidate' AND ratio < 1")
    assert table.columns == ["impl", "ratio"] and [one["impl"] for one in table] == ["native"]
    assert [one["best"] for one in results.winners()] == ["native"]
    assert str(results).split() == command("results", "--folder", folder).stdout.split()
    assert "native" in results._repr_html_() and results._repr_html_().startswith("<pre>")
    assert results.export(tmp_path / "all.csv") == results.export(tmp_path / "all.parquet") == 4
    with pytest.raises(ValueError, match="should end in"):
        results.export(tmp_path / "all.xlsx")
    with pytest.raises(ValueError, match="SELECT"):
        results.query("DROP TABLE records")
    page = results.report(tmp_path / "report.html")
    assert page.stat().st_size > 10_000 and str(folder) in page.read_text()


def test_where_is_a_results_folder_of_its_own(folder: Path) -> None:
    results = mrb.open(folder)
    part = results.where(impl=["native", "staged"], status="PASSED", role=["baseline", "candidate"])
    assert len(part) == 2 and {one.implementation.label for one in part} == {"native", "staged"}
    assert len(part.where(impl="native")) == 1 and len(results.where(ratio=None)) == 2
    assert len(results.where(impl="nobody")) == 0
    with pytest.raises(ValueError, match="'rato'; did you mean 'ratio'"):
        results.where(rato=1)
    temporary = part.folder
    assert temporary.is_dir() and temporary != folder
    del part
    assert not temporary.exists() and folder.is_dir()


def test_two_results_are_compared(folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "after", {"staged": 1.0, "native": 0.8}, seed=1, environment=WITH_SOURCE)
    changes = mrb.open(folder).compare(tmp_path / "after")
    assert [one.verdict for one in changes.changes if one.implementation == "native"] == ["SLOWER"]
    text = command("results", "compare", folder, tmp_path / "after").stdout
    assert str(changes).split() == text.split()
    past = mrb.open(folder).history()
    assert "Series: 1" in str(past) and past.metric == "ratio"


def test_packed_records_and_bundles_are_opened() -> None:
    results = mrb.open(ROOT / "measurements" / "records" / "routing.tar.xz")
    folder = results.folder
    assert len(results) > 0 and folder.is_dir()
    del results
    assert not folder.exists()
    with pytest.raises(ValueError, match="results folders; open one"):
        mrb.open(ROOT / "measurements" / "records")


def test_data_frames_need_pandas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = mrb.open(folder).query("SELECT impl, T FROM records")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotImplementedError, match="pip install pandas"):
        table.to_pandas()
    stub = ModuleType("pandas")
    stub.DataFrame = lambda rows, columns: (rows, columns)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stub)
    assert table.to_pandas() == (table.rows, ["impl", "T"])
    assert len(mrb.open(folder).to_pandas()[0]) == 4


# what starts processes


# torch and CuTe DSL want these when they are first imported
SET_BY_COMPILERS = ("TORCHINDUCTOR_CACHE_DIR", "CUTE_DSL_ARCH")


def state() -> dict[str, Any]:
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random": torch.get_rng_state().tolist(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "affinity": os.sched_getaffinity(0),
        "environment": {name: value for name, value in os.environ.items() if name not in SET_BY_COMPILERS},
        "folder": Path.cwd(),
        "main": sys.modules["__main__"],
        "streams": (sys.stdout, sys.stderr),
        "grad": torch.is_grad_enabled(),
    }


@slow
def test_bench_and_what_comes_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = state()
    results = mrb.bench(
        "topk",
        ["torch_topk", "sort"],
        tokens=[4, 8],
        **SHAPES,
        **QUICK,
        out=tmp_path / "first",
        progress=False,
    )
    assert capfd.readouterr() == ("", "")
    assert len(results.experiments) == 2 and len(results) == 6 and len(results.winners()) == 2
    assert "torch_topk" in str(results) and "2 cells" in str(results) and "verdict" in results._repr_html_()
    again = mrb.bench(results.experiments[:1], seconds=60, out=tmp_path / "first", progress=False)
    assert (
        len(again) == 3 and len(mrb.open(tmp_path / "first")) == 9
    )  # its own records, not all of the folder
    assert again.experiments == results.experiments[:1]
    assert set(mrb.open(tmp_path / "first").experiments) == set(results.experiments)
    one = next(record for record in results if record.implementation.role == "candidate")
    assert len(mrb.bench(one.experiment, seconds=60, save=False, progress=False)) == 3
    assert len(results.compare(again).changes) == 2
    assert state() == before


@slow
def test_what_is_not_saved_lives_as_long_as_the_results(tmp_path: Path) -> None:
    results = mrb.bench("topk", "sort", tokens=4, **SHAPES, **QUICK, save=False, progress=False)
    folder = results.folder
    assert len(results) == 2 and folder.is_dir()
    del results
    assert not folder.exists()


@slow
def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    before = state()
    words: dict[str, Any] = {**SHAPES, **QUICK, "progress": False}
    assert len(mrb.sweep("topk", tmp_path, "sort", tokens=4, **words)) == 2
    results = mrb.sweep("topk", tmp_path, "sort", tokens=[4, 8], **words)
    assert len(results) == 4 and results.query("SELECT count(DISTINCT session) FROM records").rows == [(2,)]
    assert "Best of each case" in str(results) and state() == before


@slow
def test_check_keeps_code_from_outside_apart(tmp_path: Path) -> None:
    before = state()
    kernels = {
        "wrong": "return y_RD.new_zeros(plan.num_tokens, y_RD.shape[1])",
        "dies": "import os; os._exit(3)",
    }
    for name, body in kernels.items():
        path = tmp_path / "combine" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'"""Bad."""\n\n\ndef unsupported(y_RD, gate_TK, plan):\n    return None\n\n\n'
            f"def run(y_RD, gate_TK, plan):\n    {body}\n"
        )
    mrb.include(tmp_path)
    report = mrb.check("combine", "[wdg]*", dtype="float32", progress=False)
    verdicts = {row.spec: row.verdict for row in report.rows}
    assert verdicts["wrong"] == verdicts["dies"] == "failed" and verdicts["gather_sum"] == "passed"
    assert not report.passed and any("combine.wrong" in sentence for sentence in report.failures)
    assert any("code 3" in sentence for sentence in report.failures)
    assert "combine" in str(report) and "failed" in report._repr_html_()
    assert "wrong" in mrb.all_ops()["combine"].names()  # still included
    words = ["--op", "combine", "--impl", "[wdg]*", "--dtype", "float32", "--include-path", tmp_path]
    with without_included():  # a command begins without what this process included
        said = command("check", *words, code=1).stdout
    assert str(report).split() == said.split()
    right = mrb.check("combine", "gather_sum", dtype="float32", tokens="1-4")
    assert (
        right.passed and right.maps[0].status == dict.fromkeys(range(1, 5), "passed") and "...." in str(right)
    )
    assert state() == before


@slow
def test_train_keeps_runs_and_models(tmp_path: Path) -> None:
    before = state()
    sizes = {"layers": 1, "D": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "F": 16, "E": 4, "sequence": 32}
    trained = mrb.train("switch", steps=2, seeds=2, batch=2, pieces=2, evaluations=1, **sizes, out=tmp_path)
    assert [(run.rule, run.seed) for run in trained.runs] == [("switch", 0), ("switch", 1)]
    assert trained.model("switch", seed=1).layers and "held-out" in str(trained)
    assert str(trained).split() == command("train", "show", tmp_path).stdout.split()
    assert state() == before


@slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "import moe_routing_bench as mrb\n"
        f"shapes = {SHAPES!r}\n"
        f"results = mrb.bench('topk', 'sort', tokens=4, **shapes, **{QUICK!r}, save=False)\n"
        "print(len(results), mrb.check('topk', 'sort', dtype='float32').passed)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert ran.returncode == 0 and ran.stdout == "once\n2 True\n" and not ran.stderr, ran.stderr[-2000:]


@slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in one namespace, as a kernel runs them; what a cell ends with can be shown as HTML."""
    notebook = json.loads((ROOT / "examples" / "two_kernels.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "commit it without outputs"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        last = "".join(cell["source"]).rstrip().splitlines()[-1]
        exec("".join(cell["source"]), names)
        if last.isidentifier():
            shown.append(names[last]._repr_html_())
    assert names["checked"].passed and len(names["results"].winners()) == 2
    assert len(shown) == 2 and all("mine" in text for text in shown)
    assert (tmp_path / "kernels.csv").stat().st_size > 1000
