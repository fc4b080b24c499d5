"""The span decoder: its parameters, every implementation against float64, its operations, the ceiling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.spans.decoder import IMPLEMENTATIONS, span
from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.models.dense_block import DenseBlock, transformers_dense
from moe_routing_bench.report.ceiling import ceilings, ceilings_of
from moe_routing_bench.workloads.cases import SUITES, cases
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

PARAMETERS = 33_572_864  # of the original plan
CASE = Experiment(
    case="own/24x32", span="decoder", T=24, D=32, F=48, E=1, K=1, heads=2, sequences=2, activation="gelu",
    bias=True, dtype="float32",
)  # fmt: skip


def test_the_suite_has_the_blocks_of_the_original_plan() -> None:
    suite = SUITES["seed-dense"]()
    assert [case.query_shape for case in suite] == [(B, 32, N, 64) for B in (1, 4, 8) for N in (64, 128)]
    one = suite[0]
    with torch.device("meta"):
        block = DenseBlock(one.D, one.F, one.heads, activation=one.activation, bias=one.bias)
    assert sum(parameter.numel() for parameter in block.parameters()) == PARAMETERS


def test_transformers_block_has_the_same_parameters() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        block = DenseBlock(2048, 4096, 32)
    theirs = transformers_dense(block).layer
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PARAMETERS


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ())
        for name in (*IMPLEMENTATIONS, "transformers(attention=eager)", "ours(attention=plain)")
    ],
)
def test_every_implementation_is_as_right_as_plain_torch(name: str, dtype: str) -> None:
    if "transformers" in name:
        pytest.importorskip("transformers")
    inputs = Inputs(replace(CASE, dtype=dtype))
    implementation = ImplementationRef.read(name)
    x_BND = span.arguments(span.call(implementation, inputs, 3, 0))["x_BND"]
    reason = span.why_not(implementation, inputs, {"x_BND": x_BND})
    if "mkl_packed" in name and dtype == "bfloat16":
        assert reason is not None and "float32" in reason
        return
    assert reason is None
    with torch.no_grad():
        y_BND = span.built(implementation, inputs).run(x_BND)
        oracle = span.plain(implementation, inputs, torch.float64).run(x_BND.double())
        plain = span.plain(implementation, inputs, inputs.dtype).run(x_BND)
    found = judge(y_BND, oracle, plain)
    assert found.passed, found


def test_a_token_sees_no_later_one_and_knows_its_place() -> None:
    inputs = Inputs(CASE)
    implementation = ImplementationRef(name="torch")
    run = span.built(implementation, inputs).run
    x_BND = span.arguments(span.call(implementation, inputs, 0, 0))["x_BND"]
    changed = x_BND.clone()
    changed[:, 5] += 1
    moved = x_BND.flip(1)
    with torch.no_grad():
        before, after = run(x_BND), run(changed)
        assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])
        assert not torch.allclose(run(moved)[:, -1], before[:, 0])


def test_frozen_is_what_packs_once() -> None:
    bfloat16 = replace(CASE, dtype="bfloat16")
    assert not span.has_frozen(ImplementationRef(name="torch"), bfloat16)
    packed = span.built(ImplementationRef(name="ours(linear=onednn_packed)"), Inputs(CASE))
    assert set(packed.owner.packed) == {"qkv", "out", "up", "down"} and "packed once" in packed.runs
    plain = span.built(ImplementationRef(name="ours(linear=native)"), Inputs(CASE))
    assert not plain.owner.packed


def test_operations_of_the_block_are_those_torch_counts() -> None:
    inputs, implementation = Inputs(CASE), ImplementationRef(name="ours(attention=plain)")
    args = span.arguments(span.call(implementation, inputs, 0, 0)).values()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        span.built(implementation, inputs).run(*args)
    B, H, N, A = CASE.query_shape
    later = 4 * B * H * A * (N * N - N * (N + 1) // 2)  # plain attention computes them too
    norms = 2 * 4 * CASE.T * CASE.D  # torch counts products alone
    assert counted.get_total_flops() == span.facts(implementation, inputs)[0].useful_flops + later - norms


def test_names_and_labels() -> None:
    implementation = ImplementationRef(name="ours(linear=torch)")
    assert span.label(implementation.name) == implementation.name and span.named(implementation.name) == [
        ("linear", "torch")
    ]
    (case,) = cases("seed-dense/4x64")
    picked = {op for op, _ in span.resolved(ImplementationRef(name="ours"), Inputs(case))}
    assert picked == {"linear", "attention", "rms_norm"}
    for wrong in ("theirs", "ours(speed=1)", "torch(linear=native)"):
        with pytest.raises(ValueError):
            span.settled(ImplementationRef(name=wrong), case)


def test_the_ceiling_says_share_and_limit() -> None:
    experts, attention = ceilings({"norms": 0.01, "attention": 0.28, "experts": 0.71})
    assert experts == "experts are 71 % of a call; infinitely fast experts would give 3.4x"
    assert attention == "attention is 28 % of a call; infinitely fast attention would give 1.4x"
    assert ceilings({"mix": 1.0, "experts": 2.0}) == [] and ceilings(None) == []
    of_two = ceilings_of(
        [{"attention": 0.5, "experts": 0.5}, {"attention": 0.25, "experts": 0.75}, {"mix": 1.0}]
    )
    assert of_two[0] == (
        "experts are 50 to 75 % of these calls; infinitely fast experts would give 2.0x to 4.0x"
    )
    inputs, implementation = Inputs(CASE), ImplementationRef(name="ours")
    args = span.arguments(span.call(implementation, inputs, 0, 0))
    seen = {}
    with torch.no_grad():
        for name, run in span.stages(implementation, inputs, args):
            run()
            seen[name] = 1.0
    assert len(ceilings(seen)) == 2 and {"linears", "attention"} < set(seen)
