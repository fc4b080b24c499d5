"""For the files of expert_ffn that call another library on a GPU: why it cannot run, how it orders columns.

No GPU has run these files. tests/ops/test_rivals.py makes each call against the signature in the library's
source, with a stand-in of plain torch behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.frozen import UNPACK, Form, Frozen
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.targets import assumed, target_of

DTYPES = (torch.bfloat16, torch.float16)
Freeze = Callable[[ExpertWeights], ExpertWeights]


def why_not(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, kernel: str,
    activation: str = "swiglu", biases: bool = False, targets: tuple[str, ...] = (),
) -> str | None:  # fmt: skip
    """Why a library cannot compute this layer here; None if it can. targets: the only ones; empty for all."""
    matrices = weights.w_in_EDG, weights.w_out_EFD
    if assumed() is None and x_TD.device.type != "cuda":
        return "it runs on a GPU"
    if len({tensor.device for tensor in (x_TD, gate_TK, plan.pair_R, *matrices)}) > 1:
        return "its tensors must be on one device"
    if targets and (name := target_of(x_TD.device).name) not in targets:
        return f"it has kernels for {', '.join(targets)}, not for {name}"
    if x_TD.dtype not in DTYPES or matrices[0].dtype != x_TD.dtype:
        return f"it computes bfloat16 or float16 throughout, not {x_TD.dtype} with {matrices[0].dtype}"
    if weights.activation != activation:
        return f"it computes {activation} here, not {weights.activation}"
    if not biases and (weights.b_in_EG is not None or weights.b_out_ED is not None):
        return "it has no biases here"
    if not plan.filled or not gate_TK.numel():
        return "there must be tokens, all of them with all their choices, and no padding"
    if weights.D % 8 or weights.F % 8:
        return f"it needs rows of a multiple of 16 bytes; D {weights.D} and F {weights.F} are not"
    for matrix in matrices:
        if isinstance(matrix, Frozen) and matrix.form.kernel != kernel:
            return f"the weights are frozen for {matrix.form.label}"
    return None


def alternating(w_EG: Tensor) -> Tensor:
    """Gate and up in turn, of a matrix or bias that has all of gate, then all of up."""
    return w_EG.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def halves(w_EG: Tensor) -> Tensor:
    return w_EG.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def up_first(w_EG: Tensor) -> Tensor:
    return torch.cat(w_EG.chunk(2, dim=1)[::-1], dim=1)


BACK: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {alternating: halves, up_first: up_first}


def freezer(kernel: str, order: Callable[[Tensor], Tensor]) -> Freeze:
    """The hook `freeze` of a library that reads matrices output first, w_in in its own order."""

    def freeze(weights: ExpertWeights) -> ExpertWeights:
        return replace(
            weights,
            w_in_EDG=packed(weights.w_in_EDG, order, gated=True),
            w_out_EFD=packed(weights.w_out_EFD, torch.clone, gated=False),
        )

    def packed(w_EKN: Tensor, change: Callable[[Tensor], Tensor], *, gated: bool) -> Frozen:
        E, depth, columns = w_EKN.shape
        form = Form(kernel=kernel, size=(E, depth, columns), dtype=w_EKN.dtype, gated=gated)
        return Frozen(change(w_EKN.detach().transpose(1, 2)).contiguous(), form)

    def unpacked(w_ENK: Tensor, form: Form) -> Tensor:
        return (BACK[order](w_ENK) if form.gated else w_ENK).transpose(1, 2).contiguous()

    UNPACK[kernel] = unpacked
    return freeze


def panels(weights: ExpertWeights, freeze: Freeze) -> tuple[Tensor, Tensor]:
    """w_in and w_out as the library reads them; plain weights are copied."""
    frozen = weights if isinstance(weights.w_in_EDG, Frozen) else freeze(weights)
    w_in, w_out = frozen.w_in_EDG, frozen.w_out_EFD
    assert isinstance(w_in, Frozen) and isinstance(w_out, Frozen)
    return w_in.panels, w_out.panels
