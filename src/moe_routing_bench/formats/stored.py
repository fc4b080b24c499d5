"""Common to all formats: codes of 8 or 4 bits, and a scale for each group of codes along the depth.

Weights are stored output first, as checkpoints are: expert, column n, depth k. In every format

    w[e, k, n] = number(code[e, n, k]) * scale[e, n, k // group] + offset[e, n, k // group]

and a format defines its numbers, groups and offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How codes become numbers: all that a kernel must know about a format.

    MXFP4: Coding(code="nibble", group=32, numbers=E2M1, scale="exponent")
    Q4_K:  Coding(code="nibble", group=32, numbers=(0, 1, .. 15), offsets=True)
    """

    code: Literal["int8", "e4m3", "nibble"]
    group: int | None = None  # how many codes of a column share a scale; None: all of them
    numbers: tuple[float, ...] = ()  # nibble: the number of each of the 16 codes
    offsets: bool = False
    scale: Literal["float32", "float16", "exponent"] = "float32"  # the narrowest type for every scale

    @property
    def bits(self) -> int:
        return 4 if self.code == "nibble" else 8


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One matrix of experts as codes and exact scales. Two columns of depth 4 in groups of 2, int8:

    code_ENK    [[[1, 2, 3, 4], [5, 6, 7, 8]]]
    scale_ENg   [[[.5, 1.], [1., 2.]]]
    weights()   [[[.5, 5.], [1., 6.], [3., 14.], [4., 16.]]]        experts x depth x columns
    """

    coding: Coding
    code_ENK: Tensor  # int8 for int8 codes, else uint8; one code per byte
    scale_ENg: Tensor  # float64, exactly as stored
    offset_ENg: Tensor | None = None

    def weights(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The stored weights, experts x depth x columns: exact in float64, else within one ulp of float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        w_ENK = torch.empty(self.code_ENK.shape, dtype=dtype)
        for e in some_experts(self.code_ENK):
            w_ENK[e] = self._weights(e, wide)
        return w_ENK.transpose(1, 2)

    def _weights(self, e: slice, wide: torch.dtype) -> Tensor:
        code_eNK, K = self.code_ENK[e], self.code_ENK.shape[2]
        first, numbers = (self.coding.numbers or (0.0,))[0], self.coding.numbers
        if self.coding.code == "e4m3":
            number_eNK = code_eNK.view(torch.float8_e4m3fn).to(wide)
        elif numbers != tuple(first + i for i in range(len(numbers))):
            number_eNK = torch.tensor(numbers, dtype=wide)[code_eNK.int()]
        else:
            number_eNK = code_eNK.to(wide)
            number_eNK = number_eNK.add_(first) if first else number_eNK
        group = self.coding.group or K
        cut_eNgi = torch.nn.functional.pad(number_eNK, (0, -K % group)).unflatten(2, (-1, group))
        cut_eNgi *= self.scale_ENg[e].to(wide).unsqueeze(-1)
        if self.offset_ENg is not None:
            cut_eNgi += self.offset_ENg[e].to(wide).unsqueeze(-1)
        return cut_eNgi.flatten(2)[:, :, :K]


class Stored(Protocol):
    """One matrix of E experts in a format: a frozen dataclass with the tensors as they are published."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> tuple[int, int, int]: ...  # experts, depth, columns

    def decoded(self) -> Decoded: ...


def bytes_per_weight(stored: Stored) -> float:
    """The bytes of all tensors of the format divided by the number of weights: 0.53125 for MXFP4."""
    E, K, N = stored.size
    return sum(tensor.nbytes for _, tensor in _tensors(stored)) / (E * K * N)


def joined(parts: Sequence[Stored], *, columns: bool = False) -> Stored:
    """Joins matrices of one format into one, along the experts or along the columns."""

    def join(tensors: Sequence[Tensor]) -> Tensor:
        if tensors[0].dtype == torch.float8_e4m3fn:  # torch cannot join these, only bytes
            return join([tensor.view(torch.uint8) for tensor in tensors]).view(torch.float8_e4m3fn)
        return torch.cat(list(tensors), dim=1 if columns else 0)

    first: Any = parts[0]
    values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(first)}
    tensors = {name: join(each) for name, each in values.items() if isinstance(each[0], Tensor)}
    return cast(Stored, replace(first, **tensors))


def side_by_side(experts: Sequence[Sequence[Stored]]) -> Stored:
    """Joins, for each expert, matrices of one format into one matrix with all their columns; copied once."""
    each, first = len(experts[0]), joined([part for parts in experts for part in parts])
    tensors = {name: tensor.unflatten(0, (-1, each)).flatten(1, 2) for name, tensor in _tensors(first)}
    return cast(Stored, replace(cast(Any, first), **tensors))


def experts_of(stored: Stored, e: slice) -> Stored:
    """Some of the experts, in the same memory."""
    return cast(Stored, replace(cast(Any, stored), **{name: tensor[e] for name, tensor in _tensors(stored)}))


def _tensors(stored: Any) -> Iterator[tuple[str, Tensor]]:
    for field in fields(stored):
        if isinstance(value := getattr(stored, field.name), Tensor):
            yield field.name, value


def some_experts(w_Exx: Tensor) -> list[slice]:
    """Slices of a few experts at a time, because all of them in a wider type may not fit in memory."""
    E = w_Exx.shape[0]
    step = max(1, (1 << 20) // max(1, w_Exx[0].numel())) if E else 1
    return [slice(e, e + step) for e in range(0, max(E, 1), step)]


def groups_of(w_EKN: Tensor, group: int) -> Iterator[Tensor]:
    """A few experts at a time, output first, with the depth divided into groups: e x N x groups x group in
    float32, with zeros after the end."""
    for e in some_experts(w_EKN):
        w_eNK = w_EKN[e].detach().transpose(1, 2).contiguous().float()
        yield torch.nn.functional.pad(w_eNK, (0, -w_eNK.shape[2] % group)).unflatten(2, (-1, group))


def positive(scale: Tensor) -> Tensor:
    """The scale, or 1 for a group of zeros."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def nibbles(code: Tensor) -> Tensor:
    """Two codes in a byte, the first in the lower half: [1, 2, 3] -> [0x21, 0x03]."""
    code = torch.nn.functional.pad(code, (0, code.shape[-1] % 2)).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def from_nibbles(byte: Tensor) -> Tensor:
    """The inverse: [0x21, 0x03] -> [1, 2, 3, 0]."""
    return torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2)


def check(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def check_tensor(stored: Stored, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a tensor of the format has this shape."""
    E, K, N = stored.size
    check(
        tuple(tensor.shape) == shape,
        f"{stored.name} of {E} experts, {N} columns of depth {K} needs {what} {shape}, "
        f"not {tuple(tensor.shape)}",
    )
