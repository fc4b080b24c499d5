"""Tensors that are spread over ranks: DTensors, and what one rank has of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(here: Tensor, like: Tensor) -> Tensor:
    """A tensor that is spread over ranks like another one."""
    if not isinstance(like, DTensor):
        return here
    return DTensor.from_local(here, like.device_mesh, like.placements, run_check=False)


@contextmanager
def locally(layer: nn.Module) -> Iterator[None]:
    """In it, parameters are the plain tensors that this rank has. The gradient of a tensor that all ranks
    have is the sum over ranks."""
    spread: list[tuple[dict[str, Any], str, Any]] = [
        (module._parameters, name, tensor)
        for module in layer.modules()
        for name, tensor in module._parameters.items()
        if isinstance(tensor, DTensor)
    ]
    for parameters, name, tensor in spread:
        grads = [Partial() if one.is_replicate() else one for one in tensor.placements]
        parameters[name] = tensor.to_local(grad_placements=grads)
    try:
        yield
    finally:
        for parameters, name, tensor in spread:
            parameters[name] = tensor


def summed(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The sums over a group, in one exchange for each dtype."""
    found = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].flatten() for place in places])
        dist.all_reduce(flat, group=group)
        for place, total in zip(places, flat.split([tensors[p].numel() for p in places]), strict=True):
            found[place] = total.view_as(tensors[place])
    return found


class WithGradients(torch.autograd.Function):
    """The result, whose backward pass gives each tensor a gradient, if only zeros: fully_shard exchanges the
    gradients that exist, and all ranks must have the same ones, even a rank without rows."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
        ctx.likes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *d_result: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)
        return d_result[0], *zeros
