"""Memory that parent and worker share, and reading of a frozen worker's own memory by the parent."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.bench.hosts.holding import can_hold
from moe_routing_bench.core.dtypes import name_of

ALIGN = 64
F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1: others may not map it writable
IOV_MAX = 1024
PIECE = 2**29  # a single read gives less than 2 GiB
PREFIX = "mrb-"  # in the names of shared memory, as /proc/PID/maps shows them


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor lies: Place(start=64, shape=(48, 32), stride=(32, 1), dtype="float32")."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """The number of elements from the first to the last, with gaps."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.numel * getattr(torch, self.dtype).itemsize

    def at(self, start: int) -> Place:
        return replace(self, start=start)


def place_of(tensor: Tensor, start: int) -> Place:
    """A place for a tensor with no gaps, in the same order of dimensions."""
    dense = torch.empty_like(tensor, memory_format=torch.preserve_format)
    dtype = name_of(tensor.dtype)
    return Place(start=start, shape=tuple(tensor.shape), stride=dense.stride(), dtype=dtype)


def places_for(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Returns places one after the other, and the bytes they take together."""
    places, end = [], 0
    for tensor in tensors:
        places.append(place_of(tensor, end))
        end += -(-max(1, places[-1].num_bytes) // ALIGN) * ALIGN
    return places, end


class SharedMemory:
    """A piece of memory in two processes: Shared.new("inputs", 4096), then Shared.open(shared.path, 4096)."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool):
        self.fd, self.num_bytes = fd, num_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.map = mmap.mmap(fd, max(1, num_bytes), mmap.MAP_SHARED, access)

    @staticmethod
    def new(name: str, num_bytes: int) -> SharedMemory:
        fd = os.memfd_create(PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, max(1, num_bytes))
        shared = SharedMemory(fd, num_bytes, writable=True)
        # if a worker could make it shorter, the next write would end the parent
        shared._seal(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return shared

    @staticmethod
    def open(path: str, num_bytes: int, *, writable: bool) -> SharedMemory:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        shared = SharedMemory(fd, num_bytes, writable=writable)
        os.close(fd)
        return shared

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def keep_others_from_writing(self) -> None:
        self._seal(F_SEAL_FUTURE_WRITE)

    def tensor(self, place: Place, offset: int = 0) -> Tensor:
        """The tensor at a place, `offset` bytes further."""
        dtype = getattr(torch, place.dtype)
        if not place.numel:
            return torch.empty(place.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the weights cannot be written: that is meant
            flat = torch.frombuffer(self.map, dtype=dtype, count=place.numel, offset=offset + place.start)
        return flat.as_strided(place.shape, place.stride) if len(place.shape) != 1 else flat

    def bytes(self) -> Tensor:
        return torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self.fd)

    def _seal(self, seals: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)


def places_to_json(places: Sequence[Place]) -> str:
    return json.dumps([[p.start, p.shape, p.stride, p.dtype] for p in places])


def places_from_json(text: str) -> list[Place]:
    return [
        Place(start=start, shape=tuple(shape), stride=tuple(stride), dtype=dtype)
        for start, shape, stride, dtype in json.loads(text)
    ]


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with every tensor inside replaced by the next one, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(with_tensors(item, tensors) for item in value)
    if isinstance(value, Mapping):
        return {name: with_tensors(item, tensors) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        inside = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changed = {name: with_tensors(item, tensors) for name, item in inside.items()}
        return replace(value, **changed)
    return value


@cache
def can_freeze_and_read() -> bool:
    """True if this system lets a process hold its children, share sealed memory and read their memory."""
    if sys.platform != "linux" or not Path("/proc/self/task").exists() or not can_hold():
        return False
    try:
        own = torch.zeros(8, dtype=torch.uint8)
        read_memory(os.getpid(), [(own.data_ptr(), 8)])
        shared = SharedMemory.new("probe", 8)
        shared.keep_others_from_writing()
        shared.close()
    except OSError:
        return False
    return True


class _Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


def read_memory(pid: int, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Copies of (address, bytes) of another process. OSError if any of it is not its memory."""
    copies = [torch.empty(num_bytes, dtype=torch.uint8) for _, num_bytes in spans]
    pieces = [
        (copy.data_ptr() + start, address + start, min(PIECE, num_bytes - start))
        for copy, (address, num_bytes) in zip(copies, spans, strict=True)
        for start in range(0, num_bytes, PIECE)
    ]
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    while pieces:
        part, most = pieces[:IOV_MAX], PIECE
        part = [piece for piece in part if (most := most - piece[2]) >= 0]
        pieces = pieces[len(part) :]
        here = (_Span * len(part))(*(_Span(to, num_bytes) for to, _, num_bytes in part))
        there = (_Span * len(part))(*(_Span(address, num_bytes) for _, address, num_bytes in part))
        got = read(pid, here, len(part), there, len(part), 0)
        if got != sum(num_bytes for *_, num_bytes in part):
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
    return copies
