"""Stored matrices as the tensors of published checkpoints, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.formats.fp8_block import FP8Block
from moe_routing_bench.formats.int4 import Int4
from moe_routing_bench.formats.int8 import Int8
from moe_routing_bench.formats.stored import from_nibbles

INT = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def words(code: Tensor, bits: int) -> Tensor:
    """Codes of the last dimension into words of 32 bits, number by number, as compressed-tensors does."""
    each, made = 32 // bits, []
    for row in code.flatten(0, -2).tolist():
        some = (row[at : at + each] for at in range(0, len(row), each))
        made.append([sum(c << (bits * i) for i, c in enumerate(codes)) for codes in some])
    return torch.tensor(made, dtype=torch.int64).to(torch.int32).view(*code.shape[:-1], -1)


def packed_int4(stored: Int4) -> dict[str, Tensor]:
    made = {"weight_packed": words(from_nibbles(stored.code_ENH), 4), "weight_scale": stored.scale_ENg}
    if stored.zero_ENg is not None:
        made["weight_zero_point"] = words(stored.zero_ENg.transpose(1, 2), 4).transpose(1, 2)
    return made


def packed_int8(stored: Int8) -> dict[str, Tensor]:
    return {"weight_packed": words(stored.code_ENK.int() + 128, 8), "weight_scale": stored.scale_ENg}


def plain_int8(stored: Int8) -> dict[str, Tensor]:
    return {"weight": stored.code_ENK, "weight_scale": stored.scale_ENg}


def fp8(stored: FP8Block) -> dict[str, Tensor]:
    return {"weight": stored.code_ENK, "weight_scale_inv": stored.scale_Enk}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**INT, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


PACKED, PLAIN = "pack-quantized", "int-quantized"
PUBLISHED: dict[str, tuple[str, Callable[[Any], dict[str, Tensor]], dict[str, Any]]] = {
    "int4": ("int4_g32", packed_int4, compressed(PACKED, num_bits=4)),
    "int4 by 128": ("int4_g128", packed_int4, compressed(PACKED, num_bits=4, group_size=128)),
    "int4 with zero points": ("int4_g128_asym", packed_int4,
                              compressed(PACKED, num_bits=4, group_size=128, symmetric=False)),
    "int8 packed": ("int8_g32", packed_int8, compressed(PACKED, num_bits=8)),
    "int8": ("int8", plain_int8, compressed(PLAIN, num_bits=8, strategy="channel", group_size=None)),
    "fp8": ("fp8_block", fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}  # fmt: skip
