"""Checks every load and store of an interpreted Triton kernel, with its programs in any order.

The interpreter runs programs one after the other and reads any address. A kernel that reads past its tensor,
or whose programs overwrite each other, gives right numbers there and garbage on a GPU. Inside `instrumented`
such kernels raise instead:

  OutOfBoundsError    a lane uses memory that is not an element of an argument, or a gap of a strided view
  RaceError           two programs use one address and one of them writes it (atomics may meet atomics); or a
                      program writes an address twice or reads what it wrote, though its threads are not in
                      step
  UninitialisedError  a lane reads memory from torch.empty that nothing has written
  OrderError          floats are added atomically, so the sum depends on the order of programs

    with instrumented(order="random", seed=1) as seen:
        kernel[grid](...)
    seen.launches, seen.programs, seen.lanes
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorDescriptor

from moe_routing_bench.conformance.interpreting import repaired, replaced

NOBODY, MANY = -1, -2
Order = Literal["forward", "reversed", "random"]


class KernelMemoryError(Exception):
    """A kernel used memory in a way it must not."""


class OutOfBoundsError(KernelMemoryError):
    pass


class RaceError(KernelMemoryError):
    pass


class UninitialisedError(KernelMemoryError):
    pass


class OrderError(KernelMemoryError):
    pass


class _Region:
    """One range of memory that arguments share: for every byte, whether it is theirs and who used it."""

    def __init__(self, start: int, stop: int):
        size = stop - start
        self.start, self.stop = start, stop
        self.valid = np.zeros(size, dtype=bool)
        self.unwritten = np.zeros(size, dtype=bool)
        self.writer = np.full(size, NOBODY, dtype=np.int32)
        self.reader = np.full(size, NOBODY, dtype=np.int32)
        self.atomic = np.full(size, NOBODY, dtype=np.int32)
        self.write_phase = np.zeros(size, dtype=np.int32)


@dataclass
class Seen:
    """What was watched: Seen(launches=2, programs=14, lanes=40960)."""

    launches: int = 0
    programs: int = 0
    lanes: int = 0
    order: Order = "random"
    seed: int = 0
    # address of memory from torch.empty -> which of its bytes were never written
    empty: dict[int, np.ndarray] = field(default_factory=dict)


class _Watch:
    """The state and the checks of one launch."""

    def __init__(self, seen: Seen, tensors: list[Tensor], kernel: str):
        self.seen, self.kernel = seen, kernel
        self.program, self.linear, self.phase = (0, 0, 0), 0, 0
        self.permutation: np.ndarray | None = None
        self.regions = _regions(tensors, seen.empty)
        self.starts = np.array([region.start for region in self.regions], dtype=np.int64)

    def place(self, grid: tuple[int, int, int], x: int, y: int, z: int) -> tuple[int, int, int]:
        """Returns the program that runs now, instead of (x, y, z)."""
        nx, ny, nz = grid
        linear = (x * ny + y) * nz + z
        if self.seen.order == "reversed":
            linear = nx * ny * nz - 1 - linear
        elif self.seen.order == "random":
            if self.permutation is None:
                dice = np.random.default_rng((self.seen.seed, self.seen.launches))
                self.permutation = dice.permutation(nx * ny * nz)
            linear = int(self.permutation[linear])
        self.seen.programs += 1
        self.linear, self.phase = linear, 0
        self.program = (linear // (ny * nz), linear // nz % ny, linear % nz)
        return self.program

    def access(self, pointers: Any, mask: Any, use: str) -> None:
        address = np.asarray(pointers.data).astype(np.int64)
        if mask is not None:
            address = address[np.broadcast_to(np.asarray(mask.data, dtype=bool), address.shape)]
        address = address.ravel()
        if address.size == 0:
            return
        self.seen.lanes += address.size
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        index = np.searchsorted(self.starts, address, side="right") - 1
        if self.starts.size == 0 or (index < 0).any():
            self.fail(
                OutOfBoundsError,
                use,
                int((index < 0).sum()) or address.size,
                "are before every argument",
            )
        for number in np.unique(index):
            region = self.regions[number]
            at = address[index == number] - region.start
            beyond = at + width > region.stop - region.start
            if beyond.any():
                self.fail(OutOfBoundsError, use, int(beyond.sum()), "are past the end of their argument")
            if not region.valid[at].all():
                self.fail(OutOfBoundsError, use, int((~region.valid[at]).sum()), "are in the gaps of a view")
            getattr(self, f"_{use}")(region, at, width)

    def _load(self, region: _Region, at: np.ndarray, width: int) -> None:
        writer = region.writer[at]
        self.others(writer, "load", "another program stores there")
        self.others(region.atomic[at], "load", "another program changes it atomically")
        own = (writer == self.linear) & (region.write_phase[at] == self.phase)
        if own.any():
            self.fail(
                RaceError, "load", int(own.sum()), "were stored by this program: another thread may be late"
            )
        if (empty := region.unwritten[at]).any():
            self.fail(UninitialisedError, "load", int(empty.sum()), "were never written since torch.empty")
        reader = region.reader[at]
        region.reader[at] = np.where((reader == NOBODY) | (reader == self.linear), self.linear, MANY)

    def _store(self, region: _Region, at: np.ndarray, width: int) -> None:
        writer = region.writer[at]
        self.others(writer, "store", "another program stores there too")
        self.others(region.reader[at], "store", "another program loads it")
        self.others(region.atomic[at], "store", "another program changes it atomically")
        if np.unique(at).size != at.size:
            self.fail(
                RaceError, "store", at.size - np.unique(at).size, "write an address that another lane writes"
            )
        again = (writer == self.linear) & (region.write_phase[at] == self.phase)
        if again.any():
            self.fail(RaceError, "store", int(again.sum()), "were stored by this program before")
        region.writer[at], region.write_phase[at] = self.linear, self.phase
        self.written(region, at, width)

    def _atomic(self, region: _Region, at: np.ndarray, width: int) -> None:
        self.others(region.writer[at], "atomic", "another program stores there")
        self.others(region.reader[at], "atomic", "another program loads it")
        if (empty := region.unwritten[at]).any():
            self.fail(UninitialisedError, "atomic", int(empty.sum()), "were never written since torch.empty")
        before = region.atomic[at]
        region.atomic[at] = np.where((before == NOBODY) | (before == self.linear), self.linear, MANY)

    def others(self, users: np.ndarray, use: str, why: str) -> None:
        theirs = (users != NOBODY) & (users != self.linear)
        if theirs.any():
            self.fail(RaceError, use, int(theirs.sum()), f"meet another program: {why}")

    def written(self, region: _Region, at: np.ndarray, width: int) -> None:
        for byte in range(width):
            region.unwritten[at + byte] = False

    def fail(self, fault: type[KernelMemoryError], use: str, lanes: int, why: str) -> None:
        raise fault(f"{self.kernel}, program {self.program}, {use}: {lanes} lanes {why}")


def _regions(tensors: list[Tensor], empty: dict[int, np.ndarray]) -> list[_Region]:
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), tensor))
    regions: list[_Region] = []
    for start, stop, _ in sorted(spans, key=lambda span: span[:2]):
        if regions and start < regions[-1].stop:
            regions[-1] = _Region(regions[-1].start, max(stop, regions[-1].stop))
        else:
            regions.append(_Region(start, stop))
    for start, stop, tensor in spans:
        region = next(r for r in regions if r.start <= start < r.stop)
        width = tensor.element_size()
        here = region.valid[start - region.start : stop - region.start]
        if tensor.numel() * width >= here.size:
            here[:] = True  # no gaps; there may be billions of elements that share memory
        else:
            strides = (*(stride * width for stride in tensor.stride()), 1)
            np.lib.stride_tricks.as_strided(here, shape=(*tensor.shape, width), strides=strides)[...] = True
        memory = tensor.untyped_storage()
        if (unwritten := empty.get(memory.data_ptr())) is not None and unwritten.size == memory.nbytes():
            # a view of one map, so that the next launch knows what this one wrote
            offset = region.start - memory.data_ptr()
            if offset >= 0 and offset + region.valid.size <= unwritten.size:
                region.unwritten = unwritten[offset : offset + region.valid.size]
    return regions


class _Allocations(TorchDispatchMode):
    """Tracks which memory comes from torch.empty, and which of it torch has written since."""

    def __init__(self, empty: dict[int, np.ndarray]):
        super().__init__()
        self.empty = empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or id(leaf) in made or leaf.device.type != "cpu":
                continue
            address = leaf.untyped_storage().data_ptr()
            if func.overloadpacket.__name__ in _EMPTY:
                self.empty[address] = np.ones(leaf.untyped_storage().nbytes(), dtype=bool)
            elif not func.is_view:
                self.empty.pop(address, None)  # new memory at an address that was used before
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._written(argument, value)
        for argument in func._schema.arguments:
            self._written(argument, (kwargs or {}).get(argument.name))
        return result

    def _written(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    # a slice counts as the whole tensor: better to miss a fault than to report a false one
                    self.empty.pop(leaf.untyped_storage().data_ptr(), None)


_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@contextlib.contextmanager
def instrumented(*, order: Order = "random", seed: int = 0) -> Iterator[Seen]:
    """Watches every Triton kernel launched inside, and runs its programs in this order."""
    seen = Seen(order=order, seed=seed)
    with repaired(), _Allocations(seen.empty), contextlib.ExitStack() as stack:
        for owner, functions in _watched(seen).items():
            stack.enter_context(replaced(owner, **functions))
        yield seen


def _watched(seen: Seen) -> dict[Any, dict[str, Any]]:
    builder = InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas, barrier = builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_barrier
    set_grid_idx, call = builder.set_grid_idx, GridExecutor.__call__
    now: list[_Watch] = []

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        now[-1].access(pointers, mask, "load")
        return load(self, pointers, mask, *rest, **named)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        now[-1].access(pointers, mask, "store")
        return store(self, pointers, value, mask, *rest, **named)

    def create_atomic_rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if "FADD" in str(op):
            raise OrderError(f"{now[-1].kernel}: atomic sums of floats depend on the order of programs")
        now[-1].access(pointer, mask, "atomic")
        return rmw(self, op, pointer, value, mask, *rest)

    def create_atomic_cas(self: Any, pointer: Any, *rest: Any) -> Any:
        now[-1].access(pointer, None, "atomic")
        return cas(self, pointer, *rest)

    def create_barrier(self: Any, *rest: Any) -> Any:
        now[-1].phase += 1
        return barrier(self, *rest)

    def place(self: Any, x: int, y: int, z: int) -> None:
        set_grid_idx(self, *now[-1].place(self.grid_dim, x, y, z))

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        seen.launches += 1
        now.append(_Watch(seen, list(_tensors([*args, *named.values()])), self.fn.__name__))
        # the launch itself copies arguments onto themselves with torch, which is not the kernel's doing
        with torch.utils._python_dispatch._disable_current_modes():
            try:
                return call(self, *args, **named)
            except Exception as error:
                fault = error
                while fault is not None and not isinstance(fault, KernelMemoryError):
                    fault = fault.__cause__  # type: ignore[assignment]
                raise (error if fault is None else fault) from None
            finally:
                now.pop()

    return {
        builder: {
            "create_masked_load": create_masked_load,
            "create_masked_store": create_masked_store,
            "create_atomic_rmw": create_atomic_rmw,
            "create_atomic_cas": create_atomic_cas,
            "create_barrier": create_barrier,
            "set_grid_idx": place,
        },
        GridExecutor: {"__call__": launch},
    }


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, TensorDescriptor):
            yield value.base
        elif isinstance(value, Tensor):
            yield value
