"""Kernels compiled ahead of time: what is read from machine code is true, and what is wrong is seen."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from child_process import python
from command_line import mrb, refused

pytest.importorskip("triton.language")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted and compiled kernels cannot share a process", allow_module_level=True)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from moe_routing_bench.cli.compile import _as_text, _tables
from moe_routing_bench.ops.gpu import Compilation
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.ops.targets import TARGETS, Target
from moe_routing_bench.studies.compiled import Compiled, programs_per_unit, text_flops, worse_than
from moe_routing_bench.studies.compiling import rows_of
from moe_routing_bench.studies.triton_code import (
    _spilled,
    compilations_of,
    compile_implementation,
    compile_kernel,
)
from repository import ROOT, SOURCE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    # triton 3.9 warns that its default (fused multiply-add) will change, and warnings are errors here
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@triton.jit
def gemm(a, b, c, N: tl.constexpr, D: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr):
    row = tl.program_id(0) * M_ + tl.arange(0, M_)
    column = tl.program_id(1) * N_ + tl.arange(0, N_)
    depth = tl.arange(0, K_)
    total = tl.zeros((M_, N_), tl.float32)
    for k in range(0, D, K_):
        left = tl.load(a + row[:, None] * D + (k + depth)[None, :])
        right = tl.load(b + (k + depth)[:, None] * N + column[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * N + column[None, :], total.to(tl.bfloat16))


@triton.jit
def copy(x, y, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * step))


@triton.jit
def gemm_of_tiles(
    a, b, c, first, tiles, N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, FLATTEN: tl.constexpr,
    CARRIED: tl.constexpr,
):  # fmt: skip
    """Tile after tile; CARRIED: b's mask is of a value that the flattened loop carries from turn to turn."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row = tl.arange(0, SIZE)
        if first is not None:
            row += tl.load(first + tile).to(tl.int32)
        place = tl.arange(0, SIZE)
        column = tile * SIZE + place
        depth = tl.arange(0, SIZE)
        a_at = a + row[:, None] * D + depth[None, :]
        b_at = b + depth[:, None] * N + column[None, :]
        total = tl.zeros((SIZE, SIZE), tl.float32)
        for k in range(0, D, SIZE):
            if CARRIED:
                inside = (depth[:, None] < D - k) & (column[None, :] < N)
            else:
                inside = (depth[:, None] < D - k) & (place[None, :] < N - tile * SIZE)
            total = tl.dot(tl.load(a_at), tl.load(b_at, mask=inside, other=0.0), total)
            a_at += SIZE
            b_at += SIZE * N
        tl.store(c + row[:, None] * N + column[None, :], total.to(tl.bfloat16), mask=column[None, :] < N)


@triton.jit
def waiting(x, y, BLOCK: tl.constexpr, LATE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LATE:
        value = tl.load(x + at)
        gdc_wait()
        tl.store(y + at, value)
    else:
        gdc_wait()
        tl.store(y + at, tl.load(x + at))


@triton.jit
def refuses(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "never")


def gemm_compilation(target: Target, *, stages: int = 3, **changes: object) -> Compilation:
    launch = target.launch(num_warps=8, num_stages=stages)
    made = Compilation(
        name="gemm",
        kernel=gemm,
        signature={"a": "*bf16", "b": "*bf16", "c": "*bf16"},
        constexprs={"N": 512, "D": 1024, "M_": 128, "N_": 128, "K_": 64},
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
        expects=("tensor_core", "vector_load"),
        flops=2 * 128 * 128 * 1024,
        bytes=2 * 1024 * 256 + 2 * 128 * 128,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def copying(step: str, expects: tuple[str, ...] = ("vector_load",)) -> Compilation:
    return Compilation(
        name="copy", kernel=copy, signature={"x": "*bf16", "y": "*bf16", "step": step},
        constexprs={"BLOCK": 1024}, num_warps=4, num_stages=1, expects=expects,
    )  # fmt: skip


@pytest.mark.parametrize("arch", TARGETS)
def test_a_matmul_becomes_tensor_core_code_without_spills(arch: str) -> None:
    target = Target.named(arch)
    code = compile_kernel(gemm_compilation(target), target)
    assert code.wrong == ()
    assert code.tensor_core > 0 and code.wide_loads > 0 and code.spill_bytes == 0
    assert 32 <= code.registers <= 255 and 0 < code.shared_bytes <= target.shared_per_program
    assert 1000 < code.code_bytes < 100_000 and 1 <= code.programs_per_unit <= 8
    assert code.intensity == pytest.approx(60, abs=5)
    # 1024 / 64 turns; pipelining may copy a turn or two before and after the loop
    assert 5 <= code.passes <= 16 or (arch == "sm_100a" and code.passes == 0)


def test_the_work_of_instructions_is_in_their_names() -> None:
    assert text_flops("mma.sync.aligned.m16n8k16.row.col.f32 {};", warps=8) == 2 * 16 * 8 * 16 * 8
    assert text_flops("wgmma.mma_async.sync.aligned.m64n128k16.f32", warps=8) == 2 * 64 * 128 * 16 * 2
    assert text_flops("v_mfma_f32_16x16x16_bf16 a, b\n" * 3, warps=4) == 3 * 2 * 16**3 * 4


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])  # for arch 120 Triton writes sm_120a
def test_spills_are_seen(arch: str) -> None:
    target = Target.named(arch)
    code = compile_kernel(gemm_compilation(target, options={"maxnreg": 64}), target)
    assert code.registers <= 64 and code.spill_bytes > 0
    assert any("spills" in sentence for sentence in code.wrong)


def test_an_assembler_that_fails_is_not_an_answer_without_spills(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ptxas.* ended with"):
        _spilled(".version 8.7\n.target sm_80\n.address_size 64\nnonsense\n", 80, tmp_path)


def test_too_much_shared_memory_is_seen_though_the_compiler_is_silent() -> None:
    target = Target.named("sm_80")
    code = compile_kernel(gemm_compilation(target, stages=5, num_stages=8), target)
    assert code.shared_bytes > target.shared_per_program
    assert any("shared memory" in sentence for sentence in code.wrong)


def test_missing_tensor_cores_and_narrow_loads_are_seen() -> None:
    target = Target.named("sm_90a")
    assert compile_kernel(copying("i32:1"), target).wrong == ()
    wrong = compile_kernel(copying("i32", ("tensor_core", "vector_load")), target).wrong
    assert "wgmma" in wrong[0] and "128 bits" in wrong[1] and len(wrong) == 2
    assert "speed" in compile_kernel(copying("i32:1", ("speed",)), target).wrong[0]


@pytest.mark.parametrize("arch", TARGETS)
def test_one_stage_is_not_taken_for_three(arch: str) -> None:
    target = Target.named(arch)
    ahead = gemm_compilation(target, expects=("pipelined",))
    code = compile_kernel(ahead, target)
    assert code.wrong == () and code.overlap == f"{ahead.num_stages} stages"
    code = compile_kernel(replace(ahead, num_stages=1), target)
    assert code.overlap == ""
    (wrong,) = code.wrong
    assert "1 stages" in wrong and "0 tiles" in wrong


@pytest.mark.parametrize("arch", TARGETS)
def test_the_next_tile_is_fetched_before_this_one_is_stored_or_that_is_told(arch: str) -> None:
    target = Target.named(arch)
    launch = target.launch(num_warps=4, num_stages=3)
    made = Compilation(
        name="tiles", kernel=gemm_of_tiles,
        signature={"a": "*bf16", "b": "*bf16", "c": "*bf16", "first": "*i64", "tiles": "i32"},
        constexprs={"N": 512, "D": 1024, "SIZE": 64, "FLATTEN": True, "CARRIED": False},
        num_warps=launch["num_warps"], num_stages=launch["num_stages"], expects=("next_tile",),
    )  # fmt: skip
    code = compile_kernel(made, target)
    assert code.wrong == () and code.overlap == f"{made.num_stages} stages, next tile"
    assert code.fetches_ahead >= 2 * (made.num_stages - 1)
    nested = compile_kernel(replace(made, constexprs={**made.constexprs, "FLATTEN": False}), target)
    (missing,) = nested.wrong
    assert "next tile" in missing
    if target.backend == "cuda":
        # one loop, and still b waits: its mask's alignment is lost, so it is not copied asynchronously
        late = replace(made, constexprs={**made.constexprs, "CARRIED": True})
        wrong = compile_kernel(replace(late, expects=("pipelined", "next_tile")), target).wrong
        assert "3 stages" in wrong[-2] and "2 tiles" in wrong[-2] and wrong[-1] == missing
    if target.name == "sm_80":
        # Triton does not pipeline this one here: it copies asynchronously and waits at once
        signature = {name: dtype for name, dtype in made.signature.items() if name != "first"}
        alone = replace(made, signature=signature, constexprs={**made.constexprs, "first": None})
        at_once = compile_kernel(replace(alone, expects=("pipelined", "next_tile")), target)
        assert at_once.wide_loads and at_once.overlap == "" and len(at_once.wrong) == 2


def of(op: str, spec: str, arch: str, kernel: str = "") -> list[Compiled]:
    """The kernels of an implementation's configuration, or the one with that name."""
    implementation, target = all_ops()[op].get(spec), Target.named(arch)
    if not kernel:
        return list(compile_implementation(implementation, "qwen3-30b-a3b", target))
    made = compilations_of(implementation, "qwen3-30b-a3b", target)
    return [compile_kernel(one, target) for one in made if one.name == kernel]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_descriptors_and_dependent_launches_are_seen_where_they_are_and_missed_where_not(arch: str) -> None:
    (ours,) = of("grouped_gemm", "triton_ragged(tma=1)", arch, "forward")
    assert ours.wrong == () and ours.descriptor_loads and ours.overlap == "3 stages, tma"
    target = Target.named(arch)
    (missing,) = compile_kernel(gemm_compilation(target, expects=("descriptor_load",)), target).wrong
    assert "cp.async.bulk.tensor" in missing

    (first,) = of("expert_ffn", "triton_fused(pdl=1)", arch, "hidden")
    (second,) = of("expert_ffn", "triton_fused(pdl=1)", arch, "weighted")
    (third,) = of("expert_ffn", "triton_fused(pdl=1)", arch, "sum_rows")
    assert (first.wrong, second.wrong, third.wrong) == ((), (), ())
    assert [bool(one.starts_next) for one in (first, second, third)] == [True, True, False]
    assert [bool(one.waits_for_previous) for one in (first, second, third)] == [False, True, True]
    assert second.overlap == "3 stages, pdl"
    wrong = compile_kernel(copying("i32:1", ("starts_next", "waits_for_previous")), target).wrong
    assert "griddepcontrol.launch_dependents" in wrong[0] and "griddepcontrol.wait" in wrong[1]


@pytest.mark.parametrize("late,loads", [(False, 0), (True, 1)])
def test_a_load_before_the_wait_is_seen(late: bool, loads: int) -> None:
    target = Target.named("sm_90a")
    made = Compilation(
        name="waiting", kernel=waiting, signature={"x": "*bf16", "y": "*bf16"},
        constexprs={"BLOCK": 1024, "LATE": late}, num_warps=4, num_stages=1, expects=("waits_for_previous",),
        options={"launch_pdl": True},
    )  # fmt: skip
    code = compile_kernel(made, target)
    assert code.early_loads == loads and bool(code.wrong) == late
    assert not late or "before" in code.wrong[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
def test_the_prefetch_of_the_fused_experts_is_one(arch: str) -> None:
    spec = "triton_fused(block_n=64,persistent=1,prefetch=1)"
    for kernel in ("hidden", "weighted"):
        (code,) = of("expert_ffn", spec, arch, kernel)
        assert code.wrong == () and "next tile" in code.overlap


def test_few_rows_take_the_small_multiply() -> None:
    target = Target.named("sm_90a")
    expects = target.compiled(rows=16, num_warps=4, num_stages=3)["expects"]
    small = gemm_compilation(target, expects=expects, num_warps=4)
    small = replace(small, constexprs={**small.constexprs, "M_": 16})
    code = compile_kernel(small, target)
    assert code.wrong == () and code.tensor_core == 0 and code.small_multiplies > 0
    (wrong,) = compile_kernel(copying("i32:1", ("small_multiply",)), target).wrong
    assert "mma.sync" in wrong


def test_a_configuration_that_is_not_for_an_architecture_is_a_row_with_a_reason() -> None:
    (row,) = of("grouped_gemm", "triton_ragged(tma=1)", "gfx942")
    assert "no TMA" in row.not_made and not row.wrong
    words = ("--op", "expert_ffn", "--impl", "triton_decode(pdl=1)", "--configs", *QUICK[4:])
    out = mrb("gpu", "compile", *words).output
    assert "triton_decode(pdl=1): not compiled" in out
    assert "0 kernels compiled" in out


def test_a_configuration_shows_the_kernels_that_differ_from_the_default() -> None:
    target = Target.named("sm_80")
    usual, other = (
        compilations_of(all_ops()["grouped_gemm"].get(spec), "qwen3-30b-a3b", target)
        for spec in ("triton_ragged", "triton_ragged(persistent=0)")
    )
    assert [one.name for one in usual] == ["forward", "input_gradient", "weight_gradient", "bias_gradient"]
    assert [one.name for one in other] == ["forward", "input_gradient"]
    assert not other[0].constexprs["PERSISTENT"] and usual[0].constexprs["PERSISTENT"]


def test_what_does_not_compile_is_an_answer() -> None:
    target = Target.named("sm_80")
    broken = Compilation(
        name="refuses", kernel=refuses, signature={"x": "*bf16"}, constexprs={"BLOCK": 1}, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    assert compile_kernel(broken, target).wrong[0].startswith("does not compile")
    silent = replace(broken, signature={})
    assert "about x" in compile_kernel(silent, target).wrong[0]
    extra = replace(broken, constexprs={"BLOCK": 1, "BLOK": 1})
    assert "BLOK" in compile_kernel(extra, target).wrong[0]


@pytest.mark.parametrize(
    "arch,registers,shared,warps,fit",
    [
        ("sm_80", 64, 0, 4, 8),  # 65,536 registers / (64 * 128)
        ("sm_80", 168, 0, 8, 1),  # 168 * 256 = 43,008 of 65,536
        ("sm_80", 32, 80 * 1024, 4, 2),  # 164 KiB / 81 KiB
        ("sm_90a", 32, 0, 4, 16),  # 64 warps / 4
        ("sm_90a", 255, 0, 16, 0),  # 256 * 512 registers are more than there are
        ("gfx942", 128, 0, 4, 4),  # 512 / 128 = 4 waves on each of 4 SIMDs
        ("gfx942", 64, 40 * 1024, 4, 1),  # 64 KiB / 40 KiB
    ],
)
def test_how_many_programs_fit(arch: str, registers: int, shared: int, warps: int, fit: int) -> None:
    assert programs_per_unit(Target.named(arch), registers, shared, warps) == fit


def test_what_costs_more_is_told() -> None:
    target = Target.named("sm_80")
    before = compile_kernel(gemm_compilation(target), target)
    assert worse_than(before, before) == []
    after = replace(before, registers=before.registers + 8, programs_per_unit=0, tensor_core=0)
    registers, programs, cores = worse_than(before, after)
    assert registers.startswith(f"{before.registers} -> {before.registers + 8} ")
    assert programs.startswith(f"{before.programs_per_unit} -> 0 ") and "tensor-core" in cores
    assert worse_than(after, before) == []


QUICK = ("gpu", "compile", "--op", "dispatch", "--arch", "sm_80", "--model", "qwen3-30b-a3b")


def test_the_command_writes_compares_and_fails_on_more(tmp_path: Path) -> None:
    file = tmp_path / "compile.json"
    out = mrb(*QUICK, "--out", file).output
    assert "nothing wrong" in out and "not run" in out
    document = json.loads(file.read_text())
    assert len(file.read_text().splitlines()) == len(document["kernels"]) + 2  # a line for each
    assert document["triton"] == triton.__version__ and document["kernels"]
    assert "triton_gather" in file.with_suffix(".txt").read_text()
    assert "needs more" in mrb(*QUICK, "--against", file, code=0).output
    first, *others = document["kernels"]
    document["kernels"] = [{**first, "kernel": "another"}, *others]
    document["kernels"] += [{**first, "impl": "triton_gather(block_d=1)"}, {**first, "op": "combine"}]
    file.write_text(json.dumps(document))
    told = " ".join(mrb(*QUICK, "--against", file, code=1).output.split())
    assert f".{first['kernel']}, qwen3-30b-a3b, sm_80: it is not in the file" in told
    assert "another, qwen3-30b-a3b, sm_80: it is in the file and was not compiled" in told
    assert "2 need more than in" in told  # what was not asked for is not gone
    document["kernels"] = [{**first, "registers": first["registers"] - 1}, *others]
    file.write_text(json.dumps(document))
    assert "registers" in mrb(*QUICK, "--against", file, code=1).output
    document["triton"] = "1.0"
    file.write_text(json.dumps(document))
    assert "compared" in mrb(*QUICK, "--against", file, code=2).output
    file.write_text("[]")
    assert "not a file" in mrb(*QUICK, "--against", file, code=2).output


def test_mistakes_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'sm_75'" in refused("gpu", "compile", "--arch", "sm_75")
    assert "'gpt-2'" in refused("gpu", "compile", "--model", "gpt-2")
    assert "nothing*" in refused("gpu", "compile", "--impl", "nothing*")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in refused(*QUICK)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs triton" in refused(*QUICK)


def test_every_triton_file_says_how_to_compile_it() -> None:
    files = {path.name: path.read_text() for path in SOURCE.glob("ops/*/triton_*.py")}
    assert files and [name for name, text in files.items() if "\ndef compilations(" not in text] == []


def test_the_table_in_the_repository_is_of_this_code() -> None:
    """Names only, which takes no compiling: a kernel that was added or renamed shows here."""
    kept = json.loads((ROOT / "tests" / "data" / "compile.json").read_text())
    code = (
        "from moe_routing_bench.studies.triton_code import compilations_of\n"
        "from moe_routing_bench.ops.catalog import find_all\n"
        "from moe_routing_bench.cli.compile import ARCHITECTURES\n"
        "from moe_routing_bench.ops.targets import TARGETS\n"
        "from moe_routing_bench.ops.registry import all_ops\n"
        "for op in all_ops().values():\n"
        "    for listed in find_all(op, configs=True, only='built in'):\n"
        "        ours = listed.spec.startswith('triton_')\n"
        "        for target in [TARGETS[n] for n in ARCHITECTURES] if ours else ():\n"
        "            try:\n"
        "                names = [one.name for one in compilations_of(listed.implementation, "
        "'qwen3-30b-a3b', target)]\n"
        "            except NotImplementedError:\n"
        "                names = ['']\n"
        "            for name in names:\n"
        "                print(f'{op.name}.{listed.spec}.{name}.{target.name}')\n"
    )
    ran = python(code)
    rows = [row for row in kept["kernels"] if row["model"] == "qwen3-30b-a3b"]
    assert {f"{r['op']}.{r['impl']}.{r['kernel']}.{r['arch']}" for r in rows} == set(ran.stdout.split())
    assert not [row for row in kept["kernels"] if row.get("wrong")]


def test_the_text_in_the_repository_is_of_the_same_kernels() -> None:
    kept = json.loads((ROOT / "tests" / "data" / "compile.json").read_text())
    text = _as_text(_tables(rows_of(kept), room=1000), kept)
    assert (ROOT / "measurements" / "gpu" / "compile.txt").read_text() == text
