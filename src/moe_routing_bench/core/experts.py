"""Weights of E experts in one documented layout, their activations, and converters from Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.core import position_invariant as steady
from moe_routing_bench.formats.named import INT8_ROWS, INT8_ROWS_ERROR, quantise, rounding
from moe_routing_bench.formats.stored import Stored

# gpt-oss: swiglu_alpha and swiglu_limit of its config, which are constants in OpenAI's own code
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0


def _swiglu_oai(
    gate_RF: Tensor, up_RF: Tensor, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Tensor:
    """g sigmoid(1.702 g) (u + 1), with g at most 7 and u within -7 .. 7."""
    gate_RF, up_RF = gate_RF.clamp(max=OAI_LIMIT), up_RF.clamp(-OAI_LIMIT, OAI_LIMIT)
    return gate_RF * sigmoid(OAI_ALPHA * gate_RF) * (up_RF + 1)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda h_RF: F.relu(h_RF).square(),
    "silu": F.silu,
}
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate_RF, up_RF: F.silu(gate_RF) * up_RF,
    "geglu": lambda gate_RF, up_RF: F.gelu(gate_RF) * up_RF,
    "swiglu_oai": _swiglu_oai,
}
ACTIVATIONS = (*PLAIN, *GATED)
# the same functions, with bits that do not depend on the place of a number in memory
STEADY: dict[str, Callable[..., Tensor]] = {
    "gelu": steady.gelu,
    "silu": steady.silu,
    "swiglu": lambda gate_RF, up_RF: steady.silu(gate_RF) * up_RF,
    "geglu": lambda gate_RF, up_RF: steady.gelu(gate_RF) * up_RF,
    "swiglu_oai": lambda gate_RF, up_RF: _swiglu_oai(gate_RF, up_RF, steady.sigmoid),
}


def activate(h_RG: Tensor, activation: str, *, batch_invariant: bool = False) -> Tensor:
    """Applies the activation: h_RG -> h_RF. If it is gated, the first half of the columns is the gate and the
    second half is multiplied by it. GELU is the exact (erf) form. batch_invariant: use position_invariant.py.
    """
    functions: dict[str, Callable[..., Tensor]]
    functions = {**PLAIN, **GATED, **STEADY} if batch_invariant else {**PLAIN, **GATED}
    if activation in GATED:
        return functions[activation](*h_RG.chunk(2, dim=-1))
    return functions[activation](h_RG)


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Expert e computes  activate(x @ w_in[e] + b_in[e]) @ w_out[e] + b_out[e].

    E=2 experts, D=3, F=4, swiglu, so G=8:
      w_in_EDG   2 x 3 x 8    columns 0-3 are the gate, columns 4-7 the up projection
      w_out_EFD  2 x 4 x 3
    A transposed view is as good as a contiguous tensor, so the weights of a Transformers model, which are
    stored output-first, are used without a copy.

    >>> weights = mrb.ExpertWeights(w_in_EDG=torch.randn(2, 3, 8), w_out_EFD=torch.randn(2, 4, 3))
    >>> weights.num_experts, weights.D, weights.F
    (2, 3, 4)
    """

    w_in_EDG: Tensor
    w_out_EFD: Tensor
    b_in_EG: Tensor | None = None
    b_out_ED: Tensor | None = None
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is unknown; there are {', '.join(ACTIVATIONS)}")

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def num_experts(self) -> int:
        return self.w_in_EDG.shape[0]

    @property
    def D(self) -> int:
        return self.w_in_EDG.shape[1]

    @property
    def F(self) -> int:
        return self.w_out_EFD.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        names = ("w_in_EDG", "w_out_EFD", "b_in_EG", "b_out_ED")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ExpertWeights:
        moved: dict[str, Any] = {
            name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors().items()
        }
        return replace(self, **moved)

    def error_stored(self, store: str) -> float:
        """Estimates the error of results if these weights are stored in a format: root mean square, relative
        to the exact results. The matrices are rounded independently, so the squares of their errors add
        up."""
        name, rows = store.removesuffix(INT8_ROWS), INT8_ROWS_ERROR if store.endswith(INT8_ROWS) else 0.0
        into = [rounding(self.w_in_EDG, name)] * (2 if self.gated else 1)
        return math.hypot(*into, rounding(self.w_out_EFD, name), rows)

    def validate(self) -> ExpertWeights:
        if self.w_in_EDG.ndim != 3 or self.w_out_EFD.ndim != 3:
            raise ValueError("w_in_EDG and w_out_EFD have three dimensions: experts, inputs, outputs")
        E, D, G = self.w_in_EDG.shape
        F_ = G // 2 if self.gated else G
        if self.gated and G % 2:
            raise ValueError(
                f"{self.activation} is gated, so w_in_EDG needs an even number of columns, not {G}"
            )
        expected = {"w_out_EFD": (E, F_, D), "b_in_EG": (E, G), "b_out_ED": (E, D)}
        for name, tensor in self.tensors().items():
            if name in expected and tuple(tensor.shape) != expected[name]:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; w_in_EDG {(E, D, G)} with {self.activation} "
                    f"needs {expected[name]}"
                )
            if tensor.dtype != self.w_in_EDG.dtype or tensor.device != self.w_in_EDG.device:
                raise ValueError(f"{name} must have the dtype and device of w_in_EDG")
        return self


@dataclass(frozen=True, kw_only=True)
class QuantisedExperts:
    """ExpertWeights as a checkpoint stores them in 8 or 4 bits: both matrices in one format.

    A layer of gpt-oss-20b: w_in and w_out are MXFP4 of size (32, 2880, 5760) and (32, 2880, 2880), columns
    0-2879 of w_in are the gate and the others the up projection, activation="swiglu_oai", store "mxfp4".
    Implementations need it frozen: native.freeze_stored(experts, torch.bfloat16).
    """

    w_in: Stored
    w_out: Stored
    b_in_EG: Tensor | None = None
    b_out_ED: Tensor | None = None
    activation: str = "swiglu"

    @classmethod
    def of(cls, weights: ExpertWeights, name: str) -> QuantisedExperts:
        """Rounds the matrices to a format, given by its name in formats/named.py. Biases are not changed."""
        w_in, w_out = (quantise(w.detach(), name) for w in (weights.w_in_EDG, weights.w_out_EFD))
        return cls(
            w_in=w_in, w_out=w_out, b_in_EG=weights.b_in_EG, b_out_ED=weights.b_out_ED,
            activation=weights.activation,
        )  # fmt: skip

    @property
    def store(self) -> str:
        return self.w_in.name

    def dequantised(self, dtype: torch.dtype = torch.float64) -> ExpertWeights:
        """The same with plain weights. They are exact in float64, so the oracle can use them."""
        b_in_EG, b_out_ED = (None if b is None else b.to(dtype) for b in (self.b_in_EG, self.b_out_ED))
        return ExpertWeights(
            w_in_EDG=self.w_in.decoded().weights(dtype), w_out_EFD=self.w_out.decoded().weights(dtype),
            b_in_EG=b_in_EG, b_out_ED=b_out_ED, activation=self.activation,
        ).validate()  # fmt: skip

    def validate(self) -> QuantisedExperts:
        if self.w_in.name != self.w_out.name:
            raise ValueError(
                f"the first matrix is stored as {self.w_in.name} and the second as {self.w_out.name}; "
                "experts have one format"
            )
        self.described(torch.float32)
        return self

    def described(self, dtype: torch.dtype) -> ExpertWeights:
        """The sizes and the activation: matrices on the device meta, no biases."""
        w_in, w_out = (
            torch.empty(stored.size, dtype=dtype, device="meta") for stored in (self.w_in, self.w_out)
        )
        return ExpertWeights(w_in_EDG=w_in, w_out_EFD=w_out, activation=self.activation).validate()


def from_transformers(
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    activation: str,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    is_transposed: bool = False,
    is_concatenated: bool = True,
) -> ExpertWeights:
    """Takes weights as Transformers 5 keeps them in an experts module. The flags have its names.

    default        gate_up_proj (E, 2F, D), down_proj (E, D, F)    most models; views, no copy
    is_transposed  gate_up_proj (E, D, 2F), down_proj (E, F, D)    views, no copy
    not is_concatenated: gate and up columns alternate (gpt-oss); they are copied into halves.
    For experts without a gate pass `up_proj` as gate_up_proj and a plain activation.

    >>> weights = mrb.from_transformers(torch.randn(2, 8, 3), torch.randn(2, 3, 4), activation="swiglu")
    >>> weights.w_in_EDG.shape
    torch.Size([2, 3, 8])
    """
    w_in_EDG = gate_up_proj if is_transposed else gate_up_proj.transpose(1, 2)
    w_out_EFD = down_proj if is_transposed else down_proj.transpose(1, 2)
    b_in_EG = gate_up_proj_bias
    if not is_concatenated:
        w_in_EDG = torch.cat((w_in_EDG[..., 0::2], w_in_EDG[..., 1::2]), dim=-1)
        if b_in_EG is not None:
            b_in_EG = torch.cat((b_in_EG[..., 0::2], b_in_EG[..., 1::2]), dim=-1)
    return ExpertWeights(
        w_in_EDG=w_in_EDG,
        w_out_EFD=w_out_EFD,
        b_in_EG=b_in_EG,
        b_out_ED=down_proj_bias,
        activation=activation,
    ).validate()


def to_transformers(
    weights: ExpertWeights, *, is_transposed: bool = False, is_concatenated: bool = True
) -> dict[str, Tensor]:
    """The inverse of from_transformers: tensors by its keyword names; views where nothing is reordered.

    >>> given = mrb.to_transformers(mrb.Experts(D=3, F=4, E=2).weights())
    >>> given["gate_up_proj"].shape
    torch.Size([2, 8, 3])
    """
    w_in_EDG, b_in_EG = weights.w_in_EDG, weights.b_in_EG
    if not is_concatenated:
        w_in_EDG = torch.stack(w_in_EDG.chunk(2, dim=-1), dim=-1).flatten(-2)
        if b_in_EG is not None:
            b_in_EG = torch.stack(b_in_EG.chunk(2, dim=-1), dim=-1).flatten(-2)
    tensors = {
        "gate_up_proj": w_in_EDG if is_transposed else w_in_EDG.transpose(1, 2),
        "down_proj": weights.w_out_EFD if is_transposed else weights.w_out_EFD.transpose(1, 2),
        "gate_up_proj_bias": b_in_EG,
        "down_proj_bias": weights.b_out_ED,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def from_expert_list(
    gate: Sequence[Tensor] | None, up: Sequence[Tensor], down: Sequence[Tensor], *, activation: str
) -> ExpertWeights:
    """Copies the weights of older models, which have one nn.Linear weight (outputs x inputs) per expert and
    projection: Mixtral's w1 (gate), w3 (up), w2 (down). gate=None is for experts without a gate.

    >>> up, down = [torch.randn(4, 3)] * 2, [torch.randn(3, 4)] * 2  # two experts, D=3, F=4
    >>> mrb.from_expert_list(up, up, down, activation="swiglu").w_in_EDG.shape
    torch.Size([2, 3, 8])
    """
    w_up_EDF = torch.stack([w.transpose(0, 1) for w in up])
    w_out_EFD = torch.stack([w.transpose(0, 1) for w in down])
    if gate is None:
        w_in_EDG = w_up_EDF
    else:
        w_in_EDG = torch.cat((torch.stack([w.transpose(0, 1) for w in gate]), w_up_EDF), dim=-1)
    return ExpertWeights(w_in_EDG=w_in_EDG, w_out_EFD=w_out_EFD, activation=activation).validate()
