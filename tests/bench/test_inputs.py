"""Inputs: fresh for every call, the same in every process, and the routing is the workload's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from child_process import python
from moe_routing_bench.bench.inputs import Inputs, fingerprint
from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

SHAPE = MoEShape(T=24, D=32, F=16, E=8, K=2)
SPANS = span_names()
LAYOUTS = ("compact", "padded(capacity_factor=1.0)", "block(8)")


def inputs_of(span: str, dtype: str = "float32", **more) -> Inputs:
    return Inputs(Experiment(case="own/x", span=span, **vars(SHAPE), dtype=dtype, **more))


def call(inputs: Inputs, number: int, layout: str = "compact", step: int = 0, **more: str) -> dict:
    """The arguments of a call by name."""
    span, implementation = (
        span_named(inputs.experiment.span),
        ImplementationRef(name="", layout=layout, **more),
    )
    return span.arguments(span.call(implementation, inputs, number, step))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_is_new_and_can_be_made_again(span, layout):
    inputs, again = inputs_of(span), inputs_of(span)
    prints = [fingerprint(call(inputs, n, layout)) for n in range(20)]
    assert len(set(prints)) == 20
    assert prints == [fingerprint(call(again, n, layout)) for n in range(20)]


@pytest.mark.parametrize("span", SPANS)
def test_calls_share_no_memory_but_weights(span):
    inputs = inputs_of(span)
    weights = {t.data_ptr() for t in tensors_in(inputs.weights)}
    calls = [call(inputs, n) for n in (0, 1)]
    one, other = ({t.data_ptr() for t in tensors_in(args) if t.numel()} for args in calls)
    assert (one & other) <= weights


@pytest.mark.slow
def test_another_process_makes_the_same():
    code = (
        "from moe_routing_bench.workloads.experiment import Experiment\n"
        "from moe_routing_bench.bench.inputs import Inputs, fingerprint\n"
        "inputs = Inputs(Experiment(span='layer', T=24, D=32, F=16, E=8, K=2, dtype='bfloat16'))\n"
        "print(fingerprint(inputs.at(7, 3, 'compact').planted_TD, inputs.weights, inputs.router_DE))"
    )
    mine = inputs_of("layer", "bfloat16")
    assert python(code).stdout.strip() == fingerprint(
        mine.at(7, 3, "compact").planted_TD, mine.weights, mine.router_DE
    )


@pytest.mark.parametrize("span", SPANS)
def test_the_number_of_threads_changes_no_bit(span):
    shape = MoEShape(T=512, D=256, F=64, E=16, K=2)
    case = Experiment(case="own/x", span=span, **vars(shape))
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        inputs = Inputs(case)
        found.append(fingerprint(call(inputs, 5), inputs.weights, inputs.router_DE))
    torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("workload", ["zipf(1.2)", "one_expert", "lognormal(maxvio=2)", "balanced"])
@pytest.mark.parametrize("K", [1, 2, 8])
def test_the_real_router_chooses_as_the_workload_says(dtype, workload, K):
    shape = MoEShape(T=64, D=64, F=16, E=32, K=K)
    inputs = Inputs(Experiment(span="layer", **vars(shape), dtype=dtype, workload=workload))
    for number in range(3):
        logits_TE = inputs.at(number, 1, "compact").planted_TD.float() @ inputs.router_DE
        assert torch.equal(logits_TE.topk(K).indices, inputs.workload(1).routing.expert_TK)


def test_a_router_too_narrow_for_a_workload_is_refused():
    case = Experiment(case="own/x", span="layer", T=4, D=8, F=8, E=16, K=2)
    with pytest.raises(NotImplementedError, match="measure expert_ffn"):
        call(Inputs(replace(case, workload="uniform")), 0)


@pytest.mark.parametrize("span", SPANS)
def test_every_span_runs_and_costs_something(span):
    inputs, this = inputs_of(span), span_named(span)
    for layout in LAYOUTS:
        implementation = ImplementationRef(name=this.all_names()[-1], layout=layout)
        args = call(inputs, 0, layout)
        with torch.no_grad():
            if this.why_not(implementation, inputs, args) is None:
                this.built(implementation, inputs).run(*args.values())
        cost, load = this.facts(implementation, inputs)
        assert cost.bytes > 0 and load["active_experts"]


def stages(inputs: Inputs, spec: str, layout: str) -> list[str]:
    span, ran = span_named(inputs.experiment.span), []
    with torch.no_grad():
        for name, stage in span.stages(
            ImplementationRef(name=spec, layout=layout), inputs, call(inputs, 0, layout)
        ):
            stage()
            ran.append(name)
    return ran


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_of_a_layer_are_the_whole(layout):
    inputs = inputs_of("layer", shared_F=16)
    assert stages(inputs, "staged", layout) == ["route", "plan", "dispatch", "gemm", "combine", "shared"]
    assert stages(inputs, "eager_loop", layout) == ["route", "plan", "eager_loop", "shared"]


def test_a_implementation_names_one_implementation_for_each_op():
    assert span_named("pack").split("index_select+gather_sum") == ["index_select", "gather_sum"]
    inner = "staged(grouped_gemm=expert_loop,combine=index_add)"
    assert span_named("expert_ffn").split(inner) == [inner]
    with pytest.raises(ValueError, match=r"dispatch \+ combine"):
        span_named("pack").split("index_select")


def test_specs_begin_with_the_defaults_and_vary_one_part():
    specs = span_named("pack").all_names()
    assert specs[0] == "index_select+gather_sum" and len(specs) == len(set(specs))
    assert "index_select+index_add" in specs and "one_hot_matmul+index_add" not in specs
