"""Memory for large results on the CPU that comes back when their tensors are gone, instead of new pages.

The system zeroes every new page before it hands it out: writing 600 MB into a fresh tensor took 680 to 960
ms, into recycled memory 160 to 310 ms (2-core Xeon VM). While nobody uses it the memory is marked free
(MADV_FREE): the system takes it back when it is short of memory, and release() gives it back at once.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

SMALLEST = 4 << 20  # bytes: what is smaller the C library keeps and recycles by itself
PAGE = 2 << 20  # of the large kind
CAN_RECYCLE = hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")


class Recycled:
    """recycled.empty(4096, 2048, dtype=torch.float32) is torch.empty(4096, 2048), in memory used before.

    A tensor and its views own the memory as long as any of them lives. Never more is kept than was in use at
    once. Safe under threads; the memory belongs to nobody in particular.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # filled by finalizers, which may run inside any allocation: they take no lock
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []
        self._in_use = self._most = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < SMALLEST or not CAN_RECYCLE:
            return torch.empty(shape, dtype=dtype)
        memory = self._take(-(-size // PAGE) * PAGE)
        view = memoryview(memory)
        weakref.finalize(view, _give_back, self._returned, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            self._collect()
            # of nearly the same size, so that a small result does not hold a large block
            fits = [block for block in self._free if size <= len(block) <= size + size // 4]
            best = min(fits, key=len, default=None)
            if best is not None:
                self._free.remove(best)
            self._in_use += size if best is None else len(best)
            self._most = max(self._most, self._in_use)
            while sum(map(len, self._free)) + self._in_use > self._most:
                del self._free[0]  # the one unused for longest
        if best is None:
            best = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            best.madvise(mmap.MADV_HUGEPAGE)
        return best

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
            self._in_use -= len(self._free[-1])

    def release(self) -> None:
        """Give back to the system what no tensor uses."""
        with self._lock:
            self._collect()
            self._free.clear()
            self._most = self._in_use


def _give_back(returned: deque[mmap.mmap], memory: mmap.mmap) -> None:
    memory.madvise(mmap.MADV_FREE)
    returned.append(memory)


recycled = Recycled()
