"""expert_ffn.native on weights of 8 and 4 bits: every format at every level, planted faults, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moe_routing_bench import Layout, Routing
from moe_routing_bench.conformance.cases import Case, KitCell
from moe_routing_bench.conformance.check import cells_of, check, check_implementation
from moe_routing_bench.core import cpp
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.formats.int8 import rounded_rows
from moe_routing_bench.formats.mxfp4 import MXFP4
from moe_routing_bench.formats.named import NAMES, quantise
from moe_routing_bench.formats.stored import Decoded
from moe_routing_bench.ops import coded
from moe_routing_bench.ops.expert_ffn import native
from moe_routing_bench.ops.expert_ffn.op import by_expert
from tiny_layers import EXPERT_FFN, MAKE_PLAN, arguments, weights_of

pytestmark = pytest.mark.slow

if (reason := cpp.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

HAS = set(this_machine().instructions)
LEVELS = [level for level in ("vnni", "avx512", "avx2", "neon", cpp.PRETENDED) if cpp.LEVELS[level][0] <= HAS]
INTEGERS = [name for name in NAMES if name != "fp8_block"]
# depths with a last group that is not whole, columns with a last panel that is not, several blocks of rows
STORED = Case(
    name="stored", guards="what is stored is what is computed with", T=30, D=296, F=200, E=2, K=2,
    layouts=("compact",), activation="swiglu", bias=True,
)  # fmt: skip
FEW = Case(
    name="few", guards=STORED.guards, T=2, D=40, F=24, E=5, K=2, layouts=("compact",), activation="gelu"
)


def cell(spec: str, case: Case, dtype: str) -> KitCell:
    return KitCell(op="expert_ffn", spec=spec, case=case, layout="compact", dtype=dtype, device="cpu")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name", [*NAMES, "int8_g32", "int4_g64", "int4_g256_asym", *(f"{name}_a8" for name in INTEGERS)]
)
def test_every_format_at_every_level(name: str, level: str) -> None:
    spec = f"native(level={level},store={name})"
    for case, dtype in ((STORED, "float32"), (FEW, "bfloat16")):
        outcome = check(cell(spec, case, dtype))
        assert outcome.status == "passed", outcome.sentences


@pytest.mark.nightly
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_a8" for name in INTEGERS)])
def test_the_whole_kit(name: str, level: str) -> None:
    for one in cells_of("expert_ffn", f"native(level={level},store={name})", ("float32", "bfloat16")):
        outcome = check(one)
        assert outcome.status == "passed", (str(one), outcome.sentences)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", INTEGERS)
def test_rows_of_8_bits_are_multiplied_exactly(name: str, level: str) -> None:
    """Sums of integers have no error, so the result is that of the same roundings in float64. Where a number
    of h lies so near to the middle of two codes that float32 takes the other, that token alone differs."""
    store = f"{name}_a8"
    x_TD, gate_TK, plan, weights = arguments(60, 2, 5, 296, 200, dtype=torch.float32)
    y_TD = native.run(x_TD, gate_TK, plan, native.freeze(weights, store=store), level=level, store=store)
    kept = native.stored(weights, store=store)
    right_TD = by_expert(x_TD.double(), gate_TK.double(), plan, kept, rounded=rounded_rows)
    error_T = (y_TD - right_TD).square().mean(dim=1).sqrt() / right_TD.square().mean().sqrt()
    assert int((error_T > 1e-6).sum()) <= 2, error_T


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_8_bits_that_are_extreme(dtype: torch.dtype, level: str) -> None:
    """Zeros, one number only, the smallest and the largest numbers, NaN and infinity: each row by itself."""
    x_TD, gate_TK, plan, weights = arguments(40, 2, 5, 96, 64, dtype=dtype, activation="relu")
    info = torch.finfo(dtype)
    x_TD[0] = 0.0
    x_TD[1] = 0.0
    x_TD[1, 95] = 3.0
    x_TD[2] *= info.smallest_normal
    x_TD[3] *= info.max / 100
    x_TD[4, 7] = float("nan")
    x_TD[5, 9] = float("-inf")
    y_TD = native.run(
        x_TD, gate_TK, plan, native.freeze(weights, store="int8_a8"), level=level, store="int8_a8"
    )
    kept = native.stored(weights, store="int8_a8")
    right_TD = by_expert(x_TD.double(), gate_TK.double(), plan, kept, rounded=rounded_rows)
    assert bool(y_TD[4].isnan().all()) and bool(y_TD[5].isnan().all())
    for t in (0, 1, 2, 3, *range(6, 40)):
        allowed = 0.02 * float(right_TD[t].abs().max()) + info.smallest_normal
        assert float((y_TD[t].double() - right_TD[t]).abs().max()) <= allowed, t


@pytest.mark.parametrize("name", ["int8", "int4_g32_asym", "fp8_block", "int8_a8", "int4_g32_a8"])
def test_the_same_bits_for_any_number_of_threads(name: str) -> None:
    x_TD, gate_TK, plan, weights = arguments(60, 2, 5, 296, 200, dtype=torch.float32)
    frozen = native.freeze(weights, store=name)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(native.run(x_TD, gate_TK, plan, frozen, store=name).clone())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_a_checkpoint_s_weights_run_as_they_are_stored() -> None:
    x_TD, gate_TK, plan, weights = arguments(30, 2, 5, 96, 64, dtype=torch.float32)
    w_in, w_out = (quantise(w, "mxfp4") for w in (weights.w_in_EDG, weights.w_out_EFD))
    experts = QuantisedExperts(
        w_in=w_in,
        w_out=w_out,
        b_in_EG=weights.b_in_EG,
        b_out_ED=weights.b_out_ED,
        activation=weights.activation,
    )
    frozen = native.freeze_stored(experts, torch.float32)
    assert experts.store == "mxfp4"
    y_TD = EXPERT_FFN.get("native(store=mxfp4)")(x_TD, gate_TK, plan, frozen)
    oracle_TD = EXPERT_FFN.reference(x_TD.double(), gate_TK.double(), plan, experts.dequantised())
    plain_TD = EXPERT_FFN.reference(x_TD, gate_TK, plan, experts.dequantised(torch.float32))
    verdict = judge(y_TD, oracle_TD, plain_TD)
    assert verdict.passed, verdict.sentence
    with pytest.raises(NotImplementedError, match=r"frozen for native\(store=mxfp4\)"):
        EXPERT_FFN.get("native(store=int8)")(x_TD, gate_TK, plan, frozen)
    with pytest.raises(ValueError, match="one format"):
        replace(experts, w_out=quantise(weights.w_out_EFD, "int8")).validate()
    with pytest.raises(ValueError, match="w_out_EFD"):
        replace(experts, w_out=w_in).validate()


def test_what_the_kernel_cannot_read_is_refused() -> None:
    case = arguments(4, 2, 5, 96, 64, dtype=torch.float32)
    assert "32 weights, not 16" in (EXPERT_FFN.get("native(store=int4_g16)").why_not(*case) or "")
    assert "'int3'" in (EXPERT_FFN.get("native(store=int3)").why_not(*case) or "")
    why = EXPERT_FFN.get("native(store=fp8_block_a8)").why_not(*case) or ""
    assert "integers" in why
    deep = arguments(1, 1, 1, 1 << 17, 8, dtype=torch.float32)
    why = EXPERT_FFN.get("native(store=int8_a8)").why_not(*deep) or ""
    assert "131072" in why
    stored = quantise(case[3].w_in_EDG, "int8").decoded()
    for wrong in (float("inf"), float("nan"), 1e300):
        with pytest.raises(ValueError, match="too large"):
            coded.pack(replace(stored, scale_ENg=stored.scale_ENg * wrong), True, native._library(None))


# ---- planted faults: what the kernel is given differs from what is stored

Fault = Callable[[Decoded], Decoded]


def scale(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda d: replace(d, scale_ENg=change(d.scale_ENg))


def codes(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda d: replace(d, code_ENK=change(d.code_ENK))


def offset(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda d: d if d.offset_ENg is None else replace(d, offset_ENg=change(d.offset_ENg))


def numbers(change: Callable[[float], float]) -> Fault:
    return lambda d: replace(d, coding=replace(d.coding, numbers=tuple(map(change, d.coding.numbers))))


def swapped_pairs(code_ENK: torch.Tensor) -> torch.Tensor:
    return code_ENK.unflatten(2, (-1, 2)).flip(3).flatten(2)


def first_half_again(value_ENg: torch.Tensor) -> torch.Tensor:
    return value_ENg[..., [i & ~4 for i in range(value_ENg.shape[-1])]]


def without_last(value_ENg: torch.Tensor) -> torch.Tensor:
    return value_ENg * (torch.arange(value_ENg.shape[-1]) < value_ENg.shape[-1] - 1)


FAULTS: dict[str, tuple[str, Fault]] = {
    "the scale of the next group": ("int4_g32", scale(lambda s: s.roll(1, dims=2))),
    "the scale of the next column": ("int8", scale(lambda s: s.roll(1, dims=1))),
    "the scale of the next expert": ("int8", scale(lambda s: s.roll(1, dims=0))),
    "a stale scale in one group": ("int8_g128", scale(lambda s: s.index_fill(2, torch.tensor([1]), 0.01))),
    "one scale for the whole column": ("q8_0", scale(lambda s: s[..., :1].expand_as(s))),
    "scales rounded to bfloat16": ("int8", scale(lambda s: s.bfloat16().double())),
    "the last group without a scale": ("int4_g128", scale(without_last)),
    "scale blocks of columns for depth": ("fp8_block", scale(lambda s: s.flip(2))),
    "an exponent off by one": ("mxfp4", scale(lambda s: s * 2)),
    "zero points dropped": ("int4_g32_asym", offset(lambda z: z * 0)),
    "zero points with the wrong sign": ("int4_g128_asym", offset(torch.neg)),
    "the zero point of the next group": ("int4_g32_asym", offset(lambda z: z.roll(1, dims=2))),
    "minima dropped": ("q4_k", offset(lambda z: z * 0)),
    "two upper bits of a scale lost": ("q4_k", scale(lambda s: s - 16 * s.amax() / 63 * (s > s.amax() / 2))),
    "groups 4 to 7 read as 0 to 3": ("q4_k", scale(first_half_again)),
    "nibbles in the other order": ("int4_g32", codes(swapped_pairs)),
    "mxfp4 nibbles in the other order": ("mxfp4", codes(swapped_pairs)),
    "codes saturated at 100": ("int8", codes(lambda c: c.clamp(-100, 100))),
    "the code 15 saturated to 14": ("int4_g32", codes(lambda c: c.clamp(max=14))),
    "signed nibbles read as unsigned": ("int4_g128", numbers(lambda n: n % 16)),
    "the sign of e2m1 ignored": ("mxfp4", numbers(abs)),
    "6 read as 5": ("mxfp4", numbers(lambda n: 5.0 if n == 6 else n)),
    "float8 subnormals flushed": ("fp8_block", codes(lambda c: torch.where(c & 127 < 8, c & 128, c))),
    "the sign of float8 lost": ("fp8_block", codes(lambda c: c & 127)),
    "W8A8: the scale of the next column": ("int8_a8", scale(lambda s: s.roll(1, dims=1))),
    "W8A8: pairs of codes exchanged": ("int8_a8", codes(swapped_pairs)),
    "W8A8: codes saturated at 100": ("int8_a8", codes(lambda c: c.clamp(-100, 100))),
    "W8A8: the last group without a scale": ("int8_g128_a8", scale(without_last)),
    "W4A8: the scale of the next group": ("int4_g32_a8", scale(lambda s: s.roll(1, dims=2))),
    "W4A8: nibbles in the other order": ("int4_g32_a8", codes(swapped_pairs)),
    "W4A8: zero points dropped": ("int4_g128_asym_a8", offset(lambda z: z * 0)),
    "W4A8: minima with the wrong sign": ("q4_k_a8", offset(torch.neg)),
    "W4A8: an exponent off by one": ("mxfp4_a8", scale(lambda s: s * 2)),
    "W4A8: 6 read as 5": ("mxfp4_a8", codes(lambda c: torch.where(c & 7 == 7, c & 8 | 6, c))),
}  # fmt: skip


@cache
def passes(name: str) -> bool:
    return check(cell(f"native(store={name})", STORED, "float32")).status == "passed"


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    implementation = EXPERT_FFN.get(f"native(store={name})")
    mine = cell(f"native(store={name})", STORED, "float32")
    assert passes(name)
    pack, changes = coded.pack, []
    numbers_of = coded.coding_of

    def faulty(decoded: Decoded, gated: bool, library: Any, int8_rows: bool) -> torch.Tensor:
        planted = plant(decoded)
        changes.append(not torch.equal(planted.weights(), decoded.weights()))
        return pack(planted, gated, library, int8_rows)

    def faulty_coding(name: str) -> object:
        empty = torch.empty(0)
        return plant(Decoded(coding=numbers_of(name), code_ENK=empty, scale_ENg=empty)).coding

    monkeypatch.setattr(coded, "pack", faulty)
    format_ = name.removesuffix("_a8")
    if plant(quantise(torch.randn(1, 296, 32), format_).decoded()).coding != numbers_of(format_):
        monkeypatch.setattr(coded, "coding_of", faulty_coding)
    outcome = check_implementation(implementation, mine)
    assert any(changes), "the fault changes nothing"
    assert outcome.status == "failed" and "oracle" in outcome.sentences[0], outcome.sentences


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("exponent", [0, 1, 100])
def test_the_smallest_power_of_two_is_a_scale_too(exponent: int, level: str) -> None:
    """2^-127 has no exponent of its own in float32."""
    x_TD, gate_TK, plan, weights = arguments(6, 2, 5, 96, 64, dtype=torch.float32)
    weights = replace(weights, w_in_EDG=weights.w_in_EDG[..., :64], activation="relu", b_in_EG=None)
    w_in, w_out = quantise(weights.w_in_EDG, "mxfp4"), quantise(weights.w_out_EFD, "mxfp4")
    assert isinstance(w_in, MXFP4)
    w_in = replace(w_in, exponent_ENg=torch.full_like(w_in.exponent_ENg, exponent))
    experts = QuantisedExperts(w_in=w_in, w_out=w_out, activation="relu")
    x_TD = x_TD * 2.0 ** (120 - exponent)
    y_TD = native.run(
        x_TD, gate_TK, plan, native.freeze_stored(experts, x_TD.dtype), level=level, store="mxfp4"
    )
    oracle_TD = EXPERT_FFN.reference(x_TD.double(), gate_TK.double(), plan, experts.dequantised())
    plain_TD = EXPERT_FFN.reference(x_TD, gate_TK, plan, experts.dequantised(torch.float32))
    verdict = judge(y_TD, oracle_TD, plain_TD)
    assert verdict.passed, verdict.sentence
    assert bool(y_TD.isfinite().all()) and float(y_TD.abs().max()) > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("store", [*NAMES, *(f"{name}_a8" for name in NAMES if name != "fp8_block")])
def test_a_row_has_the_same_bits_alone_and_among_others(store: str, level: str) -> None:
    """In every place of a block of rows; by tiles 40 rows are 32 and 8, 35 are 32 and 3. gcc had fused a
    product and a sum in all rows of a block but one."""
    frozen = native.freeze(weights_of(1, 288, 160, bias=True), store=store)
    x_TD = torch.randn(40, 288)
    gate_T1 = torch.ones(40, 1)

    def run(begin: int, end: int) -> torch.Tensor:
        gate_TK = gate_T1[begin:end]
        routing = Routing(expert_TK=gate_TK.long() - 1, gate_TK=gate_TK, num_experts=1, ragged=False)
        plan = MAKE_PLAN(routing, Layout.compact())
        return native.run(x_TD[begin:end], gate_TK, plan, frozen, level=level, store=store).clone()

    alone_TD = torch.cat([run(t, t + 1) for t in range(40)])
    for T in (2, 3, 4, 5, 8, 11, 12, 16, 17, 35, 40):
        assert torch.equal(run(0, T), alone_TD[:T]), T
