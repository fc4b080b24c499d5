"""Repairs Triton's CPU interpreter: bfloat16 as numbers, and TF32 where a kernel asks for it.

The stock interpreter (3.7.1 and 3.9.0) keeps bfloat16 as 16-bit integers and computes with the integers, so
1.5 * 2 is nonsense. It cuts float32 to bfloat16 instead of rounding (triton-lang/triton issue 11584). Its
float32 products are exact, where a GPU uses TF32 unless the kernel asks for `input_precision="ieee"`; a
kernel that forgets to ask looks better than it is. TRITON_INTERPRET=1 must be set before triton is imported.

    with repaired():
        kernel[grid](...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle


def as_float32(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of the nearest bfloat16, rounding ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def as_tf32(values: np.ndarray) -> np.ndarray:
    """Rounds float32 to 10 bits of mantissa, as tensor cores read it."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x0FFF) + ((bits >> 13) & 1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


@contextlib.contextmanager
def replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Replaces attributes of a class inside `with`; those that did not exist are removed afterwards."""
    before = {name: owner.__dict__.get(name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Inside, numbers are right, and NaN and overflow give no warnings of numpy, as on a GPU."""
    if InterpreterBuilder.create_dot.__module__ == __name__:
        yield  # they are already
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(InterpreterBuilder, **_builder_functions(InterpreterBuilder)))
        stack.enter_context(replaced(ReduceScanOpInterface, apply=_reduce(ReduceScanOpInterface.apply)))
        stack.enter_context(replaced(interpreter, _patch_lang=_PatchedOnce(interpreter._patch_lang)))
        stack.enter_context(np.errstate(all="ignore"))
        yield


class _PatchedOnce:
    """Patches the language once a launch. The stock interpreter does it again for every device function, such
    as tl.sum, which takes a quarter of its time."""

    def __init__(self, stock: Callable[[Any], Any]):
        self.stock, self.scope = stock, None

    def __call__(self, function: Any) -> _PatchedOnce:
        if self.scope is None:
            # both names by which kernels and the language's own functions know it
            self.scope = self.stock(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            return self
        return _PatchedOnce(self.stock)  # of a call inside: nothing to restore

    def restore(self) -> None:
        if self.scope is not None:
            self.scope.restore()
            self.scope = None


def _is_bfloat16(handle: Any) -> bool:
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16


def _wide(handle: Any) -> Any:
    return TensorHandle(as_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrow(handle: Any) -> Any:
    return TensorHandle(as_bfloat16(handle.data), tl.bfloat16)


def _builder_functions(stock: Any) -> dict[str, Callable[..., Any]]:
    dot, binary, unary, ternary = stock.create_dot, stock.binary_op, stock.unary_op, stock.ternary_op
    fma, cast, fp_to_fp = stock.create_fma, stock.cast_impl, stock.create_fp_to_fp
    tf32 = interpreter._ir.INPUT_PRECISION.TF32

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision == tf32 and a.dtype.scalar == tl.float32:
            a, b = (TensorHandle(as_tf32(operand.data), tl.float32) for operand in (a, b))
        return dot(self, _wide(a), _wide(b), d, precision, *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_bfloat16(lhs):
            return binary(self, lhs, rhs, op)
        result = binary(self, _wide(lhs), _wide(rhs), op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else _narrow(result)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return _narrow(unary(self, _wide(arg), op)) if _is_bfloat16(arg) else unary(self, arg, op)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not _is_bfloat16(other):  # a choice moves bits and computes nothing
            return ternary(self, lhs, rhs, other, op)
        return _narrow(ternary(self, _wide(lhs), _wide(rhs), _wide(other), op))

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bfloat16(z):
            return fma(self, x, y, z)
        return _narrow(fma(self, _wide(x), _wide(y), _wide(z)))

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            return src if _is_bfloat16(src) else _narrow(cast(self, src, tl.float32))
        return cast(self, _wide(src), dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        src = _wide(src)
        if dst_type.scalar != tl.bfloat16:
            return src if src.dtype.scalar == dst_type.scalar else fp_to_fp(self, src, dst_type, rounding)
        is_fp8 = src.dtype.primitive_bitwidth == 8
        return _narrow(fp_to_fp(self, src, tl.float32, rounding) if is_fp8 else cast(self, src, tl.float32))

    def get_bf16(self: Any, value: float) -> Any:
        return TensorHandle(as_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)

    return {
        "create_dot": create_dot,
        "binary_op": binary_op,
        "unary_op": unary_op,
        "ternary_op": ternary_op,
        "create_fma": create_fma,
        "cast_impl": cast_impl,
        "create_fp_to_fp": create_fp_to_fp,
        "get_bf16": get_bf16,
    }


def _reduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Makes reductions and scans compute in float32 and round once at the end to the input's dtype."""

    def apply(self: Any, given: Any) -> Any:
        if not isinstance(given, tuple):
            return apply(self, (given,))[0]
        narrow = [_is_bfloat16(tensor.handle) for tensor in given]
        if not any(narrow):
            return stock(self, given)
        wide = tuple(_retyped(t, _wide(t.handle)) if n else t for t, n in zip(given, narrow, strict=True))
        results = stock(self, wide)
        # an arg-reduction of (values, indices) gives them in the same places; others give one result
        return tuple(
            _retyped(result, _narrow(result.handle)) if n and result.dtype == tl.float32 else result
            for result, n in zip(results, narrow, strict=False)
        )

    return apply


def _retyped(tensor: Any, handle: Any) -> Any:
    shape = list(np.shape(handle.data)) if tensor.type.is_block() else None
    return tl.core.tensor(handle, handle.dtype if shape is None else tl.block_type(handle.dtype, shape))
