"""Prepared: weights that an implementation packs or converts once, kept as long as the originals live."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.nn import Parameter

from moe_routing_bench.experts import ExpertWeights

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Preparation(Generic[Made]):
    """Preparation(value=..., seconds=0.41, nbytes=1207959552): what was made, and its cost, paid once."""

    value: Made
    seconds: float
    nbytes: int
    state: tuple[tuple[int, int], ...]  # of each tensor: where its memory is, and torch's count of writes


class Prepared(Generic[Made]):
    """A function of weights that remembers its result.

    packed = Prepared(pack, nbytes=lambda p: p.nbytes)
    packed(weights)          calls pack
    packed(weights)          returns the same result, for the price of a dictionary look-up
    weights.w_in_EDG.add_(1)
    packed(weights)          calls pack again: torch counts the writes to a tensor (its `_version`)

    A result is freed with the tensors it was made from. torch does not count writes through `.data` or numpy:
    call forget(weights) after them; an implementation may also compare values itself. Views that are made for
    every call are recognised by their base tensor.
    """

    def __init__(self, make: Callable[[ExpertWeights], Made], *, nbytes: Callable[[Made], int]):
        self._make, self._nbytes = make, nbytes
        self._kept: dict[tuple, Preparation[Made]] = {}
        self._lock = threading.RLock()
        _everyone.add(self)

    def __call__(self, weights: ExpertWeights) -> Made:
        return self.preparation(weights).value

    def preparation(self, weights: ExpertWeights) -> Preparation[Made]:
        tensors = tuple(weights.tensors().values())
        if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return self._prepare(weights, ())  # a fake tensor has no memory by which to recognise it
        key = _key(weights, tensors)
        state = tuple((tensor.data_ptr(), _version(tensor)) for tensor in tensors)
        kept = self._kept.get(key)
        if kept is not None and kept.state == state:
            return kept
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.state == state:
                return kept  # another thread made it meanwhile
            if kept is None:
                for tensor in tensors:
                    weakref.finalize(_owner(tensor), self._kept.pop, key, None)
            self._kept[key] = made = self._prepare(weights, state)
            return made

    def _prepare(self, weights: ExpertWeights, state: tuple[tuple[int, int], ...]) -> Preparation[Made]:
        started = time.perf_counter()
        value = self._make(weights)
        seconds = time.perf_counter() - started
        return Preparation(value=value, seconds=seconds, nbytes=self._nbytes(value), state=state)

    def peek(self, weights: ExpertWeights) -> Made | None:
        """The result kept for these weights, or None; nothing is made."""
        kept = self._kept.get(_key(weights, tuple(weights.tensors().values())))
        return None if kept is None else kept.value

    def forget(self, weights: ExpertWeights) -> int:
        """Make it again at the next call, whatever torch's counters say. Returns the bytes freed."""
        with self._lock:
            kept = self._kept.pop(_key(weights, tuple(weights.tensors().values())), None)
        return 0 if kept is None else kept.nbytes

    def __len__(self) -> int:
        return len(self._kept)


_everyone: weakref.WeakSet[Prepared] = weakref.WeakSet()


def release(weights: ExpertWeights) -> int:
    """Free all that was prepared from these weights; later calls make it again. Returns the bytes freed."""
    return sum(prepared.forget(weights) for prepared in _everyone)


def _owner(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # inference tensors have no counter


def _key(weights: ExpertWeights, tensors: tuple[Tensor, ...]) -> tuple:
    # an entry is removed with its owner, so an id never belongs to another tensor
    return (
        weights.activation,
        *((id(_owner(t)), t.storage_offset(), t.dtype, t.shape, t.stride()) for t in tensors),
    )
