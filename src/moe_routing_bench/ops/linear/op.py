"""linear: each token times a matrix.   x_TD, w_FD, b_F -> y_TF

y = x w^T (+ b), summed in at least float32. The matrix lies output first, as in nn.Linear. An implementation
that likes it packed defines freeze(w_FD), which gives a PackedMatrix.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.frozen import PackedMatrix
from moe_routing_bench.ops.auto import resolve
from moe_routing_bench.ops.registry import Op


def reference(x_TD: Tensor, w_FD: Tensor, b_F: Tensor | None) -> Tensor:
    return functional.linear(x_TD, w_FD.to(x_TD.dtype), b_F)


def cost(x_TD: Tensor, w_FD: Tensor, b_F: Tensor | None) -> Cost:
    (T, D), F, size = x_TD.shape, w_FD.shape[0], x_TD.element_size()
    flops = 2 * T * D * F
    bias = 0 if b_F is None else F * b_F.element_size()
    return Cost(
        useful_flops=flops,
        executed_flops=flops,
        weight_bytes=D * F * w_FD.element_size() + bias,
        activation_bytes=T * (D + F) * size,
    )


def why_not_packed(w_FD: Tensor | PackedMatrix, kernel: str, store: str | None = None) -> str | None:
    """Why this implementation cannot read the matrix; None if it can."""
    if isinstance(w_FD, PackedMatrix) and (w_FD.kernel, w_FD.store) != (kernel, store):
        return f"the matrix is packed for linear.{w_FD.label}"
    return None


op = Op(
    __package__, reference, cost=cost, default="torch", weights="w_FD", stage=12,
    usual=("torch", "mkl_packed", "onednn_packed", "inductor_frozen", "native", "frozen(native)"),
)  # fmt: skip


def linear(
    x_TD: Tensor, w_FD: Tensor | PackedMatrix, b_F: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """Multiply each token by a matrix.

    >>> mrb.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[11.0]]
    """
    return resolve(op, w_FD.label if isinstance(w_FD, PackedMatrix) and impl == "auto" else impl)(
        x_TD, w_FD, b_F
    )
