"""Reference weights for cases with stored weights: the stored weights decoded to float64, one expert at a
time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.formats.stored import Decoded


@dataclass(frozen=True)
class Kept:
    """A matrix of experts that a reference reads as it reads a tensor: kept.unbind(0)[3].to(torch.float64).

    All experts in float64 may not fit in memory, so each is decoded when it is asked for.
    """

    decoded: Decoded

    @property
    def shape(self) -> tuple[int, int, int]:
        E, N, K = self.decoded.code_ENK.shape
        return E, K, N

    def unbind(self, dim: int) -> list[Kept]:
        """Returns the experts, one matrix each."""
        assert dim == 0
        d, ones = self.decoded, [slice(e, e + 1) for e in range(self.shape[0])]
        offsets = [None if d.offset_ENg is None else d.offset_ENg[e] for e in ones]
        parts = zip(ones, offsets, strict=True)
        return [
            Kept(replace(d, code_ENK=d.code_ENK[e], scale_ENg=d.scale_ENg[e], offset_ENg=offset))
            for e, offset in parts
        ]

    def to(self, dtype: torch.dtype) -> Tensor:
        """Decodes one expert, depth x columns. The values are exact in float64."""
        (w_KN,) = self.decoded.weights(dtype)
        return w_KN


def kept_of(stored: QuantisedExperts) -> dict[str, Kept]:
    """Returns both matrices by name."""
    return {"w_in_EDG": Kept(stored.w_in.decoded()), "w_out_EFD": Kept(stored.w_out.decoded())}
