"""Frozen: weights that exist only as a kernel packed them, so that no copy can grow old.

A kernel that likes its weights packed cannot cheaply notice every change of the originals: torch counts no
writes through `.data`, numpy or a flat buffer. So packing is asked for by name, `freeze()`, and the packed
form takes the place of the parameter. There is nothing else left to write to, and no memory is used twice.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moe_routing_bench.core.experts import ExpertWeights

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Form:
    """How weights are packed, and what they were: Form(kernel="native", size=(64, 2048, 2048),
    dtype=torch.bfloat16, gated=True).

    size          experts, depth, columns
    store         the narrower type that values were rounded to, here or by a checkpoint
    output_first  the parameter has columns before depth
    alternating   the parameter's gate and up columns alternate; packed they are halves
    """

    kernel: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    gated: bool = False
    store: str | None = None
    output_first: bool = False
    alternating: bool = False

    @property
    def label(self) -> str:
        """The implementation of expert_ffn that computes with these weights."""
        return self.kernel if self.store is None else f"{self.kernel}(store={self.store})"


# by the kernel's name: panels and their form to a plain tensor, experts x depth x columns
UNPACK: dict[str, Callable[[Tensor, Form], Tensor]] = {}


class Frozen(Tensor):
    """A parameter whose values are in `panels` and nowhere else.

    It has the shape, dtype and device of the parameter it replaces. clone() and pickling give the plain
    values; reading in any other way, and every write, raises. Copies share the panels, which nobody changes.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    panels: Tensor
    form: Form

    @staticmethod
    def __new__(cls, panels: Tensor, form: Form) -> Frozen:
        E, depth, columns = form.size
        shape = (E, columns, depth) if form.output_first else (E, depth, columns)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=form.dtype, device=panels.device)
        made.panels, made.form = panels, form
        return made

    def plain(self) -> Tensor:
        """The values as a tensor of their own."""
        if self.form.store is not None:
            raise NotImplementedError(f"these weights exist as {self.form.store} alone; load the originals")
        if self.form.kernel not in UNPACK:
            raise NotImplementedError(f"{self.form.kernel} cannot unpack these weights; load the originals")
        w_EKN = UNPACK[self.form.kernel](self.panels, self.form)
        if self.form.alternating:
            w_EKN = torch.stack(w_EKN.chunk(2, dim=-1), dim=-1).flatten(-2)
        return w_EKN.transpose(1, 2).contiguous() if self.form.output_first else w_EKN

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return Frozen(args[0].panels, args[0].form)
        if func in (aten.clone.default, aten._to_copy.default) and isinstance(args[0], Frozen):
            return func(args[0].plain(), *args[1:], **(kwargs or {}))
        _refuse(f"{func.overloadpacket.__name__}()")

    def __tensor_flatten__(self) -> tuple[list[str], Form]:
        return ["panels"], self.form

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], form: Form, size: Any, stride: Any) -> Frozen:
        return Frozen(inner["panels"], form)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = Frozen(self.panels, self.form)
        memo[id(self)] = made = nn.Parameter(copied, requires_grad=False) if _is_parameter(self) else copied
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain()
        made = nn.Parameter(plain, requires_grad=False) if _is_parameter(self) else plain
        return made.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Frozen({tuple(self.shape)}, {self.dtype}, packed for {self.form.label})"

    def share_memory_(self) -> Frozen:
        self.panels.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.panels.is_shared()

    # torch's own would hand out an address where there is nothing
    def data_ptr(self) -> NoReturn:
        _refuse("address")

    def untyped_storage(self) -> torch.UntypedStorage:
        if torch._guards.TracingContext.try_get() is None:
            _refuse("storage")
        return super().untyped_storage()  # torch.compile asks how large it is

    def storage(self) -> NoReturn:
        _refuse("storage")

    def __dlpack__(self, **_: Any) -> NoReturn:
        _refuse("address")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Frozen) or value.panels is not self.panels:
            _refuse("other .data")


@dataclass(frozen=True, kw_only=True, repr=False)
class Freezing:
    """What freezing did to the experts of a layer or model; a REPL shows it as a sentence.

    Freezing(label="native(store=int8)", before=302_000_000, after=76_000_000, error=0.03)

    before, after  bytes of the matrices, plain and frozen; None: they are inside another library
    error          about the root mean square error of a layer's results, relative to the right ones, because
                   weights were rounded (ExpertWeights.error_stored); of several layers the largest. 0:
                   nothing was rounded when it was frozen
    """

    label: str
    before: int
    after: int | None
    error: float

    @property
    def saved(self) -> int | None:
        return None if self.after is None else self.before - self.after

    def __str__(self) -> str:
        size = f"{self.before / 1e6:,.1f} MB of weights are frozen for {self.label}"
        if self.after is not None and self.saved is not None:
            size += f" in {self.after / 1e6:,.1f} MB, {self.saved / 1e6:,.1f} MB saved"
        if not self.error:
            return f"{size}; no weight was rounded"
        return f"{size}; expect results that differ by about {self.error:.2g} of their size (rms per layer)"

    __repr__ = __str__


def freezing(module: nn.Module) -> Freezing | None:
    """What freezing did to all inside this module; None if nothing is frozen."""
    if not (frozen := [one for one in module.parameters() if isinstance(one, Frozen)]):
        return None
    inside = any(hasattr(one.panels, "holder") for one in frozen)
    return Freezing(
        label=", ".join(sorted({one.form.label for one in frozen})),
        before=sum(one.numel() * one.dtype.itemsize for one in frozen),
        after=None if inside else sum(one.panels.nbytes for one in frozen),
        error=max(getattr(one.panels, "error", 0.0) for one in frozen),
    )


def held_by(holder: object, weights: ExpertWeights, kernel: str, store: str | None = None) -> ExpertWeights:
    """These weights where both matrices are inside an object of another library and nowhere else, which lives
    as long as they do: holder_of(weights)."""
    inside = torch.empty(0, dtype=weights.w_in_EDG.dtype)
    inside.holder = holder  # type: ignore[attr-defined]

    def frozen(w_EKN: Tensor) -> Frozen:
        E, depth, columns = w_EKN.shape
        form = Form(kernel=kernel, size=(E, depth, columns), dtype=w_EKN.dtype, store=store)
        return Frozen(inside, form)

    return replace(weights, w_in_EDG=frozen(weights.w_in_EDG), w_out_EFD=frozen(weights.w_out_EFD))


def holder_of(weights: ExpertWeights) -> Any:
    assert isinstance(weights.w_in_EDG, Frozen)
    return weights.w_in_EDG.panels.holder  # type: ignore[attr-defined]


def _refuse(what: object) -> NoReturn:
    raise RuntimeError(
        f"these weights are frozen: they exist only as a kernel packed them, without {what}. thaw() makes "
        "them plain parameters again; clone() gives a plain copy"
    )


def _is_parameter(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_param", False)


def as_experts(tensor: Tensor) -> Tensor:
    """The same panels, experts x depth x columns, in halves."""
    return as_parameter(tensor, output_first=False, alternating=False)


def as_parameter(tensor: Tensor, *, output_first: bool, alternating: bool) -> Tensor:
    """The same panels, in the shape that a module keeps its weights in."""
    if not isinstance(tensor, Frozen):
        raise RuntimeError("only one of the two matrices is frozen; thaw() the model")
    form = replace(tensor.form, output_first=output_first, alternating=alternating)
    return Frozen(tensor.panels, form)


def take_place(module: nn.Module, frozen: Mapping[str, Tensor]) -> None:
    """Put frozen weights in the place of a module's parameters. RuntimeError, with the module as it was, if
    somebody else could still write to the memory of one of them, because that would no longer be seen."""
    for name in frozen:
        if _is_foreign(getattr(module, name).untyped_storage()):
            raise RuntimeError(
                f"{name} is in memory that others may write to (numpy, another process); freeze a deepcopy"
            )
    left = {name: _Left(getattr(module, name)) for name in frozen}
    for name, tensor in frozen.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    if any(one.is_held() for one in left.values()):
        gc.collect()
    if held := [name for name, one in left.items() if one.is_held()]:
        for name, one in left.items():
            setattr(module, name, one.parameter())
        raise RuntimeError(
            f"something else holds {' and '.join(held)} too (an optimizer, a result with gradients, a "
            "state_dict, a flat buffer, a numpy view, another module), and what it writes later would not be "
            "seen; let it go first, or freeze a deepcopy"
        )
    left.clear()
    give_back()


def give_back() -> None:
    """Freed memory goes to the system; the C library would keep what packing used, more than it made."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class _Left:
    """A parameter that its module gives up: does anybody else still have it, or its memory?"""

    def __init__(self, parameter: Tensor):
        self.memory, self.wanted = parameter.untyped_storage(), parameter.requires_grad
        self.dtype = parameter.dtype
        self.place = parameter.storage_offset(), parameter.size(), parameter.stride()
        self.seen = weakref.ref(parameter)

    def is_held(self) -> bool:
        if self.seen() is not None or torch._C._storage_Use_Count(self.memory._cdata) > 1:
            return True
        nobodys = _Left(torch.empty(1))
        return sys.getrefcount(self.memory) > sys.getrefcount(nobodys.memory)

    def parameter(self) -> Tensor:
        """The parameter again, a new one if nobody else has it."""
        if (seen := self.seen()) is not None:
            return seen
        tensor = torch.empty(0, dtype=self.dtype).set_(self.memory, *self.place)
        return nn.Parameter(tensor, requires_grad=self.wanted)


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    """Is this memory not torch's own? Private pages of a file, as of a checkpoint, are as good as its own."""
    if storage.is_shared():
        return True
    if storage.resizable() or storage.nbytes() == 0:
        return False
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            span, access, _, _, inode, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= storage.data_ptr() < last:
                return inode == "0" or "s" in access
    return True


def thaw(module: nn.Module) -> None:
    """Plain parameters in the place of frozen ones, in this module and all inside it."""
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            if isinstance(parameter, Frozen):
                setattr(inner, name, nn.Parameter(parameter.plain(), requires_grad=False))
