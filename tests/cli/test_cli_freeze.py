"""mrb model freeze: bytes and error of each layer, the files it keeps, and a sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command_line import mrb, mrb_json, refused

pytest.importorskip("transformers")

import tiny_models
from moe_routing_bench.models import transformers as plugin
from tiny_layers import needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_models.make("qwen3_moe").save_pretrained(folder)
    return folder


def test_bytes_errors_and_files(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = mrb_json("model", "freeze", checkpoint, "int8_g32", "--out", tmp_path / "packed")
    model = tiny_models.make("qwen3_moe").from_pretrained(checkpoint)
    plain = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert told["all"]["before"] == plain > told["all"]["after"]
    assert len(told["layers"]) == 2
    assert told["all"]["error"] == max(one["error"] for one in told["layers"].values()) > 0
    capsys.readouterr()
    plugin.freeze(model, "int8_g32", keep_packed=tmp_path / "packed")
    assert "0 GB written" in capsys.readouterr().err
    shown = mrb("model", "freeze", checkpoint).stdout
    assert "no weight was rounded" in shown and "layers.1" in shown


def test_mistakes(checkpoint: Path, tmp_path: Path) -> None:
    assert "int9" in refused("model", "freeze", checkpoint, "int9")
    assert "config.json" in refused("model", "freeze", tmp_path)
