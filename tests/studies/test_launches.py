"""What the Triton implementations ask for: on the right device, within limits, for any number of tokens."""

from __future__ import annotations

import ast
import os
import runpy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.language")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted and compiled kernels cannot share a process", allow_module_level=True)

from moe_routing_bench import Layout, MoEShape
from moe_routing_bench.ops import gpu
from moe_routing_bench.ops.registry import all_ops, get_op
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.ops.stand_ins import StandIns, weights_without_values
from moe_routing_bench.ops.targets import TARGETS, Target
from moe_routing_bench.studies.triton_code import compile_kernel
from repository import ROOT, SOURCE

pytestmark = pytest.mark.slow
SCRIPT = runpy.run_path(str(ROOT / "measurements" / "gpu" / "launches.py"))
Launch, ask, launches_of, recording = (SCRIPT[n] for n in ("Launch", "ask", "launches_of", "recording"))
TRITON = [(op, n) for op in all_ops().values() for n in op.names() if n.startswith("triton_")]


def asked(op: str, spec: str, arch: str, *, T: int = 32, layout: str = "block(16)", dtype=torch.bfloat16):
    """The launches for these sizes, or the reason why there are none."""
    with recording(Target.named(arch)) as found:
        shape = MoEShape(T=T, D=256, F=128, E=8, K=2)
        weights = weights_without_values(shape, "swiglu", bias=True, train=False, dtype=dtype)
        source = StandIns(weights, shape.K, Layout.parse(layout), T, rule=ScoreRule())
        reason = launches_of(get_op(op).get(spec), get_op(op).arguments(source))
        return reason or set(found)


def test_every_launcher_launches_on_the_device_of_its_tensors() -> None:
    launchers = 0
    for path in [*SOURCE.glob("ops/gpu*.py"), *SOURCE.glob("ops/*/triton_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            wraps = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == "wrap_triton"]
            if wraps:
                launchers += 1
                decorators = [ast.unparse(d).rpartition(".")[2] for d in node.decorator_list]
                assert "on_its_device" in decorators, f"{path.name}: {node.name} launches on any device"
    assert launchers >= 12


def test_the_current_device_is_that_of_the_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(place: torch.device):
        entered.append(place)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", device)
    launch = gpu.on_its_device(lambda x: list(entered))
    place = torch.device("cuda:1")
    assert launch(SimpleNamespace(device=place)) == [place] and not entered
    assert launch(torch.zeros(1)) == []


@pytest.mark.parametrize("op,name", TRITON, ids=str)
def test_another_number_of_tokens_compiles_nothing(op, name: str) -> None:
    """Multiples of 16 and others are two kernels to Triton, unless it is told not to look."""
    some = asked(op.name, name, "sm_90a", T=32)
    assert some and not isinstance(some, str)
    # these have a kernel for up to 16, 32 and 64 pairs or queries (docs/gpu.md)
    others = (31, 30, 29) if name in ("triton_decode", "triton_flash") else (31, 48, 17)
    for T in others:
        assert asked(op.name, name, "sm_90a", T=T) == some, T


@pytest.mark.parametrize("arch", ["gfx942", "sm_86"])
@pytest.mark.parametrize("spec", ["triton_ragged", "triton_blocks"])
def test_float32_tiles_fit(spec: str, arch: str) -> None:
    layout = "block(128)" if spec == "triton_blocks" else "compact"
    found = asked("grouped_gemm", spec, arch, layout=layout, dtype=torch.float32)
    target = Target.named(arch)
    gemms = [launch for launch in found if launch.kernel.endswith(("_ragged", "_blocks", "_outer_product"))]
    assert len(gemms) >= 3
    for launch in sorted(gemms, key=str)[:2] + [one for one in gemms if "outer" in one.kernel][:1]:
        code = compile_kernel(launch.compilation(target), target)
        assert 0 < code.shared_bytes <= target.shared_per_program and not code.spill_bytes, launch


def test_a_tile_too_large_for_a_gpu_is_refused_and_a_smaller_gpu_has_fewer_stages() -> None:
    spec = "triton_ragged(block_m=256,block_n=256,block_k=128)"
    assert "gfx942 has 64" in asked("grouped_gemm", spec, "gfx942")
    assert "sm_86 has 99" in asked("grouped_gemm", spec, "sm_86")
    assert not isinstance(asked("grouped_gemm", spec, "sm_90a"), str)
    spec = "triton_fused(block_m=64,block_n=256,num_stages=4)"
    stages = {
        arch: {
            dict(one.options)["num_stages"]
            for one in asked("expert_ffn", spec, arch)
            if "_hidden" in one.kernel
        }
        for arch in ("sm_90a", "sm_120")
    }
    assert stages == {"sm_90a": {4}, "sm_120": {2}}


def test_what_an_architecture_lacks_is_refused() -> None:
    for spec, lacks in (
        ("triton_ragged(tma=1)", "has no TMA"),
        ("triton_ragged(store=e4m3)", "from sm_89 on"),
    ):
        assert lacks in asked("grouped_gemm", spec, "sm_86")
        assert not isinstance(asked("grouped_gemm", spec, "sm_120"), str)
    assert "sm_90" in asked("expert_ffn", "triton_fused(pdl=1)", "sm_89")


def test_a_launch_is_told_by_dtype_alignment_and_class_of_integers() -> None:
    found = {str(one) for one in asked("dispatch", "triton_gather", "gfx942")}
    (forward,) = [one for one in found if "_gather_rows" in one]
    assert "x_TD=*bf16 pair_R=*i64 x_RD=*bf16 R=i32 stride_T=i32:16 stride_D=i32:1" in forward
    assert forward.endswith("num_stages=1 num_warps=2")
    recorded = next(iter(asked("topk", "triton_select", "sm_80")))
    assert isinstance(recorded, Launch) and recorded.compilation(TARGETS["sm_80"]).name == "select"


@pytest.mark.parametrize("arch,kit", [("sm_90a", True), ("gfx942", False)])
def test_every_launch_asked_for_is_in_the_table(arch: str, kit: bool) -> None:
    """Something new fails here: run measurements/gpu/launches.py."""
    table = SCRIPT["read"]()
    found = ask(TARGETS[arch], table["model"], kit=kit)
    new = [str(one) for one in found.launches if str(one) not in table["launches"][arch]]
    assert not new, f"{len(new)} launches are not in measurements/gpu/launches.json.xz, the first: {new[0]}"
    assert set(table["launches"]) == set(TARGETS)


def test_nothing_in_the_table_is_past_a_limit() -> None:
    table = SCRIPT["read"]()
    for arch, rows in table["launches"].items():
        made = {key: row for key, row in rows.items() if row is not None}
        assert made, f"nothing is compiled for {arch}"
        for key, row in made.items():
            assert row.get("shared_bytes", 0) <= TARGETS[arch].shared_per_program, (arch, key)
            assert not [one for one in row.get("wrong", ()) if "spills" not in one], (arch, key, row)
    assert SCRIPT["TABLE"].with_name("launches.txt").read_text() == SCRIPT["summary"](table)


def test_spills_that_are_not_known_are_told_and_not_counted_as_none() -> None:
    assert [SCRIPT["spills_known"](row) for row in ({}, {"spill_bytes": 4}, {"spill_bytes": None})] == [
        True, True, False
    ]  # fmt: skip
    table = SCRIPT["read"]()
    table["launches"] = {arch: {"a | | | ": {"spill_bytes": None}} for arch in TARGETS}
    assert SCRIPT["summary"](table).count("    1 of ") == len(TARGETS)
