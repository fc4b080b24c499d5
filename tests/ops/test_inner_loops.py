"""The loops in which CPU kernels spend their time keep all sums in registers.

A sum that the compiler puts on the stack costs a load and a store with every product; results stay right, so
nothing but the machine code shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from moe_routing_bench.core import cpp
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.ops.expert_ffn import native as expert_ffn
from moe_routing_bench.ops.linear import native as linear

pytestmark = pytest.mark.slow

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)
if shutil.which("objdump") is None:
    pytest.skip("objdump was not found; apt install binutils", allow_module_level=True)
if not {"avx512f", "avx512_vnni"} <= set(this_machine().instructions):
    pytest.skip("it reads machine code for AVX-512 with VNNI", allow_module_level=True)

LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*)$")
PRODUCT = re.compile(r"vfmadd|vpdpbusd")
TO_STACK = re.compile(r"[xyz]mm\d+,\S*\(%r[sb]p\)$")  # what is only read there does not change: masks, scales


@cache
def machine_code(source: Path) -> str:
    cpp.load(source, "vnni")
    library = cpp._library(source, "vnni")
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inner_loop(code: str, function: str) -> list[str]:
    """The shortest way back to an earlier instruction with a product on it."""
    (body,) = re.findall(rf"<void {re.escape(function)}\(.*\)>:\n((?:.+\n)+)", code)
    found = [match.groups() for match in map(LINE.match, body.splitlines()) if match]
    at = {int(address, 16): i for i, (address, _) in enumerate(found)}
    texts = [text for _, text in found]
    loops = []
    for i, text in enumerate(texts):
        jump = re.match(r"j\w+\s+([0-9a-f]+)", text)
        begin = at.get(int(jump[1], 16)) if jump else None
        if begin is not None and begin <= i and any(map(PRODUCT.match, texts[begin:i])):
            loops.append(texts[begin : i + 1])
    return min(loops, key=len)


def to_stack(loop: list[str]) -> list[str]:
    return [text for text in loop if TO_STACK.search(text)]


@pytest.mark.parametrize(
    ("source", "function", "products"),
    [
        (expert_ffn.SOURCE, "Vector<float>::block<11>", 22),
        (expert_ffn.SOURCE, "Vector<unsigned short>::block<11>", 44),
        (expert_ffn.SOURCE, "Int8Rows<0>::block<12>", 24),
        (expert_ffn.SOURCE, "Int8Rows<2>::block<12>", 24),
        (linear.SOURCE, "Vector<float>::block<11>", 22),
        (linear.SOURCE, "Vector<unsigned short>::block<11>", 44),
    ],
)
def test_sums_stay_in_registers(source: Path, function: str, products: int) -> None:
    loop = inner_loop(machine_code(source), function)
    assert sum(bool(PRODUCT.match(text)) for text in loop) % products == 0
    assert to_stack(loop) == []


def test_a_sum_on_the_stack_is_noticed() -> None:
    code = """
0000000000001000 <void Made::up<1>(float const*)>:
    1000:\tvxorps %xmm0,%xmm0,%xmm0
    1004:\tvmovaps 0x40(%rsp),%zmm1
    1008:\tvfmadd231ps (%rax){1to16},%zmm2,%zmm1
    100c:\tvmovaps %zmm1,0x40(%rsp)
    1010:\tjne    1004 <void Made::up<1>(float const*)+0x4>
    1014:\tret
"""
    loop = inner_loop(code, "Made::up<1>")
    assert len(loop) == 4 and to_stack(loop) == ["vmovaps %zmm1,0x40(%rsp)"]
