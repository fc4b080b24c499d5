"""mrb model kernels: the folder is complete, its digests are right, it runs without our package."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import mrb, refused
from moe_routing_bench.models.hub_folder import VARIANTS, export_folder

CALL = """
import importlib.util, json, sys, types
sys.modules["moe_routing_bench"] = None  # an import of it raises
if {kernels!r}:
    sys.modules["kernels"] = types.SimpleNamespace(__version__={kernels!r})
def load(file, name):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
folder = {folder!r}
kernel = load(folder + "/__init__.py", json.load(open(folder + "/metadata.json"))["id"])
import torch
torch.manual_seed(0)
x, ids, gates = torch.randn(7, 24), torch.rand(7, 5).argsort(1)[:, :2], torch.rand(7, 2)
w_in, w_out = torch.randn(5, 32, 24) / 5, torch.randn(5, 24, 16) / 4
y = kernel.moe_experts(x, ids, gates, w_in, w_out, impl="staged")
right = torch.zeros_like(x)
for t in range(7):
    for e, g in zip(ids[t], gates[t]):
        gate, up = (w_in[e] @ x[t]).chunk(2)
        right[t] += g * (w_out[e] @ (torch.nn.functional.silu(gate) * up))
torch.testing.assert_close(y, right)
older = load(folder + "/moe_routing_bench/__init__.py", "older")
assert older.__all__ == kernel.__all__ and "transformers" not in sys.modules
print("right")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hub") / "new"
    export_folder(target)
    return target


def called(folder: Path, kernels: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # other tests look at all files of the folder
    code = CALL.format(folder=str(folder), kernels=kernels)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_it_computes_without_our_package(exported: Path) -> None:
    ran = called(exported / "build" / "torch-cpu", "0.17.9")
    assert ran.stdout == "right\n", ran.stderr


def test_another_version_of_kernels_is_refused(exported: Path) -> None:
    ran = called(exported / "build" / "torch-cpu", "0.18.0")
    assert "0.18.0" in ran.stderr


# register() imports them
FOR_TRANSFORMERS = ("models/transformers.py", "models/loading.py", "models/attention.py")


@pytest.mark.parametrize("variant", VARIANTS)
def test_digests_and_imports(exported: Path, variant: str) -> None:
    folder = exported / "build" / variant
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["backend"]["type"] == variant.removeprefix("torch-") and metadata["id"].isidentifier()
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert files.keys() == {*metadata["digest"]["files"], "metadata.json"}
    for name, digest in metadata["digest"]["files"].items():
        assert base64.b64encode(hashlib.sha256(files[name].read_bytes()).digest()).decode() == digest
    assert any("triton_" in name for name in files) == (variant != "torch-cpu")
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for name, path in files.items():
        if path.suffix != ".py" or name in FOR_TRANSFORMERS:
            continue
        for node in ast.parse(path.read_text()).body:
            absolute = node.names[0].name if isinstance(node, ast.Import) else ""
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                absolute = node.module or ""
            assert not absolute or absolute.partition(".")[0] in allowed, f"{name} imports {absolute}"


def test_the_command(tmp_path: Path) -> None:
    target = tmp_path / "hub"
    assert "torch-cpu (" in mrb("model", "kernels", target).stdout.replace("\n", " ")
    assert "empty folder" in refused("model", "kernels", target)
