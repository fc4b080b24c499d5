"""torch's compiler for implementations that it makes: what it cannot compile for, and how it is loaded."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_routing_bench.core import cpp

OPTIONS: dict[str, Any] = {"compile_threads": 1}  # in this process, because workers may not start others


def why_not(*tensors: Tensor) -> str | None:
    """Why nothing can be compiled for these tensors of the CPU; None if it can."""
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return "a fake tensor cannot be compiled for"
    if not all(tensor.is_cpu for tensor in tensors):
        return f"it is compiled for the CPU, not for {tensors[0].device}"
    return cpp.why_not_compiled()


def load() -> None:
    with warnings.catch_warnings():  # torch 2.13's compiler imports what torch 2.13 calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch._inductor.compile_fx")
        import_module("torch.utils.mkldnn")
