"""Inputs: fresh for every call, the same in every process, and the routing is the workload's."""

from __future__ import annotations

import pytest
import torch

from child_process import python
from moe_routing_bench.bench.inputs import Inputs, fingerprint
from moe_routing_bench.bench.spans import SPANS, cost_of_span, function_of, stages_of
from moe_routing_bench.ops.registry import tensors_in
from moe_routing_bench.shapes import MoEShape
from moe_routing_bench.workloads.cases import BenchCase

SHAPE = MoEShape(T=24, D=32, F=16, E=8, K=2)
LAYOUTS = ("compact", "padded(capacity_factor=1.0)", "block(8)")


def inputs_of(span: str, dtype: str = "float32", **more) -> Inputs:
    return Inputs(BenchCase(name="own/x", span=span, shape=SHAPE, dtype=dtype, **more), "zipf(1.2)")


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_is_new_and_can_be_made_again(span, layout):
    inputs, again = inputs_of(span), inputs_of(span)
    prints = [fingerprint(inputs.call(n, layout, step=0)) for n in range(20)]
    assert len(set(prints)) == 20
    assert prints == [fingerprint(again.call(n, layout, step=0)) for n in range(20)]


@pytest.mark.parametrize("span", SPANS)
def test_calls_share_no_memory_but_weights(span):
    inputs = inputs_of(span)
    weights = {t.data_ptr() for t in tensors_in(inputs.weights)}
    calls = [inputs.call(n, "compact", step=0) for n in (0, 1)]
    one, other = ({t.data_ptr() for t in tensors_in(call) if t.numel()} for call in calls)
    assert (one & other) <= weights


@pytest.mark.slow
def test_another_process_makes_the_same():
    code = (
        "from moe_routing_bench.workloads.cases import BenchCase\n"
        "from moe_routing_bench.bench.inputs import Inputs, fingerprint\n"
        "from moe_routing_bench.shapes import MoEShape\n"
        "shape = MoEShape(T=24, D=32, F=16, E=8, K=2)\n"
        "case = BenchCase(name='own/x', span='layer', shape=shape, dtype='bfloat16')\n"
        "inputs = Inputs(case, 'zipf(1.2)')\n"
        "print(fingerprint(inputs.call(7, 'compact'), inputs.weights, inputs.router_DE))"
    )
    mine = inputs_of("layer", "bfloat16")
    assert python(code).stdout.strip() == fingerprint(mine.call(7, "compact"), mine.weights, mine.router_DE)


@pytest.mark.parametrize("span", SPANS)
def test_the_number_of_threads_changes_no_bit(span):
    shape = MoEShape(T=512, D=256, F=64, E=16, K=2)
    case = BenchCase(name="own/x", span=span, shape=shape)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        inputs = Inputs(case, "zipf(1.2)")
        found.append(fingerprint(inputs.call(5, "compact"), inputs.weights, inputs.router_DE))
    torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("workload", ["zipf(1.2)", "one_expert", "lognormal(maxvio=2)", "balanced"])
@pytest.mark.parametrize("K", [1, 2, 8])
def test_the_real_router_chooses_as_the_workload_says(dtype, workload, K):
    shape = MoEShape(T=64, D=64, F=16, E=32, K=K)
    case = BenchCase(name="own/x", span="layer", shape=shape, dtype=dtype)
    inputs = Inputs(case, workload)
    for number in range(3):
        (x_TD,) = inputs.call(number, "compact", step=1)
        logits_TE = x_TD.float() @ inputs.router_DE
        assert torch.equal(logits_TE.topk(K).indices, inputs.routing(1).expert_TK)


def test_a_router_too_narrow_for_a_workload_is_refused():
    case = BenchCase(name="own/x", span="layer", shape=MoEShape(T=4, D=8, F=8, E=16, K=2))
    with pytest.raises(NotImplementedError, match="measure expert_ffn"):
        Inputs(case, "uniform")


@pytest.mark.parametrize("span", SPANS)
def test_every_span_runs_and_costs_something(span):
    inputs = inputs_of(span, shared_F=16)
    for layout in LAYOUTS:
        parts = SPANS[span].parts(SPANS[span].specs()[0])
        with torch.no_grad():
            function_of(SPANS[span], parts, inputs, layout)(*inputs.call(0, layout))
        assert cost_of_span(SPANS[span], inputs, layout).bytes > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_of_a_layer_are_the_whole(layout):
    inputs = inputs_of("layer", shared_F=16)
    span = SPANS["layer"]
    ran = []
    with torch.no_grad():
        for name, stage in stages_of(span, span.parts("staged"), inputs, layout, inputs.call(0, layout)):
            stage()
            ran.append(name)
    assert ran == ["route", "plan", "dispatch", "gemm", "combine", "shared"]
    fused = []
    with torch.no_grad():
        for name, stage in stages_of(span, span.parts("eager_loop"), inputs, layout, inputs.call(0, layout)):
            stage()
            fused.append(name)
    assert fused == ["route", "plan", "eager_loop", "shared"]


def test_a_subject_names_one_implementation_for_each_op():
    assert SPANS["pack"].split("index_select+gather_sum") == ["index_select", "gather_sum"]
    inner = "staged(grouped_gemm=expert_loop,combine=index_add)"
    assert SPANS["expert_ffn"].split(inner) == [inner]
    with pytest.raises(ValueError, match=r"names 1 implementations, but pack is dispatch \+ combine"):
        SPANS["pack"].split("index_select")


def test_specs_begin_with_the_defaults_and_vary_one_part():
    specs = SPANS["pack"].specs()
    assert specs[0] == "index_select+gather_sum" and len(specs) == len(set(specs))
    assert "index_select+index_add" in specs and "one_hot_matmul+index_add" not in specs
