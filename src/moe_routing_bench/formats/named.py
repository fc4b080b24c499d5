"""Formats by name, as in native(store=int4_g32). The number after _g is the size of a group."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from moe_routing_bench.formats import fp8_block, ggml, int4, int8, mxfp4
from moe_routing_bench.formats.stored import Coding, Stored, check

# the names in tables and in the kit; other group sizes that are multiples of 32 work too
NAMES = (
    "int8", "int8_g128", "int4_g32", "int4_g128", "int4_g32_asym", "int4_g128_asym", "mxfp4", "fp8_block",
    "q8_0", "q4_k",
)  # fmt: skip
# the end of a name if the kernel also rounds rows to int8: int4_g32_a8 is W4A8
INT8_ROWS = "_a8"
# how much that adds to a layer's error (`mrb model formats`); it depends on inputs, not on weights
INT8_ROWS_ERROR = 0.0285
SAMPLED = 128  # first and last columns
# formats without a group size in their name
FIXED: dict[str, tuple[Coding, Callable[[Tensor], Stored]]] = {
    "int8": (int8.coding(None), int8.quantise),
    "mxfp4": (mxfp4.CODING, mxfp4.quantise),
    "fp8_block": (fp8_block.CODING, fp8_block.quantise),
    "q8_0": (ggml.Q8_0_CODING, ggml.quantise_q8_0),
    "q4_k": (ggml.Q4_K_CODING, ggml.quantise_q4_k),
}
GROUPED = re.compile(r"(int8|int4)_g([1-9]\d{0,4})(_asym)?")


def _grouped(name: str) -> tuple[str, int, bool] | None:
    """ "int4_g32_asym" -> ("int4", 32, True)"""
    match = GROUPED.fullmatch(name)
    if match is None or (match[1] == "int8" and match[3]):
        return None
    return match[1], int(match[2]), match[3] is not None


@lru_cache(maxsize=256)  # every call of a kernel needs it, and with one token its time matters
def coding_of(name: str) -> Coding:
    """The coding of a format. Raises ValueError with all names if the name is unknown."""
    if name in FIXED:
        return FIXED[name][0]
    if (grouped := _grouped(name)) is None:
        raise ValueError(f"there is no format {name!r}; there are {', '.join(NAMES)}")
    kind, group, asymmetric = grouped
    return int8.coding(group) if kind == "int8" else int4.coding(group, asymmetric)


def rounding(w_EKN: Tensor, name: str) -> float:
    """The rounding error of these weights in a format or in bfloat16: root mean square, relative to theirs.
    It uses only the first and last columns of the first and the last expert."""
    E, N = w_EKN.shape[0], w_EKN.shape[2]
    column_n = [n for n in range(N) if min(n, N - 1 - n) < SAMPLED]
    w_ekn = w_EKN.detach()[[0, E - 1]][..., column_n].float()
    kept = w_ekn.bfloat16() if name == "bfloat16" else quantise(w_ekn, name).decoded().weights(torch.float32)
    size = float(w_ekn.square().mean().sqrt())
    return float((kept - w_ekn).square().mean().sqrt()) / size if size else 0.0


def quantise(w_EKN: Tensor, name: str) -> Stored:
    """Rounds weights, experts x depth x columns, to the nearest numbers of the format."""
    check(w_EKN.numel() > 0, "there are no experts, or no weights in them, to store")
    if name in FIXED:
        return FIXED[name][1](w_EKN)
    coding_of(name)
    kind, group, asymmetric = _grouped(name) or ("", 0, False)
    if kind == "int8":
        return int8.quantise(w_EKN, group)
    return int4.quantise(w_EKN, group, asymmetric=asymmetric)
