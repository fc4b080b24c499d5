"""a sum over choices"""

from __future__ import annotations

from torch import Tensor


def unsupported(x_TD: Tensor, gate_TK: Tensor) -> str | None:
    return "it takes at least one choice" if gate_TK.shape[1] == 0 else None


def run(x_TD: Tensor, gate_TK: Tensor) -> Tensor:
    wide_TD = x_TD.to(gate_TK.dtype)
    y_TD = wide_TD * gate_TK[:, :1]
    for k in range(1, gate_TK.shape[1]):
        y_TD = y_TD + wide_TD * gate_TK[:, k : k + 1]
    return y_TD.to(x_TD.dtype)
