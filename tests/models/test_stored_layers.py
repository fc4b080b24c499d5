"""Experts out of quantised checkpoints and GGUF files, as published, and damaged ones."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.formats.mxfp4 import MXFP4
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.models.checkpoint import read_layer
from moe_routing_bench.models.gguf import read_gguf
from moe_routing_bench.models.stored_layers import from_words, read_stored
from published_formats import PACKED, PLAIN, PUBLISHED, compressed, packed_int4, words

E, D, F = 3, 256, 128
HOME = "model.layers.1.mlp.experts"
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": E, "num_experts_per_tok": 2,
    "hidden_size": D, "moe_intermediate_size": F, "hidden_act": "silu", "norm_topk_prob": True,
}  # fmt: skip


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def by_expert(
    name: str, parts: Callable[[Any], dict[str, Tensor]]
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The tensors of a checkpoint with every matrix stored in a format, and what they hold."""
    torch.manual_seed(0)
    tensors, kept = {}, {}
    for part, (N, K) in {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items():
        stored = quantise(torch.randn(E, K, N), name)
        kept[part] = stored.decoded().weights()
        for e in range(E):
            tensors |= {f"{HOME}.{e}.{part}.{last}": t[e] for last, t in parts(stored).items()}
    return tensors, torch.cat((kept["gate_proj"], kept["up_proj"]), dim=2), kept["down_proj"]


def assert_holds(experts: QuantisedExperts, name: str, w_in_EDG: Tensor, w_out_EFD: Tensor) -> None:
    assert experts.store == name
    plain = experts.dequantised()
    assert torch.equal(plain.w_in_EDG, w_in_EDG) and torch.equal(plain.w_out_EFD, w_out_EFD)


@pytest.mark.parametrize("how", PUBLISHED)
def test_a_checkpoint_is_read_as_it_is_stored(how: str, tmp_path: Path) -> None:
    name, parts, config = PUBLISHED[how]
    tensors, w_in_EDG, w_out_EFD = by_expert(name, parts)
    folder = write(tmp_path / "model", tensors, quantization_config=config)
    experts = read_stored(folder, 1)
    assert experts.activation == "swiglu"
    assert_holds(experts, name, w_in_EDG, w_out_EFD)
    with pytest.raises(NotImplementedError, match="stored_layers"):
        read_layer(folder, 1)


def gpt_oss(folder: Path) -> tuple[Path, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    up, down = quantise(torch.randn(E, D, 2 * F), "mxfp4"), quantise(torch.randn(E, F, D), "mxfp4")
    assert isinstance(up, MXFP4) and isinstance(down, MXFP4)
    bias_EG = torch.randn(E, 2 * F).bfloat16()
    tensors = {
        "gate_up_proj_blocks": up.block_ENgB, "gate_up_proj_scales": up.exponent_ENg,
        "gate_up_proj_bias": bias_EG,
        "down_proj_blocks": down.block_ENgB, "down_proj_scales": down.exponent_ENg,
        "down_proj_bias": torch.zeros(E, D).bfloat16(),
    }  # fmt: skip
    tensors = {f"{HOME}.{name}": tensor for name, tensor in tensors.items()}
    config = {"model_type": "gpt_oss", "num_local_experts": E, "intermediate_size": F}
    write(folder, tensors, quantization_config={"quant_method": "mxfp4"}, **config)
    return folder, up.decoded().weights(), down.decoded().weights(), bias_EG


def test_gpt_oss_alternates_gate_and_up(tmp_path: Path) -> None:
    folder, up, down, bias_EG = gpt_oss(tmp_path / "oss")
    experts = read_stored(folder, 1)
    assert experts.activation == "swiglu_oai"
    assert_holds(experts, "mxfp4", torch.cat((up[..., 0::2], up[..., 1::2]), dim=2), down)
    assert experts.b_in_EG is not None
    assert torch.equal(experts.b_in_EG, torch.cat((bias_EG[:, 0::2], bias_EG[:, 1::2]), dim=1))


def test_words() -> None:
    assert from_words(torch.tensor([[0x21]], dtype=torch.int32), 4)[0, :3].tolist() == [1, 2, 0]
    every = torch.randint(0, 256, (3, 64))
    assert torch.equal(from_words(words(every, 8), 8).long(), every)


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    tensors, _, _ = by_expert("int4_g32", packed_int4)
    good = compressed(PACKED, num_bits=4)
    refused = {
        "quant_method awq": {"quant_method": "awq"},
        "quant_method None": {},
        "not read here; int8 and int4": compressed(PACKED, num_bits=3),
        "with weights": compressed("nvfp4-pack-quantized", num_bits=4),
        "actorder": compressed(PACKED, num_bits=4, actorder="group"),
        "one config_group": {**good, "config_groups": {}},
        "cut into groups of 96": compressed(PACKED, num_bits=4, group_size=96),
        "has shape": compressed(PACKED, num_bits=4, group_size=64),
        "no tensor": compressed(PLAIN, num_bits=8),
        "weight_block_size": {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "is stored as I32; this reads F8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    for sentence, config in refused.items():
        changed = dict(tensors)
        if "I32" in sentence:
            for name in tensors:
                changed[name.replace("weight_packed", "weight")] = torch.zeros(
                    (D, F) if "down" in name else (F, D), dtype=torch.int32
                )
        folder = write(tmp_path / "model", changed, quantization_config=config)
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(sentence)):
            read_stored(folder, 1)
    with pytest.raises(ValueError, match="0 to 1, not 7"):
        read_stored(write(tmp_path / "model", tensors, quantization_config=good), 7)
    folder = write(tmp_path / "model", tensors, quantization_config=good, num_experts=1 << 30)
    with pytest.raises(ValueError, match="num_experts"):
        read_stored(folder, 1)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder, *_ = gpt_oss(tmp_path / "oss")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{HOME}.down_proj_scales"][1, 2, 3] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="scale is 255"):
        read_stored(folder, 1).dequantised()


# ---- GGUF


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_file(path: Path, name: str, kind: int, *, alignment: int = 64) -> tuple[Tensor, Tensor]:
    """Written by the specification: magic, version, counts, values, entries, padding, data."""
    torch.manual_seed(0)
    kept, entries, data = {}, b"", b""
    for part, (N, K) in {"gate": (256, D), "up": (256, D), "down": (D, 256)}.items():
        stored: Any = quantise(torch.randn(E, K, N), name)
        kept[part] = stored.decoded().weights()
        data += b"\0" * (-len(data) % alignment)
        entries += text(f"blk.1.ffn_{part}_exps.weight") + struct.pack("<I3QIQ", 3, K, N, E, kind, len(data))
        data += bytes(stored.block_ENbB.flatten().tolist())
    values = text("general.alignment") + struct.pack("<II", 4, alignment)
    values += text("general.name") + struct.pack("<I", 8) + text("tiny")
    values += text("some.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    values += text("some.scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3)
    head = b"GGUF" + struct.pack("<IQQ", 3, 3, 4) + values + entries
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return torch.cat((kept["gate"], kept["up"]), dim=2), kept["down"]


@pytest.mark.parametrize(("name", "kind"), [("q8_0", 8), ("q4_k", 12)])
def test_a_gguf_file_is_read_as_it_is_stored(name: str, kind: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    w_in_EDG, w_out_EFD = gguf_file(path, name, kind)
    assert_holds(read_gguf(path, 1), name, w_in_EDG, w_out_EFD)
    with pytest.raises(ValueError, match=r"no tensor blk\.0\.ffn_gate_exps"):
        read_gguf(path, 0)


def test_damaged_gguf_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_file(path, "q8_0", 8)
    whole = path.read_bytes()
    texts, floats = struct.pack("<IIQ", 9, 8, 2), struct.pack("<IIQ", 9, 6, 3)
    at = whole.index(b"blk.1.ffn_down") + len("blk.1.ffn_down_exps.weight")
    damaged = {
        "is not a GGUF file": b"GGML" + whole[4:],
        "version 9": whole[:4] + struct.pack("<I", 9) + whole[8:],
        "tensors; this reads at most": whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:],
        "values; this reads at most": whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:],
        "letters in a name": whole[:24] + struct.pack("<Q", 1 << 63) + whole[32:],
        "no power of two": whole.replace(struct.pack("<II", 4, 64), struct.pack("<II", 4, 63), 1),
        "items in an array": whole.replace(texts, struct.pack("<IIQ", 9, 8, 1 << 40), 1),
        "ends inside its head": whole.replace(floats, struct.pack("<IIQ", 9, 6, 1 << 23), 1),
        "unknown type 77": whole.replace(texts, struct.pack("<IIQ", 9, 77, 2), 1),
        "dimensions in a tensor": whole[:at] + struct.pack("<I", 1 << 30) + whole[at + 4 :],
        "whole blocks of 32": whole[:at + 4] + struct.pack("<Q", 33) + whole[at + 12 :],
        "past the end": whole[:at + 12] + struct.pack("<Q", 1 << 60) + whole[at + 20 :],
        "type 2; this reads 8 (Q8_0), 12 (Q4_K)": whole[:at + 28] + struct.pack("<I", 2) + whole[at + 32 :],
        "reaches past the end": whole[:-1],
        "two tensors of one name": whole.replace(b"ffn_down_exps", b"ffn_gate_exps"),
    }  # fmt: skip
    for sentence, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(sentence)):
            read_gguf(path, 1)
    for length in range(0, at, 7):  # a file that ends early, wherever it ends
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError):
            read_gguf(path, 1)
