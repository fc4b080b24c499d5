"""The tiles of every Triton kernel, looked at through their layouts as triton prints them (TTGIR).

    PYTHONPATH=src:/where/triton/is python measurements/gpu/tiles.py        5 minutes, no GPU

For every access to a tile of two sides: does each place have one thread, how wide can an access be, how many
sectors does a warp touch, in how many passes do the banks of shared memory serve a phase. Writes tiles.txt.

How we read an encoding is held to Triton's own linear layouts, for every encoding and tile that occurs.
TTGIR does not say where the tile's rows lie: they are taken to be contiguous along the side that Triton put
first, and a multiple of 256 bytes apart, as with the sizes of the models. Registers of tensor cores (dot_op,
mma) are not read; that an operand is read by ldmatrix, 8 rows of 16 bytes at a time, is taken for granted.
Phases and sectors are NVIDIA's, so of AMD's tiles only places and widths are said.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import gluon_ir, ir

from moe_routing_bench.layouts.encodings import matrix_reads, registers, shared
from moe_routing_bench.layouts.layout import Layout
from moe_routing_bench.layouts.tiles import Copy, look_at_copy
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.studies.triton_code import compilations_of, compile_kernel

ACCESS = re.compile(
    r"(tt\.load|tt\.store|ttg\.async_copy_global_to_local|ttg\.local_store|ttg\.local_load"
    r"|ttg\.local_alloc(?= %)|amdg\.buffer_load|amdg\.buffer_store)\b[^\n]*? : ([^\n]*?)(?: loc\(|$)",
    re.MULTILINE,
)
TENSOR = re.compile(r"<((?:\d+x)+)(?:!tt\.ptr<(\w+)>|(\w+)), (#ttg\.\w+<\{.*?\}>|#\w+)")
BITS = {"bf16": 16, "f16": 16, "f32": 32, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "f8E4M3FN": 8, "i1": 8}
PITCH = 2048


@dataclass(frozen=True)
class Tile:
    """One access to a tile in one kernel."""

    access: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    memory: str  # the encoding of shared memory, or "" for device memory


def tiles_of(ttgir: str) -> Iterator[Tile]:
    names = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", ttgir, re.MULTILINE))
    for access, types in ACCESS.findall(ttgir):
        found = []
        for sides, pointer, plain, encoding in TENSOR.findall(types):
            shape = tuple(int(side) for side in sides.split("x")[:-1])
            found.append((shape, pointer or plain, names.get(encoding, encoding)))
        if len(found) == 2 and "local_load" in access:
            found.reverse()  # registers first, then shared memory
        if found and len(found[0][0]) == 2:
            shape, dtype, encoding = found[0]
            yield Tile(access, shape, dtype, encoding, found[1][2] if len(found) == 2 else "")


def looked_at(tile: Tile, nvidia: bool) -> Iterator[tuple[str, Layout, Copy]]:
    """Which memory, the thread-value layout, what the copy does; an asynchronous copy uses both memories."""
    bits = BITS[tile.dtype]
    if "dot_op" in tile.encoding:
        memory = shared(tile.memory, tile.shape, bits)
        if not nvidia or bits != 16:
            raise NotImplementedError(
                "operands of tensor cores that ldmatrix does not read are not read here"
            )
        strides = getattr(memory, "layout", memory).stride
        inner = 0 if strides[0] == 1 else 1
        tv = matrix_reads(tile.shape, inner)
        yield "shared", tv, look_at_copy(tv, tile.shape, memory, item_bits=bits, space="shared")
        return
    tv = registers(tile.encoding, tile.shape)
    lanes = 32 if nvidia else 64
    if not tile.memory or "async_copy" in tile.access:
        order = re.search(r"order = \[(\d)", tile.encoding)
        inner = int(order[1]) if order else 1
        strides = (1, PITCH) if inner == 0 else (PITCH, 1)
        rows = Layout(tile.shape, strides)
        yield "device", tv, look_at_copy(tv, tile.shape, rows, item_bits=bits, lanes=lanes)
    if tile.memory:
        memory = shared(tile.memory, tile.shape, bits)
        yield "shared", tv, look_at_copy(tv, tile.shape, memory, item_bits=bits, space="shared", lanes=lanes)


class Oracle:
    """Triton's own word on an encoding: the bases of its linear layout."""

    def __init__(self) -> None:
        self.context = ir.context()
        ir.load_dialects(self.context)
        self.builder = gluon_ir.GluonOpBuilder(self.context)
        self.agreed: set[tuple[str, tuple[int, ...]]] = set()

    def check(self, encoding: str, shape: tuple[int, ...], bits: int) -> None:
        if (encoding, shape) in self.agreed or "dot_op" in encoding or ".linear<" in encoding:
            return
        lists = {n: [int(i) for i in v.split(",")] for n, v in re.findall(r"(\w+) = \[([\d, ]*)\]", encoding)}
        numbers = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", encoding)}
        if ".blocked<" in encoding:
            parts = (lists[name] for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order"))
            bases = self.builder.to_linear_layout(self.builder.get_blocked_layout(*parts, []), list(shape))
            threads = self.places(bases.lane_bases + bases.warp_bases, shape)
            values = self.places(bases.reg_bases, shape)
            said = [value ^ thread for value in values for thread in threads]
            assert said == registers(encoding, shape).places(), f"{encoding} of {shape} is read wrongly"
        else:
            if "swizzled" in encoding:
                parts = (numbers["vec"], numbers["perPhase"], numbers["maxPhase"], lists["order"], [])
                made = self.builder.get_swizzled_shared_layout(*parts)
            else:
                wide, turned = numbers["swizzlingByteWidth"], "transposed = true" in encoding
                made = self.builder.get_nvmma_shared_layout(wide, bits, turned, False, [], 2)
            places = self.places(self.builder.to_linear_layout(made, list(shape)).offset_bases, shape)
            memory = shared(encoding, shape, bits).places()
            assert [memory[place] for place in places] == list(range(len(places))), f"{encoding} of {shape}"
        self.agreed.add((encoding, shape))

    @staticmethod
    def places(bases: list[list[int]], shape: tuple[int, ...]) -> list[int]:
        places = [0]
        for row, column in bases:
            places += [place ^ (row + column * shape[0]) for place in places]
        return places


def kernels(model: str, architectures: list[str]) -> Iterator[tuple[str, Target, str]]:
    """Every Triton kernel of the package with its TTGIR."""
    kept: list[str] = []
    compile_ = triton.compile

    def keep(*arguments: Any, **options: Any) -> Any:
        made = compile_(*arguments, **options)
        kept.append(made.asm["ttgir"])
        return made

    triton.compile = keep
    for op in all_ops().values():
        for entry in find_all(op, configs=False):
            for arch in architectures if entry.implementation is not None else ():
                target = Target.named(arch)
                assert entry.implementation is not None
                for kernel in compilations_of(entry.implementation, model, target):
                    kept.clear()
                    compile_kernel(kernel, target, op.name, entry.spec, model)
                    yield f"{op.name}.{entry.spec}.{kernel.name}", target, kept[0]


def line(kernel: str, arch: str, tile: Tile, where: str, tv: Layout, copy: Copy, nvidia: bool) -> str:
    fewest, most = copy.holders
    held = "once" if copy.bijective else f"x{most}" if fewest == most and not copy.missing else "WRONG"
    traffic = f"{copy.sectors}/{copy.least_sectors} sectors" if where == "device" else f"{copy.passes} passes"
    sides, access = "x".join(map(str, tile.shape)), tile.access.rpartition(".")[2]
    return (
        f"{kernel:44} {arch:8} {access:27} {sides:>9} {tile.dtype:5} {where:7} {held:5} "
        f"{copy.accesses:3} x {copy.width_bits:3} bits  {traffic if nvidia else '':15} {tv}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--arch", default="sm_80,sm_90a,sm_100a,gfx942")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".txt"))
    options = parser.parse_args()
    lines: dict[str, None] = {}
    seen: Counter[str] = Counter()
    not_read: Counter[str] = Counter()
    oracle = Oracle()
    for kernel, target, ttgir in kernels(options.model, options.arch.split(",")):
        nvidia = target.backend == "cuda"
        seen["kernels"] += 1
        for tile in dict.fromkeys(tiles_of(ttgir)):
            try:
                found = list(looked_at(tile, nvidia))
            except NotImplementedError as reason:
                not_read[str(reason)] += 1
                continue
            for encoding in filter(None, (tile.encoding, tile.memory)):
                oracle.check(encoding, tile.shape, BITS[tile.dtype])
            for where, tv, copy in found:
                new = line(kernel, target.name, tile, where, tv, copy, nvidia)
                if new in lines:
                    continue
                lines[new] = None
                seen["accesses"] += 1
                seen["wrong"] += " WRONG " in new
                seen["held by one thread each"] += copy.bijective
                seen[f"{where} {copy.width_bits} bits"] += 1
                if nvidia and where == "device":
                    seen["sectors to spare"] += copy.sectors > copy.least_sectors
                if nvidia and where == "shared":
                    seen[f"shared {copy.passes} passes"] += 1
    seen["encodings as Triton says"] = len(oracle.agreed)
    head = [
        f"$ python measurements/gpu/tiles.py --model {options.model} --arch {options.arch}",
        f"triton {triton.__version__}. A line: kernel, GPU, access, tile, memory, how often a place is held,",
        "accesses of a thread, sectors of a warp's access / least or passes of a phase, thread-value layout.",
        *(f"{name:28} {count:5}" for name, count in sorted(seen.items())),
        *(f"not looked at {count:4}: {reason}" for reason, count in sorted(not_read.items())),
        "",
    ]
    options.out.write_text("\n".join([*head, *lines]) + "\n")
    print("\n".join(head))


if __name__ == "__main__":
    main()
