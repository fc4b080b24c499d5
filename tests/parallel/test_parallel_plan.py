"""mrb parallel plan: what it recommends follows from the fabric, the memory and the routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.planner.fabric import Fabric, read_fabric
from moe_routing_bench.planner.plans import Question, _drawn, answer, degrees_of, options_of
from moe_routing_bench.planner.step import PARTS, LayerSize

H100 = read_fabric("h100-400g")
QWEN = LayerSize(D=2048, F=768, E=128, K=8)
ASKED = Question(size=QWEN, gpus=32, tokens=64, fabric=H100)


def other(**more: object) -> Fabric:
    return Fabric.model_validate(H100.model_dump() | more)


def test_degrees_fill_nodes() -> None:
    assert degrees_of(64, 8) == [1, 2, 4, 8, 16, 32, 64]
    assert degrees_of(72, 72) == [1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72]
    assert degrees_of(48, 8) == [1, 2, 4, 8, 16, 24, 48]
    with pytest.raises(ValueError, match=r"4,032 or 4,104"):
        degrees_of(4096, 72)


def test_memory_forces_a_degree() -> None:
    small = answer(ASKED)
    assert small.best is not None and small.best.fits
    layer = 128 * QWEN.expert_bytes
    forced = answer(replace(ASKED, memory=layer / 6)).best
    assert forced is not None and forced.degree >= 8 and forced.memory <= layer / 6
    assert answer(replace(ASKED, memory=1.0)).best is None


def test_slow_networks_make_small_groups_and_skew_makes_copies() -> None:
    quick = {"gb_per_second": 360.0, "exchange_us": 1.0, "message_us": 0.0}
    slow = {"gb_per_second": 0.5, "exchange_us": 50.0, "message_us": 1.0}
    decode = replace(ASKED, tokens=16)
    wide = answer(replace(decode, fabric=other(inside=quick, between=quick))).best
    narrow = answer(replace(decode, fabric=other(between=slow))).best
    assert wide is not None and narrow is not None
    assert narrow.degree <= 8 < wide.degree, "weights are read by more ranks if sending is cheap"
    skewed = answer(replace(ASKED, tokens=2048, gpus=8, workload="zipf(1.2)"))
    by_way = {one.way: one for one in skewed.options if one.degree == 8 and one.transport == "all_to_all"}
    assert by_way["replicated"].busiest < by_way["greedy"].busiest < by_way["contiguous"].busiest


def test_more_of_everything_takes_longer() -> None:
    """Growth: with twice the tokens, and on a network of half the rate, no degree is quicker."""
    base = answer(ASKED)
    more = answer(replace(ASKED, tokens=128))
    half = answer(replace(ASKED, fabric=other(between=H100.between.model_dump() | {"gb_per_second": 21.5})))
    for degree in base.degrees:
        assert more.of(degree).total > base.of(degree).total
        assert half.of(degree).total >= base.of(degree).total
    sent = [base.of(degree).sent for degree in (2, 4, 8)]
    assert sent == sorted(sent), "larger groups send more"


@pytest.mark.slow
def test_four_thousand_gpus() -> None:
    """Counted, not sampled: 4,096 ranks, 16.8 million messages an exchange."""
    found = answer(replace(ASKED, gpus=4096, tokens=8, spare=(0,)))
    assert found.degrees[-1] == 4096
    last = found.of(4096)
    assert last.copies == 4096 - 128 and last.places == 1
    assert last.seconds["plan"] > found.of(64).seconds["plan"]


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    words = ("parallel", "plan", "--model", "olmoe-1b-7b", "--gpus", 16, "--tokens", 64)
    shown = mrb(*words, "-o", picture).stdout
    assert "Assumptions" in shown and all(source in shown for source in H100.sources)
    assert "Use" in shown and "<svg" in picture.read_text()
    found = mrb_json(*words)
    assert found["best"]["total"] == pytest.approx(sum(found["best"]["seconds"][part] for part in PARTS))
    assert {one["degree"] for one in found["options"]} == {1, 2, 4, 8, 16}
    assert found["question"]["layers"] == 16 and found["assumptions"]
    assert (
        "No plan fits" in mrb("parallel", "plan", "--model", "deepseek-v3", "--gpus", 2, "--tokens", 8).stdout
    )
    assert "gb200-nvl72" in mrb("parallel", "fabrics").stdout


def test_tokens_choose_experts_of_few_groups() -> None:
    """DeepSeek's limit: four of eight groups, two of which are on a node."""
    size = LayerSize(D=64, F=64, E=64, K=8, groups=8, keep_groups=4)
    asked = Question(size=size, gpus=32, tokens=256, fabric=H100, steps=1)
    expert_TK = _drawn(asked, 32, 0).routing.expert_TK
    assert (expert_TK >= 0).float().mean() > 0.999
    for chosen in expert_TK[:50].tolist():
        kept = [expert for expert in chosen if expert >= 0]
        assert len(set(kept)) == len(kept) and len({expert // 8 for expert in kept}) <= 4
    load_E = expert_TK[expert_TK >= 0].bincount(minlength=64)
    assert load_E.max() < 1.3 * load_E.double().mean(), "no group is preferred"
    limited, free = (
        min(one.between for one in options_of(each, 32)[0] if one.transport == "hierarchical")
        for each in (asked, replace(asked, size=replace(size, groups=0)))
    )
    # 4 of 8 groups are on 4 (1 - C(6,4) / C(8,4)) = 3.14 of 4 nodes; 8 of 64 experts on 3.66
    assert limited / free == pytest.approx(3.143 / 3.663, rel=0.02)


def test_mistakes(tmp_path: Path) -> None:
    words = ("parallel", "plan", "--model", "olmoe-1b-7b", "--gpus", 16)
    assert "did you mean" in refused(*words, "--fabric", "h100-400")
    assert "no model" in refused("parallel", "plan", "--model", "gpt", "--gpus", 8)
    assert "workload" in refused(*words, "--workload", "zip(1)")
    assert "whole nodes" in refused(*words[:-1], 12)
    assert "--send-bits" in refused(*words, "--send-bits", 0)
    assert "hot_rank" in refused(
        "parallel", "plan", "--model", "olmoe-1b-7b", "--gpus", 1, "--workload", "hot_rank"
    )
    good = json.loads(H100.model_dump_json())
    for change, sentence in (
        ({"title": "a\x1b[31mb"}, "title"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"inside": {"gb_per_second": float("inf"), "exchange_us": 1.0}}, "inside.gb_per_second"),
        ({"more": 1}, "more"),
        ({"sources": []}, "sources"),
    ):
        file = tmp_path / "bad.toml"
        file.write_text(_toml(good | change))
        assert sentence in refused(*words, "--fabric", file)
    file.write_bytes(b"\xff\xfe")
    assert "not TOML" in refused(*words, "--fabric", file)
    file.write_bytes(b"#" * 70_000)
    assert "too many for a fabric" in refused(*words, "--fabric", file)
    file.write_text(_toml(good))
    mrb(*words, "--tokens", 16, "--fabric", file)


def _toml(values: dict[str, object]) -> str:
    plain, tables = [], []
    for name, value in values.items():
        if isinstance(value, dict):
            inner = "\n".join(f"{key} = {one}" for key, one in value.items() if one is not None)
            tables.append(f"[{name}]\n{inner}")
        elif value is not None:
            plain.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*plain, *tables])
