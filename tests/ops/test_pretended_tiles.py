"""Level amx_pretended: AMX's code on processors without AMX, each instruction of a tile in plain C++.

The instructions themselves, then the kernels on them: the bits of level vnni, the kit, planted faults."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_routing_bench import ExpertWeights, Layout, Routing, ops
from moe_routing_bench.conformance.cases import Case, KitCell
from moe_routing_bench.conformance.check import cells_of, check
from moe_routing_bench.core import cpp, levels
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.formats.named import NAMES
from moe_routing_bench.ops.expert_ffn import native
from moe_routing_bench.ops.preference import MACHINES
from tiny_layers import MAKE_PLAN, weights_of

pytestmark = pytest.mark.slow

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)
if not cpp.LEVELS[cpp.PRETENDED][0] <= set(this_machine().instructions):
    pytest.skip("it is compiled for AVX-512 with VNNI", allow_module_level=True)

OPS = Path(ops.__file__).parent
INTEGERS = [f"{name}_a8" for name in NAMES if name != "fp8_block"]


# ---- the instructions

Shape = tuple[int, int]  # rows, bytes


def config(shapes: dict[int, Shape], palette: int = 1, start: int = 0) -> bytes:
    rows, row_bytes = bytearray(16), [0] * 16
    for tile, shape in shapes.items():
        rows[tile], row_bytes[tile] = shape
    return struct.pack("<BB14x16H16s", palette, start, *row_bytes, bytes(rows))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("tiles") / "tiles.so"
    source = Path(__file__).parents[1] / "data/pretended_tiles.cpp"
    flags = [*levels.options(cpp.PRETENDED), "-Wall", "-Werror", f"-I{OPS}", "-fPIC", "-shared"]
    subprocess.run([str(cpp.compiler()), *flags, str(source), "-o", str(built)], check=True)
    return built


def product(library: Path, shapes: dict[int, Shape], a: Tensor, b: Tensor, c: Tensor) -> None:
    strided: list[Any] = []
    for tensor in (a, b, c):
        strided += [tensor.data_ptr(), tensor.stride(0) * tensor.element_size()]
    multiply = ctypes.CDLL(str(library)).multiply
    multiply.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p, ctypes.c_int64] * 3]
    multiply(config(shapes), a.dtype is torch.bfloat16, 0, *strided)


@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (1, 8, 16), (13, 16, 5), (7, 3, 1)])
def test_products_of_bytes(library: Path, m: int, k: int, n: int) -> None:
    """m x 4k signed times 4k x n unsigned; what lies beyond is neither read nor written."""
    a_mk = torch.randint(-128, 128, (20, 100), dtype=torch.int8)
    b_kn4 = torch.randint(0, 256, (20, 100), dtype=torch.uint8)
    c_mn = torch.randint(-(2**31), 2**31, (20, 30), dtype=torch.int32)
    before_mn = c_mn.clone()
    product(library, {0: (m, 4 * n), 4: (m, 4 * k), 6: (k, 4 * n)}, a_mk, b_kn4, c_mn)
    b_Kn = b_kn4[:k, : 4 * n].long().unflatten(1, (n, 4)).transpose(1, 2).flatten(0, 1)
    right_mn = before_mn.long()
    right_mn[:m, :n] += a_mk[:m, : 4 * k].long() @ b_Kn
    assert torch.equal(c_mn, right_mn.to(torch.int32))  # sums wrap
    assert not torch.equal(c_mn, before_mn)


@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (5, 16, 16), (13, 3, 5)])
def test_products_of_bfloat16(library: Path, m: int, k: int, n: int) -> None:
    """Even and odd places of depth have a float32 sum each; both are added, then to what was there."""
    a_mK, b_kn2 = torch.randn(20, 50).bfloat16(), torch.randn(20, 50).bfloat16()
    b_kn2[2] = 1e38
    a_mK[:, 4:6] = 1e-39  # subnormal: zero
    c_mn = torch.randn(20, 30)
    right_mn, even_mn, odd_mn = c_mn.clone(), torch.zeros(m, n), torch.zeros(m, n)
    for i in range(k):
        if i != 2:
            even_mn += a_mK[:m, 2 * i, None].float() * b_kn2[i, : 2 * n : 2].float()
            odd_mn += a_mK[:m, 2 * i + 1, None].float() * b_kn2[i, 1 : 2 * n : 2].float()
    right_mn[:m, :n] += even_mn + odd_mn
    product(library, {0: (m, 4 * n), 4: (m, 4 * k), 6: (k, 4 * n)}, a_mK, b_kn2, c_mn)
    assert torch.equal(c_mn, right_mn)


RIGHT: dict[int, Shape] = {0: (16, 64), 4: (16, 64), 6: (16, 64)}
FAULTS_OF_A_PROCESSOR: dict[str, tuple[bytes | None, int, str]] = {
    "nothing": (config(RIGHT), 0, ""),
    "no configuration": (None, 0, "tileloadd: no tile is configured"),
    "released": (config(RIGHT, palette=0), 0, "tileloadd: no tile is configured"),
    "another palette": (config(RIGHT, palette=2), 0, "ldtilecfg: the only palette is 1"),
    "a row to start from": (config(RIGHT, start=3), 0, "ldtilecfg: bytes 1 to 15 are zero"),
    "a ninth tile": (config({**RIGHT, 8: (1, 4)}), 0, "ldtilecfg: there are tiles 0 to 7"),
    "17 rows": (config({**RIGHT, 4: (17, 64)}), 0, "ldtilecfg: a tile has at most 16 rows of 64 bytes"),
    "65 bytes": (config({**RIGHT, 4: (16, 65)}), 0, "ldtilecfg: a tile has at most 16 rows of 64 bytes"),
    "rows without bytes": (config({**RIGHT, 3: (16, 0)}), 0, "ldtilecfg: a tile has rows and bytes"),
    "a tile left out": (config({0: (16, 64), 4: (16, 64)}), 0, "tileloadd: this tile is not configured"),
    "other rows": (config({**RIGHT, 4: (15, 64)}), 0, "tdpbsud: the rows of the sums"),
    "other depth": (config({**RIGHT, 4: (16, 32)}), 0, "tdpbsud: the first factor is not as deep"),
    "other columns": (config({**RIGHT, 6: (16, 32)}), 0, "tdpbsud: the columns of the sums"),
    "no whole words": (config({**RIGHT, 6: (16, 62)}), 0, "tdpbsud: a row is whole words"),
    "one tile twice": (config(RIGHT), 4, "tdpbsud: three different tiles"),
}
CHILD = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
room, config = ctypes.create_string_buffer(4096), bytes.fromhex(sys.argv[2]) or None
strided = [room, ctypes.c_int64(64)] * 3
ctypes.CDLL(sys.argv[1]).multiply(config, 0, int(sys.argv[3]), *strided)
"""


@pytest.mark.parametrize("fault", FAULTS_OF_A_PROCESSOR)
def test_what_a_processor_faults_on_ends_the_process(fault: str, library: Path) -> None:
    given, tile, sentence = FAULTS_OF_A_PROCESSOR[fault]
    words = [sys.executable, "-c", CHILD, str(library), (given or b"").hex(), str(tile)]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert (ran.returncode != 0) == (sentence != ""), ran.stderr
    assert sentence in ran.stderr and ("pretended tiles: " in ran.stderr) == (sentence != "")


AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
room = mmap.mmap(-1, 8192)
page = ctypes.addressof(ctypes.c_char.from_buffer(room))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page + 4096), 4096, 0) == 0
strided = [ctypes.c_void_p(page + 4096 - 8 * 32), ctypes.c_int64(32)] * 3
ctypes.CDLL(sys.argv[1]).multiply(bytes.fromhex(sys.argv[2]), 0, 0, *strided)
print("done")
"""


@pytest.mark.parametrize(("rows", "row_bytes", "fits"), [(8, 32, True), (8, 64, False), (9, 36, False)])
def test_nothing_is_touched_behind_a_tile(rows: int, row_bytes: int, fits: bool, library: Path) -> None:
    """Eight rows of 32 bytes, and then no memory."""
    given = config({tile: (rows, row_bytes) for tile in (0, 4, 6)}).hex()
    words = [sys.executable, "-c", AT_THE_END_OF_MEMORY, str(library), given]
    assert (subprocess.run(words, capture_output=True, text=True).stdout == "done\n") == fits


# ---- the level


def test_nobody_gets_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpp.PRETENDED not in MACHINES
    with monkeypatch.context() as patch:
        patch.setattr(cpp, "LEVELS", {cpp.PRETENDED: cpp.LEVELS[cpp.PRETENDED]})
        cpp.best_level.cache_clear()
        assert cpp.best_level() is None
    cpp.best_level.cache_clear()
    with pytest.raises(ValueError, match="amx_pretended"):
        cpp.load(native.SOURCE, "sse")


def test_amx_s_own_code_compiles(tmp_path: Path) -> None:
    """It cannot be run here. Its instructions are those that are pretended."""
    flags = [flag for flag in levels.options("amx") if flag != "-O3"]  # quicker
    library = tmp_path / "library.so"
    command = [str(cpp.compiler()), *flags, "-fPIC", "-shared", str(native.SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    assert b"mrb_forward" in library.read_bytes()


# ---- rows of 8 bits: the bits of level vnni


def run(x_TD: Tensor, frozen: ExpertWeights, store: str, level: str) -> Tensor:
    """All rows by one expert."""
    gate_TK = torch.ones(x_TD.shape[0], 1)
    routing = Routing(expert_TK=gate_TK.long() - 1, gate_TK=gate_TK, num_experts=1, ragged=False)
    plan = MAKE_PLAN(routing, Layout.compact())
    return native.run(x_TD, gate_TK, plan, frozen, level=level, store=store).clone()


SIZES = [  # D, F, activation, bias: depths of half a tile, one, one and a half, many, and some in between
    (32, 96, "swiglu", True),
    (64, 32, "gelu", False),
    (96, 64, "swiglu", False),
    (2048, 32, "gelu", True),
    (200, 2048, "swiglu", True),
]


@pytest.mark.parametrize("store", INTEGERS)
def test_the_bits_of_level_vnni(store: str) -> None:
    for D, F, activation, bias in SIZES:
        weights = weights_of(1, D, F, activation=activation, bias=bias)
        frozen = native.freeze(weights, store=store)
        x_TD = torch.randn(40, D) * torch.rand(40, 1)
        for T in range(1, 41):
            vnni_TD, tiles_TD = (run(x_TD[:T], frozen, store, level) for level in ("vnni", cpp.PRETENDED))
            assert torch.equal(vnni_TD, tiles_TD), (D, F, T)


# ---- the kit


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("grouped_gemm", ""),
        *(("expert_ffn", more) for more in ("", ",batch_invariant=True", ",store=bfloat16")),
    ],
)
def test_the_whole_kit(op: str, options: str) -> None:
    """test_stored_experts.py has the formats."""
    spec = f"native(level={cpp.PRETENDED}{options})"
    outcomes = [check(cell) for cell in cells_of(op, spec, ("float32", "bfloat16"))]
    assert not [(str(o.cell), o.sentences) for o in outcomes if o.status == "failed"]
    assert sum(o.status == "passed" for o in outcomes) > 60


# ---- planted faults: all in one library, of which one is switched on

# depths with a rest of 32 and without, groups, 30 rows of each expert
CASE = Case(
    name="tiles", guards="tiles compute what vectors do", T=30, D=296, F=200, E=2, K=2,
    layouts=("compact",), activation="swiglu", bias=True,
)  # fmt: skip
IN_PLACE = replace(CASE, D=288, strided=True)  # an order of memory in which columns are read one by one
# file, what stands there, what is put there instead; the weights, knob or case with which it must be noticed
FAULTS: dict[str, tuple[str, str, str, str | Case]] = {
    "weights with the stride of one tile": (
        "int8_tiles.h", "_tile_loadd(6, w, PANEL * 4);", "_tile_loadd(6, w, HALF * 4);", "int8_a8",
    ),
    "the second half of a panel one column early": (
        "int8_tiles.h", "_tile_loadd(7, w + HALF * 4, PANEL * 4);",
        "_tile_loadd(7, w + HALF * 4 - 4, PANEL * 4);", "int8_a8",
    ),
    "the correction dropped": (
        "int8_tiles.h", "Vectors::add(sum, Vectors::same(off))", "sum", "int8_a8",
    ),
    "the correction of the first group": (
        "int8_tiles.h", "Vectors::taken_off(a + r * lda, depth, g)",
        "Vectors::taken_off(a + r * lda, depth, 0)", "int4_g32_a8",
    ),
    "the scales of the group before": (
        "int8_tiles.h", "b = Coded<CODE>::read_scales(b, *coding, scale, offset);",
        "static thread_local Lanes last[N]; b = Coded<CODE>::read_scales(b, *coding, scale, offset); "
        "for (int n = 0; n < N; n++) "
        "{ const Lanes now = scale[n]; if (!first) scale[n] = last[n]; last[n] = now; }",
        "int8_g128_a8",
    ),
    "offsets dropped": (
        "int8_tiles.h", "Vectors::fused(offset[n], (float)off - Lanes{}, *to)", "*to", "int4_g32_asym_a8",
    ),
    "a rest of 32 ignored": ("int8_tiles.h", "part(end, 32);", "k = end;", "int8_a8"),
    "sums lost before a rest": (
        "int8_tiles.h", "if (whole) take_up(sums, both);\n        else zero();", "zero();", "int8_a8",
    ),
    "sums of the group before kept": (
        "int8_tiles.h", "zero();\n        part(k + whole, 64);", "if (first) zero(); part(k + whole, 64);",
        "int8_g128_a8",
    ),
    "the upper 16 rows not stored": (
        "int8_tiles.h", "_tile_stored(2, sums + 16 * PANEL, PANEL * 4);", ";", "int8_a8",
    ),
    "the first 16 rows twice": (
        "int8_tiles.h", "_tile_loadd(5, lower + k, lda);", "_tile_loadd(5, a + k, lda);", "int8_a8",
    ),
    "nibbles in the other order": (
        "int8_tiles.h", "Vectors::both(codes, low)", "Vectors::both(Vectors::upper(codes), low)", "mxfp4_a8",
    ),
    "bfloat16: a tile of weights twice": (
        "tiles.h", "_tile_loadd(7, b + 512, 64);\n        _tile_dpbf16ps(1, 4, 7);",
        "_tile_loadd(7, b, 64); _tile_dpbf16ps(1, 4, 7);", "in_place=2",
    ),
    "bfloat16: a quarter of the sums not stored": (
        "tiles.h", "_tile_stored(3, c + 16 * PANEL + HALF, PANEL * 4);", ";", "in_place=2",
    ),
    "in place: sums of less depth dropped": ("in_place.h", "_tile_loadd(0, here, 64);", ";", CASE),
    "in place: the upper rows twice": (
        "in_place.h", "_tile_loadd(5, x + HALF * lda + k, lda * sizeof(B));",
        "_tile_loadd(5, x + k, lda * sizeof(B));", CASE,
    ),
    "in place: a quarter of the sums not stored": (
        "in_place.h", "_tile_stored(3, to + HALF * ldc + HALF, ldc * 4);", ";", CASE,
    ),
    "in place: rows where columns belong": ("in_place.h", "transpose(v);", ";", IN_PLACE),
    "in place: all rows are the last": ("in_place.h", "(j + k) * ldc", "j * ldc", IN_PLACE),
}  # fmt: skip


def planted(text: str, right: str, wrong: str, number: int) -> str:
    """Either, as the variable says: statements end with a semicolon, all else are expressions."""
    assert text.count(right) == 1, f"there is no longer one {right!r}"
    if right.endswith(";"):
        return text.replace(right, f"if (mrb_fault == {number}) {{ {wrong} }} else {{ {right} }}")
    return text.replace(right, f"(mrb_fault == {number} ? ({wrong}) : ({right}))")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "expert_ffn").mkdir()
    for path in levels.with_includes(native.SOURCE):
        text = path.read_text()
        for number, (name, right, wrong, _) in enumerate(FAULTS.values(), start=1):
            text = planted(text, right, wrong, number) if name == path.name else text
        if path.name == "processor.h":
            text += 'extern "C" { int mrb_fault; }\n'
        (folder / path.relative_to(OPS)).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "FLAGS", tuple(flag for flag in levels.FLAGS if flag != "-O3"))  # quicker
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        return cpp.load(folder / "expert_ffn/native.cpp", cpp.PRETENDED)


@pytest.fixture
def switch(faulty: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.c_int]:
    """Which fault is on, while level amx_pretended is the library with faults."""
    load, mine = cpp.load, (native.SOURCE, cpp.PRETENDED)
    monkeypatch.setattr(cpp, "load", lambda *which: faulty if which == mine else load(*which))
    native._library.cache_clear()
    yield ctypes.c_int.in_dll(faulty, "mrb_fault")
    native._library.cache_clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault: str, switch: ctypes.c_int) -> None:
    of = FAULTS[fault][3]
    stored = of in INTEGERS
    case, options = (of, "") if isinstance(of, Case) else (CASE, f",{'store=' * stored}{of}")
    cell = KitCell(
        op="expert_ffn", spec=f"native(level={cpp.PRETENDED}{options})", case=case, layout="compact",
        dtype="float32" if stored else "bfloat16", device="cpu",
    )  # fmt: skip
    switch.value = 0
    assert check(cell).status == "passed", check(cell).sentences
    switch.value = 1 + list(FAULTS).index(fault)
    outcome = check(cell)
    assert outcome.status == "failed" and "oracle" in outcome.sentences[0], outcome.sentences
