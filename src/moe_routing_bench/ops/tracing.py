"""Marks functions that torch.compile calls once while tracing instead of tracing into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def while_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Makes torch.compile call this function while tracing and treat the result as a constant. It sets the
    same mark as torch.compiler.assume_constant_result, which would import all of torch.compile (1 s)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
