"""mrb model profile and mrb bench block: what they measure and show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import mrb, mrb_json, refused
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.spans.layer import span as layer_span
from moe_routing_bench.cli.profile import operations_table
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.studies import profiles
from moe_routing_bench.studies.profiles import profile, profiled, read_profile, share_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

SIZES = "--tokens 24 --width 32 --hidden 16 --experts 4 --topk 2".split()
QUICK = "--threads 1 --rounds 8 --seconds 180 --dtype float32".split()
CASE = Experiment(case="own/24x32", span="layer", T=24, D=32, F=16, E=4, K=2, dtype="float32")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def layer_inputs(**changes: Any) -> Inputs:
    return Inputs(replace(CASE, **changes))


def arguments(implementation: ImplementationRef, inputs: Inputs, number: int = 0) -> Any:
    return layer_span.arguments(layer_span.call(implementation, inputs, number, 0)).values()


def test_profile_shows_a_table_each_the_shares_and_who_is_right(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files = ["--chrome", tmp_path / "t.json", "--picture", tmp_path / "p.png", "--out", tmp_path / "kept"]
    text = mrb("model", "profile", *SIZES, *QUICK, "--calls", 2, "--rows", 30, *files).stdout
    assert "T=24 D=32 F=16 E=4 K=2, float32, zipf(1.2)" in text
    for name in ("transformers(eager)", "transformers(grouped_mm)", "hand-ordered"):
        assert f"{name}: 2 calls" in text
    assert text.count("self CPU %") == 5 and "aten::mm" in text and "mrb::gemm" in text
    assert "route" in text and "GEMM" in text and "combine" in text and "CUDA" not in text
    assert "results checked" in text and "Not timed" not in text
    assert (tmp_path / "p.png").stat().st_size > 10_000
    traces = list(tmp_path.glob("t.*.json"))
    assert len(traces) == 5 and "traceEvents" in json.loads(traces[0].read_text())
    kept = list(iterate(tmp_path / "kept"))
    assert {record.experiment.span for record in kept} == {"layer"} and len(
        kept
    ) == 6  # with the baseline's twin


@pytest.mark.parametrize(
    ("name", "impl"), [("attention", "plain,sdpa"), ("decoder", "torch,ours"), ("block", "ours(impl=staged)")]
)
def test_profile_of_another_span_is_in_its_records(name: str, impl: str, tmp_path: Path) -> None:
    words = [*SIZES, *QUICK, "--heads", 2, "--activation", "gelu", "--impl", impl, "--calls", 2, "--rows", 3]
    text = mrb("model", "profile", name, *words, "--out", tmp_path).stdout
    assert text.count("self CPU %") == impl.count(",") + 1 and "one call under the profiler" in text
    for record in iterate(tmp_path):
        profiled = record.implementation.role != "twin"
        assert record.experiment.span == name and len(record.profile) == (3 if profiled else 0)
        assert all(one.seconds >= one.self_seconds > 0 for one in record.profile.values())


def test_a_profile_without_a_time_fails(tmp_path: Path) -> None:
    words = [*SIZES, *QUICK, "--heads", 2, "--impl", "sdpa_folded", "--calls", 2, "--out", tmp_path]
    assert "not timed" in mrb("model", "profile", "attention", *words, code=1).stderr


def test_profile_in_json_and_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--impl", "hand-ordered,staged", "--calls", 2]
    (experiment,) = mrb_json("model", "profile", *SIZES, *QUICK, *words)
    hand, staged, twin = experiment["implementations"]
    assert hand["median_seconds"] > 0 and hand["comparison"] is None and staged["comparison"] is not None
    assert staged["max_error"] <= staged["max_bound"] and twin["role"] == "twin"
    assert list(experiment["profiles"]) == ["hand-ordered", "staged"]
    shares = experiment["profiles"]["staged"]["shares"]
    assert {"route", "pack", "gemm", "combine"} <= set(shares) and sum(shares.values()) == pytest.approx(1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = layer_span.why_not(ImplementationRef(name="transformers"), layer_inputs(), {})
    assert reason is not None and "needs transformers" in reason


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model", "profile", "seed-nothing"], "case 'seed-nothing'"),
        (["model", "profile", *SIZES, "--impl", "theirs"], "implementation 'theirs'"),
        (["model", "profile", *SIZES, "--picture", "x.txt"], ".png"),
        (["model", "profile", *SIZES, "--chrome", "x.txt"], ".json"),
        (["model", "profile", *SIZES, "--workload", "zipff"], "no workload"),
        (["model", "profile", *SIZES, "--nvtx"], "no NVTX"),
        (["model", "profile", *SIZES, "--device", "cuda"], "no cuda"),
        (["model", "profile", "seed-qwen", "--picture", "x.png"], "3 cases"),
        (["bench", "block", "--model", "deepseek-v3"], "latent attention"),
        (["bench", "block", *SIZES, "--impl", "theirs"], "cannot read 'theirs'"),
        (["bench", "block", *SIZES, "--impl", "ours(speed=1)"], "option speed"),
        (["bench", "block", *SIZES, "--impl", "ours(impl=nothing)"], "implementation 'nothing'"),
        (["bench", "combine", "--checkpoint", "x"], "combine reads none"),
        (["bench", "layer", "--checkpoint", "x", "--width", "3"], "but --tokens"),
        (["bench", "layer", "--checkpoint", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_it(words: list[str], named: str) -> None:
    assert named in refused(*words)


def test_bench_block_shows_times_rates_and_stages(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = mrb("bench", "block", *SIZES, *QUICK, "--stages", "--out", tmp_path).stdout
    assert "T=24 D=32 F=16 E=4 K=2, float32, zipf(1.2)" in text
    for word in ("tokens/s", "TFLOP/s", "norms", "attention", "experts", "results checked"):
        assert word in text, word
    kept = {record.implementation.spec: record for record in iterate(tmp_path)}
    assert set(kept) == {
        "transformers", "transformers(attention=eager,experts=eager)", "ours(attention=naive)", "ours",
        "frozen(ours)",
    }  # fmt: skip
    assert all(r.timing is not None for r in kept.values()), [r.correctness.reason for r in kept.values()]
    words = ["--impl", "ours(attention=flash),ours(impl=staged)"]
    (experiment,) = mrb_json("bench", "block", *SIZES, *QUICK, *words, code=1)
    flash, staged, _ = experiment["implementations"]
    assert flash["status"] == "UNSUPPORTED" and "attention 'flash'" in flash["reason"]
    assert "staged" in staged["runs"] and len(staged["samples"]) == 8


def test_bench_on_a_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    words = ["--checkpoint", tmp_path / "model", "--layer", 1, *QUICK[:4], "--tokens", 16]
    text = mrb("bench", "layer", *words, "--impl", "staged,eager_loop", "--out", tmp_path / "kept").stdout
    assert "T=16 D=32 F=16 E=8 K=2, float32" in text and "own router" in text
    assert all(record.timing is not None for record in iterate(tmp_path / "kept"))
    more = ["--impl", "staged,native(store=int8)", "--workload", "one_expert"]
    (experiment,) = mrb_json("bench", "expert_ffn", *words, *more, code=1)
    staged, stored, _ = experiment["implementations"]
    assert experiment["workload"] == "one_expert" and staged["load"]["max_over_mean"] == pytest.approx(4)
    assert staged["max_error"] <= staged["max_bound"] and stored["reason"]
    assert "0 to 1" in refused("bench", "layer", *words[:2], "--layer", 5)
    assert "own router" in refused("bench", "layer", *words, "--workload", "uniform")


@pytest.mark.parametrize(
    "changes", [{}, {"shared_F": 16}, {"bias": True, "activation": "gelu"}, {"dtype": "bfloat16"}]
)
@pytest.mark.parametrize("spec", ["staged", "hand-ordered", "eager_loop"])
def test_named_ranges_change_no_bit(spec: str, changes: dict[str, Any]) -> None:
    inputs, implementation = layer_inputs(**changes), ImplementationRef(name=spec)
    args = arguments(implementation, inputs, 3)
    with torch.no_grad():
        plain, ranged = (
            layer_span.built(implementation, inputs).run(*args),
            profiled(implementation, inputs).run(*args),
        )
    assert torch.equal(plain, ranged)


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
        device_time_total=8.0, self_cpu_memory_usage=3, self_device_memory_usage=4,
    )  # fmt: skip
    one = read_profile([average], [call, route], calls=2, width=32)
    assert one.shares == {"route": 0.5, "python": 0.5} and one.seconds == pytest.approx(50e-6)
    table = operations_table(one, rows=5)
    assert [column.header for column in table.columns][4:6] == ["self CUDA", "CUDA total"]
    assert one.rows[0].memory_bytes == 7 and one.operations(1)["aten::mm"].device_seconds == 4e-6


def test_nvtx_ranges_are_opened_around_every_stage() -> None:
    opened: list[str] = []

    class Nvtx:
        def range(self, name: str) -> Any:
            opened.append(name)
            return profiles.nullcontext()

    inputs = layer_inputs()
    for spec, names in (
        ("staged", ["route", "pack", "pack", "gemm", "combine"]),
        ("hand-ordered", ["route", "pack", "gemm", "combine"]),
        ("eager_loop", ["route", "pack", "fused"]),
    ):
        opened.clear()
        with torch.no_grad():
            profiled(ImplementationRef(name=spec), inputs, Nvtx()).run(
                *arguments(ImplementationRef(name=spec), inputs)
            )
        assert opened == [f"mrb::{name}" for name in names]


def test_hooks_are_removed_after_a_profile_that_fails() -> None:
    pytest.importorskip("transformers")
    inputs = layer_inputs()
    one = profiled(ImplementationRef(name="transformers(eager)"), inputs)

    def broken(*args: Any) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        profile(replace(one, run=broken), inputs, calls=1)
    assert one.modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules.values())
