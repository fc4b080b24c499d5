"""Compiles Triton kernels without a GPU and reads what their machine code needs.

Kernels are compiled with the constants of a model, or with those a launcher passes
(measurements/gpu/launches.py). This file needs triton.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_routing_bench.core.published import model
from moe_routing_bench.ops.gpu import Compilation
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.studies.compiled import (
    DESCRIPTOR_LOADS,
    STARTS_NEXT,
    WAITS_FOR_PREVIOUS,
    WIDE_LOADS,
    Compiled,
    early_loads,
    fetches_ahead,
    fetches_next_tile,
    programs_per_unit,
    text_flops,
    whats_wrong,
)

TOKENS = 4096
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = [["tt.divisibility", 16]]


def compile_implementation(
    implementation: Implementation, model_name: str, target: Target
) -> Iterator[Compiled]:
    """Compiles every kernel of an implementation with the constants of a model; none if it is not in Triton.

    A configuration yields the kernels that differ from those of the default, or one row with a reason if the
    architecture does not support it.
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
    return [kernel for kernel in made(sizes, target, **implementation.config) if kernel not in usual]


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
    except Exception as error:  # any error of the compiler is a result here
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
        "early_loads": early_loads(text),
        "next_tile": int(fetches_next_tile(made.asm["ttgir"])),
        "warps": made.metadata.num_warps,
    }
    fits = programs_per_unit(
        target, fields["registers"], fields["shared_bytes"], fields["warps"], fields["tensor_memory"]
    )
    occupancy = fits * fields["warps"] / target.warps_per_unit
    code = Compiled(**fields, programs_per_unit=fits, occupancy=occupancy)
    return replace(code, wrong=tuple(whats_wrong(code, target, compilation.expects)))


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
        # spilled registers are on the stack: without a stack there are none
        spill = _spilled(ptx, target.arch, Path(folder)) if stack else 0
    return {
        "registers": registers,
        "spill_bytes": spill,
        "shared_bytes": made.metadata.shared,
        "tensor_memory": getattr(made.metadata, "tmem_size", 0) or 0,
        "code_bytes": code_size(cubin),
    }


def _spilled(ptx: str, arch: int | str, folder: Path) -> int:
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    written_for = re.search(r"^\.target (\w+)", ptx, re.M)  # for arch 120 Triton writes sm_120a
    assert written_for is not None, f"the code says no .target: {ptx[:200]!r}"
    command = (get_ptxas(arch).path, "-v", f"--gpu-name={written_for[1]}", source, "-o", folder / "out")
    return max(int(number) for number in re.findall(r"(\d+) bytes spill", _output(*command)))


def _read_hip(made: Any, assembly: str, target: Target) -> dict[str, int]:
    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert match is not None, f"the assembly does not say {name}"
        return int(match[1])

    return {
        "registers": number("vgpr_count"),
        # scalar registers spill into vector registers, which is not memory
        "spill_bytes": max(number("private_segment_fixed_size"), 4) if number("vgpr_spill_count") else 0,
        "shared_bytes": made.metadata.shared,
        "tensor_memory": 0,
        "code_bytes": code_size(made.asm["hsaco"]),
    }


def code_size(elf: bytes) -> int:
    """Returns the bytes of instructions in a 64-bit ELF file: the size of its executable sections."""
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
    output = ran.stdout + ran.stderr
    if ran.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {ran.returncode}: {output.strip()[:500]}")
    return output
