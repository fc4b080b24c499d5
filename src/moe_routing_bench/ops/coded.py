"""Stored weights as the panels that coded.h multiplies with: codes and their scales in one stream."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import Coding, Decoded, some_experts
from moe_routing_bench.recycled import recycled

PANEL, HALF = 32, 16  # columns, as in tiles.h
CODES = ("int8", "e4m3", "nibble")  # the enum of coded.h
E4M3_FACTOR = 256.0  # the kernel reads e4m3 as float16, 256 times too small


class CCoding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("code", "group", "offsets")),
        ("numbers", ctypes.c_float * 16),
    )


def for_c(coding: Coding) -> CCoding:
    numbers = (ctypes.c_float * 16)(*coding.numbers)
    return CCoding(CODES.index(coding.code), coding.group or 1 << 62, coding.offsets, numbers)


def why_not(coding: Coding) -> str | None:
    if coding.group is not None and coding.group % PANEL:
        return f"its groups are multiples of {PANEL} weights, not {coding.group}"
    return None


def panel_bytes(coding: Coding, depth: int) -> int:
    depth = _up(depth, PANEL)
    groups = -(-depth // (coding.group or depth)) if depth else 0
    return depth * PANEL * coding.bits // 8 + groups * PANEL * 4 * (1 + coding.offsets)


def pack(decoded: Decoded, gated: bool) -> Tensor:
    """Panels of all experts: E x bytes."""
    coding, (E, N, K) = decoded.coding, decoded.code_ENK.shape
    group = coding.group or _up(K, PANEL)
    order_n = _columns(N, gated)  # N: a column of padding
    one = panel_bytes(coding, K)
    panels = recycled.empty(E, len(order_n) // PANEL, one, dtype=torch.uint8)
    factor = E4M3_FACTOR if coding.code == "e4m3" else 1.0
    for e in some_experts(decoded.code_ENK) if panels.numel() else ():
        code_eNK = decoded.code_ENK[e].view(torch.uint8)
        code_eNK = torch.nn.functional.pad(code_eNK, (0, _up(K, group) - K, 0, 1))[:, order_n]
        # experts x panels x groups x depth of a group x columns
        code_epgkc = code_eNK.unflatten(2, (-1, group)).unflatten(1, (-1, PANEL)).permute(0, 1, 3, 4, 2)
        if coding.code == "nibble":
            code_epgkc = code_epgkc[..., 0::2, :] | (code_epgkc[..., 1::2, :] << 4)
        parts = [_numbers(decoded.scale_ENg[e] * factor, order_n)]
        if decoded.offset_ENg is not None:
            parts.append(_numbers(decoded.offset_ENg[e], order_n))
        stream = torch.cat((*parts, code_epgkc.flatten(3)), dim=3).flatten(2)
        panels[e] = stream[:, :, :one]  # without the depth past the last 32 that are used
    return panels.flatten(1)


def _numbers(value_eNg: Tensor, order_n: Tensor) -> Tensor:
    """Scales or offsets as bytes: experts x panels x groups x (32 columns of float32)."""
    if not bool(value_eNg.abs().le(torch.finfo(torch.float32).max).all()):
        raise ValueError("a scale is too large for float32, or no number")
    value_eng = torch.nn.functional.pad(value_eNg.float(), (0, 0, 0, 1))[:, order_n]
    return value_eng.unflatten(1, (-1, PANEL)).transpose(2, 3).contiguous().view(torch.uint8)


def _columns(N: int, gated: bool) -> Tensor:
    """Which column stands where in the panels, as tiles.h has them; N is padding. Gated, N = 4:
    0, 1 (gate), padding to 16, 2, 3 (up), padding to 32, and a panel of padding."""
    column = torch.arange(_up(N // 2, PANEL) if gated else _up(N, PANEL))
    if not gated:
        return torch.where(column < N, column, N)
    gate = torch.where(column < N // 2, column, N)
    up = torch.where(column < N // 2, column + N // 2, N)
    return torch.stack((gate.view(-1, HALF), up.view(-1, HALF)), dim=1).flatten()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
