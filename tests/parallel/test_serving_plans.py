"""mrb parallel serve: the deployment with most tokens per second that keeps the latency and fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from command_line import mrb_json, refused
from moe_routing_bench.core.published import model
from moe_routing_bench.planner.fabric import Fabric, read_fabric
from moe_routing_bench.planner.serving import HIDDEN_RANGE, Served, attention_numbers, other_weights, serve

H100 = read_fabric("h100-400g")
GPT_OSS = Served(
    model=model("gpt-oss-120b"), gpus=1, fabric=H100, phase="decode", context=4096, format="mxfp4",
    batch=(1, 8, 64, 512),
)  # fmt: skip
QWEN = Served(model=model("qwen3-30b-a3b"), gpus=8, fabric=H100, phase="decode", context=2048, batch=(8, 64))


def test_weights_are_those_of_the_checkpoints() -> None:
    """gpt-oss-120b has 65.2 GB of files (huggingface.co/openai/gpt-oss-120b); DeepSeek-V3 671 billion numbers
    (arXiv:2412.19437), qwen3-235b 235."""
    gpt_oss = model("gpt-oss-120b")
    experts = 36 * 128 * 3 * 2880**2 * 4.25 / 8
    assert experts + other_weights(gpt_oss, 16) == pytest.approx(65.2e9, rel=0.01)
    for name, numbers in (("deepseek-v3", 671e9), ("qwen3-235b-a22b", 235e9)):
        one = model(name)
        held = one.layers * one.E * 3 * one.D * one.F + other_weights(one, 16) / 2
        assert held == pytest.approx(numbers, rel=0.01)
    assert attention_numbers(model("deepseek-v3")) == pytest.approx(187.1e6, rel=1e-3)


def test_gpt_oss_fits_on_one_gpu_of_80_gb_with_memory_by_parts() -> None:
    best, _ = serve(GPT_OSS)
    assert best is not None and best.batch == 64 and best.replicas == 1
    assert best.memory["experts"] == pytest.approx(60.9e9, rel=0.01)
    # every second layer keeps 128 tokens: 64 sequences x 18 layers x (4096 + 128) tokens x 1024 numbers x 2
    assert best.memory["cache"] == 64 * 18 * (4096 + 128) * 1024 * 2
    assert sum(best.memory.values()) < 80e9 and set(best.memory) >= {"rows", "workspace", "fragmentation"}
    assert serve(replace(GPT_OSS, format="bf16"))[0] is None
    assert serve(replace(GPT_OSS, context=200_000, batch=(64,)))[0] is None, "the cache does not fit"


def test_latency_limits_the_batch() -> None:
    free, _ = serve(QWEN)
    assert free is not None and free.batch == 64 and free.in_time
    tight, _ = serve(replace(QWEN, latency=0.9 * free.step))
    assert tight is not None and tight.step <= 0.9 * free.step and tight.rate < free.rate
    none, tried = serve(replace(QWEN, latency=1e-4))
    assert none is None and tried and not any(one.in_time for one in tried)


def test_groups_copies_and_replicas_use_all_gpus() -> None:
    _, tried = serve(QWEN)
    assert {(one.tp, one.ep) for one in tried} >= {(1, 1), (1, 8), (2, 1), (2, 4), (8, 8)}
    for one in tried:
        assert one.replicas * max(one.tp, one.ep) == 8 and max(one.tp, one.ep) % one.tp == 0
    by_tp = {one.tp: one for one in serve(replace(QWEN, ep=(1,), batch=(8,)))[1]}
    assert by_tp[8].memory["experts"] == by_tp[1].memory["experts"] / 8
    # four heads of keys: more ranks do not divide the cache further, and a rank has the sequences of all
    assert by_tp[8].memory["cache"] == 2 * by_tp[4].memory["cache"] == 2 * by_tp[1].memory["cache"]


def test_eight_bits_are_sent_and_multiplied_faster() -> None:
    wide = replace(QWEN, tp=(1,), ep=(8,), batch=(2048,), phase="prefill", context=512)
    half = replace(wide, format="fp8")
    (sixteen,), (eight,) = serve(wide)[1], serve(half)[1]
    assert eight.seconds["sending"] < 0.85 * sixteen.seconds["sending"], "8 bits there, 16 back"
    assert eight.seconds["experts"] < 0.75 * sixteen.seconds["experts"]
    slow = H100.model_copy(update={"device": H100.device.model_copy(update={"tflops_8bit": None})})
    (same,) = serve(replace(half, fabric=slow))[1]
    assert same.seconds["experts"] > eight.seconds["experts"]


def test_two_half_batches_hide_sending_and_read_weights_twice() -> None:
    prefill = replace(QWEN, tp=(1,), ep=(8,), batch=(2048,), phase="prefill")
    (hides,), (bare,) = serve(replace(prefill, hidden=1.0))[1], serve(replace(prefill, hidden=0.0))[1]
    assert hides.halves and not bare.halves and hides.step < bare.step
    computing = hides.seconds["attention"] + hides.seconds["experts"]
    assert hides.hidden == min(computing, hides.seconds["sending"])
    low, high = hides.between
    assert low < high == pytest.approx(hides.rate) and HIDDEN_RANGE[1] == 1
    # one token of a half reads the same weights as one of the whole, so a small batch is not divided
    links: Fabric = H100.model_copy(update={"inside": H100.inside.model_copy(update={"exchange_us": 0.0})})
    (small,) = serve(replace(QWEN, tp=(1,), ep=(8,), batch=(2,), fabric=links))[1]
    assert not small.halves


def test_the_command() -> None:
    words = (
        "parallel",
        "serve",
        "--model",
        "gpt-oss-120b",
        "--gpus",
        1,
        "--format",
        "mxfp4",
        "--batch",
        "64",
    )
    found = mrb_json(*words)
    assert (
        found["best"]["fits"] and found["best"]["tokens_per_second"] == found["tried"][0]["tokens_per_second"]
    )
    assert "no format" in refused(*words[:-2], "--format", "fp5")
    assert "--context" in refused(*words, "--context", 0)
    assert "no TP and EP" in refused(*words, "--tp", "3", "--ep", "2")
