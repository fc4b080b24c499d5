"""Reads Triton's encodings, as TTGIR prints them, as our layouts.

    registers("#ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4],
      order = [1, 0]}>", (4, 1024))  ->  ((32,4),(8,4)):((32,1024),(4,1))
    shared("#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>", (64, 64), 16)
      ->  S<3,3,3> o 0 o (64,64):(64,1)

Sides are powers of two, as in Triton. NotImplementedError is raised for other encodings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from moe_routing_bench.layouts.layout import Layout
from moe_routing_bench.layouts.swizzle import Swizzle, Swizzled

Modes = list[tuple[int, int]]


def registers(encoding: str, shape: Sequence[int]) -> Layout:
    """The thread-value layout of a tensor in registers: (thread, value) -> place, first side fastest.

    If the tensor is smaller than all threads together, extra threads hold the same numbers as others: a mode
    of stride 0.
    """
    kind, fields = _read(encoding)
    if kind == "blocked":
        threads, values = _blocked(fields, shape)
    elif kind == "linear":
        steps = _steps(shape)

        def modes(name: str) -> Modes:
            return [(2, sum(map(int.__mul__, basis, steps))) for basis in fields[name]]

        threads, values = modes("lane") + modes("warp"), modes("register")
    else:
        raise NotImplementedError(f"#ttg.{kind} is not supported here")
    return Layout((_sizes(threads), _sizes(values)), (_strides(threads), _strides(values)))


def shared(encoding: str, shape: Sequence[int], item_bits: int) -> Layout | Swizzled:
    """The places of a tensor's numbers in shared memory: coordinates -> place, in numbers."""
    kind, fields = _read(encoding)
    if len(shape) != 2:
        raise NotImplementedError(f"shared memory of {len(shape)} dimensions is not supported here")
    if kind == "swizzled_shared":
        inner, outer = fields["order"]
        row, vec, per_phase = shape[inner], fields["vec"], fields["perPhase"]
        phases = min(fields["maxPhase"], max(1, row // vec))
        strides = [0, 0]
        strides[inner], strides[outer] = 1, row
        return _turned(Layout(tuple(shape), tuple(strides)), vec, row * per_phase, phases)
    if kind == "nvmma_shared" and (wide := fields["swizzlingByteWidth"]):
        inner = 0 if fields["transposed"] else 1
        rows, row, panel = shape[1 - inner], shape[inner], wide * 8 // item_bits
        if row % panel:
            raise NotImplementedError(f"rows of {row} numbers in panels of {panel} are not supported here")
        # panels of `wide` bytes one after another; in a panel, 8 rows are swizzled against each other
        across, along = Layout((panel, row // panel), (1, rows * panel)), Layout(rows, panel)
        sides = (across, along) if inner == 0 else (along, across)
        layout = Layout(tuple(s.shape for s in sides), tuple(s.stride for s in sides))
        return _turned(layout, 128 // item_bits, panel * 128 // wide, wide // 16)
    raise NotImplementedError(f"#ttg.{kind} is not supported here")


def matrix_reads(shape: Sequence[int], inner: int) -> Layout:
    """How one warp reads a tile of 16-bit numbers by ldmatrix: 8 lanes have 8 rows of 16 bytes each.

    `inner` is the contiguous side. With phases of 8 lanes, a phase is one matrix of 8 x 8.
    """
    steps, outer = _steps(shape), 1 - inner
    chunks, rows = shape[inner] // 8, shape[outer] // 8
    if not chunks or not rows:
        raise NotImplementedError(f"a tile of {tuple(shape)} is smaller than a matrix of 8 x 8")
    beside = math.gcd(chunks, 4)
    below = math.gcd(rows, 4 // beside)
    threads = [(8, steps[outer]), (beside, 8 * steps[inner]), (below, 8 * steps[outer])]
    values = [
        (8, steps[inner]),
        (chunks // beside, 8 * beside * steps[inner]),
        (rows // below, 8 * below * steps[outer]),
    ]
    return Layout((_sizes(threads), _sizes(values)), (_strides(threads), _strides(values)))


def _blocked(fields: dict[str, Any], shape: Sequence[int]) -> tuple[Modes, Modes]:
    steps, order = _steps(shape), fields["order"]
    reached = [1] * len(shape)

    def modes(counts: Sequence[int]) -> Modes:
        made = []
        for side in order:
            fits = min(counts[side], shape[side] // reached[side])
            made += [(fits, reached[side] * steps[side]), (counts[side] // fits, 0)]
            reached[side] *= fits
        return made

    values = modes(fields["sizePerThread"])
    threads = modes(fields["threadsPerWarp"]) + modes(fields["warpsPerCTA"])
    again = [(size // done, done * step) for size, done, step in zip(shape, reached, steps, strict=True)]
    return threads, values + again


def _turned(layout: Layout, vec: int, phase_length: int, phases: int) -> Layout | Swizzled:
    if phases == 1:
        return layout
    bits, base = phases.bit_length() - 1, vec.bit_length() - 1
    return Swizzled(Swizzle(bits, base, phase_length.bit_length() - 1 - base), layout)


def _read(encoding: str) -> tuple[str, dict[str, Any]]:
    match = re.fullmatch(r"#ttg\.(\w+)<\{(.*)\}>", encoding.strip(), re.DOTALL)
    if match is None:
        raise NotImplementedError(f"{encoding!r} is not an encoding that is supported here")
    kind, inside = match.groups()
    fields: dict[str, Any] = {}
    for name, value in re.findall(r"(\w+) = (\[\[.*?\]\]|\[.*?\]|\w+)", inside, re.DOTALL):
        if value in ("true", "false"):
            fields[name] = value == "true"
        elif value.startswith("[["):
            fields[name] = [_numbers(basis) for basis in re.findall(r"\[([^\[\]]*)\]", value)]
        else:
            fields[name] = _numbers(value) if value.startswith("[") else int(value)
    return kind, fields


def _numbers(written: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", written)]


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[:side]) for side in range(len(shape))]


def _sizes(modes: Modes) -> tuple[int, ...]:
    return tuple(size for size, _ in modes if size > 1) or (1,)


def _strides(modes: Modes) -> tuple[int, ...]:
    return tuple(stride for size, stride in modes if size > 1) or (0,)
