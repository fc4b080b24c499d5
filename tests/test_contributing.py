"""Follows CONTRIBUTING.md in a copy of the package: a new transport, and a new format for expert weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repository import SOURCE

pytestmark = pytest.mark.slow

# sends the columns of all rows in two exchanges
TRANSPORT = {
    "ep_dispatch": '''"""The left half of every row, then the right half."""

import torch

from moe_routing_bench.ops.hops import Hop


def run(x_TD, plan, traffic):
    hop = Hop(plan=plan, way=traffic.way)
    return torch.cat([hop.there(half) for half in x_TD.chunk(2, dim=1)], dim=1)
''',
    "ep_combine": '''"""The left half of every row back, then the right half."""

import torch

from moe_routing_bench.ops.hops import Hop


def run(y_QD, gate_TK, plan, traffic):
    hop = Hop(plan=plan, way=traffic.way)
    return torch.cat([hop.back(half, gate_TK, "gather_sum") for half in y_QD.chunk(2, dim=1)], dim=1)
''',
}
FORMAT = '''"""int8_twos: int8 codes, and a power of two as the scale of a column."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import Coding, Decoded, groups_of, positive

CODING = Coding(code="int8")


@dataclass(frozen=True, kw_only=True)
class Twos:
    code_ENK: Tensor
    scale_EN1: Tensor
    name = "int8_twos"

    @property
    def size(self):
        E, N, K = self.code_ENK.shape
        return E, K, N

    def decoded(self):
        return Decoded(coding=CODING, code_ENK=self.code_ENK, scale_ENg=self.scale_EN1.double())


def quantise(w_EKN):
    w_EN1K = torch.cat(list(groups_of(w_EKN, w_EKN.shape[1])))
    scale_EN1 = positive(w_EN1K.abs().amax(dim=-1) / 127).log2().ceil().exp2()
    code_EN1K = w_EN1K.div(scale_EN1.unsqueeze(-1)).round_()
    return Twos(code_ENK=code_EN1K.squeeze(2).to(torch.int8), scale_EN1=scale_EN1)
'''
# formats/named.py: text -> what stands there instead
NAMED = {
    "import fp8_block, ": "import fp8_block, int8_twos, ",
    'NAMES = (\n    "int8", ': 'NAMES = (\n    "int8", "int8_twos", ',
    '    "mxfp4": (': '    "int8_twos": (int8_twos.CODING, int8_twos.quantise),\n    "mxfp4": (',
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "src" / SOURCE.name
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def mrb(package: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "COLUMNS": "200"}
    command = [sys.executable, "-m", SOURCE.name, *words]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


def test_a_transport_is_a_file_in_each_of_two_folders(package: Path) -> None:
    for op, text in TRANSPORT.items():
        (package / "ops" / op / "halves.py").write_text(text)
    mrb(package, "check", "--op", "ep_*", "--impl", "halves", "--dtype", "float32")
    assert mrb(package, "list", "ops").count("The left half of every row") == 2


def test_a_format_is_a_file_and_its_name(package: Path) -> None:
    (package / "formats" / "int8_twos.py").write_text(FORMAT)
    named = package / "formats" / "named.py"
    text = named.read_text()
    for old, new in NAMED.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    named.write_text(text)
    losses = json.loads(
        mrb(package, "model", "formats", "--width", "64", "--hidden", "64", "--tokens", "8", "--json")
    )
    rows = {row["name"]: row for row in losses["layer"]}
    assert rows["int8"]["weights"] < rows["int8_twos"]["weights"] < rows["int4_g32"]["weights"]
    assert rows["int8_twos"]["kernel"] < 0.01  # the C++ kernel computes with it, without an edit
