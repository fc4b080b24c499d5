"""Frozen: weights that exist only in the form a kernel packed them, so that no copy can become outdated.

A kernel with packed weights cannot cheaply notice every change of the originals: torch does not count writes
through `.data`, numpy or a flat buffer. So the user calls `freeze()`, and the packed form replaces the
parameter. Nothing else is left to write to, and no memory is used twice.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moe_routing_bench.core.experts import ExpertWeights

aten = torch.ops.aten


def _label(kernel: str, store: str | None) -> str:
    return kernel if store is None else f"{kernel}(store={store})"


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A matrix as an implementation of linear packed it, rounded to the format `store` if there is one:
    PackedMatrix(kernel="native", F=4096, D=2048, panels=...)."""

    kernel: str
    F: int
    D: int
    panels: Tensor
    store: str | None = None

    @property
    def label(self) -> str:
        """The implementation of linear that computes with it."""
        return _label(self.kernel, self.store)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How weights are packed and what they were before:
    Form(kernel="native", size=(64, 2048, 2048), dtype=torch.bfloat16, gated=True).

    size          experts, depth, columns
    store         the narrower format that values were rounded to, here or in a checkpoint
    output_first  the parameter has columns before depth
    alternating   the parameter's gate and up columns alternate; the packed ones are halves
    matrix        the parameter is one matrix, without a dimension for experts
    """

    kernel: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    gated: bool = False
    store: str | None = None
    output_first: bool = False
    alternating: bool = False
    matrix: bool = False

    @property
    def label(self) -> str:
        """The implementation of expert_ffn, or of linear, that computes with these weights."""
        return _label(self.kernel, self.store)


# for each kernel: a function from panels and their form to a plain tensor, experts x depth x columns
UNPACK: dict[str, Callable[[Tensor, Form], Tensor]] = {}


class Frozen(Tensor):
    """A parameter whose values are in `panels` and nowhere else.

    It has the shape, dtype and device of the parameter it replaces. clone() and pickling give plain values.
    Any other read, and every write, raises an error. Copies share the panels, which never change.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    panels: Tensor
    form: Form

    @staticmethod
    def __new__(cls, panels: Tensor, form: Form) -> Frozen:
        E, depth, columns = form.size
        shape = (E, columns, depth) if form.output_first else (E, depth, columns)
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape[form.matrix :], dtype=form.dtype, device=panels.device
        )
        made.panels, made.form = panels, form
        return made

    def plain(self) -> Tensor:
        """The values as a plain tensor."""
        if self.form.store is not None:
            raise NotImplementedError(f"these weights exist as {self.form.store} alone; load the originals")
        if self.form.kernel not in UNPACK:
            raise NotImplementedError(f"{self.form.kernel} cannot unpack these weights; load the originals")
        w_EKN = UNPACK[self.form.kernel](self.panels, self.form)
        if self.form.alternating:
            w_EKN = torch.stack(w_EKN.chunk(2, dim=-1), dim=-1).flatten(-2)
        w_EKN = w_EKN.transpose(1, 2).contiguous() if self.form.output_first else w_EKN
        return w_EKN[0] if self.form.matrix else w_EKN

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

    # torch's own methods would return an address without memory behind it
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
    """What freezing did to the weights of a layer or model; a REPL shows it as sentences.

    Freezing(label="native(store=int8)", before=302_000_000, after=76_000_000, error=0.03)

    before, after  bytes of the matrices, plain and frozen; after is None if another library holds them
    error          estimated root mean square error of a layer's results, relative to the exact results,
                   because weights were rounded (ExpertWeights.error_stored). With several layers it is the
                   largest. 0: freezing rounded nothing
    layers         the same for each module, if linear modules were frozen too
    left           the linear modules that were not frozen, and why
    """

    label: str
    before: int
    after: int | None
    error: float
    layers: Mapping[str, Freezing] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def saved(self) -> int | None:
        return None if self.after is None else self.before - self.after

    def __str__(self) -> str:
        each = (f"\n{path}: {one._line()}" for path, one in self.layers.items())
        left = (f"\n{path}: as it was; {why}" for path, why in self.left.items())
        return self._sentence() + "".join((*each, *left))

    def _line(self) -> str:
        after = "elsewhere" if self.after is None else f"{self.after / 1e6:,.1f}"
        return f"{self.label}, MB {self.before / 1e6:,.1f} -> {after}, error {self.error:.2g}"

    def _sentence(self) -> str:
        size = f"{self.before / 1e6:,.1f} MB of weights are frozen for {self.label}"
        if self.after is not None and self.saved is not None:
            gain = f"{abs(self.saved) / 1e6:,.1f} MB {'saved' if self.saved >= 0 else 'more'}"
            size += f" in {self.after / 1e6:,.1f} MB, {gain}"
        if not self.error:
            return f"{size}; no weight was rounded"
        return f"{size}; expect results that differ by about {self.error:.2g} of their size (rms per layer)"

    __repr__ = __str__


def freezing(module: nn.Module, *, recurse: bool = True) -> Freezing | None:
    """What freezing did to this module and, with recurse, all modules in it; None if nothing is frozen."""
    if not (frozen := [weight for weight in module.parameters(recurse) if isinstance(weight, Frozen)]):
        return None
    elsewhere = any(hasattr(weight.panels, "holder") for weight in frozen)
    return Freezing(
        label=", ".join(sorted({weight.form.label for weight in frozen})),
        before=sum(
            weight.numel() * weight.dtype.itemsize
            for weight in frozen
            if not hasattr(weight.panels, "beside")  # the plain ones still exist, in another module
        ),
        after=None if elsewhere else sum(weight.panels.nbytes for weight in frozen),
        error=max(getattr(weight.panels, "error", 0.0) for weight in frozen),
    )


def held_by(holder: object, weights: ExpertWeights, kernel: str, store: str | None = None) -> ExpertWeights:
    """Weights whose matrices exist only in an object of another library. holder_of(weights) returns this
    object, which lives as long as the weights."""
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
        f"these weights are frozen: they exist only in a kernel's packed form, without {what}. thaw() makes "
        "them plain parameters again; clone() gives a plain copy"
    )


def _is_parameter(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_param", False)


def as_experts(tensor: Tensor) -> Tensor:
    """The same panels as experts x depth x columns, gate and up in halves. A tensor keeps its view,
    because a model asks for it in every call, and making it takes longer than choosing the kernel."""
    if (view := getattr(tensor, "_as_experts", None)) is None:
        view = as_parameter(tensor, output_first=False, alternating=False)
        tensor._as_experts = view  # type: ignore[attr-defined]
    return view


def as_parameter(tensor: Tensor, *, output_first: bool, alternating: bool) -> Tensor:
    """The same panels, with the shape in which a module keeps its weights."""
    if not isinstance(tensor, Frozen):
        raise RuntimeError("only one of the two matrices is frozen; thaw() the model")
    form = replace(tensor.form, output_first=output_first, alternating=alternating)
    return Frozen(tensor.panels, form)


def take_place(module: nn.Module, frozen: Mapping[str, Tensor]) -> None:
    """Replaces a module's parameters by frozen weights. Raises RuntimeError and leaves the module unchanged
    if other code could still write to the memory of a parameter, because nobody would notice that."""
    for name in frozen:
        if _is_foreign(getattr(module, name).untyped_storage()):
            raise RuntimeError(
                f"other code may write to the memory of {name} (numpy, another process); freeze a deepcopy"
            )
    left = {name: _Left(getattr(module, name)) for name in frozen}
    for name, tensor in frozen.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    for seconds in (0.0, 0.01, 0.1):  # a thread of torch.distributed lets go of what it sent a moment later
        if not any(old.is_held() for old in left.values()):
            break
        gc.collect()
        time.sleep(seconds)
    if held := [name for name, old in left.items() if old.is_held()]:
        for name, old in left.items():
            setattr(module, name, old.parameter())
        raise RuntimeError(
            f"something else also uses {' and '.join(held)} (an optimizer, a result with gradients, a "
            "state_dict, a flat buffer, a numpy view, another module), and its later writes would be lost; "
            "delete it first, or freeze a deepcopy"
        )
    left.clear()
    give_back()


def give_back() -> None:
    """Returns freed memory to the system. The C library would keep what packing used, more than the
    result."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class _Left:
    """A parameter that its module gives up. is_held() says whether other code still has it or its memory."""

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
        """The parameter again; a new one if no other code has it."""
        if (seen := self.seen()) is not None:
            return seen
        tensor = torch.empty(0, dtype=self.dtype).set_(self.memory, *self.place)
        return nn.Parameter(tensor, requires_grad=self.wanted)


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    """True if this memory is not torch's own. Private pages of a file, such as a checkpoint, count as own."""
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
    """Replaces frozen parameters by plain ones, in this module and all modules in it."""
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            if isinstance(parameter, Frozen):
                setattr(inner, name, nn.Parameter(parameter.plain(), requires_grad=False))
