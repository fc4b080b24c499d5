"""Packs stored weights into the panels of coded.h and int8_rows.h: codes and scales in one stream.

Kernels name what they store by `store`: bfloat16, a format of formats/named.py, or a format that ends in _a8
if they also round rows to int8."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp
from moe_routing_bench.core.dtypes import name_of
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.formats.named import INT8_ROWS, coding_of
from moe_routing_bench.formats.stored import Coding, Decoded, Stored, experts_of, some_experts

PANEL, HALF = 32, 16  # columns, as in tiles.h
CODES = ("int8", "e4m3", "nibble")  # the enum of coded.h
SCALES = ("float32", "float16", "exponent")  # another enum of coded.h, and the bytes of each
SCALE_BYTES = dict(zip(SCALES, (4, 2, 1), strict=True))
E4M3_FACTOR = 256.0  # the kernel reads e4m3 as float16, which is 256 times too small
DTYPES = (torch.bfloat16, torch.float32)  # of activations
DEEPEST = 1 << 16  # how many products of a byte and an int8 fit in a sum of 32 bits


class CCoding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("code", "group", "offsets", "scale")),
        ("numbers", ctypes.c_float * 16),
        *((name, ctypes.c_int64) for name in ("int8_rows", "zero")),
        ("unit", ctypes.c_float),
        ("table", ctypes.c_uint8 * 16),
    )


@lru_cache(maxsize=256)  # the result is never written to
def for_c(coding: Coding, int8_rows: bool = False) -> CCoding:
    numbers = (ctypes.c_float * 16)(*coding.numbers)
    group = coding.group or 1 << 62
    zero, unit, table = _unsigned(coding) if int8_rows else (0, 1.0, [])
    return CCoding(
        CODES.index(coding.code), group, coding.offsets, SCALES.index(coding.scale), numbers, int8_rows, zero,
        unit, (ctypes.c_uint8 * 16)(*table),
    )  # fmt: skip


def _unsigned(coding: Coding) -> tuple[int, float, list[int]]:
    """zero, unit and bytes with numbers[i] = (bytes[i] - zero) * unit. MXFP4's -6 .. 6 in halves: 12, 0.5 and
    12, 13, 14, 15, 16, 18, 20, 24, 12, 11, .. 0."""
    if coding.code == "int8":
        return 128, 1.0, []
    unit = 1.0 if all(number.is_integer() for number in coding.numbers) else 0.5
    zero = -int(min(coding.numbers) / unit)
    return zero, unit, [int(number / unit) + zero for number in coding.numbers]


# of mrb_pack_coded, which every library with coded.h has
PACK_ARGUMENTS: list[Any] = [
    *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 6, ctypes.POINTER(CCoding), ctypes.c_int,
]  # fmt: skip


def format_of(store: str) -> str:
    """ "int8_a8" -> "int8": how the weights alone are stored."""
    return store.removesuffix(INT8_ROWS)


def rounds_rows(store: str | None) -> bool:
    return store is not None and store.endswith(INT8_ROWS)


def coding_in(store: str | None) -> Coding | None:
    """None if weights are stored as numbers, not as codes."""
    return None if store is None or store == "bfloat16" else coding_of(format_of(store))


def why_not_store(dtype: torch.dtype, store: str | None, depth: int) -> str | None:
    """Why kernels with coded.h cannot store weights of this depth so, with activations of this dtype."""
    if store is not None and store != "bfloat16":
        try:
            coding = coding_of(format_of(store))
        except ValueError as unknown:
            return f"it stores weights as bfloat16 or in a format, and {unknown}"
        if reason := why_not(coding, rounds_rows(store)):
            return reason
    if store is not None and store == name_of(dtype):
        return f"these weights are {store} already; leave store out"
    if dtype not in DTYPES:
        return cpp.other_dtypes(dtype, dtype)
    if rounds_rows(store) and depth > DEEPEST:
        return f"rows of 8 bits are at most {DEEPEST} numbers long, not {depth}"
    return None


def why_not(coding: Coding, int8_rows: bool = False) -> str | None:
    if coding.group is not None and coding.group % PANEL:
        return f"its groups are multiples of {PANEL} weights, not {coding.group}"
    if int8_rows and coding.code == "e4m3":
        return "rows of 8 bits need weights that are integers times a scale; float8 weights are not"
    return None


def panel_bytes(coding: Coding, depth: int) -> int:
    depth = _up(depth, PANEL)
    groups = -(-depth // (coding.group or depth)) if depth else 0
    return depth * PANEL * coding.bits // 8 + groups * PANEL * (
        SCALE_BYTES[coding.scale] + 4 * coding.offsets
    )


def panel(coding: Coding | None, depth: int) -> int:
    """The distance from one panel to the next, in elements."""
    return _up(depth, PANEL) * PANEL if coding is None else panel_bytes(coding, depth)


def pack(decoded: Decoded, gated: bool, library: ctypes.CDLL, int8_rows: bool = False) -> Tensor:
    """The panels of all experts, E x bytes. library: the compiled coded.h. int8_rows: for rows of 8 bits."""
    E, N, K = decoded.code_ENK.shape
    panels = _empty(decoded.coding, E, N, K, gated)
    _pack(panels, decoded, gated, library, int8_rows)
    return panels


def pack_stored(stored: Stored, gated: bool, library: ctypes.CDLL, int8_rows: bool = False) -> Tensor:
    """pack for weights in a format. It decodes a few experts at a time, because all codes with a byte each
    would need more memory than the panels."""
    E, K, N = stored.size
    panels: Tensor | None = None
    for e in some_experts(torch.empty(stored.size, device="meta")):
        decoded = experts_of(stored, e).decoded()
        panels = _empty(decoded.coding, E, N, K, gated) if panels is None else panels
        _pack(panels[e], decoded, gated, library, int8_rows)
    assert panels is not None
    return panels


def _empty(coding: Coding, E: int, N: int, K: int, gated: bool) -> Tensor:
    return recycled.empty(E, len(_columns(N, gated)) // PANEL * panel_bytes(coding, K), dtype=torch.uint8)


def _pack(panels: Tensor, decoded: Decoded, gated: bool, library: ctypes.CDLL, int8_rows: bool) -> None:
    coding, (E, N, K) = decoded.coding, decoded.code_ENK.shape
    order_n, bytes_each = _columns(N, gated), panel_bytes(coding, K)
    code_ENK = decoded.code_ENK.view(torch.uint8).contiguous()
    scale_ENg = _numbers(decoded.scale_ENg * (E4M3_FACTOR if coding.code == "e4m3" else 1.0))
    offset_ENg = None if decoded.offset_ENg is None else _numbers(decoded.offset_ENg)
    library.mrb_pack_coded(
        panels.data_ptr(), code_ENK.data_ptr(), scale_ENg.data_ptr(),
        None if offset_ENg is None else offset_ENg.data_ptr(), order_n.data_ptr(), E, N, K,
        scale_ENg.shape[2], len(order_n) // PANEL, bytes_each, for_c(coding, int8_rows),
        torch.get_num_threads(),
    )  # fmt: skip


def _numbers(value_ENg: Tensor) -> Tensor:
    if not bool(value_ENg.abs().le(torch.finfo(torch.float32).max).all()):
        raise ValueError("a scale is too large for float32, or not a number")
    return value_ENg.float().contiguous()


def _columns(N: int, gated: bool) -> Tensor:
    """The column at each place of the panels, as in tiles.h; -1 is padding. Gated with N = 4: 0, 1 (gate),
    padding to 16, 2, 3 (up), padding to 32, and a panel of padding."""
    column = torch.arange(_up(N // 2, PANEL) if gated else _up(N, PANEL))
    if not gated:
        return torch.where(column < N, column, -1)
    gate = torch.where(column < N // 2, column, -1)
    up = torch.where(column < N // 2, column + N // 2, -1)
    return torch.stack((gate.view(-1, HALF), up.view(-1, HALF)), dim=1).flatten()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
