"""The span block: attention of published models, its router behind attention, its operations, its words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.spans.block import attention_of, parse_block, span
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.workloads.cases import cases, scaled
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

SHAPE = MoEShape(T=24, D=32, F=16, E=4, K=2)


def block_inputs(workload: str, dtype: str = "float32") -> Inputs:
    case = Experiment(case="own/24x32", span="block", **vars(SHAPE), dtype=dtype, sequences=2)
    return Inputs(replace(case, workload=workload))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_an_attention_and_its_twin_too(model: str) -> None:
    (case,) = cases(f"{model}/prefill-128")
    if MODELS[model].attention.missing:
        with pytest.raises(NotImplementedError, match="MoE alone"):
            attention_of(case)
        return
    full, twin = attention_of(case), attention_of(scaled(case))
    assert full == MODELS[model].attention and twin.head_dim == full.head_dim
    assert twin.heads // twin.kv_heads == full.heads // full.kv_heads and twin.heads <= full.heads


def test_the_seed_block_has_the_heads_it_declares() -> None:
    (case,) = cases("seed-moe-block/4x64")
    assert (attention_of(case).heads, attention_of(case).head_dim) == (32, 64)
    twin = attention_of(scaled(case))
    assert (twin.heads, twin.head_dim) == (16, 64) and scaled(case).sequences == 4


def test_the_router_behind_attention_chooses_as_the_workload_says() -> None:
    inputs, implementation, chosen = (
        block_inputs("zipf(1.2)", "bfloat16"),
        ImplementationRef(name="ours(impl=staged)"),
        [],
    )
    owner = span.built(implementation, inputs).owner
    owner.feed_forward.router.register_forward_hook(lambda m, a, routing: chosen.append(routing.expert_TK))
    with torch.no_grad():
        owner(*span.arguments(span.call(implementation, inputs, 5, 1)).values())
    assert torch.equal(chosen[0], inputs.workload(1).routing.expert_TK)


def test_operations_of_a_block_are_those_torch_counts() -> None:
    inputs, implementation = (
        block_inputs("balanced"),
        ImplementationRef(name="ours(attention=naive,impl=eager_loop)"),
    )
    run = span.built(implementation, inputs).run
    args = span.arguments(span.call(implementation, inputs, 0, 0)).values()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        run(*args)
    a, N = attention_of(inputs.experiment), 12
    # naive attention computes the other half too
    skipped = 4 * a.heads * a.head_dim * 2 * (N * N - N * (N + 1) // 2)
    gates = 2 * SHAPE.num_pairs * SHAPE.D
    cost, _ = span.facts(implementation, inputs)
    assert counted.get_total_flops() == cost.useful_flops + skipped - gates


def test_implementations_are_read_with_their_options() -> None:
    impl = "staged(combine=index_add,dispatch=native(level=avx2))"
    assert parse_block(f"ours(attention=naive, impl={impl})") == (
        "ours",
        {"attention": "naive", "impl": impl},
    )
    assert parse_block("transformers") == ("transformers", {"attention": "sdpa", "experts": "grouped_mm"})
    with pytest.raises(ValueError, match="option=value"):
        parse_block("ours(naive)")
