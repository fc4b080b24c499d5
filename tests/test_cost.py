"""The cost model: against operations counted by torch, and against hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_routing_bench import ExpertWeights, Layout, Routing, all_ops, make_plan
from moe_routing_bench.conformance.arguments import arguments
from moe_routing_bench.conformance.cases import CASES
from moe_routing_bench.core.cost import Cost, pack_bytes

ROUTED = [
    case for case in CASES if case.layouts[0] == "compact" and (not case.ops or "expert_ffn" in case.ops)
]


def counted(run, *args) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*args)
    return counter.get_total_flops()


@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_useful_operations_are_those_of_the_compact_reference(case) -> None:
    for op in ("grouped_gemm", "expert_ffn"):
        args = arguments(op, case, "compact", case.dtypes[0])
        pairs = int(args["plan"].count_E.sum())
        # torch counts matrix products alone, the model also the gates
        gates = 2 * case.D * pairs if op == "expert_ffn" else 0
        cost = all_ops()[op].cost(*args.values())
        assert cost.useful_flops - gates == counted(all_ops()[op].reference, *args.values())


@pytest.mark.parametrize("layout", ["padded(capacity=24)", "block(4)"])
def test_executed_operations_are_those_of_the_padded_reference(layout: str) -> None:
    args = arguments("grouped_gemm", CASES[0], layout, "float32")
    cost = all_ops()["grouped_gemm"].cost(*args.values())
    assert cost.executed_flops == counted(all_ops()["grouped_gemm"].reference, *args.values())
    assert cost.executed_flops > cost.useful_flops > 0


def test_the_example_in_the_docstring() -> None:
    expert_TK = torch.tensor([[0], [0], [0], [1], [1], [1]])
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.ones(6, 1), num_experts=5, ragged=False)
    plan = make_plan(routing, Layout.block(4))
    x_RD = torch.zeros(plan.num_rows, 8, dtype=torch.bfloat16)
    cost = all_ops()["grouped_gemm"].cost(x_RD, torch.zeros(5, 8, 16, dtype=torch.bfloat16), plan)
    assert cost == Cost(useful_flops=1536, executed_flops=2048, weight_bytes=512, activation_bytes=288)
    assert cost.bytes == 800 and cost.intensity == 1536 / 800


def test_an_expert_nobody_chose_is_not_loaded() -> None:
    routing = Routing(
        expert_TK=torch.zeros(4, 1, dtype=torch.int64), gate_TK=torch.ones(4, 1), num_experts=64
    )
    plan = make_plan(routing, Layout.compact())
    weights = ExpertWeights(w_in_EDG=torch.zeros(64, 8, 32), w_out_EFD=torch.zeros(64, 16, 8))
    cost = all_ops()["expert_ffn"].cost(torch.zeros(4, 8), torch.ones(4, 1), plan, weights)
    assert cost.weight_bytes == (8 * 32 + 16 * 8) * 4


def test_no_tokens_cost_nothing_to_compute() -> None:
    args = arguments("expert_ffn", CASES[1], "compact", "float32")
    cost = all_ops()["expert_ffn"].cost(*args.values())
    assert cost == Cost() and cost.intensity == 0


def test_both_bandwidth_conventions() -> None:
    # 32 KiB and 48 KiB per token at K=2, D=4096, 2 bytes
    assert pack_bytes("bw_2pass", 1, 2, 4096, 2) == 32 * 1024
    assert pack_bytes("bw_strict", 1, 2, 4096, 2) == 48 * 1024
    # 3.37 ms is 159.5 and about 239 GB/s at 16384 tokens
    assert pack_bytes("bw_2pass", 16384, 2, 4096, 2) / 3.37e-3 / 1e9 == pytest.approx(159.5, rel=2e-3)
    assert pack_bytes("bw_strict", 16384, 2, 4096, 2) / 3.37e-3 / 1e9 == pytest.approx(239, rel=2e-3)
    with pytest.raises(ValueError, match="bw_2pass, bw_strict"):
        pack_bytes("bw", 1, 1, 1, 1)


def test_every_op_has_a_cost_model() -> None:
    for op in all_ops().values():
        args = arguments(op.name, CASES[0], CASES[0].layouts[0], "float32")
        assert op.cost(*args.values()).bytes > 0


def test_a_cost_counted_several_times() -> None:
    once = Cost(useful_flops=1, executed_flops=2, weight_bytes=3, activation_bytes=4)
    assert once.times(flops=3, bytes=2) == Cost(
        useful_flops=3, executed_flops=6, weight_bytes=6, activation_bytes=8
    )
