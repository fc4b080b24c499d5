"""Shared by the CuTe DSL kernels: memory access of threads, and a watched run of all threads on the CPU.

It needs nvidia-cutlass-dsl (NVIDIA's licence, which is not open). Only `ops/<op>/cute_*.py` import this file.

A kernel is written as a **body**: a `@cute.jit` function of (block, thread, tensors). On a GPU `@cute.kernel`
calls it with the hardware's numbers. On a CPU, with MRB_CUTE_ON_CPU=1, a loop calls the same function for
every block and thread, compiled by CuTe's host JIT. A kernel with a barrier has two bodies. On the CPU every
access goes through `watch`. A kernel raises KernelMemoryError if a thread accesses memory outside its tensor,
if an element is stored twice or never, if an address is not aligned, or if shared memory is read that was
never written. On a GPU `watch` is None and these checks do not exist.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ON_CPU = os.environ.get("MRB_CUTE_ON_CPU") == "1"
if ON_CPU or not torch.cuda.is_available():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_80")  # else the import looks for a driver

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_ptr  # noqa: E402

THREADS = 128

import cuda.bindings.driver as cuda  # noqa: E402  # part of cutlass, which our messages name

WIDEST = 16  # bytes of one access
DTYPES = {
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.int64: cutlass.Int64,
    torch.int32: cutlass.Int32,
}
# the host JIT of cutlass-dsl 4.8.1 fails at bfloat16 with "Symbols not found: [ __truncsfbf2 ]", so on the
# CPU it is bits that integer arithmetic converts
BFLOAT16_ON_CPU = cutlass.Int16
FAULTS = (
    "loads lie outside their tensor",
    "stores lie outside their tensor",
    "elements were stored twice",
    "accesses are not aligned to their width",
    "loads of shared memory that nobody has written",
)
LOAD_OUTSIDE, STORE_OUTSIDE, TWICE, MISALIGNED, UNWRITTEN = range(len(FAULTS))


class KernelMemoryError(Exception):
    """A thread accessed memory in a forbidden way."""


def why_not(*tensors: Tensor) -> str | None:
    """Why a CuTe kernel cannot run on these tensors here; None if it can."""
    if len({tensor.device for tensor in tensors}) > 1:
        return "its tensors must be on one device"
    if all(tensor.device.type == "cuda" for tensor in tensors):
        if torch.version.hip is not None:
            return "CuTe DSL is for NVIDIA's GPUs"
        return "with MRB_CUTE_ON_CPU=1 it needs CPU tensors" if ON_CPU else None
    if any(tensor.device.type != "cpu" for tensor in tensors) or not ON_CPU:
        return "it runs on a GPU; MRB_CUTE_ON_CPU=1 runs its threads one by one on a CPU, for tests"
    return None


def width_for(D: int, *tensors: Tensor) -> int:
    """How many numbers of a row one access can take: 16 bytes if all sizes are multiples of that."""
    width = WIDEST // tensors[0].element_size()
    while width > 1 and (
        D % width
        or any(t.shape[1] > 1 and t.stride(1) != 1 for t in tensors)
        or any(t.shape[0] > 1 and t.stride(0) % width for t in tensors)
        or any(t.data_ptr() % (width * t.element_size()) for t in tensors)
    ):
        width //= 2
    return width


def pointer(
    tensor: Tensor | None, dtype: torch.dtype | None = None, width: int = 1, on_cpu: bool = ON_CPU
) -> Any:
    """A pointer for a kernel; without a tensor, a pointer that is only used to compile."""
    kind = dtype or (torch.int32 if tensor is None else tensor.dtype)
    size = torch.empty(0, dtype=kind).element_size()
    address = 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()
    element = DTYPES[kind] if not on_cpu or kind != torch.bfloat16 else BFLOAT16_ON_CPU
    return make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=size * width)


@cute.jit
def matrix(memory: cute.Pointer, rows, columns, stride, column_stride, WIDTH: cutlass.Constexpr):
    """rows x columns numbers. With WIDTH > 1 a row is contiguous and rows begin at multiples of WIDTH."""
    if cutlass.const_expr(WIDTH > 1):
        layout = cute.make_layout((rows, columns), stride=(cute.assume(stride, divby=WIDTH), 1))
        return cute.make_tensor(memory, layout)
    return cute.make_tensor(memory, cute.make_layout((rows, columns), stride=(stride, column_stride)))


@cute.jit
def vector(memory: cute.Pointer, numbers):
    return cute.make_tensor(memory, cute.make_layout((numbers,)))


@cute.jit
def _fault(watch, kind: cutlass.Constexpr):
    watch[kind] = watch[kind] + 1


@cute.jit
def _is_inside(tensor: cute.Tensor, row, chunk, WIDTH: cutlass.Constexpr):
    rows, columns = tensor.shape
    return row >= 0 and row < rows and chunk >= 0 and (chunk + 1) * WIDTH <= columns


@cute.jit
def _look_at_alignment(chunk: cute.Tensor, WIDTH: cutlass.Constexpr, watch):
    if chunk.iterator.toint() % (WIDTH * chunk.element_type.width // 8) != 0:
        _fault(watch, MISALIGNED)


@cute.jit
def load(into: cute.Tensor, source: cute.Tensor, row, chunk, watch):
    """into = source[row, chunk * WIDTH : (chunk + 1) * WIDTH] in one access, where WIDTH is into's size."""
    WIDTH = cutlass.const_expr(cute.size(into))
    if cutlass.const_expr(watch is None):
        cute.autovec_copy(cute.local_tile(source, (1, WIDTH), (row, chunk)), into)
    elif _is_inside(source, row, chunk, WIDTH):
        place = cute.local_tile(source, (1, WIDTH), (row, chunk))
        _look_at_alignment(place, WIDTH, watch)
        cute.autovec_copy(place, into)
    else:
        _fault(watch, LOAD_OUTSIDE)


@cute.jit
def store(values: cute.Tensor, target: cute.Tensor, row, chunk, watch, stored):
    """target[row, chunk * WIDTH : (chunk + 1) * WIDTH] = values in one access. `stored`, a matrix of the same
    shape, counts the stores."""
    WIDTH = cutlass.const_expr(cute.size(values))
    if cutlass.const_expr(watch is None):
        cute.autovec_copy(values, cute.local_tile(target, (1, WIDTH), (row, chunk)))
    elif _is_inside(target, row, chunk, WIDTH):
        place = cute.local_tile(target, (1, WIDTH), (row, chunk))
        _look_at_alignment(place, WIDTH, watch)
        cute.autovec_copy(values, place)
        for w in cutlass.range_constexpr(WIDTH):
            column = chunk * WIDTH + w
            if stored[row, column] != 0:
                _fault(watch, TWICE)
            stored[row, column] = stored[row, column] + 1
    else:
        _fault(watch, STORE_OUTSIDE)


@cute.jit
def load_shared(into: cute.Tensor, source: cute.Tensor, row, column, watch, stored):
    """into = source[row, column] of shared memory, after a barrier."""
    if cutlass.const_expr(watch is not None):
        if _is_inside(source, row, column, 1):
            if stored[row, column] == 0:
                _fault(watch, UNWRITTEN)
    load(into, source, row, column, watch)


@cute.jit
def forget(stored: cute.Tensor):
    """Marks shared memory as unwritten, at the start of every block."""
    rows, columns = stored.shape
    for row in cutlass.range_constexpr(rows):
        for column in cutlass.range_constexpr(columns):
            stored[row, column] = 0


@cute.jit
def number(source: cute.Tensor, place, watch):
    """source[place] of a vector: an index."""
    value = source.element_type(-1)
    if cutlass.const_expr(watch is None):
        value = source[place]
    elif place >= 0 and place < cute.size(source):
        value = source[place]
    else:
        _fault(watch, LOAD_OUTSIDE)
    return value


@cute.jit
def piece(WIDTH: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """WIDTH zeros in registers."""
    zeros = cute.make_rmem_tensor(cute.make_layout((1, WIDTH)), dtype)
    zeros.fill(0)
    return zeros


@cute.jit
def widened(values: cute.Tensor):
    """Values in registers as float32."""
    wide = piece(cutlass.const_expr(cute.size(values)), cutlass.Float32)
    if cutlass.const_expr(values.element_type is BFLOAT16_ON_CPU):
        bits_of = cute.recast_tensor(wide, cutlass.Uint32)
        for w in cutlass.range_constexpr(cute.size(values)):
            bits_of[w] = values[w].to(cutlass.Uint32) << 16
    else:
        wide.store(values.load().to(cutlass.Float32))
    return wide


@cute.jit
def rounded(wide: cute.Tensor, dtype: cutlass.Constexpr):
    """float32 values in registers, rounded to another dtype."""
    values = piece(cutlass.const_expr(cute.size(wide)), dtype)
    if cutlass.const_expr(dtype is BFLOAT16_ON_CPU):
        bits_of = cute.recast_tensor(wide, cutlass.Uint32)
        for w in cutlass.range_constexpr(cute.size(wide)):
            bits = bits_of[w]
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            if (bits & 0x7FFFFFFF) > 0x7F800000:
                nearest = cutlass.Uint32(0x7FC0)  # NaN
            values[w] = nearest.to(BFLOAT16_ON_CPU)
    else:
        values.store(wide.load().to(dtype))
    return values


class Watch:
    """Counts faults, and the stores to every element of the results, while a kernel's threads run on the CPU.
    On a GPU nothing is counted and the pointers are null."""

    def __init__(self, device: torch.device, *results: Tensor):
        watched = device.type == "cpu"
        self.faults = torch.zeros(len(FAULTS), dtype=torch.int32) if watched else None
        self.stored = [torch.zeros(t.shape, dtype=torch.int32) if watched else None for t in results]

    def pointers(self) -> list[Any]:
        return [pointer(self.faults), *map(pointer, self.stored)]

    def check(self, kernel: str, whole: bool = True) -> None:
        """Raises an error for the faults found. `whole`: every element of the results must have been
        stored."""
        if self.faults is None:
            return
        counted = [f"{n} {fault}" for n, fault in zip(self.faults.tolist(), FAULTS, strict=True) if n]
        for stored in self.stored:
            if stored is not None and whole and (missing := int((stored == 0).sum())):
                counted.append(f"{missing} elements of a result were never stored")
        if counted:
            raise KernelMemoryError(f"{kernel}: {'; '.join(counted)}")


class Launch:
    """A compiled `@cute.jit` function (*arguments, stream, *constants, ON_CPU). With ON_CPU it loops over
    blocks and threads. Else it launches a kernel on this machine's GPU ("gpu"), or it is compiled for the
    named architecture, and its code is in `ptx` and `cubin`."""

    def __init__(
        self, entry: Callable[..., Any], arguments: Sequence[Any], constants: Sequence[Any], arch: str
    ):
        on_cpu = arch == "cpu"
        stream = cuda.CUstream(0) if on_cpu else make_fake_stream()
        given = (*arguments, stream, *constants, on_cpu)
        self.ptx, self.cubin = "", b""
        if arch in ("cpu", "gpu"):
            self.compiled = cute.compile(entry, *given)
            return
        with tempfile.TemporaryDirectory() as folder:
            options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
            self.compiled = cute.compile(entry, *given, options=options)
            self.ptx, self.cubin = self.compiled.__ptx__, self.compiled.__cubin__

    def __call__(self, device: torch.device, *arguments: Any) -> None:
        if device.type != "cuda":
            self.compiled(*arguments, cuda.CUstream(0))
            return
        with torch.cuda.device(device):
            self.compiled(*arguments, cuda.CUstream(torch.cuda.current_stream(device).cuda_stream))


def here(device: torch.device) -> str:
    """The architecture for Launch, to run on this device."""
    return "gpu" if device.type == "cuda" else "cpu"


def strides(tensor: Tensor) -> list[Any]:
    return [cutlass.Int64(stride) for stride in tensor.stride()]
