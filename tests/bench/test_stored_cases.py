"""Cases whose weights are stored in a format: bytes, refusals, keys, and what is right for whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_routing_bench.bench.calls import Result
from moe_routing_bench.bench.choosing import (
    SizeOptions,
    WhatOptions,
    chosen_cases,
    chosen_implementations,
    stored_as,
)
from moe_routing_bench.bench.floor import floor_seconds, raise_stored, roof_seconds
from moe_routing_bench.bench.hosts.secret_inputs import SecretInputs, use_weights, weights_of
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.bench.roofs import Roofs, store_roofs, stored_roofs
from moe_routing_bench.bench.spans.span import span_named, why_not_stored
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.formats.int8 import rounded_rows
from moe_routing_bench.formats.named import quantise
from moe_routing_bench.ops.expert_ffn.op import by_expert, op
from moe_routing_bench.workloads.axes import key_values
from moe_routing_bench.workloads.cases import cases, fitted
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from sample_outcomes import an_outcome

PLAIN = Experiment(case="own/x", span="expert_ffn", T=24, D=64, F=32, E=8, K=2, dtype="float32", bias=True)
INT4 = stored_as(PLAIN, "int4_g32")
SPAN = span_named("expert_ffn")
STAGED, EAGER = ImplementationRef(name="staged"), ImplementationRef(name="eager_loop")
ROWS = ImplementationRef(name="native(store=int4_g32_a8)")


def inputs_of(case: Experiment) -> Inputs:
    return Inputs(case)


def test_weights_take_the_bytes_of_their_format() -> None:
    numbers = 3 * 8 * 64 * 32
    assert PLAIN.weight_bytes == PLAIN.held_bytes == 4 * numbers
    assert INT4.weight_bytes == numbers * 4.5 / 8 and INT4.held_bytes == 2 * 4 * numbers
    int8 = stored_as(PLAIN, "int8").weight_bytes
    assert int8 == numbers + 4 * 8 * (2 * 32 + 64)  # a float32 for each column
    cost, plain = (SPAN.facts(STAGED, inputs_of(case))[0] for case in (INT4, PLAIN))
    assert cost.weight_bytes == pytest.approx(plain.weight_bytes * 4.5 / 32, rel=1e-3)
    assert replace(cost, weight_bytes=0) == replace(plain, weight_bytes=0)
    small = fitted(INT4, memory_bytes=21 * INT4.drawn_bytes // 2)  # the weights eight times, and rows
    assert small.store == "int4_g32" and small.shape.T < 24


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store": "int9"}, "'int9'"),
        ({"store": "int8_a8"}, "measure native"),
        ({"span": "layer"}, "in expert_ffn"),
        ({"direction": "train"}, "forward, not train"),
        ({"checkpoint": "model"}, "a checkpoint"),
    ],
)
def test_cases_that_cannot_be_measured_are_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        replace(INT4, **changes)


def test_the_command_names_the_format_and_repeats_it() -> None:
    sizes = SizeOptions(model="qwen3-30b-a3b", tokens="1,64", axes={"store": "int8"})
    one, many = chosen_cases(SPAN, sizes, WhatOptions())
    assert [one.case, many.case] == ["qwen3-30b-a3b/decode-1-int8", "qwen3-30b-a3b/decode-64-int8"]
    assert one.store == "int8" and one.weight_bytes < 0.51 * one.drawn_bytes
    command = repro_command(replace(one, workload="uniform", implementations=(STAGED,)), STAGED)
    assert "--case qwen3-30b-a3b/decode-1 --full --store int8" in command
    own = repro_command(replace(INT4, workload="uniform", implementations=(STAGED,)), STAGED)
    assert "--tokens 24" in own and "--store int4_g32" in own
    specs = [one.name for one in chosen_implementations(SPAN, INT4, WhatOptions())]
    assert specs[:3] == ["native", "native(store=int4_g32_a8)", "native(store=int4_g32)"]


def test_the_format_is_part_of_the_key() -> None:
    assert {**key_values(INT4), "case": "own/x"} == {**key_values(PLAIN), "store": "int4_g32"}


def result_with(inputs: Inputs, weights: ExpertWeights, **how) -> Result:
    args = SPAN.arguments(SPAN.call(STAGED, inputs, 0, 0))
    args["weights"] = weights
    return Result(out=by_expert(*args.values(), **how))


def judged(judge: Judge, result: Result, implementation: ImplementationRef = STAGED) -> Status:
    return judge.judge_result(result, 0, 0, implementation).status


@torch.no_grad()
def test_everybody_is_judged_by_what_is_stored() -> None:
    inputs = inputs_of(INT4)
    judge, drawn = Judge(SPAN, inputs), inputs.drawn
    assert drawn is not None
    as_always = inputs_of(PLAIN).weights.w_in_EDG  # the same numbers, in memory output first
    assert torch.equal(drawn.w_in_EDG.transpose(1, 2).flatten(), as_always.flatten())
    kept = quantise(drawn.w_out_EFD, "int4_g32").decoded().weights()
    assert torch.equal(inputs.weights.w_out_EFD, kept.float())
    assert torch.equal(inputs.exact.w_out_EFD.unbind(0)[3].to(torch.float64), kept[3])
    assert judged(judge, result_with(inputs, inputs.weights)) is Status.PASSED
    assert judged(judge, result_with(inputs, drawn)) is Status.WRONG_VALUE  # it ignores the format
    other = replace(inputs.weights, b_in_EG=torch.zeros_like(inputs.weights.b_in_EG))
    assert judged(judge, result_with(inputs, other)) is Status.WRONG_VALUE
    finding = judge.judge_result(result_with(inputs, inputs.weights), 0, 0, STAGED)
    assert finding.verdict is not None and 0 < (finding.verdict.relative_error or 0) < 1e-6


@torch.no_grad()
def test_the_oracle_is_exact() -> None:
    inputs = inputs_of(stored_as(PLAIN, "int8"))  # a code times a float32 is no float32
    exact = replace(
        inputs.weights,
        **{
            n: quantise(getattr(inputs.drawn, n), "int8").decoded().weights()
            for n in ("w_in_EDG", "w_out_EFD")
        },
    ).to(dtype=torch.float64)
    args = SPAN.arguments(SPAN.call(STAGED, inputs, 0, 0))
    args |= {"x_TD": args["x_TD"].double(), "gate_TK": args["gate_TK"].double(), "weights": exact}
    right = Judge(SPAN, inputs).right(0, 0, STAGED)
    torch.testing.assert_close(right.oracle.out, op.reference(*args.values()), rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_rows_of_8_bits_have_a_tolerance_of_their_own() -> None:
    inputs = inputs_of(INT4)
    judge = Judge(SPAN, inputs)
    mine = result_with(inputs, inputs.weights, rounded=rounded_rows)
    assert judged(judge, mine) is Status.WRONG_VALUE
    assert judged(judge, mine, ROWS) is Status.PASSED
    assert judged(judge, result_with(inputs, inputs.drawn, rounded=rounded_rows), ROWS) is Status.WRONG_VALUE
    ours, others = judge.right(0, 0, ROWS), judge.right(0, 0, STAGED)
    assert ours.oracle is others.oracle and not torch.equal(ours.baseline.out, others.baseline.out)


def test_what_stores_weights_runs_only_where_they_are_stored_so() -> None:
    def reason(own: str, store: str, origin: str = "built in") -> str:
        part: Any = SimpleNamespace(stored=print, config={"store": own}, origin=origin)
        return why_not_stored(part, store) or ""

    assert "`mrb bench expert_ffn --store int8`" in reason("int8_a8", "")
    assert reason("bfloat16", "") and "`" not in reason("bfloat16", "")  # no format: nothing to advise
    assert not reason("int8", "int8") and not reason("int8_a8", "int8")
    assert "mxfp4" in reason("int8", "mxfp4")
    assert not reason("int8_a8", "int8", "file /tmp/x.py")  # judged by the op's own rows of 8 bits


def test_code_from_outside_gets_the_secret_weights_drawn_and_stored() -> None:
    secret, theirs = SecretInputs(inputs_of(INT4), b"1"), inputs_of(INT4)
    use_weights(theirs, weights_of(secret), "swiglu")
    assert secret.drawn is not None and theirs.drawn is not None
    assert torch.equal(theirs.drawn.w_in_EDG, secret.drawn.w_in_EDG)
    assert torch.equal(theirs.weights.w_in_EDG, secret.weights.w_in_EDG)
    stored, given = theirs._stored, secret._stored
    assert stored is not None and given is not None
    assert torch.equal(stored.w_in.decoded().code_ENK, given.w_in.decoded().code_ENK)
    assert not torch.equal(secret.drawn.w_in_EDG, inputs_of(PLAIN).weights.w_in_EDG)
    assert "drawn.w_in_EDG" not in weights_of(SecretInputs(inputs_of(PLAIN), b"1"))


def test_only_bytes_make_the_floor_and_no_roof_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MRB_HOME", str(tmp_path))
    here = this_machine().name
    rates = {"read_bytes": {1: 1e3}, "copy_bytes": {1: 1e3}, "gemm_flops": {"float32": {1: 1e3}}}
    roofs = Roofs(machine=here, **rates, seconds=1.0)
    cost = Cost(useful_flops=10**9, executed_flops=10**9, weight_bytes=2000, activation_bytes=1000)
    experiment = replace(INT4, workload="uniform", implementations=(STAGED,), cache="cold")
    assert floor_seconds(experiment, cost, roofs) == 3.0
    assert floor_seconds(replace(experiment, cache="hot"), cost, roofs) is None  # all of it in the caches
    # people are told more: rows rounded to int8 use another unit than rows of floats
    rates |= {"gemm_flops": {"float32": {1: 1e6}, "int8": {1: 4e6}}, "ladder": {1: {2**10: 4e3, 2**20: 2e3}}}
    ladder = Roofs(machine=here, **rates, seconds=1.0)
    for spec, seconds in (("native(store=int4)", 1000.0), ("native(store=int4_a8)", 250.0)):
        assert roof_seconds(experiment, ImplementationRef(name=spec), cost, ladder) == seconds
    few = replace(cost, useful_flops=0)
    assert roof_seconds(experiment, STAGED, few, ladder) == 3.0
    assert roof_seconds(replace(experiment, cache="hot"), STAGED, few, ladder) == pytest.approx(
        3000 / ladder.bandwidth(3000, 1)
    )
    store_roofs(roofs)
    outcome = an_outcome(1e6, 0.9e6, implementations=(EAGER, STAGED), span="expert_ffn", cost=cost)
    raise_stored(replace(outcome, experiment=replace(INT4, implementations=(EAGER, STAGED))))
    assert stored_roofs(here) == roofs
    raise_stored(outcome)
    assert stored_roofs(here) != roofs


def test_a_suite_may_be_stored_too() -> None:
    (case,) = cases("seed-fused/1x7168x256")
    assert stored_as(case, "mxfp4").case == "seed-fused/1x7168x256-mxfp4" and stored_as(case, None) is case
