"""Every command and every piece of Python in README and docs is run here, or has a reason why it is not.

A command is run now, unless NIGHTLY or NOT_RUN has a pattern for it with the reason. Those are still read:
their options must exist. Commands run in a folder that has the files they name.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import mrb
from documents import Command, Python, commands, file_named, pythons
from engine_routes import routes, saved, sglang, text, vllm
from many_runs import WITH_SOURCE
from moe_routing_bench.cli import command_of, today
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.paths import default_results
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.workloads.trace import write_trace
from repository import ROOT
from sample_runs import make_run
from timing import in_time

MINUTES = "minutes of timing"
MACHINE = this_machine()
HERE = {**WITH_SOURCE, "machine": {**asdict(MACHINE), **WITH_SOURCE["machine"], "name": MACHINE.name}}
NOT_RUN = {
    r"(MRB_PREBUILD=1 )?pip |python -m venv|\. |make ": "installs, or runs this test suite",
    r"(MRB_VLLM=1 )?vllm |LOCAL_KERNELS": "needs vLLM or kernels; measurements/models has the transcripts",
    r".*(TRITON_INTERPRET|_ON_CPU=1)|mrb gpu |bash measurements/gpu": "needs Triton or CuTe: steps of CI",
    r"pytest ": "a step of .ci/run",
    r".*--device cuda|mrb sweep gpu-hour --out gpu$": "needs a GPU",
    r"python measurements/sweeps.py run": "an hour; the records are in measurements/records",
    r"python (measurements/(figures|which_router)|docs/study/build)": "test_figures.py and its like compare",
    r"python examples/|torchrun ": "test_examples.py, test_faster_example.py and test_restart.py do",
    r"mrb sweep (?!.*--dry-run)": "minutes to hours; the records are in measurements/records",
    r"mrb train study": "half an hour and more; the runs are in measurements/training",
    r".*kt_kernel": "needs kt-kernel; measurements/cpu/kt.txt has the transcript",
    r".*--checkpoint|mrb model (trace record|kernels|freeze)": "needs a model; tests/models has small ones",
    r"mrb bundle make": "test_bundle.py does: records that are made up here do not follow from their samples",
    r"mrb results report measurements": "a minute; test_report.py reads the same records",
    r"mrb doctor": "minutes, and it wants the machine for itself",
    r"mrb bench .*(qwen3-30b|olmoe|mixtral|seed-|--full)|mrb (bench block|model profile)": MINUTES,
    r"mrb bench layer (--router|--tokens (512|1024))|mrb bench (expert_ffn|parallel)": MINUTES,
    r"mrb tune (layer|op) ": MINUTES,
    r"mrb check$": "half an hour; a step of .ci/run",
    r"bash measurements/parallel": "minutes of training; what it printed is beside it",
    r"mrb .*(s3|gs|az)://": "needs an object store; test_fleet_s3.py has one",
    r"mrb bundle verify": "needs a bundle; test_bundle.py makes them",
    r"mrb tune (check|import|export)": "needs tuned files; tests/studies/test_tuned.py has small ones",
    r"mrb model formats .*--text": "trains a model; docs/formats.md has what it printed",
}
NIGHTLY = {
    r"mrb (bench|check|train) ": "starts workers or trains: 4 s to a minute each",
    r"mrb sweep .*--dry-run|mrb parallel plan": "3 s each, and tests/parallel, test_sweep.py run their like",
    r"mrb parallel serve": "a search over hundreds of deployments; test_serving.py asks smaller questions",
    r".*--picture|mrb results report routers": "draws for seconds; other tests draw less",
    r"mrb parallel (place|cache) ": "a search over 128 experts: seconds to a minute",
    r"mrb explain .*--arch": "4 s of imports; test_targets.py asks the same",
}
WRITES = ("--out", "-o", "--html", "--picture", "--parquet")


def reason(command: Command, table: dict[str, str]) -> str | None:
    return next((why for pattern, why in table.items() if re.match(pattern, command.text)), None)


def level(command: Command) -> str:
    if a_name_alone(command):
        return "name"
    return "not run" if reason(command, NOT_RUN) else "night" if reason(command, NIGHTLY) else "now"


def a_name_alone(command: Command) -> bool:
    """`mrb check` in a sentence is the name of a command, `<op>`, COMMAND and ... stand for something."""
    named = command.mentioned and len(command.words) <= 3 and not re.search(r" (-|\w+[./]\w+)", command.text)
    runs = command.text in ("mrb list", "mrb list ops", "mrb list routers", "mrb list workloads")
    stands = re.search(r"<|\.\.\.|COMMAND", command.text)
    return bool(stands or (named and not runs and command.text.startswith("mrb ")))


ALL = commands()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # commands that name no folder read what `mrb bench` saved
    make_run(default_results(), {"staged": 1.0, "native": 0.5}, environment=HERE)
    return furnish(tmp_path_factory.mktemp("documents"))


def furnish(folder: Path) -> Path:
    """Puts everything that the commands name into a folder."""
    for name in ("results", "before", "after", "fleet", "part1", "part2", "part3", "part4", "gpu"):
        make_run(folder / name, {"staged": 1.0, "native": 0.5}, seed=len(name), environment=HERE)
    for name in ("routers", "layers"):
        shutil.copytree(ROOT / "measurements" / "training" / name, folder / name)
    _write(folder / "t.safetensors", 128, 8, T=8192)
    _write(folder / "deepseek.safetensors", 256, 8)
    for name, E, K in (("olmoe", 64, 8), ("routing", 64, 8), ("r", 16, 2), ("a", 16, 2), ("rollout", 16, 2)):
        _write(folder / f"{name}.safetensors", E, K)
    for name in ("b", "trainer"):
        _write(folder / f"{name}.safetensors", 16, 2, seed=1)
    words = text(200)
    saved(folder / "vllm.json", vllm(routes(words[:-1], E=64, L=3), words, 20))
    saved(folder / "sglang.json", sglang(routes(words[:-1], E=256, K=8, L=61), words, 20))
    for python in pythons():
        if (path := file_named(python)) and python.document != "README.md":
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_text(python.text)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def _write(path: Path, E: int, K: int, *, T: int = 64, layers: int = 4, seed: int = 0) -> None:
    dice = torch.Generator().manual_seed(seed)
    score_TE = torch.rand(T * layers, E, generator=dice)
    gate_TK, expert_TK = score_TE.softmax(1).topk(K)
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=False)
    layer_T, position_T = torch.arange(layers).repeat_interleave(T), torch.arange(T).repeat(layers)
    document_T = torch.zeros(T * layers, dtype=torch.int64)
    labels = {"layer_T": layer_T, "position_T": position_T, "document_T": document_T}
    write_trace(path, routing, source="a test", score_TE=score_TE, documents=["a.txt"], **labels)


def words_of(command: Command) -> list[str]:
    """Without `mrb`, variables before it, and with `part*` as a shell gives it."""
    words = command.words[command.words.index("mrb") + 1 :]
    return [one for word in words for one in (["part1", "part2"] if word == "part*" else [word])]


OURS = [one for one in ALL if "mrb" in one.words[:3] and words_of(one)[0] != "COMMAND"]


@pytest.mark.parametrize("command", OURS, ids=lambda one: one.text)
def test_a_command_exists_with_its_options(command: Command) -> None:
    """It is read as the command line reads it, and not run."""
    words = words_of(command)
    old, words = today(words)
    assert not old, f"{command.document}: mrb {old} is an old name"
    found, rest = command_of(words)
    assert len(rest) < len(words), f"{command.document}: there is no mrb {words[0]}"
    if level(command) != "name":
        found.make_context("mrb", [*rest])


def _there(command: Command, place: Path, folder: Path) -> list[str]:
    """The words, in a folder that shows what `place` has but for what the command will write."""
    words = words_of(command)
    written = {words[at + 1] for at, word in enumerate(words) if word in WRITES}
    for path in place.iterdir():
        if path.name not in written:
            (folder / path.name).symlink_to(path)
    return words


@pytest.mark.parametrize("command", [one for one in ALL if level(one) == "now"], ids=lambda one: one.text)
def test_a_command_runs(
    command: Command, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mrb(*_there(command, place, tmp_path))


@pytest.mark.nightly
@pytest.mark.timing
@pytest.mark.parametrize("command", [one for one in ALL if level(one) == "night"], ids=lambda one: one.text)
def test_a_slower_command_runs(command: Command, place: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "moe_routing_bench", *_there(command, place, tmp_path)]
    ran = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=380)
    in_time(ran.returncode == 0 or "NO_TIME" not in ran.stdout, ran.stdout[-1000:])
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-2000:]


def test_every_reason_is_needed() -> None:
    """A pattern that no command has is dead."""
    alive = {why for one in ALL for why in (reason(one, NOT_RUN), reason(one, NIGHTLY)) if why}
    assert alive == {*NOT_RUN.values(), *NIGHTLY.values()}


SCRIPTS = [one for one in pythons() if file_named(one) is None]


def _needs_model(python: Python) -> bool:
    return bool(re.search(r"\bmodel\b", python.text))


def _marked(python: Python) -> Any:
    """What measures starts processes."""
    measures = re.search(r"mrb\.(bench|sweep|check|train)\(", python.text)
    name = f"{python.document}:{python.line}"
    return pytest.param(python, marks=pytest.mark.slow if measures else (), id=name)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process of torchrun has; a group that a snippet opened is closed."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("python", [_marked(one) for one in SCRIPTS if not _needs_model(one)])
def test_python_runs(python: Python, place: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    if "init_device_mesh" in python.text:
        pytest.skip("needs eight processes; tests/parallel/test_parallel_moe.py has them")
    if "read_stored" in python.text:
        pytest.skip("needs a published checkpoint; tests/models/test_stored_layers.py writes small ones")
    _execute(python, place, x=torch.randn(16, 256, requires_grad=True))


@pytest.mark.nightly  # Transformers takes four seconds to import
@pytest.mark.parametrize(
    "python", [one for one in SCRIPTS if _needs_model(one)], ids=lambda one: f"{one.document}:{one.line}"
)
def test_python_runs_on_a_model(python: Python, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    if "plugin.replay" in python.text:
        pytest.skip("needs a trace of that very model; tests/models/test_replay.py has one")
    tiny = importlib.import_module("tiny_models")
    monkeypatch.chdir(place)
    model = tiny.make(next(iter(tiny.MODELS)))
    model.save_pretrained(place / "model")
    if "plugin.load" in python.text:
        write_model = importlib.import_module("quantised_models").write_model
        write_model(place / "gpt-oss-20b", "gpt_oss", "mxfp4")
        write_model(place / "Qwen3-30B-A3B-FP8", "qwen3_moe", "fp8")
    ids = tiny.tokens()
    given: dict[str, Any] = {"model": model, "path": str(place / "model"), "ids": ids}
    given["token_ids"] = ids.flatten().repeat(200)
    _execute(python, place, **given)


def _execute(python: Python, place: Path, **given: Any) -> None:
    script = place / "snippet.py"
    script.write_text(python.text)
    runpy.run_path(str(script), init_globals=given)
