"""plugin.load refuses in a sentence what it does not read: other families, damaged folders and configs."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import moe_routing_bench.models.transformers as plugin
from damaged_files import assert_one_sentence, hurt
from quantised_models import change, retensor, shard, write_model
from tiny_layers import needs_compiler
from tiny_models import make

pytestmark = [pytest.mark.slow, needs_compiler]


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match="not a folder"):
        plugin.load(folder)
    make("qwen3_moe").save_pretrained(folder)
    with pytest.raises(ValueError, match=r"not quantised; .*plugin\.freeze"):
        plugin.load(folder)
    write_model(folder, "qwen3_moe", "int8")
    good = json.loads((folder / "config.json").read_text())
    refused: dict[str, tuple[type[Exception], dict[str, Any]]] = {
        "this reads qwen3_moe, olmoe, mixtral, deepseek_v3, gpt_oss": (
            NotImplementedError, {"model_type": "llama4"}
        ),
        "quant_method awq; this reads mxfp4": (
            NotImplementedError, {"quantization_config": {"quant_method": "awq"}}
        ),
        "cannot be frozen in torch.float16": (NotImplementedError, {"dtype": "float16"}),
        "no tensors of layer 6": (ValueError, {"num_hidden_layers": 7}),
        "Transformers makes no model of": (ValueError, {"num_attention_heads": "four"}),
    }  # fmt: skip
    for sentence, (kind, config) in refused.items():
        change(folder, **config)
        with pytest.raises(kind, match=re.escape(sentence)):
            plugin.load(folder)
        change(folder, **good)
    with pytest.raises(ValueError, match="int8, not as mxfp4"):
        plugin.load(folder, "native(store=mxfp4)")
    with pytest.raises(NotImplementedError, match=r"not in staged"):
        plugin.load(folder, "staged")
    assert plugin.load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


EXPERT = "model.layers.1.mlp.experts.3"
ATTENTION = "model.layers.1.self_attn.o_proj"
Damage = Callable[[dict[str, Tensor]], None]


def without(name: str) -> Damage:
    return lambda tensors: tensors.__delitem__(name)


def with_(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Damage:
    return lambda tensors: tensors.update({name: torch.ones(shape).to(dtype)})


E4M3 = torch.float8_e4m3fn
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no norm": (without("model.norm.weight"), "no tensor model.norm.weight"),
    "no router": (without("model.layers.0.mlp.gate.weight"), "no tensor model.layers.0.mlp.gate.weight"),
    "no head": (without("lm_head.weight"), "no tensor lm_head.weight"),
    "no embeddings": (without("model.embed_tokens.weight"), "no tensor model.embed_tokens.weight"),
    "no attention": (without(f"{ATTENTION}.weight"), f"no tensor {ATTENTION}.weight"),
    "no scales of attention": (without(f"{ATTENTION}.weight_scale_inv"), f"{ATTENTION}.weight_scale_inv"),
    "no expert": (without(f"{EXPERT}.up_proj.weight"), f"no tensor {EXPERT}.up_proj.weight"),
    "no scales of an expert": (without(f"{EXPERT}.up_proj.weight_scale_inv"), "up_proj.weight_scale_inv"),
    "a short norm": (with_("model.norm.weight", (255,)), "shape [255]; config.json calls for [256]"),
    "a flat norm": (with_("model.norm.weight", (256, 1)), "shape [256, 1]; config.json calls for [256]"),
    "wide attention": (with_(f"{ATTENTION}.weight", (256, 257), E4M3), "shape [256, 257]"),
    "scales of attention": (with_(f"{ATTENTION}.weight_scale_inv", (2, 3)), "shape [2, 3]"),
    "a wide expert": (with_(f"{EXPERT}.down_proj.weight", (256, 129), E4M3), "shape [256, 129]"),
    "an expert too many": (with_(f"{EXPERT}1.up_proj.weight", (128, 256), E4M3), "experts.31"),
    "a layer too many": (with_("model.layers.2.input_layernorm.weight", (256,)), "model.layers.2.input"),
    "a bias": (with_(f"{ATTENTION}.bias", (256,)), f"has {ATTENTION}.bias, which a qwen3_moe"),
    "a scale of activations": (with_(f"{ATTENTION}.input_scale", (1,)), "o_proj.input_scale, which"),
    "many": (lambda tensors: [with_(f"a.{i}", (1,))(tensors) for i in range(9)] and None, "a.3 and 5 more"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    write_model(folder, "qwen3_moe", "fp8")
    return folder


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_refused_in_a_sentence(what: str, whole: Path, tmp_path: Path) -> None:
    damage, sentence = DAMAGES[what]
    folder = copied(whole, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        plugin.load(folder)
    assert_one_sentence(caught.value, folder)
    if what != "no embeddings":  # the index may say other things than the files
        shard(folder)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            plugin.load(folder)


def copied(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_tensor_that_the_index_does_not_name_is_noticed(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    shard(folder)
    tensors = load_file(folder / "model-2.safetensors")
    save_file({**tensors, "model.stowaway": torch.zeros(1)}, folder / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"has model\.stowaway, which"):
        plugin.load(folder)


def test_a_packed_weight_that_says_another_shape_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder, "qwen3_moe", "int4")
    name = f"{EXPERT}.up_proj.weight_shape".replace(".", "__")
    retensor(folder, **{name: torch.tensor([128, 255])})
    with pytest.raises(ValueError, match=r"\[128, 255\].* \[128, 256\]"):
        plugin.load(folder)


VALUES = (None, True, -1, 0, 1, 3, 2**40, 1e300, float("nan"), "", "fp8", [], [1], {}, {"a": 1}, [[]])


def test_a_damaged_config_ends_in_an_error_or_in_a_model(whole: Path, tmp_path: Path) -> None:
    """Whatever stands in config.json: a ValueError in a sentence, a reason, or a model that runs."""
    folder = copied(whole, tmp_path)
    good, draw = json.loads((folder / "config.json").read_text()), random.Random(0)
    ends = []
    for _ in range(120):
        document = copy.deepcopy(good)
        hurt(document, draw, VALUES, ("hidden_size", "_attn_implementation", "dtype"))
        (folder / "config.json").write_text(json.dumps(document))
        try:
            plugin.load(folder)
            ends.append("model")
        except NotImplementedError:
            ends.append("reason")
        except ValueError as error:
            assert_one_sentence(error, folder)
            ends.append("error")
    assert {"model", "reason", "error"} == set(ends)
