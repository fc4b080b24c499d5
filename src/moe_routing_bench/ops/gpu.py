"""Shared by the Triton implementations: Compilation, reasons why a kernel cannot run, device functions.

It needs triton. Only the Triton implementations, `ops/<op>/triton_*.py`, import this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_bench.core import experts
from moe_routing_bench.core.dtypes import FLOATS
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.ops.rows import why_not_gates
from moe_routing_bench.ops.targets import Target, assumed, target_of, why_too_old

P = ParamSpec("P")
R = TypeVar("R")
INTERPRETING: bool = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One kernel with the constants of a model, to be compiled ahead of time by `mrb gpu compile`.

    Compilation(
        name="gather", kernel=_gather,
        signature={"x": "*bf16", "row": "*i64", "R": "i32", "stride": "i32:16"},
        constexprs={"D": 2048, "BLOCK": 256}, num_warps=4, num_stages=1, expects=("vector_load",),
    )
    has pointers aligned to 16 bytes (as torch's memory is), an integer of any value, and a multiple of 16.
    The signature names the arguments that are not constexpr; "i32:1" is an integer that is 1, such as the
    last stride.
    """

    name: str
    kernel: Any  # a function decorated with @triton.jit
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int  # of the launch on this target, see Target.launch
    num_stages: int
    expects: tuple[str, ...] = ()  # keys of EXPECTED in studies/compiled.py
    options: Mapping[str, Any] | None = None  # further launch options, such as matrix_instr_nonkdim
    # the least work of one program, for the static estimate: operations, and bytes read and written
    flops: int = 0
    bytes: int = 0


def why_not(*tensors: Tensor | None) -> str | None:
    """Why a Triton kernel cannot run on these tensors here; None if it can."""
    given = [tensor for tensor in tensors if tensor is not None]
    if (reason := why_too_old(target_of(given[0].device))) is not None:
        return reason
    if len({tensor.device for tensor in given}) > 1:
        return "its tensors must be on one device"
    if assumed() is not None:  # nothing will run
        return None
    if all(tensor.device.type == "cuda" for tensor in given):  # torch's name for AMD's GPUs too
        return "interpreted with TRITON_INTERPRET=1 it needs CPU tensors" if INTERPRETING else None
    if any(tensor.device.type != "cpu" for tensor in given) or not INTERPRETING:
        return "it runs on a GPU; on a CPU it is only interpreted, slowly, with TRITON_INTERPRET=1"
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in given):
        return "the interpreter needs plain tensors with values"
    return None


def why_not_layer(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: experts.ExpertWeights
) -> str | None:
    """Why a kernel for all of expert_ffn cannot run on these arguments; None if it can."""
    if (reason := why_not(x_TD, gate_TK, plan.pair_R, weights.w_in_EDG)) is not None:
        return reason
    matrices = (weights.w_in_EDG, weights.w_out_EFD)
    if x_TD.dtype not in FLOATS or matrices[0].dtype != x_TD.dtype:
        return (
            f"it computes float32, bfloat16 or float16 throughout, not {x_TD.dtype} with {matrices[0].dtype}"
        )
    return why_not_gates(gate_TK, x_TD.dtype) or why_not_spans(*matrices)


def why_not_spans(*matrices: Tensor) -> str | None:
    """Why an expert's matrix, or its gradient, spans too much memory; None if it does not."""
    for w in matrices:
        span = (w.shape[1] - 1) * w.stride(1) + (w.shape[2] - 1) * w.stride(2)
        if max(span, w.shape[1] * w.shape[2]) >= 2**31:
            return "one expert's matrix spans 2^31 elements or more, and offsets inside it have 32 bits"
    return None


def why_not_early(device: torch.device) -> str | None:
    """Why a kernel cannot be launched before the kernel it waits for has ended; None if it can."""
    if INTERPRETING or not target_of(device).pdl:
        return "programmatic dependent launch (pdl=1) needs an NVIDIA GPU from sm_90 on"
    if torch.compiler.is_compiling():
        return "torch.compile drops launch_pdl, so pdl=1 would do nothing in it; leave the option pdl out"
    return None


def why_not_tile(tile: int, target: Target) -> str | None:
    """Why a tile with this many bytes (of both operands) is too large for a GPU; None if it is not."""
    if tile > target.shared_per_program:
        return (
            f"a tile takes {tile // 1024} KiB of shared memory, and {target.name} has "
            f"{target.shared_per_program // 1024}; choose smaller blocks"
        )
    return None


def on_its_device(launcher: Callable[P, R]) -> Callable[P, R]:
    """Makes a launcher use the device of its first argument. Triton uses the current device, which may be
    another one on a machine with several GPUs."""

    @functools.wraps(launcher)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        device = args[0].device  # type: ignore[attr-defined]
        if device.type != "cuda" or not torch.cuda.is_available():
            return launcher(*args, **kwargs)
        with torch.cuda.device(device):
            return launcher(*args, **kwargs)

    return guarded


def depth_of(block_k: int, x: Tensor) -> int:
    """The depth of a tile for rows of x: block_k for elements of 2 bytes, a quarter for float32, at least 16.

    float32 is multiplied without tensor cores, from registers. With half the depth, 18 of 48 launches of the
    grouped GEMMs spilled registers (measurements/gpu/launches.txt shows what they need now).
    """
    return max(16, block_k if x.element_size() <= 2 else block_k // 4)


def multiprocessors(device: torch.device) -> int:
    """The number of programs of a persistent kernel. It is 3 if interpreted, so that each program takes
    several tiles even in a small case."""
    if (target := assumed()) is not None:
        return target.units
    if INTERPRETING or device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_powers_of_two(**options: int) -> None:
    for name, value in options.items():
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} is {value}; a tile's sides and its warps are powers of two")


def tile_sides(tall: int, wide: int, D: int) -> tuple[int, int]:
    """The rows and columns of a tile that moves rows. If D is narrower than the tile, the tile gets taller
    and keeps its size."""
    narrow = min(wide, triton.next_power_of_2(D))
    return tall * (wide // narrow), narrow


OAI_ALPHA, OAI_LIMIT = tl.constexpr(experts.OAI_ALPHA), tl.constexpr(experts.OAI_LIMIT)


@triton.jit
def activated(h, up, ACTIVATION: tl.constexpr):
    """What experts.activate does, in float32; `up` is the second half of the columns, unread if not gated.

    Written with tl.where: tl.maximum and tl.clamp turn NaN into a number.
    """
    if ACTIVATION == "swiglu_oai":
        h = tl.where(h > OAI_LIMIT, OAI_LIMIT, h)
        up = tl.where(up > OAI_LIMIT, OAI_LIMIT, tl.where(up < -OAI_LIMIT, -OAI_LIMIT, up))
        return h * tl.sigmoid(h * OAI_ALPHA) * (up + 1.0)  # the interpreter needs a constexpr on the right
    elif ACTIVATION == "swiglu":
        return h * tl.sigmoid(h) * up
    elif ACTIVATION == "geglu":
        return 0.5 * h * (1.0 + tl.math.erf(h * 0.7071067811865476)) * up
    elif ACTIVATION == "silu":
        return h * tl.sigmoid(h)
    elif ACTIVATION == "gelu":
        return 0.5 * h * (1.0 + tl.math.erf(h * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        return tl.where(h < 0.0, 0.0, h * h)
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.where(h < 0.0, 0.0, h)


@triton.jit
def expert_of_row(row, offset_E1, E: tl.constexpr, E_PADDED: tl.constexpr):
    """The expert whose span holds a row; E or more if none does. E_PADDED: the next power of two."""
    expert_E = tl.arange(0, E_PADDED)
    end_E = tl.load(offset_E1 + 1 + expert_E, mask=expert_E < E, other=2**62)
    return tl.sum((end_E <= row).to(tl.int32), 0)


@triton.jit
def key_of(score, id, IDS: tl.constexpr):
    """An integer that sorts like (score, lower id first); IDS, a power of two, is above every id.

    score is float32. As in torch.sort, -0.0 equals 0.0 and NaN is above infinity. All are above NO_KEY.
    """
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    # the bits of negative floats run backwards
    sortable = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    sortable = tl.where(score != score, 0x7FFFFFFF, sortable)
    return sortable.to(tl.int64) * IDS + (IDS - 1 - id)


@triton.jit
def id_of(key, IDS: tl.constexpr):
    return IDS - 1 - (key & (IDS - 1))


NO_KEY = tl.constexpr(-(2**62))
