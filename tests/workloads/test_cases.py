"""Cases and models: the sizes of the original plan are there, suites are explained, and twins fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_routing_bench.core.plan import Layout
from moe_routing_bench.core.published import MODELS, model
from moe_routing_bench.workloads.cases import SUITES, cases, fitted, scaled

EVERY = [case for name in (*SUITES, *MODELS) for case in cases(name)]


def test_the_suites_have_their_sizes() -> None:
    counts = {name: len(cases(name)) for name in SUITES}
    assert counts == {
        "seed-fused": 10,
        "seed-qwen": 3,
        "seed-pack": 54,
        "seed-grid": 36,
        "seed-routing": 9,
        "seed-moe-block": 6,
        "seed-dense": 6,
        "seed-attention": 14,
        "seed-linear": 24,
        "seed-rmsnorm": 2,
        "seed-balance": 20,
        "whole-model": 3,
        "topk-grid": 27,
        "gpu-quick": 10,
        "gpu-hour": 38,
        "cpu-grid": 21,
        "layouts": 2,
        "soft-moe": 2,
        "regret": 276,
    }
    assert all(suite.__doc__ and "\n" not in suite.__doc__ for suite in SUITES.values())
    fused = [(c.shape.T, c.shape.D, c.shape.F, c.shape.E, c.shape.K) for c in cases("seed-fused")]
    assert fused == [
        *((T, 7168, 256, 256, 8) for T in (1, 2, 4, 8, 16, 32)),
        (32, 8192, 6144, 8, 2), (128, 8192, 6144, 8, 2), (32, 8192, 16384, 8, 2), (128, 8192, 16384, 8, 2),
    ]  # fmt: skip
    assert [c.case for c in cases("seed-pack/16384x4096-e128-k2")] == ["seed-pack/16384x4096-e128-k2"]
    assert all(len(cases(name)) == 15 for name in MODELS)


def test_names_are_unique_and_found_by_themselves() -> None:
    assert len({case.case for case in EVERY}) == len(EVERY)
    for case in EVERY:
        assert cases(case.case) == [case]
        Layout.parse(case.layout)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.case)
def test_a_twin_fits_and_says_what_it_is(case) -> None:
    twin = scaled(case)
    assert twin.fits_a_laptop
    if case.fits_a_laptop:
        assert twin is case
    else:
        assert twin.case == f"{case.case}~scaled" and twin.scaled_from == case.case
        assert twin.shape.K == case.K and twin.span == case.span and twin.dtype == case.dtype
        assert cases(twin.case) == [twin]


def test_attention_gets_fewer_sequences_and_keeps_their_length() -> None:
    (founding,) = cases("seed-attention/founding-float32")
    assert founding.query_shape == (16, 32, 1024, 16) and founding.key_shape == (16, 16, 1024, 16)
    for twin in (scaled(founding), fitted(founding, memory_bytes=20 * 2**30, most_flops=1e10)):
        assert twin.scaled_from and twin.sequences < 16
        assert (
            twin.query_shape[1:] == founding.query_shape[1:] and twin.key_shape[1:] == founding.key_shape[1:]
        )
    alone = replace(founding, sequences=1, T=1024)
    assert fitted(alone, memory_bytes=20 * 2**30, most_flops=1e9).query_shape == (1, 32, 512, 16)
    for wrong in ({"sequences": 3}, {"heads": 5}, {"kv_heads": 3}, {"window": -1}, {"D": 32 * 15}):
        with pytest.raises(ValueError):
            replace(founding, **wrong)


def test_models_are_guessed() -> None:
    assert model("mixtral-8x7b").shape(4).F == 14336
    with pytest.raises(ValueError, match="'deepseek-v3'"):
        model("deepseek-v33")
    with pytest.raises(ValueError, match="'seed-pack'"):
        cases("seed-pac")
    with pytest.raises(ValueError, match="'seed-fused/7'"):
        cases("seed-fused/7")
    with pytest.raises(ValueError, match="~scaled"):
        cases("seed-fused~tiny")


def test_weights_of_known_models() -> None:
    # Mixtral 8x7B: 45.1 B of its 46.7 B parameters are experts, in 32 layers
    weights = cases("mixtral-8x7b/decode-1")[0].weight_bytes / 2
    assert weights * 32 == pytest.approx(45.1e9, rel=0.01)
    # DeepSeek-V3: 256 routed and 1 shared expert, 44 M parameters each
    assert cases("deepseek-v3/decode-1")[0].weight_bytes / 2 == pytest.approx(257 * 44.04e6, rel=0.01)
    # V2: 162 experts in 59 of its layers are 226 B of 236 B; Scout: 17 in 48 are 103 B of 109 B
    assert cases("deepseek-v2/decode-1")[0].weight_bytes / 2 * 59 == pytest.approx(226e9, rel=0.01)
    assert cases("llama-4-scout/decode-1")[0].weight_bytes / 2 * 48 == pytest.approx(103e9, rel=0.01)


def test_a_case_is_made_smaller_only_as_far_as_memory_and_a_minute_demand():
    gib = 2**30
    for name in ("olmoe-1b-7b/prefill-128", "qwen3-30b-a3b/prefill-128"):
        (case,) = cases(name)
        assert fitted(case, memory_bytes=20 * gib) is case
    (mixtral,) = cases("mixtral-8x7b/prefill-128")
    fewer = fitted(mixtral, memory_bytes=20 * gib)
    assert fewer.shape.T == 32 and fewer.scaled_from == mixtral.case
    assert fewer.shape == replace(mixtral.shape, T=32)  # the weights stay as they are
    assert fewer.fewer_tokens and not scaled(mixtral).fewer_tokens
    assert fitted(mixtral, memory_bytes=20 * gib, most_flops=fewer.flops / 2).shape.T == fewer.shape.T // 2
    assert fitted(mixtral, memory_bytes=4 * gib) == scaled(mixtral)
    training = replace(mixtral, direction="train")
    assert fitted(training, memory_bytes=20 * gib) == scaled(training)
