"""One C++ kernel from gather to weighted sum, AMX or AVX on packed weights. Compiled at first use; CPU.

Frozen weights were packed once. Plain weights may change at any time: weights of an expert with few rows are
read in place, output-first or not, and others are packed in strips when they are used. If gradients are
needed, it runs `staged` with the native dispatch, grouped_gemm and combine, which have no knobs.

store=bfloat16, or a format of formats/named.py (int8, int4_g32, mxfp4, ...), rounds the weights and computes
with the rounded ones, so results are judged by `stored(weights)`. Plain weights must be frozen first: a
user's call refuses them, and `run`, which the kit calls, rounds them anew. Weights that a checkpoint stores
in the format are frozen unchanged. A format that ends in _a8 (int8_a8: W8A8, int4_g32_a8: W4A8) also rounds
the rows of both products to int8, each with its own scale. That is faster, and as exact as `plain`, which
rounds the same way in plain torch.

batch_invariant=True changes nothing for frozen weights. With plain weights it gives the bits of frozen
weights for any number of rows: weights stored output-first are always packed, and with AMX all weights. With
gradients it uses activation functions whose bits do not depend on the place of a row.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core import cpp, levels
from moe_routing_bench.core.experts import GATED, ExpertWeights, QuantisedExperts
from moe_routing_bench.core.frozen import UNPACK, Form, Frozen
from moe_routing_bench.core.host_allocator import recycled
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.core.topology import nodes_in_use
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.formats.stored import Stored
from moe_routing_bench.ops import coded, nodes
from moe_routing_bench.ops.coded import DTYPES, coding_in, format_of, panel, rounds_rows, why_not_store
from moe_routing_bench.ops.expert_ffn.op import check_sizes, op, with_int8_rows
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.knobs import KnobSet, knob

BATCH_INVARIANT = {"batch_invariant": True}
READS_PLAIN = True
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"level": "vnni"},
    {"level": "avx512"},
    {"level": "avx2"},
    {"store": "bfloat16"},
    {"store": "int8"},
    {"store": "int8_a8"},
    {"level": "avx2", "store": "int4_g32_asym"},  # tests/ops/test_stored_experts.py has all formats
    {"batch_invariant": True},
    # the smallest and the largest value of every knob
    {"rows": 4, "strip": 1, "strip_out": 1, "prefetch": 2048, "in_place": 2, "group": 2},
    {"rows": 16, "strip": 8, "strip_out": 8, "prefetch": 32768, "in_place": 192, "group": 64},
)
SOURCE = Path(__file__).with_name("native.cpp")
# the enum of native.cpp
ACTIVATIONS = {
    name: i for i, name in enumerate(("gelu", "relu", "silu", "relu2", "geglu", "swiglu", "swiglu_oai"))
}
WRONG_PLAN = 3  # a return code of mrb_forward


@dataclass(frozen=True, kw_only=True)
class Knobs(KnobSet):
    """In the order of the fields of native.cpp. The depth of a sum is not here, because it decides bits, nor
    the number of threads, which is the caller's."""

    rows: int | None = knob(
        4, 6, 8, 10, 16, stage="blocks", help="Most rows of a block. Else 11, 6 with AVX2, 32 with AMX."
    )
    strip: int | None = knob(
        1,
        2,
        4,
        8,
        stage="first product",
        help="Panels of 32 columns in a task of the first product. Else 1 to 4.",
    )
    strip_out: int | None = knob(
        1, 2, 4, 8, stage="second product", help="Panels in a task of the second product. Else 1 to 8."
    )
    prefetch: int | None = knob(
        2048, 4096, 16384, 32768, stage="reading", help="Bytes of frozen weights to read ahead. Else 8192."
    )
    in_place: int | None = knob(
        2, 6, 12, 24, 48, 96, 192, stage="reading",
        help="Most rows of an expert whose plain weights are not packed. Else 24, 128 with AMX and bfloat16.",
    )  # fmt: skip
    group: int | None = knob(
        2, 4, 8, 32, 64, stage="groups", help="MiB of rows that go through both products together. Else 16."
    )

    def pointless(
        self, x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights
    ) -> str | None:
        tiles = cpp.best_level() == "amx" and x_TD.dtype == torch.bfloat16
        most = 32 if tiles else 6 if cpp.best_level() in ("avx2", "neon") else 11
        pairs, panels = plan.pair_R.shape[0], (weights.F // 16 if weights.gated else weights.F // 32)
        if self.rows is not None and (self.rows >= min(most, pairs) or (tiles and self.rows != 16)):
            return f"a block has at most {most} rows, in whole tiles with AMX, and there are {pairs} in all"
        if (self.strip or 0) > panels or (self.strip_out or 0) > weights.D // 32:
            return "the matrix has fewer panels"
        frozen, rule = isinstance(weights.w_in_EDG, Frozen), 128 if tiles else 24
        few = self.in_place or rule
        if not frozen and pairs <= few and (self.rows or self.strip):
            return f"all weights of at most {pairs} rows are read in place, without blocks or strips"
        if self.in_place is not None and (frozen or self.in_place == rule):
            return "frozen weights are always packed, and this is the kernel's own rule for others"
        if self.in_place is not None and pairs <= min(few, rule):
            return f"there are {pairs} rows in all, which are read in place by the kernel's own rule"
        if self.prefetch is not None and not frozen:
            return "only frozen weights are a stream that can be read ahead"
        row_bytes = (weights.D + weights.F) * x_TD.element_size()
        if self.group is not None and pairs * row_bytes <= min(self.group, 16) << 20:
            return "all rows fit into one group"
        return None


KERNELS_RULE = Knobs()


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w_in", "w_out", "b_in", "b_out", "gate")),
        ("coding", ctypes.POINTER(coded.CCoding)),
        *((name, ctypes.c_void_p) for name in ("pair_R", "offset_E1", "count_E", "y")),
        *((name, ctypes.c_int64) for name in ("ldx", "T", "K", "D", "F", "E")),
        *((name, ctypes.c_int64) for name in ("in_stride", "out_stride", "in_panel", "out_panel")),
        *((name, ctypes.c_int64) for name in ("in_k", "in_n", "out_k", "out_n", "plain")),
        *((name, ctypes.c_int64) for name in ("activation", "threads", "R")),
        ("nodes", ctypes.POINTER(nodes.CNodes)),
        *((one.name, ctypes.c_int64) for one in fields(Knobs)),
    )


@cache
def _library(level: str | None) -> ctypes.CDLL:
    library, pointer = cpp.load(SOURCE, level), ctypes.POINTER
    memory, long, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    functions: dict[str, tuple[Any, list[Any]]] = {
        "mrb_packed_elements": (long, [long, long, number]),
        "mrb_pack": (None, [memory] * 2 + [long] * 6 + [number] * 3),
        "mrb_unpack": (None, [memory] * 2 + [long] * 3 + [number] * 3),
        "mrb_pack_coded": (None, coded.PACK_ARGUMENTS),
        "mrb_copy_by_node": (number, [*[memory] * 2, *[long] * 3, pointer(nodes.CNodes), pointer(long)]),
        "mrb_forward": (number, [pointer(_Problem), number, number]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def stored(weights: ExpertWeights, *, store: str) -> ExpertWeights:
    """The weights it computes with, exact in float64."""
    if store != "bfloat16":
        return QuantisedExperts.of(weights, format_of(store)).dequantised()
    w_in_EDG, w_out_EFD = (w.detach().bfloat16() for w in (weights.w_in_EDG, weights.w_out_EFD))
    return replace(weights, w_in_EDG=w_in_EDG, w_out_EFD=w_out_EFD).to(dtype=torch.float64)


def plain(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str) -> Tensor:
    """The reference, with rows of 8 bits if the kernel rounds them."""
    reference = with_int8_rows if rounds_rows(store) else op.reference
    return reference(x_TD, gate_TK, plan, weights)


def freeze(
    weights: ExpertWeights, *, store: str | None = None, kept: PackedFiles | None = None
) -> ExpertWeights:
    """Packs both matrices into panels of 32 columns, the same at every level. Biases are not changed."""
    _must_freeze(weights.validate().w_in_EDG.dtype, store, weights.w_in_EDG)
    return replace(
        weights,
        w_in_EDG=_pack(weights.w_in_EDG.detach(), weights.gated, store, kept),
        w_out_EFD=_pack(weights.w_out_EFD.detach(), False, store, kept),
    )


def freeze_stored(
    experts: QuantisedExperts,
    dtype: torch.dtype,
    *,
    store: str | None = None,
    kept: PackedFiles | None = None,
) -> ExpertWeights:
    """freeze for weights that a checkpoint stores in a format, with activations of this dtype. No weight is
    rounded, and the loaded weights are not needed any more. store: the format, optionally with _a8."""
    own = experts.validate().store
    store = store or own
    if format_of(store) != own:
        raise ValueError(f"these weights are stored as {own}, not as {format_of(store)}")
    _must_freeze(dtype, store)
    return ExpertWeights(
        w_in_EDG=_pack_stored(experts.w_in, dtype, experts.activation in GATED, store, kept),
        w_out_EFD=_pack_stored(experts.w_out, dtype, False, store, kept),
        b_in_EG=None if experts.b_in_EG is None else experts.b_in_EG.to(dtype),
        b_out_ED=None if experts.b_out_ED is None else experts.b_out_ED.to(dtype),
        activation=experts.activation,
    ).validate()


def why_not_freeze(dtype: torch.dtype, store: str | None, *tensors: Tensor) -> str | None:
    return cpp.unsupported(SOURCE, None, *tensors) or why_not_store(dtype, store, 0)


def _must_freeze(dtype: torch.dtype, store: str | None, *tensors: Tensor) -> None:
    if (reason := why_not_freeze(dtype, store, *tensors)) is not None:
        raise NotImplementedError(f"cannot freeze weights for expert_ffn.native: {reason}")


def _pack(w_EKN: Tensor, gated: bool, store: str | None, kept: PackedFiles | None) -> Frozen:
    form = Form(kernel="native", size=tuple(w_EKN.shape), dtype=w_EKN.dtype, gated=gated, store=store)  # type: ignore[arg-type]
    w_EKN = w_EKN[:1] if w_EKN.stride(0) == 0 else w_EKN  # experts that share memory are packed once
    return _frozen(form, [w_EKN], lambda: _panels(w_EKN, gated, store), kept)


def _panels(w_EKN: Tensor, gated: bool, store: str | None) -> Tensor:
    library = _library(None)
    if store is not None and store != "bfloat16":
        return coded.pack(quantise(w_EKN, format_of(store)).decoded(), gated, library, rounds_rows(store))
    w_EKN = w_EKN if store is None else w_EKN.to(torch.bfloat16)
    E, depth, columns = w_EKN.shape
    panels = recycled.empty(E, library.mrb_packed_elements(depth, columns, gated), dtype=w_EKN.dtype)
    library.mrb_pack(
        panels.data_ptr(), w_EKN.data_ptr(), *w_EKN.stride(), E, depth, columns, gated, w_EKN.element_size(),
        torch.get_num_threads(),
    )  # fmt: skip
    return panels


def _pack_stored(
    stored: Stored, dtype: torch.dtype, gated: bool, store: str, kept: PackedFiles | None
) -> Frozen:
    form = Form(kernel="native", size=stored.size, dtype=dtype, gated=gated, store=store)
    return _frozen(
        form,
        list(tensors_in(stored)),
        lambda: coded.pack_stored(stored, gated, _library(None), rounds_rows(store)),
        kept,
    )


def _frozen(form: Form, source: list[Tensor], pack: Callable[[], Tensor], kept: PackedFiles | None) -> Frozen:
    topology = nodes_in_use()
    if kept is not None:
        if topology is not None:
            nodes.say_once("weights mapped from files are not placed on NUMA nodes: processes share them")
        return Frozen(kept.panels((form, _packing_code()), source, pack), form)
    panels = pack()
    if topology is not None:
        each = panel(coding_in(form.store), form.size[1]) * panels.element_size()
        panels = nodes.placed(panels, each, topology, _library(None))
    return Frozen(panels, form)


@cache
def _packing_code() -> str:
    """A hash of all files that decide what panels contain: a change in one of them makes old panels
    invalid."""
    formats = Path(__file__).parents[2].joinpath("formats").glob("*.py")
    files = [*levels.with_includes(SOURCE), Path(__file__), Path(coded.__file__), *sorted(formats)]
    return hashlib.sha256(repr([path.read_text() for path in files]).encode()).hexdigest()


def _unpack(panels: Tensor, form: Form) -> Tensor:
    E, (_, depth, columns) = panels.shape[0], form.size
    w_EKN = torch.empty(E, depth, columns, dtype=form.dtype)
    _library(None).mrb_unpack(
        w_EKN.data_ptr(), panels.data_ptr(), E, depth, columns, form.gated, w_EKN.element_size(),
        torch.get_num_threads(),
    )  # fmt: skip
    return w_EKN if form.size[0] == E else w_EKN.repeat(form.size[0], 1, 1)


UNPACK["native"] = _unpack


def unsupported(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    level: str | None = None,
    store: str | None = None,
) -> str | None:
    dtype, w_in, w_out = x_TD.dtype, weights.w_in_EDG, weights.w_out_EFD
    if (store is not None or dtype not in DTYPES) and (
        reason := why_not_store(dtype, store, max(weights.D, weights.F))
    ):
        return reason
    if w_in.dtype != dtype:
        return cpp.other_dtypes(dtype, w_in.dtype)
    if (type(w_in) is Frozen) != (type(w_out) is Frozen):
        return "only one of the two matrices is frozen; thaw() the layer"
    if type(w_in) is Frozen:
        if (w_in.form.kernel, w_in.form.store) != ("native", store):
            return f"these weights are frozen for {w_in.form.label}"
        if _wants_gradients(x_TD, gate_TK, weights):
            return "frozen weights have no gradients: call it under torch.no_grad(), or thaw() them"
        w_in = w_out = w_in.panels
    reason = cpp.unsupported(SOURCE, level, x_TD, plan.pair_R, w_in, w_out)
    return reason or cpp.why_not_cast(dtype)


def run(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: RoutingPlan,
    weights: ExpertWeights,
    *,
    level: str | None = None,
    store: str | None = None,
    batch_invariant: bool = False,
    knobs: Knobs = KERNELS_RULE,
) -> Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()  # needed by the parts and by the kernel
    check_sizes(x_TD, gate_TK, plan, weights.validate())
    if _wants_gradients(x_TD, gate_TK, weights):
        part = f"native(level={level})" if level else "native"
        steady = ",batch_invariant=True" if batch_invariant else ""
        staged = op.get(f"staged(dispatch={part},grouped_gemm={part},combine={part}{steady})")
        return staged.run(x_TD, gate_TK, plan, weights)
    T, D = x_TD.shape
    if store is not None and not isinstance(weights.w_in_EDG, Frozen):
        weights = freeze(weights, store=store)
    plain = 0 if isinstance(weights.w_in_EDG, Frozen) else 2 if batch_invariant else 1
    w_in, (in_E, in_D, in_G) = _memory(weights.w_in_EDG)
    w_out, (out_E, out_F, out_D) = _memory(weights.w_out_EFD)
    y_TD = recycled.empty(T, D, dtype=x_TD.dtype)
    gate_TK = gate_TK.float().contiguous()
    b_in_EG, b_out_ED = (
        None if b is None else b.detach().float().contiguous() for b in (weights.b_in_EG, weights.b_out_ED)
    )
    coding, topology = coding_in(store), None if plain else nodes_in_use()
    for_c = coding and ctypes.pointer(coded.for_c(coding, rounds_rows(store)))
    shares = None if topology is None else nodes.for_c(topology)
    problem = _Problem(
        x_TD.data_ptr(), w_in.data_ptr(), w_out.data_ptr(), _pointer(b_in_EG),
        _pointer(b_out_ED), gate_TK.data_ptr(), for_c,
        plan.pair_R.data_ptr(), plan.offset_E1.data_ptr(), plan.count_E.data_ptr(), y_TD.data_ptr(),
        x_TD.stride(0), T,
        max(plan.num_choices, 1), D, weights.F, weights.num_experts, in_E, out_E,
        panel(coding, D), panel(coding, weights.F), in_D, in_G, out_F, out_D, plain,
        ACTIVATIONS[weights.activation], torch.get_num_threads(), plan.pair_R.shape[0],
        shares and ctypes.pointer(shares), *knobs.numbers(),
    )  # fmt: skip
    failed = _library(level).mrb_forward(problem, x_TD.element_size(), w_in.element_size())
    if failed == WRONG_PLAN:
        raise ValueError("the plan has an index outside its rows or tokens; validate() says where")
    if failed:
        raise MemoryError("no memory for the workspace of expert_ffn.native")
    if shares is not None:
        nodes.say_refused(shares)
    return y_TD


def _wants_gradients(x_TD: Tensor, gate_TK: Tensor, weights: ExpertWeights) -> bool:
    if not torch.is_grad_enabled():
        return False
    parts = (x_TD, gate_TK, weights.w_in_EDG, weights.w_out_EFD, weights.b_in_EG, weights.b_out_ED)
    return True in [part.requires_grad for part in parts if part is not None]


def _memory(w_EKN: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor that C++ reads, and its strides. The stride of panels is 0 if experts share memory."""
    if not isinstance(w_EKN, Frozen):
        return w_EKN, w_EKN.stride()
    panels = w_EKN.panels
    return panels, (0 if panels.shape[0] == 1 else panels.stride(0), 0, 0)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
