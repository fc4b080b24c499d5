"""Tiny Transformers models as folders of quantised checkpoints, and the models that they mean."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moe_routing_bench.formats.fp8_block import FP8Block
from moe_routing_bench.formats.int4 import Int4
from moe_routing_bench.formats.int8 import Int8
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.formats.stored import from_nibbles
from moe_routing_bench.models.reading import experts_modules
from published_formats import PUBLISHED
from tiny_models import make

D, F = 256, 128
WIDE = {
    "hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "olmoe": {"num_key_value_heads": 4},
    "mixtral": {},
    "gpt_oss": {},
    # 128 + 64 rows of kv_a_proj: a whole block of scales and half of one
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64, "v_head_dim": 64, "n_shared_experts": 1, "intermediate_size": 384,
        "num_hidden_layers": 3,
    },
}  # fmt: skip
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")


def write_model(
    folder: Path, family: str, how: str, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A folder with experts and linear layers stored as `how` of PUBLISHED, or "mxfp4"; answers the model of
    Transformers with exactly what was stored, in float32. Its linear layers are rounded as Transformers and
    compressed-tensors round them."""
    model = make(family, **{**WIDE, **OWN[family], **options})
    with torch.no_grad():
        for parameter in model.parameters():  # what is not quantised is stored in the model's dtype
            parameter.copy_(parameter.to(dtype))
        tensors = _mxfp4(model) if how == "mxfp4" else _by_matrix(model, family, how, dtype)
    written = {id(tensor) for tensor in _experts_matrices(model)}
    block, *_ = NAMES.get(family, USUAL)
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = name.replace(".mlp.", f".{block}.")
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if id(tensor) not in written and f"{name.removesuffix('.weight')}.weight_scale" not in tensors:
            if f"{name}_scale_inv" not in tensors and not tied:
                tensors[name] = tensor.detach().to(torch.float32 if "correction" in name else dtype)
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    quantization = {"quant_method": "mxfp4"} if how == "mxfp4" else PUBLISHED[how][2]
    change(folder, quantization_config=quantization, dtype=str(dtype).removeprefix("torch."))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return model


def write_large(folder: Path, family: str, *, experts: int, layers: int, width: int) -> int:
    """A model in bfloat16 with experts of random codes, mxfp4 of gpt_oss and fp8 of others, and plain linear
    layers; answers the number of the experts' weights."""
    config = make(family).config
    sizes = {"hidden_size": width, "intermediate_size": width, "moe_intermediate_size": width}
    sizes |= {"num_local_experts" if family == "gpt_oss" else "num_experts": experts}
    for name, value in {**sizes, "num_hidden_layers": layers}.items():
        setattr(config, name, value)
    if family == "gpt_oss":
        config.layer_types = (config.layer_types * layers)[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {}
    matrices = {id(w) for w in _experts_matrices(model)}
    for name, like in model.state_dict(keep_vars=True).items():
        if id(like) not in matrices:
            tensors[name] = (torch.randn(like.shape) * 0.02).bfloat16()
    for path, _ in experts_modules(model):
        if family == "gpt_oss":
            for part, columns in {"gate_up_proj": 2 * width, "down_proj": width}.items():
                size = experts, columns, width // 32
                tensors[f"{path}.{part}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8)
                tensors[f"{path}.{part}_scales"] = torch.randint(116, 122, size, dtype=torch.uint8)
            continue
        for e, part in itertools.product(range(experts), USUAL[1:]):
            code_NK = torch.randint(127, (width, width), dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{path}.{e}.{part}.weight"] = code_NK
            tensors[f"{path}.{e}.{part}.weight_scale_inv"] = torch.rand(width // 128, width // 128) * 1e-3
    folder.mkdir()
    config.save_pretrained(folder)
    quantization = {"quant_method": "mxfp4"} if family == "gpt_oss" else PUBLISHED["fp8"][2]
    change(folder, quantization_config=quantization, dtype="bfloat16")
    save_file(tensors, folder / "model.safetensors")
    return layers * experts * 3 * width * width


def change(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def retensor(folder: Path, remove: str | None = None, **more: Tensor) -> None:
    """The folder with a tensor less, or others in their places; __ stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    if remove is not None:
        del tensors[remove]
    tensors |= {name.replace("__", "."): tensor for name, tensor in more.items()}
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """The same in two files with an index."""
    tensors, names = load_file(folder / "model.safetensors"), ("model-1.safetensors", "model-2.safetensors")
    shard_of = {name: names[i % 2] for i, name in enumerate(sorted(tensors))}
    for name in names:
        save_file({one: tensors[one] for one, its in shard_of.items() if its == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    (folder / "model.safetensors").unlink()


def _experts_matrices(model: Any) -> list[Tensor]:
    return [w for _, module in experts_modules(model) for w in (module.gate_up_proj, module.down_proj)]


def _mxfp4(model: Any) -> dict[str, Tensor]:
    tensors = {}
    for path, module in experts_modules(model):
        for name in ("gate_up_proj", "down_proj"):
            stored: Any = quantise(getattr(module, name), "mxfp4")
            getattr(module, name).copy_(stored.decoded().weights())
            tensors |= {
                f"{path}.{name}_blocks": stored.block_ENgB, f"{path}.{name}_scales": stored.exponent_ENg
            }  # fmt: skip
    return tensors


def _by_matrix(model: Any, family: str, how: str, dtype: torch.dtype) -> dict[str, Tensor]:
    store, parts, _ = PUBLISHED[how]
    block, *names = NAMES.get(family, USUAL)
    tensors = {}
    for path, module in experts_modules(model):
        home = path.replace(".mlp.", f".{block}.")
        half = module.gate_up_proj.shape[1] // 2
        matrices = module.gate_up_proj[:, :half], module.gate_up_proj[:, half:], module.down_proj
        for name, w_ENK in zip(names, matrices, strict=True):
            stored: Any = quantise(w_ENK.transpose(1, 2), store)
            w_ENK.copy_(stored.decoded().weights().transpose(1, 2))
            for last, tensor in parts(stored).items():
                tensors |= {f"{home}.{e}.{name}.{last}": one for e, one in enumerate(tensor)}
            if "weight_packed" in parts(stored):
                shape = torch.tensor(w_ENK.shape[1:])
                tensors |= {f"{home}.{e}.{name}.weight_shape": shape.clone() for e in range(w_ENK.shape[0])}
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and path != "lm_head":
            stored = quantise(linear.weight.t()[None], store)
            linear.weight.copy_(rounded(stored).to(dtype))
            tensors |= {f"{path}.{last}": tensor[0] for last, tensor in parts(stored).items()}
    return tensors


def rounded(stored: Any) -> Tensor:
    """One matrix as Transformers' Fp8Dequantize makes it, with blocks of 128, or compressed-tensors'
    dequantize: the codes less the zero point, in the dtype of the scales, times the scales."""
    if isinstance(stored, FP8Block):
        code_NK = stored.code_ENK[0].float()
        scale_NK = stored.scale_Enk[0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return code_NK * scale_NK[: code_NK.shape[0], : code_NK.shape[1]]
    scale_Ng, zero_Ng = stored.scale_ENg[0], torch.zeros_like(stored.scale_ENg[0])
    if isinstance(stored, Int8):
        code_NK = stored.code_ENK[0]
    else:
        assert isinstance(stored, Int4)
        code_NK = from_nibbles(stored.code_ENH[0])[:, : stored.depth]
        zero_Ng = torch.full_like(zero_Ng, 8) if stored.zero_ENg is None else stored.zero_ENg[0]
    code_Ngi = code_NK.unflatten(1, (scale_Ng.shape[1], -1)).to(scale_Ng.dtype)
    return ((code_Ngi - zero_Ng.to(scale_Ng.dtype).unsqueeze(-1)) * scale_Ng.unsqueeze(-1)).flatten(1)
