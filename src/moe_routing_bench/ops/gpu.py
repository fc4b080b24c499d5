"""What the Triton implementations share: the GPUs, Compilation, and a few device functions.

Needs triton. Only the Triton implementations, `ops/<op>/triton_*.py`, import this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_routing_bench import experts
from moe_routing_bench.plan import RoutingPlan

INTERPRETING: bool = bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the matrix products compute with


@dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU architecture, with all numbers about it that a kernel or a check needs.

    Target.named("sm_90a").launch(num_warps=8, num_stages=4) -> {"num_warps": 8, "num_stages": 4}
    Target.named("gfx942").launch(num_warps=8, num_stages=4) -> {"num_warps": 4, "num_stages": 2,
      "matrix_instr_nonkdim": 16}: a wave has 64 lanes, and two stages fill its 64 KiB of shared memory.
    """

    name: str
    backend: str  # triton's name for it, "cuda" or "hip"
    arch: int | str  # triton's name or number for it
    lanes: int  # in one warp (NVIDIA) or wave (AMD)
    shared_per_program: int  # bytes one program may use
    shared_per_unit: int  # bytes one multiprocessor (compute unit) has
    reserved_shared: int  # bytes the system takes for each program
    registers_per_unit: int  # 32-bit registers of all lanes of one multiprocessor
    register_granule: int  # registers of one lane are given in multiples of this
    warps_per_unit: int
    programs_per_unit: int
    units: int  # multiprocessors of the usual card: A100, H100 SXM, B200, MI300X
    tma: bool  # tensor descriptors are moved by hardware
    pdl: bool  # programmatic dependent launch: a kernel may start before the one it waits for has ended
    e4m3: bool  # Triton reads 8-bit floats of 4 exponent bits
    most_stages: int
    matrix_instruction: str  # how the assembly text spells the tensor-core multiply

    @staticmethod
    def named(name: str) -> Target:
        if name not in TARGETS:
            raise ValueError(f"there is no architecture {name!r} here; there are {', '.join(TARGETS)}")
        return TARGETS[name]

    def warps(self, num_warps: int) -> int:
        """The number of warps of this GPU that have as many lanes as `num_warps` warps of 32."""
        return max(1, num_warps * 32 // self.lanes)

    def launch(self, *, num_warps: int, num_stages: int) -> dict[str, int]:
        """Triton's launch options for a configuration written for warps of 32 lanes."""
        options = {
            "num_warps": self.warps(num_warps),
            "num_stages": min(num_stages, self.most_stages),
        }
        if self.backend == "hip":
            options["matrix_instr_nonkdim"] = 16  # the 16x16 MFMA: it takes fewer registers than 32x32
        return options

    def moving(self, num_warps: int) -> dict[str, Any]:
        """Launch options for a kernel without a pipelined matrix product, where stages mean nothing."""
        return {"num_warps": self.warps(num_warps), "num_stages": 1}

    def compiled(self, *, rows: int, num_warps: int, num_stages: int) -> dict[str, Any]:
        """Fields of the Compilation of a GEMM with tiles of `rows` rows, and what its code must contain."""
        options = self.launch(num_warps=num_warps, num_stages=num_stages)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        # wgmma and tcgen05 multiply 64 rows or more; fewer rows use sm_80's instruction
        multiply = "small_multiply" if rows < 64 and self.backend == "cuda" else "tensor_core"
        expects = (multiply, "pipelined") if stages > 1 else (multiply,)
        return {"num_warps": warps, "num_stages": stages, "options": options, "expects": expects}


# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (8.0, 9.0, 10.0):
# 64 warps, 32 programs, 65,536 registers; shared memory 164 / 228 / 228 KiB, a program may use 1 KiB less.
# AMD: LLVM's AMDGPU usage guide, CDNA 3 ISA: 4 SIMDs of 512 x 64 registers, 8 waves each, 64 KiB of LDS.
TARGETS = {
    target.name: target
    for target in (
        Target(
            name="sm_80", backend="cuda", arch=80, lanes=32, shared_per_program=163 * 1024,
            shared_per_unit=164 * 1024, reserved_shared=1024, registers_per_unit=65536, register_granule=8,
            warps_per_unit=64, programs_per_unit=32, units=108, tma=False, pdl=False, e4m3=False,
            most_stages=5, matrix_instruction=r"\bmma\.sync",
        ),
        Target(
            name="sm_90a", backend="cuda", arch=90, lanes=32, shared_per_program=227 * 1024,
            shared_per_unit=228 * 1024, reserved_shared=1024, registers_per_unit=65536, register_granule=8,
            warps_per_unit=64, programs_per_unit=32, units=132, tma=True, pdl=True, e4m3=True,
            most_stages=6, matrix_instruction=r"\bwgmma\.mma_async",
        ),
        Target(
            name="sm_100a", backend="cuda", arch=100, lanes=32, shared_per_program=227 * 1024,
            shared_per_unit=228 * 1024, reserved_shared=1024, registers_per_unit=65536, register_granule=8,
            warps_per_unit=64, programs_per_unit=32, units=148, tma=True, pdl=True, e4m3=True,
            most_stages=6, matrix_instruction=r"\btcgen05\.mma",
        ),
        Target(
            name="gfx942", backend="hip", arch="gfx942", lanes=64, shared_per_program=64 * 1024,
            shared_per_unit=64 * 1024, reserved_shared=0, registers_per_unit=4 * 512 * 64, register_granule=8,
            warps_per_unit=32, programs_per_unit=32, units=304, tma=False, pdl=False, e4m3=True,
            most_stages=2, matrix_instruction=r"\bv_mfma",
        ),
    )
}  # fmt: skip


def target_of(device: torch.device) -> Target:
    """The architecture of a device; the oldest NVIDIA one if it is interpreted, absent or not listed."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return TARGETS["sm_80"]
    if torch.version.hip is not None:
        return TARGETS["gfx942"]
    major, _ = torch.cuda.get_device_capability(device)
    return {9: TARGETS["sm_90a"], 10: TARGETS["sm_100a"]}.get(major, TARGETS["sm_80"])


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One kernel with the constants of a model, to be compiled ahead of time by `mrb compile`.

    Compilation(
        name="gather", kernel=_gather,
        signature={"x": "*bf16", "row": "*i64", "R": "i32", "stride": "i32:16"},
        constexprs={"D": 2048, "BLOCK": 256}, num_warps=4, num_stages=1, expects=("vector_load",),
    )
    has pointers aligned to 16 bytes (as torch's memory is), an integer of any value, and a multiple of 16.
    The signature names what is not a constexpr; "i32:1" is an integer that is 1, such as the last stride.
    """

    name: str
    kernel: Any  # a function decorated with @triton.jit
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int  # as given to the launch on this target: see Target.launch
    num_stages: int
    expects: tuple[str, ...] = ()  # keys of EXPECTED in studies/compiled.py
    options: Mapping[str, Any] | None = None  # further launch options, such as matrix_instr_nonkdim
    # the least work of one program, for the static estimate: operations, bytes to and from device memory
    flops: int = 0
    bytes: int = 0


def why_not(*tensors: Tensor | None) -> str | None:
    """Why a Triton kernel cannot run on these tensors here, in words; None if it can."""
    given = [tensor for tensor in tensors if tensor is not None]
    if len({tensor.device for tensor in given}) > 1:
        return "its tensors must be on one device"
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
    """Why a kernel that is the whole of expert_ffn cannot run on these arguments; None if it can."""
    if (reason := why_not(x_TD, gate_TK, plan.pair_R, weights.w_in_EDG)) is not None:
        return reason
    matrices = (weights.w_in_EDG, weights.w_out_EFD)
    if x_TD.dtype not in DTYPES or matrices[0].dtype != x_TD.dtype:
        return (
            f"it computes float32, bfloat16 or float16 throughout, not {x_TD.dtype} with {matrices[0].dtype}"
        )
    if gate_TK.dtype not in (x_TD.dtype, torch.float32):
        return f"gates are float32 or of the rows' dtype {x_TD.dtype}, not {gate_TK.dtype}"
    if any((w.shape[1] - 1) * w.stride(1) + (w.shape[2] - 1) * w.stride(2) >= 2**31 for w in matrices):
        return "one expert's matrix spans 2^31 elements or more, and offsets inside it have 32 bits"
    return None


def why_not_early(device: torch.device) -> str | None:
    """Why a kernel cannot be launched before the one it waits for has ended; None if it can."""
    if INTERPRETING or not target_of(device).pdl:
        return "programmatic dependent launch (pdl=1) needs an NVIDIA GPU from sm_90 on"
    return None


def multiprocessors(device: torch.device) -> int:
    """For persistent kernels. Three if interpreted, so that each takes several tiles even in a small case."""
    if INTERPRETING or device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_powers_of_two(**options: int) -> None:
    for name, value in options.items():
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} is {value}; a tile's sides and its warps are powers of two")


def tile_sides(tall: int, wide: int, D: int) -> tuple[int, int]:
    """Rows and columns of a tile for moving rows. If D is narrower than the tile, the tile gets taller and
    keeps its size."""
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
