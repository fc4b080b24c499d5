"""Triton kernels compiled ahead of time, without a GPU: what the machine code needs, what is wrong with it.

Registers, spills, shared memory and instructions are read from the cubin or hsaco that a GPU would run, made
with the constants of a model. Nothing is executed, so this says nothing about speed. Needs triton.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_routing_bench.ops.gpu import Compilation, Target
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.published import model

TOKENS = 4096
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = [["tt.divisibility", 16]]

# 128 bits or more at once, from device memory: plain, asynchronous copies to shared memory, descriptors
WIDE_LOADS = {
    "cuda": (
        r"ld\.global[\w.:]*\.(?:v4\.[busf]32|v8\.[busf]32|v2\.[busf]64|v4\.[busf]64)"
        r"|cp\.async\.cg\.shared\.global\b|cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global"
    ),
    "hip": r"\b(?:global|buffer)_load_dwordx4\b",
}


# what overlaps: fetches of a tile in Triton's code, those by TMA, the halves of programmatic dependent launch
FETCHES = r"\b(?:async_copy_global_to_local|async_tma_copy_global_to_local|ttg\.local_store)\b"
DESCRIPTOR_LOADS = r"\bcp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global"
STARTS_NEXT = r"\bgriddepcontrol\.launch_dependents\b"
WAITS_FOR_PREVIOUS = r"\bgriddepcontrol\.wait\b"

# what a Compilation may expect -> the field of Compiled that must not be 0, and what is wrong if it is
EXPECTED = {
    "tensor_core": ("tensor_core", "has no tensor-core instruction ({instruction})"),
    "small_multiply": ("small_multiplies", "has no tensor-core instruction (mma.sync)"),
    "vector_load": ("wide_loads", "loads nothing 128 bits at a time"),
    "pipelined": ("is_pipelined", "has {stages} stages and only {fetches_ahead} tiles on their way"),
    "descriptor_load": ("descriptor_loads", "loads nothing by tensor descriptor (cp.async.bulk.tensor)"),
    "starts_next": ("starts_next", "never lets the next kernel start (griddepcontrol.launch_dependents)"),
    "waits_for_previous": (
        "waits_for_previous",
        "is started early and never waits for the kernel before (griddepcontrol.wait)",
    ),
    "next_tile": ("next_tile", "does not fetch all of the next tile before it stores this one"),
}

# the size of one multiply in its name, and how many warps do it together; tcgen05 has it in a register
SHAPES = (
    (r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", 1),
    (r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", 4),
    (r"v_mfma_f32_(\d+)x(\d+)x(\d+)", 1),
)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel as machine code for one architecture.

    Compiled(op="grouped_gemm", impl="triton_ragged", kernel="forward", model="qwen3-30b-a3b", arch="sm_90a",
      registers=168, spill_bytes=0, shared_bytes=98304, warps=8, stages=3, programs_per_unit=1,
      occupancy=0.125, tensor_core=4, wide_loads=12, fetches_ahead=8, code_bytes=9216, flops=67108864,
      bytes=1081344, wrong=())
    `occupancy` is the share of a multiprocessor's warps that fit at most; `flops` and `bytes` are the
    kernel's own estimate for one program.
    """

    op: str
    impl: str
    kernel: str
    model: str
    arch: str
    registers: int = 0  # of one lane
    spill_bytes: int = 0
    shared_bytes: int = 0
    tensor_memory: int = 0  # columns, of 512; sm_100a only
    warps: int = 0
    stages: int = 0
    programs_per_unit: int = 0
    occupancy: float = 0.0
    tensor_core: int = 0  # multiply instructions of the architecture's own in the text
    small_multiplies: int = 0  # mma.sync, which every NVIDIA architecture has
    text_flops: int = 0  # what they do if each runs once in every warp; 0 if their text does not say
    wide_loads: int = 0
    fetches_ahead: int = 0  # of tiles, under way when the loop begins
    descriptor_loads: int = 0
    starts_next: int = 0
    waits_for_previous: int = 0
    next_tile: int = 0  # 1: the next tile is fetched while this one ends
    code_bytes: int = 0
    flops: int = 0
    bytes: int = 0
    wrong: tuple[str, ...] = ()
    not_made: str = ""  # why the configuration makes no sense on this architecture

    @property
    def name(self) -> str:
        return f"{self.op}.{self.impl}" + (f".{self.kernel}" if self.kernel else "")

    @property
    def key(self) -> str:
        return f"{self.name}, {self.model}, {self.arch}"

    @property
    def is_pipelined(self) -> bool:
        """Whether both operands are fetched as far ahead as the stages say."""
        return self.fetches_ahead >= 2 * max(1, self.stages - 1)

    @property
    def overlap(self) -> str:
        """What was seen in the code: "3 stages, tma, next tile, pdl"."""
        seen = {
            f"{self.stages} stages": self.is_pipelined, "tma": self.descriptor_loads,
            "next tile": self.next_tile, "pdl": self.starts_next + self.waits_for_previous,
        }  # fmt: skip
        return ", ".join(name for name, count in seen.items() if count)

    @property
    def passes(self) -> float:
        """How often the multiplies of the text must run for the work of one program."""
        return self.flops / self.text_flops if self.text_flops else 0.0

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


def compile_implementation(
    implementation: Implementation, model_name: str, target: Target
) -> Iterator[Compiled]:
    """Every kernel of an implementation with the constants of a model; nothing if it is not in Triton.

    A configuration gives the kernels that differ from the default's, or one row with a reason if it makes no
    sense on the architecture.
    """
    names = (implementation.op, implementation.label, model_name)
    try:
        compilations = compilations_of(implementation, model_name, target)
    except NotImplementedError as reason:
        yield Compiled(
            op=names[0], impl=names[1], kernel="", model=names[2], arch=target.name, not_made=str(reason)
        )
        return
    for compilation in compilations:
        yield compile_kernel(compilation, target, *names)


def compilations_of(implementation: Implementation, model_name: str, target: Target) -> list[Compilation]:
    run: Any = implementation.run
    made = getattr(getattr(run, "func", run), "__globals__", {}).get("compilations")
    if made is None:
        return []
    sizes = model(model_name).shape(TOKENS)
    usual = list(made(sizes, target))
    if not implementation.config:
        return usual
    return [one for one in made(sizes, target, **implementation.config) if one not in usual]


def compile_kernel(
    compilation: Compilation, target: Target, op: str = "", impl: str = "", model_name: str = ""
) -> Compiled:
    fields: dict[str, Any] = {
        "op": op, "impl": impl, "kernel": compilation.name, "model": model_name, "arch": target.name,
        "warps": compilation.num_warps, "stages": compilation.num_stages, "flops": compilation.flops,
        "bytes": compilation.bytes,
    }  # fmt: skip
    options = {"num_warps": compilation.num_warps, "num_stages": compilation.num_stages}
    try:
        made = triton.compile(
            _source(compilation),
            target=GPUTarget(target.backend, target.arch, target.lanes),
            options={**options, **(compilation.options or {})},
        )
    except Exception as error:  # whatever a compiler raises is an answer here
        last = [line for line in str(error).splitlines() if line.strip()][-1:] or [""]
        return Compiled(**fields, wrong=(f"does not compile: {type(error).__name__}: {last[0][:300]}",))
    text = made.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    read = _read_cuda if target.backend == "cuda" else _read_hip
    fields |= read(made, text, target)
    fields |= {
        "tensor_core": len(re.findall(target.matrix_instruction, text)),
        "small_multiplies": len(re.findall(r"\bmma\.sync", text)),
        "text_flops": text_flops(text, made.metadata.num_warps),
        "wide_loads": len(re.findall(WIDE_LOADS[target.backend], text)),
        "fetches_ahead": fetches_ahead(made.asm["ttgir"]),
        "descriptor_loads": len(re.findall(DESCRIPTOR_LOADS, text)),
        "starts_next": len(re.findall(STARTS_NEXT, text)),
        "waits_for_previous": len(re.findall(WAITS_FOR_PREVIOUS, text)),
        "next_tile": int(fetches_next_tile(made.asm["ttgir"])),
        "warps": made.metadata.num_warps,
    }
    fits = programs_per_unit(
        target, fields["registers"], fields["shared_bytes"], fields["warps"], fields["tensor_memory"]
    )
    occupancy = fits * fields["warps"] / target.warps_per_unit
    code = Compiled(**fields, programs_per_unit=fits, occupancy=occupancy)
    return replace(code, wrong=tuple(whats_wrong(code, target, compilation.expects)))


def whats_wrong(code: Compiled, target: Target, expects: tuple[str, ...]) -> Iterator[str]:
    if code.spill_bytes:
        yield f"spills {code.spill_bytes} bytes of registers to memory"
    if code.shared_bytes > target.shared_per_program:
        yield f"needs {code.shared_bytes:,} bytes of shared memory; there are {target.shared_per_program:,}"
    elif not code.programs_per_unit:
        yield f"no program fits: {code.warps} warps of {code.registers} registers are too many"
    for expected in expects:
        if expected not in EXPECTED:
            yield f"expects {expected}, which is not a known check"
            continue
        field, sentence = EXPECTED[expected]
        if not getattr(code, field):
            instruction = target.matrix_instruction.strip("\\b")
            yield sentence.format(instruction=instruction, **vars(code))


def programs_per_unit(target: Target, registers: int, shared: int, warps: int, tensor_memory: int = 0) -> int:
    """How many programs one multiprocessor holds at once, at most."""
    granted = -(-max(registers, 1) // target.register_granule) * target.register_granule
    # each of the four schedulers has a quarter of the registers, and takes whole warps
    by_registers = 4 * (target.registers_per_unit // 4 // (granted * target.lanes)) // warps
    by_warps = target.warps_per_unit // warps
    each = shared + target.reserved_shared
    by_shared = target.shared_per_unit // each if each else target.programs_per_unit
    by_tensor_memory = 512 // tensor_memory if tensor_memory else target.programs_per_unit
    return min(by_registers, by_warps, by_shared, by_tensor_memory, target.programs_per_unit)


def text_flops(text: str, warps: int) -> int:
    """Operations of all tensor-core multiplies in a text, each once: one m16n8k16 on 8 warps is 32768."""
    return sum(
        2 * int(m) * int(n) * int(k) * warps // together
        for pattern, together in SHAPES
        for m, n, k in re.findall(pattern, text)
    )


def fetches_ahead(ttgir: str) -> int:
    """Fetches of tiles that are under way when the innermost loop begins, counted in Triton's own code.

    With 3 stages and 2 operands 4 on NVIDIA: asynchronous copies, TMA's among them. On AMD tiles are loaded
    into registers one turn ahead and then put in shared memory. Counting cp.async in the PTX shows less: a
    loop that was not pipelined may copy asynchronously and wait in the same turn.
    """
    before, loop, _ = ttgir.rpartition("scf.for")
    return len(re.findall(FETCHES, before)) if loop else 0


def fetches_next_tile(ttgir: str) -> bool:
    """Whether a loop over tiles and one over their depth became one, and its every fetch is for a later turn.

    Then the first fetches of the next tile are under way when this one is stored. A tile that is fetched and
    multiplied in the same turn has a local_alloc of its own.
    """
    loops = re.findall(r"^( *)(?:%\S+ = )?scf\.for\b(.*?)^\1\}", ttgir, re.DOTALL | re.MULTILINE)
    if ttgir.count("scf.for") != 1 or len(loops) != 1 or not fetches_ahead(ttgir):
        return False
    turn = loops[0][1]
    return "tt.store" in turn and "ttg.local_alloc %" not in turn


def worse_than(before: Compiled, now: Compiled) -> list[str]:
    """What the same kernel costs more than it did."""
    worse = []
    for field, unit in (
        ("registers", "registers"),
        ("spill_bytes", "bytes spilled"),
        ("shared_bytes", "bytes of shared memory"),
    ):
        old, new = getattr(before, field), getattr(now, field)
        if new > old:
            worse.append(f"{old:,} -> {new:,} {unit}")
    for field, unit in (("programs_per_unit", "programs per multiprocessor"), ("wide_loads", "wide loads")):
        old, new = getattr(before, field), getattr(now, field)
        if new < old and not (field == "wide_loads" and new):
            worse.append(f"{old} -> {new} {unit}")
    if before.tensor_core and not now.tensor_core:
        worse.append("tensor-core instructions are gone")
    return worse


def _source(compilation: Compilation) -> ASTSource:
    kernel, constants = compilation.kernel, dict(compilation.constexprs)
    names = list(kernel.arg_names)
    if absent := [n for n in names if n not in compilation.signature and n not in constants]:
        raise ValueError(f"the compilation says nothing about {', '.join(absent)}")
    if unknown := [n for n in (*compilation.signature, *constants) if n not in names]:
        raise ValueError(f"the kernel has no argument {', '.join(unknown)}")
    signature, attributes = {}, {}
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        dtype, _, value = compilation.signature[name].partition(":")
        if value == "1":
            signature[name], constants[name] = "constexpr", 1
            continue
        signature[name] = dtype
        if value == "16" or (dtype.startswith("*") and not value):
            attributes[(place,)] = ALIGNED
    return ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)


def _read_cuda(made: Any, ptx: str, target: Target) -> dict[str, int]:
    cubin = made.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        usage = _output(BINARIES / "cuobjdump", "-res-usage", str(binary))
        match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert match is not None, f"cuobjdump says {usage!r}"
        registers, stack = int(match[1]), int(match[2])
        # spilled registers live on the stack, so without one there are none
        spill = _spilled(ptx, target, Path(folder)) if stack else 0
    return {
        "registers": registers,
        "spill_bytes": spill,
        "shared_bytes": made.metadata.shared,
        "tensor_memory": getattr(made.metadata, "tmem_size", 0) or 0,
        "code_bytes": code_size(cubin),
    }


def _spilled(ptx: str, target: Target, folder: Path) -> int:
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    output = _output(
        get_ptxas(target.arch).path, "-v", f"--gpu-name={target.name}", str(source), "-o", str(folder / "out")
    )
    return max((int(number) for number in re.findall(r"(\d+) bytes spill", output)), default=0)


def _read_hip(made: Any, assembly: str, target: Target) -> dict[str, int]:
    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert match is not None, f"the assembly does not say {name}"
        return int(match[1])

    return {
        "registers": number("vgpr_count"),
        # scalar registers spill into lanes of vector registers, which is not memory
        "spill_bytes": max(number("private_segment_fixed_size"), 4) if number("vgpr_spill_count") else 0,
        "shared_bytes": made.metadata.shared,
        "tensor_memory": 0,
        "code_bytes": code_size(made.asm["hsaco"]),
    }


def code_size(elf: bytes) -> int:
    """Bytes of instructions in a 64-bit ELF file: its executable sections."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    total = 0
    for index in range(count):
        section_type, flags = struct.unpack_from("<IQ", elf, table + index * size + 4)
        (length,) = struct.unpack_from("<Q", elf, table + index * size + 0x20)
        total += length if section_type == 1 and flags & 4 else 0  # SHT_PROGBITS, SHF_EXECINSTR
    return total


def _output(*command: str | Path) -> str:
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return ran.stdout + ran.stderr
