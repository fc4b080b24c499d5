"""mrb profile block, mrb bench block and mrb bench layer --checkpoint: what they measure and show."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from command_line import mrb, mrb_json, refused
from moe_routing_bench.accuracy import Verdict
from moe_routing_bench.bench.blocks import (
    ATTENTION,
    BlockInputs,
    attention_of,
    parse_contender,
)
from moe_routing_bench.bench.cell import Policy
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.paired import Contender, part_shares, race
from moe_routing_bench.cli.profiling import operations_table
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.studies import profiles
from moe_routing_bench.studies.profiles import (
    MoEInputs,
    profile,
    read_profile,
    share_of,
)
from moe_routing_bench.workloads.cases import BenchCase, cases, scaled
from moe_routing_bench.workloads.models import MODELS

pytestmark = pytest.mark.slow

SIZES = ["--tokens", "24", "--width", "32", "--hidden", "16", "--experts", "4", "--choices", "2"]
QUICK = ["--rounds", "8", "--seconds", "3", "--dtype", "float32"]
CASE = BenchCase(
    name="own/24x32", span="block", shape=MoEShape(T=24, D=32, F=16, E=4, K=2), dtype="float32", sequences=2
)
POLICY = Policy(min_rounds=8, max_rounds=8, checked=2, max_seconds=5)


def moe_inputs(**changes: Any) -> MoEInputs:
    return MoEInputs(Inputs(replace(CASE, span="layer", **changes), "zipf(1.2)"))


def test_profile_shows_a_table_each_the_shares_and_who_is_right(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files = ["--chrome", str(tmp_path / "t.json"), "--picture", str(tmp_path / "p.png")]
    text = mrb("profile", "block", *SIZES, *QUICK, "--calls", "2", "--rows", "30", *files).stdout
    assert "MoE block, T=24 D=32 F=16 E=4 K=2, float32, zipf(1.2)" in text
    for name in ("transformers(eager)", "transformers(grouped_mm)", "hand-ordered", "ours"):
        assert f"{name}: 2 calls under the profiler" in text
    assert text.count("self CPU %") == 5 and "aten::mm" in text and "mrb::gemm" in text
    assert "route" in text and "GEMM" in text and "combine" in text and "CUDA" not in text
    assert text.count("right: error") == 5 and "measured in this process" in text
    assert (tmp_path / "p.png").stat().st_size > 10_000
    traces = list(tmp_path.glob("t.*.json"))
    assert len(traces) == 5 and "traceEvents" in json.loads(traces[0].read_text())


def test_profile_in_json_and_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--contender", "transformers,hand-ordered", "--contender", "ours(staged)"]
    (found,) = mrb_json("profile", "block", *SIZES, *QUICK, *words, "--calls", "2")
    absent, hand, ours = found["contenders"]
    assert "needs transformers" in absent["reason"] and absent["median_seconds"] is None
    assert hand["median_seconds"] > 0 and hand["comparison"] is None and ours["comparison"] is not None
    assert ours["max_error"] <= ours["max_bound"] and ours["max_difference"] < 1e-5
    assert list(found["profiles"]) == ["hand-ordered", "ours(staged)"]
    shares = found["profiles"]["ours(staged)"]["shares"]
    assert {"route", "pack", "gemm", "combine"} <= set(shares) and sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["profile", "block", "seed-nothing"], "there is no case 'seed-nothing'"),
        (["profile", "block", *SIZES, "--contender", "theirs"], "cannot read 'theirs'"),
        (["profile", "block", *SIZES, "--contender", "hand-ordered(x)"], "cannot read"),
        (["profile", "block", *SIZES, "--contender", "ours(nothing)"], "no implementation 'nothing'"),
        (["profile", "block", *SIZES, "--picture", "x.txt"], ".png"),
        (["profile", "block", *SIZES, "--chrome", "x.txt"], ".json"),
        (["profile", "block", *SIZES, "--workload", "zipff"], "there is no workload"),
        (["profile", "block", *SIZES, "--nvtx"], "no NVTX"),
        (["profile", "block", *SIZES, "--device", "cuda"], "there is no cuda here"),
        (["profile", "block", "seed-qwen", "--picture", "x.png"], "3 cases; a picture shows one"),
        (["bench", "block", "--model", "deepseek-v3"], "latent attention"),
        (["bench", "block", *SIZES, "--impl", "theirs"], "cannot read 'theirs'"),
        (["bench", "block", *SIZES, "--impl", "ours(speed=1)"], "option that ours does not take"),
        (["bench", "block", *SIZES, "--impl", "ours(attention=flash)"], "there is no attention 'flash'"),
        (["bench", "block", *SIZES, "--out", "x"], "leave out --out"),
        (["bench", "combine", "--checkpoint", "x"], "--checkpoint is for layer"),
        (["bench", "layer", "--checkpoint", "x", "--width", "3"], "all sizes but --tokens"),
        (["bench", "layer", "--checkpoint", "nowhere"], "nowhere is not a folder"),
        (["bench", "layer", "--checkpoint", "nowhere", "--cache", "cold"], "leave out"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence(words: list[str], sentence: str) -> None:
    assert sentence in refused(*words)


def test_bench_block_shows_times_rates_and_shares() -> None:
    pytest.importorskip("transformers")
    text = mrb("bench", "block", *SIZES, *QUICK).stdout
    assert "decoder block, 1 x 24 tokens, D=32 F=16 E=4 K=2, 1 heads (1 of keys and values) of 32" in text
    for word in ("tokens/s", "TFLOP/s", "attention", "norms", "experts", "measured in this process"):
        assert word in text, word
    for name in (
        "transformers",
        "transformers(attention=eager,experts=eager)",
        "ours(attention=naive)",
        "ours",
    ):
        assert sum(line.split()[0] == name for line in text.splitlines() if line.strip()) == 3, name
    (found,) = mrb_json("bench", "block", *SIZES, *QUICK, "--impl", "ours(attention=naive),ours(impl=staged)")
    naive, staged = found["contenders"]
    assert naive["runs"].startswith("naive attention") and "staged" in staged["runs"]
    assert sum(staged["shares"].values()) == pytest.approx(1, abs=1e-6) and len(staged["samples"]) == 8


def test_bench_layer_on_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import tiny_models

    tiny_models.make("qwen3_moe").save_pretrained(tmp_path)
    words = ["bench", "layer", "--checkpoint", str(tmp_path), "--layer", "1", *QUICK[:4], "--tokens", "16"]
    text = mrb(*words, "--impl", "staged,eager_loop,native(store=int8)").stdout
    assert f"{tmp_path} layer 1: qwen3_moe, T=16 D=32 F=24 E=8 K=2, float32, compact" in text
    assert "by the layer's own router" in text and "stored in another type" in text
    (found,) = mrb_json(*words, "--impl", "staged,eager_loop", "--workload", "one_expert")
    assert found["workload"] == "one_expert" and found["load"]["max_over_mean"] == pytest.approx(4)
    assert all(one["max_error"] <= one["max_bound"] for one in found["contenders"])
    assert "layers 0 to 1, not 5" in refused(*words[:4], "--layer", "5")


def test_stages_and_the_hand_ordered_path_compute_what_the_layer_does() -> None:
    for changes in ({}, {"shared_F": 16}, {"bias": True, "activation": "gelu"}, {"dtype": "bfloat16"}):
        inputs = moe_inputs(**changes)
        layer = inputs.contender("ours(staged)")
        x_TD = inputs.x(3)
        assert layer.contender.call is not None and layer.ranged is not None
        with torch.no_grad():
            assert torch.equal(layer.contender.call(x_TD), layer.ranged(x_TD))
            hand = inputs.contender("hand-ordered").contender.call
            assert hand is not None and inputs.judge(hand(x_TD), 3).passed
            assert not inputs.judge(hand(x_TD), 4).passed  # of another input


def test_a_wrong_contender_is_not_timed() -> None:
    inputs = moe_inputs()
    right = inputs.contender("ours(staged)").contender
    assert right.call is not None
    calls, wrong_calls = 0, 0

    def errs(x_TD: Tensor) -> Tensor:
        nonlocal wrong_calls
        wrong_calls += 1
        return right.call(x_TD) * 1.01  # type: ignore[misc]

    wrong = Contender(name="wrong", call=errs)

    def tires(x_TD: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return right.call(x_TD) if calls < 5 else torch.zeros_like(x_TD)  # type: ignore[misc]

    late = Contender(name="late", call=tires)
    found = race([right, wrong, late], x_of=inputs.x, judge=inputs.judge, policy=POLICY)
    assert [bool(row.samples) for row in found.rows] == [True, False, False]
    assert "largest error" in found.rows[1].reason and "largest error" in found.rows[2].reason
    assert found.checked == 2 and wrong_calls == 1


def test_rounds_are_paired_and_judged() -> None:
    judged: list[int] = []

    def x_of(number: int) -> Tensor:
        return torch.full((1,), float(number))

    def judge(y: Tensor, number: int) -> Verdict:
        judged.append(number)
        return Verdict(passed=bool(y.item() == number), sentence="of another call")

    both = [Contender(name=name, call=lambda x: x.clone()) for name in ("a", "b")]
    found = race(both, x_of=x_of, judge=judge, policy=POLICY)
    assert found.rounds == 8 and found.checked == 4 and found.aa_floor is not None
    assert judged[:2] == [0, 0] and sorted(judged[2:]) == [1, 1, 2, 2]  # the same inputs for both
    assert found.rows[0].comparison is None and found.rows[1].comparison is not None


def test_parts_inside_parts_are_taken_out_of_them() -> None:
    class Slow(nn.Module):
        def __init__(self, seconds: float, inner: nn.Module | None = None):
            super().__init__()
            self.seconds, self.inner = seconds, inner

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(self.seconds)
            return x if self.inner is None else self.inner(x)

    inner = Slow(0.03)
    outer = Slow(0.01, inner)
    one = Contender(name="nested", call=outer, parts={"outer": [outer], "inner": [inner]})
    shares = part_shares(one, lambda n: torch.zeros(1))
    assert shares["inner"] > 1.5 * shares["outer"] > 0.15 and sum(shares.values()) == pytest.approx(
        1, abs=1e-6
    )
    assert not outer._forward_hooks and not inner._forward_pre_hooks


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_an_attention_and_its_twin_too(model: str) -> None:
    assert set(ATTENTION) == set(MODELS)
    (case,) = cases(f"{model}/prefill-128")
    if ATTENTION[model].missing:
        with pytest.raises(NotImplementedError, match="latent"):
            attention_of(case)
        return
    full, twin = attention_of(case), attention_of(scaled(case))
    assert full == ATTENTION[model] and twin.head_dim == full.head_dim
    assert twin.heads // twin.kv_heads == full.heads // full.kv_heads and twin.heads <= full.heads


def test_the_seed_decoder_has_the_heads_it_declares() -> None:
    (case,) = cases("seed-decoder/4x64")
    found = attention_of(case)
    assert (found.heads, found.head_dim) == (32, 64)
    twin = attention_of(scaled(case))
    assert (twin.heads, twin.head_dim) == (16, 64) and scaled(case).sequences == 4


def test_the_router_behind_attention_chooses_as_the_workload_says() -> None:
    inputs = BlockInputs(replace(CASE, dtype="bfloat16"), "zipf(1.2)")
    block = inputs.block(inputs.moe("staged"), "sdpa")
    with torch.no_grad():
        _, routing = block(inputs.x(5), inputs.rotary)
    assert torch.equal(routing.expert_TK, inputs.layer_inputs.routing(5 % 4).expert_TK)


def test_operations_of_a_block_are_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = BlockInputs(CASE, "balanced")
    block = inputs.block(inputs.moe("eager_loop"), "naive")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        block(inputs.x(0), inputs.rotary)
    N, a = 12, inputs.attention
    skipped = (
        4 * a.heads * a.head_dim * 2 * (N * N - N * (N + 1) // 2)
    )  # naive attention computes the rest too
    gates = 2 * CASE.shape.num_pairs * CASE.shape.D
    assert counted.get_total_flops() == inputs.flops + skipped - gates


def test_contenders_are_read_with_their_options() -> None:
    impl = "staged(combine=index_add,dispatch=native(level=avx2))"
    assert parse_contender(f"ours(attention=naive, impl={impl})") == (
        "ours",
        {"attention": "naive", "impl": impl},
    )
    assert parse_contender("transformers") == ("transformers", {})
    with pytest.raises(ValueError, match="option=value"):
        parse_contender("ours(naive)")


def operation(name: str, width: int = 0, us: float = 1.0, start: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, input_shapes=[[3, width]], cpu_time_total=us, device_time_total=10 * us, cpu_children=[],
        device_type=torch.autograd.DeviceType.CPU, time_range=SimpleNamespace(start=start),
    )  # fmt: skip


def test_operations_inside_transformers_experts_are_sorted_into_shares() -> None:
    D, F = 32, 16
    expert = ["aten::where", "aten::index", "aten::linear", "aten::silu", "aten::mul", "aten::linear"]
    widths = [0, D, D, F, F, F]
    loop = [operation("aten::one_hot"), *map(operation, expert, widths)]
    loop += [operation("aten::mul", D), operation("aten::index_add_", D)]
    loop += [*map(operation, expert, widths), operation("aten::mul", D), operation("aten::index_add_", D)]
    one = ["pack", "pack", "gemm", "gemm", "gemm", "gemm", "combine", "combine"]
    assert share_of(loop, D) == ["pack", *one, *one]
    grouped = [
        "aten::sort",
        "aten::index",
        "aten::_grouped_mm",
        "aten::silu",
        "aten::mul",
        "aten::_grouped_mm",
    ]
    grouped += ["aten::mul", "aten::index", "aten::sum"]
    assert share_of([operation(n, F) for n in grouped], D) == [
        "pack", "pack", "gemm", "gemm", "gemm", "gemm", "combine", "combine", "combine"
    ]  # fmt: skip
    assert share_of([operation("aten::zeros")], D) == ["pack"]


def test_device_columns_appear_when_a_device_worked() -> None:
    """The profiler of a GPU, by a stand-in: shares are then of device time."""
    call, route = operation("mrb::call", us=100), operation("mrb::route", us=25)
    route.device_time_total = 500
    average = SimpleNamespace(
        key="aten::mm", count=2, self_cpu_time_total=5.0, cpu_time_total=6.0, self_device_time_total=7e6,
        device_time_total=8.0,
    )  # fmt: skip
    found = read_profile([average], [call, route], calls=2, width=32)
    assert found.shares == {"route": 0.5, "python": 0.5} and found.seconds == pytest.approx(50e-6)
    table = operations_table(found, rows=5)
    assert [column.header for column in table.columns][4:6] == ["self CUDA", "CUDA total"]


def test_nvtx_ranges_are_opened_around_every_stage() -> None:
    opened: list[str] = []

    class Nvtx:
        def range(self, name: str) -> Any:
            opened.append(name)
            return profiles.nullcontext()

    inputs = MoEInputs(Inputs(replace(CASE, span="layer"), "balanced"), nvtx=Nvtx())
    one = inputs.contender("ours(staged)")
    assert one.ranged is not None
    with torch.no_grad():
        one.ranged(inputs.x(0))
    assert opened == ["mrb::route", "mrb::pack", "mrb::pack", "mrb::gemm", "mrb::combine"]


def test_hooks_are_removed_after_a_profile_that_fails() -> None:
    pytest.importorskip("transformers")
    inputs = moe_inputs()
    one = inputs.contender("transformers(eager)")

    def broken(x_TD: Tensor) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        profile(replace(one, ranged=broken), inputs.x, calls=1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules.values())


def test_stages_of_a_fused_kernel_are_one() -> None:
    inputs = moe_inputs()
    layer = inputs.contender("ours(eager_loop)")
    assert layer.ranged is not None
    found = profile(layer, inputs.x, calls=2)
    assert "fused" in found.shares and "gemm" not in found.shares
