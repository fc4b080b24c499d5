"""Target: the numbers of each GPU architecture, and the architecture of a device. It needs only torch.

Target.named("sm_90a").shared_per_program     one of TARGETS, for code that compiles without a GPU
target_of(x_TD.device)                         the target of a launch; unknown GPUs get their family's minimum
with as_if(Target.named("gfx942")): ...        inside, every device counts as this one: what would run there?
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from moe_routing_bench.ops.tracing import while_tracing

OLDEST_NVIDIA = (8, 0)  # older GPUs do not have the tensor-core instructions that we use


@dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU architecture, with all its numbers that a kernel or a check needs.

    Target.named("sm_90a").launch(num_warps=8, num_stages=4) -> {"num_warps": 8, "num_stages": 4}
    Target.named("gfx942").launch(num_warps=8, num_stages=4) -> {"num_warps": 4, "num_stages": 2,
      "matrix_instr_nonkdim": 16}: a wave has 64 lanes, and two stages fill its 64 KiB of shared memory.
    """

    name: str
    backend: str  # triton's name for it, "cuda" or "hip"
    arch: int | str  # triton's name or number for it
    lanes: int  # in one warp (NVIDIA) or wave (AMD)
    shared_per_program: int  # bytes that one program may use
    shared_per_unit: int  # bytes of one multiprocessor (compute unit)
    reserved_shared: int  # bytes that the system takes for each program
    registers_per_unit: int  # 32-bit registers of all lanes of one multiprocessor
    register_granule: int  # a lane gets registers in multiples of this
    warps_per_unit: int
    programs_per_unit: int
    units: int  # multiprocessors of the usual card: `usual`
    tma: bool  # hardware moves tensor descriptors
    pdl: bool  # programmatic dependent launch: a kernel may start before the kernel it waits for has ended
    e4m3: bool  # Triton reads 8-bit floats of 4 exponent bits
    most_stages: int
    matrix_instruction: str  # how the assembly text spells the tensor-core multiply
    usual: str = ""
    unlisted: str = ""  # a sentence, if the GPU is not in the table and this is the minimum of its family

    @staticmethod
    def named(name: str) -> Target:
        if name not in TARGETS:
            raise ValueError(f"there is no architecture {name!r} here; there are {', '.join(TARGETS)}")
        return TARGETS[name]

    def warps(self, num_warps: int) -> int:
        """How many warps of this GPU have as many lanes as `num_warps` warps of 32."""
        return max(1, num_warps * 32 // self.lanes)

    def launch(self, *, num_warps: int, num_stages: int, tile: int = 1) -> dict[str, int]:
        """Triton's launch options for a configuration written for warps of 32 lanes, with as many of its
        stages as fit if each needs `tile` bytes of shared memory."""
        # one tile fewer than stages: the last is being read into registers, or copied while another is freed
        fitting = max(1, self.shared_per_program // tile + (0 if self.tma else 1))
        options = {
            "num_warps": self.warps(num_warps),
            "num_stages": min(num_stages, self.most_stages, fitting),
        }
        if self.backend == "hip":
            options["matrix_instr_nonkdim"] = 16  # the 16x16 MFMA: it takes fewer registers than 32x32
        return options

    def moving(self, num_warps: int) -> dict[str, Any]:
        """Launch options for a kernel without a pipelined matrix product, where stages have no effect."""
        return {"num_warps": self.warps(num_warps), "num_stages": 1}

    def compiled(self, *, rows: int, num_warps: int, num_stages: int, tile: int = 1) -> dict[str, Any]:
        """Fields for the Compilation of a GEMM with tiles of `rows` rows, with what its code must contain."""
        options = self.launch(num_warps=num_warps, num_stages=num_stages, tile=tile)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        # wgmma and tcgen05 multiply 64 rows or more; fewer rows use sm_80's instruction
        multiply = "small_multiply" if rows < 64 and self.backend == "cuda" else "tensor_core"
        expects = (multiply, "pipelined") if stages > 1 else (multiply,)
        return {"num_warps": warps, "num_stages": stages, "options": options, "expects": expects}


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 65,536 registers everywhere;
# a program may use 1 KiB of shared memory less than the multiprocessor has.
_nvidia = partial(
    Target, backend="cuda", lanes=32, reserved_shared=1024, registers_per_unit=65536, register_granule=8,
)  # fmt: skip
_old = partial(_nvidia, tma=False, pdl=False, most_stages=5, matrix_instruction=r"\bmma\.sync")
_new = partial(_nvidia, tma=True, pdl=True, e4m3=True, most_stages=6)
_large = {"shared_per_program": 227 * 1024, "shared_per_unit": 228 * 1024, "warps_per_unit": 64}
_small = {"shared_per_program": 99 * 1024, "shared_per_unit": 100 * 1024, "warps_per_unit": 48}
# LLVM's AMDGPU usage guide, CDNA 3 and 4 ISA: 4 SIMDs of 512 x 64 registers, 8 waves each
_amd = partial(
    Target, backend="hip", lanes=64, reserved_shared=0, registers_per_unit=4 * 512 * 64, register_granule=8,
    warps_per_unit=32, programs_per_unit=32, tma=False, pdl=False, e4m3=True, most_stages=2,
    matrix_instruction=r"\bv_mfma",
)  # fmt: skip
TARGETS = {
    target.name: target
    for target in (
        _old(
            name="sm_80", arch=80, usual="A100", units=108, shared_per_program=163 * 1024,
            shared_per_unit=164 * 1024, warps_per_unit=64, programs_per_unit=32, e4m3=False,
        ),
        _old(name="sm_86", arch=86, usual="A40", units=84, programs_per_unit=16, e4m3=False, **_small),
        _old(name="sm_89", arch=89, usual="L40S", units=142, programs_per_unit=24, e4m3=True, **_small),
        _new(
            name="sm_90a", arch=90, usual="H100", units=132, programs_per_unit=32,
            matrix_instruction=r"\bwgmma\.mma_async", **_large,
        ),
        _new(
            name="sm_100a", arch=100, usual="B200", units=148, programs_per_unit=32,
            matrix_instruction=r"\btcgen05\.mma", **_large,
        ),
        _new(
            name="sm_120", arch=120, usual="RTX 5090", units=170, programs_per_unit=24,
            matrix_instruction=r"\bmma\.sync", **_small,
        ),
        _amd(
            name="gfx942", arch="gfx942", usual="MI300X", units=304, shared_per_program=64 * 1024,
            shared_per_unit=64 * 1024,
        ),
        _amd(
            name="gfx950", arch="gfx950", usual="MI355X", units=256, shared_per_program=160 * 1024,
            shared_per_unit=160 * 1024,
        ),
    )
}  # fmt: skip
CAPABILITIES = {
    divmod(target.arch, 10): target for target in TARGETS.values() if isinstance(target.arch, int)
}
_assumed: ContextVar[Target | None] = ContextVar("assumed", default=None)


@contextmanager
def as_if(target: Target) -> Iterator[None]:
    """Inside the context, target_of returns this architecture for every device."""
    before = _assumed.set(target)
    try:
        yield
    finally:
        _assumed.reset(before)


@while_tracing
def assumed() -> Target | None:
    return _assumed.get()


@while_tracing
def target_of(device: torch.device) -> Target:
    """The architecture of a device. For a GPU that is not there, or a CPU that interprets, it is the oldest
    NVIDIA one; for a GPU that is not in the table, the minimum of its family, with a warning."""
    if (target := assumed()) is not None:
        return target
    if device.type != "cuda" or not torch.cuda.is_available():
        return TARGETS["sm_80"]
    if torch.version.hip is not None:
        seen = torch.cuda.get_device_properties(device)
        target = _of_amd(seen.gcnArchName.partition(":")[0], getattr(seen, "warp_size", 64))
    else:
        target = _of_nvidia(*torch.cuda.get_device_capability(device))
    if target.unlisted:
        warnings.warn(target.unlisted, RuntimeWarning, stacklevel=2)
    return target


@cache
def _of_nvidia(major: int, minor: int) -> Target:
    if (known := CAPABILITIES.get((major, minor))) is not None:
        return known
    relatives = [target for (first, _), target in CAPABILITIES.items() if first == major]
    least = _least(relatives or list(CAPABILITIES.values()))
    name = f"sm_{major}{minor}"
    return replace(
        least, name=name, arch=10 * major + minor, unlisted=_sentence(name, least, bool(relatives))
    )


@cache
def _of_amd(name: str, lanes: int) -> Target:
    if name in TARGETS:
        return TARGETS[name]
    least = _least([target for target in TARGETS.values() if target.backend == "hip"])
    # other families may not have an MFMA, a wave of 64 or Triton's 8-bit floats
    least = replace(least, name=name, arch=name, lanes=lanes, e4m3=False)
    return replace(least, unlisted=_sentence(name, least, related=False))


def _least(relatives: list[Target]) -> Target:
    """The minimum of every limit, and only the features that all of them have."""
    least: dict[str, Any] = {
        name: min(getattr(target, name) for target in relatives)
        for name in (
            "shared_per_program", "shared_per_unit", "warps_per_unit", "programs_per_unit", "most_stages",
            "units", "tma", "pdl", "e4m3",
        )
    }  # fmt: skip
    return replace(relatives[0], **least)


def _sentence(name: str, least: Target, related: bool) -> str:
    whose = "its family" if related else "any GPU of its maker"
    return (
        f"{name} is not one of the known GPUs ({', '.join(TARGETS)}): kernels use the smallest limits of "
        f"{whose}, {least.shared_per_program // 1024} KiB of shared memory; `mrb doctor --device cuda` "
        "checks their results"
    )


def why_too_old(target: Target) -> str | None:
    """Why our kernels cannot run on an architecture; None if they may."""
    if isinstance(target.arch, int) and target.arch < 10 * OLDEST_NVIDIA[0] + OLDEST_NVIDIA[1]:
        return f"{target.name} is too old; kernels need an NVIDIA GPU from sm_80 on, or AMD's CDNA 3 or 4"
    return None
