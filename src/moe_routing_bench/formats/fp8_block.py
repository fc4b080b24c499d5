"""fp8_block as DeepSeek stores it: float8 (e4m3), and a scale for every 128 x 128 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_routing_bench.formats.stored import Coding, Decoded, check, check_tensor, groups_of, positive

BLOCK = 128
LARGEST = 448.0  # of e4m3
CODING = Coding(code="e4m3", group=BLOCK)


@dataclass(frozen=True, kw_only=True)
class FP8Block:
    """w = code * scale of its block. One expert, 256 columns of depth 128:

    code_ENK    1 x 256 x 128    float8_e4m3fn, the checkpoint's weight
    scale_Enk   1 x 2 x 1        float32, its weight_scale_inv: columns 0 .. 127, columns 128 .. 255

    code 1.5 at column 130 with scale_Enk[0, 1, 0] = 0.25 is the weight 0.375.
    """

    name: ClassVar[str] = "fp8_block"
    code_ENK: Tensor
    scale_Enk: Tensor

    @property
    def size(self) -> tuple[int, int, int]:
        E, N, K = self.code_ENK.shape
        return E, K, N

    def decoded(self) -> Decoded:
        E, K, N = self.size
        check(
            self.code_ENK.dtype == torch.float8_e4m3fn, f"codes are float8_e4m3fn, not {self.code_ENK.dtype}"
        )
        check_tensor(self, "scales", self.scale_Enk, (E, -(-N // BLOCK), -(-K // BLOCK)))
        code_ENK = self.code_ENK.contiguous().view(torch.uint8)
        check(not bool((code_ENK & 127 == 127).any()), "a float8 weight is not a number")
        scale_ENk = self.scale_Enk.double().repeat_interleave(BLOCK, dim=1)[:, :N]
        return Decoded(coding=CODING, code_ENK=code_ENK, scale_ENg=scale_ENk)


def quantise(w_EKN: Tensor) -> FP8Block:
    """The largest weight of a block becomes 448."""
    _, K, N = w_EKN.shape
    codes, scales = [], []
    for w_eNki in groups_of(w_EKN, BLOCK):
        w_enjki = torch.nn.functional.pad(w_eNki, (0, 0, 0, 0, 0, -N % BLOCK)).unflatten(1, (-1, BLOCK))
        scale_enk = positive(w_enjki.abs().amax(dim=(2, 4)) / LARGEST)
        w_enjki = (w_enjki / scale_enk[:, :, None, :, None]).clamp(-LARGEST, LARGEST)
        codes.append(w_enjki.flatten(3).flatten(1, 2)[:, :N, :K].to(torch.float8_e4m3fn).view(torch.uint8))
        scales.append(scale_enk)
    code_ENK = torch.cat(codes).view(torch.float8_e4m3fn)
    return FP8Block(code_ENK=code_ENK, scale_Enk=torch.cat(scales))
