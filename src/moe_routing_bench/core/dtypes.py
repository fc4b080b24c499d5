"""The number types of tokens and weights, with the names they have here and in files."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = tuple(DTYPES.values())
IN_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def name_of(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16"""
    return str(dtype).removeprefix("torch.")
