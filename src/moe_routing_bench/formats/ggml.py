"""Q8_0 and Q4_K as GGUF files store them: blocks of bytes along a column, with their scales inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import Coding, Decoded, check, groups_of, positive

# codes of a block, bytes of a block
Q8_0_BLOCK, Q8_0_BYTES = 32, 34
Q4_K_BLOCK, Q4_K_BYTES = 256, 144
Q8_0_CODING = Coding(code="int8", group=32, scale="float16")
Q4_K_CODING = Coding(code="nibble", group=32, numbers=tuple(float(i) for i in range(16)), offsets=True)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Experts x columns x blocks x bytes, and the number of codes of a column that are used."""

    block_ENbB: Tensor
    depth: int

    @property
    def size(self) -> tuple[int, int, int]:
        return self.block_ENbB.shape[0], self.depth, self.block_ENbB.shape[1]


@dataclass(frozen=True, kw_only=True)
class Q8_0(_Blocks):  # noqa: N801 - its published name
    """A block has 34 bytes: a float16 scale and 32 codes of int8. One column of depth 32:

    block_ENbB   [[[[0x00, 0x38, 1, 0xFF, 0, .. 0]]]]    0x3800 is 0.5: the weights are .5, -.5, 0, ..
    """

    name: ClassVar[str] = "q8_0"

    def decoded(self) -> Decoded:
        _check_blocks(self.name, self.block_ENbB, self.depth, Q8_0_BLOCK, Q8_0_BYTES)
        scale_ENg = _halves(self.block_ENbB[..., :2]).squeeze(-1)
        code_ENK = self.block_ENbB[..., 2:].contiguous().view(torch.int8).flatten(2)[:, :, : self.depth]
        return Decoded(coding=Q8_0_CODING, code_ENK=code_ENK, scale_ENg=scale_ENg)


@dataclass(frozen=True, kw_only=True)
class Q4_K(_Blocks):  # noqa: N801 - its published name
    """A block has 144 bytes for 256 codes in 8 groups of 32: float16 d and dmin, 8 scales and 8 minima of
    6 bits in 12 bytes, 128 bytes of codes. w = d * scale * code - dmin * minimum.

    The 12 bytes: for groups 0 .. 3 the scales are in bytes 0-3 and the minima in bytes 4-7, in the lower 6
    bits. For groups 4 .. 7 the lower 4 bits of scale and minimum are in bytes 8-11, and their upper 2 bits
    are the upper 2 bits of bytes 0-3 and 4-7. 32 bytes of codes hold two groups: the first in the lower
    halves, the second in the upper halves.

    d 0.5, dmin 0.25, scale 3, minimum 2, code 5: 0.5 * 3 * 5 - 0.25 * 2 = 7
    """

    name: ClassVar[str] = "q4_k"

    def decoded(self) -> Decoded:
        _check_blocks(self.name, self.block_ENbB, self.depth, Q4_K_BLOCK, Q4_K_BYTES)
        block, groups = self.block_ENbB, -(-self.depth // 32)
        d, dmin = _halves(block[..., :4]).unbind(-1)
        low, mid, high = block[..., 4:8], block[..., 8:12], block[..., 12:16]
        scale = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=-1).double() * d.unsqueeze(-1)
        minimum = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), dim=-1).double() * dmin.unsqueeze(-1)
        pairs = block[..., 16:].unflatten(-1, (4, 32))
        code_ENK = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(2)
        return Decoded(
            coding=Q4_K_CODING,
            code_ENK=code_ENK[:, :, : self.depth],
            scale_ENg=scale.flatten(2)[:, :, :groups],
            offset_ENg=-minimum.flatten(2)[:, :, :groups],
        )


def quantise_q8_0(w_EKN: Tensor) -> Q8_0:
    blocks = []
    for w_eNgi in groups_of(w_EKN, Q8_0_BLOCK):
        exact_eNg1 = positive(w_eNgi.abs().amax(dim=-1, keepdim=True) / 127)
        code_eNgi = w_eNgi.div(exact_eNg1).round_().clamp_(-127, 127).to(torch.int8)
        blocks.append(torch.cat((exact_eNg1.half().view(torch.uint8), code_eNgi.view(torch.uint8)), dim=-1))
    return Q8_0(block_ENbB=torch.cat(blocks), depth=w_EKN.shape[1])


def quantise_q4_k(w_EKN: Tensor) -> Q4_K:
    """15 steps from the smallest weight of a group (at most 0) to the largest. llama.cpp searches for steps
    with a smaller error; its files are read the same way."""
    blocks = []
    for w_eNbi in groups_of(w_EKN, Q4_K_BLOCK):
        w_eNb8i = w_eNbi.unflatten(-1, (8, 32))
        low = w_eNb8i.amin(dim=-1).clamp(max=0)
        step = (w_eNb8i.amax(dim=-1) - low).clamp(min=0) / 15
        d = positive((step.amax(dim=-1) / 63).half()).float().unsqueeze(-1)
        dmin = positive((-low.amin(dim=-1) / 63).half()).float().unsqueeze(-1)
        scale, minimum = (step / d).round().clamp(0, 63), (-low / dmin).round().clamp(0, 63)
        steps = positive(scale * d).unsqueeze(-1)
        code = ((w_eNb8i + (minimum * dmin).unsqueeze(-1)) / steps).round().clamp(0, 15).to(torch.uint8)
        s, m = scale.to(torch.uint8), minimum.to(torch.uint8)
        parts = (
            torch.cat((d, dmin), dim=-1).half().view(torch.uint8),
            (s[..., :4] & 63) | (s[..., 4:] >> 4 << 6),
            (m[..., :4] & 63) | (m[..., 4:] >> 4 << 6),
            (s[..., 4:] & 15) | (m[..., 4:] << 4),
            (code[..., 0::2, :] | (code[..., 1::2, :] << 4)).flatten(-2),
        )
        blocks.append(torch.cat(parts, dim=-1))
    return Q4_K(block_ENbB=torch.cat(blocks), depth=w_EKN.shape[1])


def _halves(byte: Tensor) -> Tensor:
    half = byte.contiguous().view(torch.float16)
    check(bool(half.isfinite().all()), "a scale in a GGUF block is not a number")
    return half.double()


def _check_blocks(name: str, block_ENbB: Tensor, depth: int, codes: int, size: int) -> None:
    wanted = (*block_ENbB.shape[:2], -(-depth // codes), size)
    check(
        block_ENbB.dtype == torch.uint8 and tuple(block_ENbB.shape) == wanted,
        f"{name} of depth {depth} needs blocks {wanted} of bytes, not {tuple(block_ENbB.shape)} of "
        f"{block_ENbB.dtype}",
    )
