"""What a kernel's machine code needs, and what is wrong with it. This file needs no compiler.

triton_code.py compiles, and reads registers, spills, shared memory and instructions from the cubin or hsaco
that a GPU would run. Nothing is executed, so this says nothing about speed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from moe_routing_bench.ops.targets import Target

# 128 bits or more at once, from device memory: plain, asynchronous copies to shared memory, descriptors
WIDE_LOADS = {
    "cuda": (
        r"ld\.global[\w.:]*\.(?:v4\.[busf]32|v8\.[busf]32|v2\.[busf]64|v4\.[busf]64)"
        r"|cp\.async\.cg\.shared\.global\b|cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global"
    ),
    "hip": r"\b(?:global|buffer)_load_(?:lds_)?dwordx4\b",  # lds: into shared memory, gfx950
}


# signs of overlap: fetches of a tile in Triton's code, fetches by TMA, and the two instructions of
# programmatic dependent launch
FETCHES = r"\b(?:async_copy_global_to_local|async_tma_copy_global_to_local|ttg\.local_store)\b"
DESCRIPTOR_LOADS = r"\bcp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global"
STARTS_NEXT = r"\bgriddepcontrol\.launch_dependents\b"
WAITS_FOR_PREVIOUS = r"\bgriddepcontrol\.wait\b"
LOADS = r"\bld\.global|\bcp\.async\.(?:c[ag]|bulk)"

# what a Compilation may expect -> the field of Compiled that must not be 0, and the message if it is 0
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

# patterns for the size of a multiply, and how many warps execute it together; tcgen05 has the size in a
# register
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
    `occupancy` is the largest share of a multiprocessor's warps that fit; `flops` and `bytes` are the
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
    tensor_core: int = 0  # the architecture's own multiply instructions in the text
    small_multiplies: int = 0  # mma.sync, which every NVIDIA architecture has
    text_flops: int = 0  # of these, if each runs once in every warp; 0 if unknown
    wide_loads: int = 0
    fetches_ahead: int = 0  # fetches of tiles that have started when the loop begins
    descriptor_loads: int = 0
    starts_next: int = 0
    waits_for_previous: int = 0
    early_loads: int = 0  # from device memory, before it waits
    next_tile: int = 0  # 1: the next tile is fetched while this one is finished
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
        """The kinds of overlap in the code: "3 stages, tma, next tile, pdl"."""
        seen = {
            f"{self.stages} stages": self.is_pipelined, "tma": self.descriptor_loads,
            "next tile": self.next_tile, "pdl": self.starts_next + self.waits_for_previous,
        }  # fmt: skip
        return ", ".join(name for name, count in seen.items() if count)

    @property
    def passes(self) -> float:
        """How often the multiplies in the text must run to do the work of one program."""
        return self.flops / self.text_flops if self.text_flops else 0.0

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


def whats_wrong(code: Compiled, target: Target, expects: tuple[str, ...]) -> Iterator[str]:
    if code.spill_bytes:
        yield f"spills {code.spill_bytes} bytes of registers to memory"
    if code.shared_bytes > target.shared_per_program:
        yield f"needs {code.shared_bytes:,} bytes of shared memory; there are {target.shared_per_program:,}"
    elif not code.programs_per_unit:
        yield f"no program fits: {code.warps} warps of {code.registers} registers are too many"
    if code.early_loads:
        yield f"loads {code.early_loads} times before it waits for the kernel before (griddepcontrol.wait)"
    for expected in expects:
        if expected not in EXPECTED:
            yield f"expects {expected}, which is not a known check"
            continue
        field, sentence = EXPECTED[expected]
        if not getattr(code, field):
            instruction = target.matrix_instruction.strip("\\b")
            yield sentence.format(instruction=instruction, **vars(code))


def programs_per_unit(target: Target, registers: int, shared: int, warps: int, tensor_memory: int = 0) -> int:
    """Returns how many programs fit on one multiprocessor at the same time."""
    granted = -(-max(registers, 1) // target.register_granule) * target.register_granule
    # each of the four schedulers has a quarter of the registers, and whole warps
    by_registers = 4 * (target.registers_per_unit // 4 // (granted * target.lanes)) // warps
    by_warps = target.warps_per_unit // warps
    each = shared + target.reserved_shared
    by_shared = target.shared_per_unit // each if each else target.programs_per_unit
    by_tensor_memory = 512 // tensor_memory if tensor_memory else target.programs_per_unit
    return min(by_registers, by_warps, by_shared, by_tensor_memory, target.programs_per_unit)


def text_flops(text: str, warps: int) -> int:
    """Returns the operations of all tensor-core multiplies in a text, each executed once: one m16n8k16 on 8
    warps is 32768."""
    return sum(
        2 * int(m) * int(n) * int(k) * warps // together
        for pattern, together in SHAPES
        for m, n, k in re.findall(pattern, text)
    )


def early_loads(text: str) -> int:
    """Counts loads before the wait for the previous kernel. They may read what is not written yet."""
    before, waits, _ = text.partition("griddepcontrol.wait")
    return len(re.findall(LOADS, before)) if waits else 0


def fetches_ahead(ttgir: str) -> int:
    """Counts fetches of tiles that have started when the innermost loop begins, in Triton's own code.

    With 3 stages and 2 operands there are 4 on NVIDIA: asynchronous copies, including those by TMA. On AMD
    tiles are loaded into registers one iteration ahead and then put in shared memory. A count of cp.async in
    the PTX would not do: a loop without a pipeline may copy asynchronously and wait in the same iteration.
    """
    before, loop, _ = ttgir.rpartition("scf.for")
    return len(re.findall(FETCHES, before)) if loop else 0


def fetches_next_tile(ttgir: str) -> bool:
    """Whether the loops over tiles and over their depth became one loop that only fetches for later
    iterations.

    Then the first fetches of the next tile have started when this one is stored. A tile that is fetched and
    multiplied in the same iteration has its own local_alloc.
    """
    loops = re.findall(r"^( *)(?:%\S+ = )?scf\.for\b(.*?)^\1\}", ttgir, re.DOTALL | re.MULTILINE)
    if ttgir.count("scf.for") != 1 or len(loops) != 1 or not fetches_ahead(ttgir):
        return False
    turn = loops[0][1]
    return "tt.store" in turn and "ttg.local_alloc %" not in turn


def worse_than(before: Compiled, now: Compiled) -> list[str]:
    """Returns in words which costs of a kernel have increased."""
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
