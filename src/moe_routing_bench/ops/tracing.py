"""What torch.compile must not look into: a function that it calls once and whose answer it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def while_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Make torch.compile call this function while tracing, and keep the result. This sets the same mark as
    torch.compiler.assume_constant_result, which takes a second to import all of torch.compile."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
