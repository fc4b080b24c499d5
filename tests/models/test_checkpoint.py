"""MoE layers out of checkpoints: what Transformers saved, and what an enemy did."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.models.checkpoint import read_layer
from moe_routing_bench.moe.layer import Experts
from moe_routing_bench.ops.expert_ffn.op import expert_ffn
from moe_routing_bench.ops.make_plan.op import make_plan

pytest.importorskip("transformers")

import tiny_models

pytestmark = pytest.mark.slow

D, F, E = 32, 24, 8
MODELS = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3")


def saved(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    shared = {"n_shared_experts": 2} if name == "deepseek_v3" else {}
    model = tiny_models.make(name, **shared).to(dtype)
    model.save_pretrained(folder, **{"max_shard_size": "8KB", **how})
    return model


def moe_of(model: Any) -> Any:
    layer = model.model.layers[1]
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "1GB"}, {"save_original_format": False}], ids=str)
def test_a_layer_read_computes_what_the_model_does(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    model = saved(name, tmp_path, **how)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("max_shard_size" not in how)
    layer = read_layer(tmp_path, 1)
    assert (layer.model_type, layer.weights.num_experts, layer.weights.D, layer.weights.F) == (name, E, D, F)
    x_TD = torch.randn(50, D)
    routing = layer.route(x_TD)
    y_TD = expert_ffn(x_TD, routing.gate_TK, make_plan(routing, Layout.compact()), layer.weights)
    if layer.shared is not None:
        y_TD = y_TD + shared(layer.shared, x_TD)
    with torch.no_grad():
        out = moe_of(model)(x_TD.unsqueeze(0))
    expected = (out[0] if isinstance(out, tuple) else out).view(50, D)
    assert torch.allclose(y_TD, expected, atol=1e-5, rtol=1e-4)
    assert name != "deepseek_v3" or layer.shared is not None


def shared(weights: ExpertWeights, x_TD: torch.Tensor) -> torch.Tensor:
    one = Experts(weights.D, weights.F, 1)
    one.load_weights(weights)
    return one.on_every_token(x_TD).detach()


def test_types_are_kept_and_only_the_layers_own_tensors_are_read(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {shard for name, shard in index.items() if "layers.1.mlp." in name}
    others = set(index.values()) - needed
    assert others, "the test needs shards that hold nothing of the layer"
    for shard in others:
        (tmp_path / shard).unlink()
    assert read_layer(tmp_path, 1).weights.w_in_EDG.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved("mixtral", made := tmp_path_factory.mktemp("mixtral"))
    return made


@pytest.fixture
def folder(mixtral: Path, tmp_path: Path) -> Path:
    shutil.copytree(mixtral, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, layer: int = 1, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        read_layer(folder, layer)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": 33}, "shape .*config.json"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_local_experts": 2**20}, "shape .*config.json"),
        ({"num_local_experts": E + 1}, "config.json calls for"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"num_experts_per_tok": E + 1}, "choices per token"),
        ({"num_hidden_layers": 1}, "0 to 0, not 1"),
        ({"norm_topk_prob": "yes"}, "true or false"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    change_json(folder / "config.json", **changes)
    assert re.search(sentence, refused(folder))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "bert"}, "model_type bert"),
        ({"model_type": ["mixtral"]}, "model_type"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"hidden_act": "quick_gelu"}, "hidden_act quick_gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
    ],
    ids=str,
)
def test_what_is_not_read_here_says_why(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    change_json(folder / "config.json", **changes)
    assert sentence in refused(folder, error=NotImplementedError)


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin", 7, None, ["m.safetensors"],
     "\ud800.safetensors", "a\0b.safetensors", "n" * 5000 + ".safetensors"],
)  # fmt: skip
def test_an_index_may_not_leave_the_folder(folder: Path, shard: Any) -> None:
    index = folder / "model.safetensors.index.json"
    shard_of = json.loads(index.read_text())["weight_map"]
    shard_of["model.layers.1.block_sparse_moe.gate.weight"] = shard
    change_json(index, weight_map=shard_of)
    assert ".safetensors" in refused(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[]", "not a JSON object"), ("{", "not JSON"), ("[" * 200_000, "not JSON"), ("{}", "no weight_map"),
     ('{"weight_map": []}', "no weight_map"), ('{"weight_map": {}}', "no tensor")],
)  # fmt: skip
def test_a_broken_index_is_refused(folder: Path, text: str, sentence: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert sentence in refused(folder)


def test_missing_and_broken_files_are_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / index["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    whole = shard.read_bytes()
    far = struct.pack("<Q", 2**62) + whole[8:]
    for broken in (b"", b"\0" * 8, whole[: len(whole) // 2], far, b"junk" * 99):
        shard.write_bytes(broken)
        assert "safetensors file" in refused(folder)
    shard.unlink()
    assert "is missing" in refused(folder)
    assert "0 to 1, not 12" in refused(folder, 12)
    empty = tmp_path_factory.mktemp("empty")
    assert "config.json" in refused(empty)
    assert "not a folder" in refused(empty / "nowhere")
    (empty / "config.json").write_bytes((folder / "config.json").read_bytes())
    (empty / "pytorch_model.bin").write_bytes(b"pickle")
    assert "unpickled" in refused(empty)


def test_odd_tensors_are_refused(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    shard = folder / index[name]
    good = load_file(shard)
    save_file({**good, name: good[name].half()}, shard)
    assert "mixed types: F16, F32" in refused(folder)
    save_file({**good, name: good[name].double()}, shard)
    assert "stored as F64" in refused(folder, error=NotImplementedError)
    save_file({**good, name: good[name].T.contiguous()}, shard)
    assert "shape [24, 32]" in refused(folder)
    save_file({key: value for key, value in good.items() if key != name}, shard)
    assert f"no tensor {name}" in refused(folder)


def test_four_bit_blocks_and_dense_layers_say_so(tmp_path: Path) -> None:
    (tmp_path / "oss").mkdir()
    saved("gpt_oss", tmp_path / "oss", max_shard_size="1GB")
    path = tmp_path / "oss" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"] = torch.zeros(1, dtype=torch.uint8)
    save_file(tensors, path)
    assert "MXFP4" in refused(tmp_path / "oss", error=NotImplementedError)
    (tmp_path / "deep").mkdir()
    saved("deepseek_v3", tmp_path / "deep")
    sentence = refused(tmp_path / "deep", 0)
    assert "layer 0 of" in sentence and "some is 1" in sentence
    change_json(tmp_path / "deep" / "config.json", n_group=3)
    assert "groups" in refused(tmp_path / "deep")
