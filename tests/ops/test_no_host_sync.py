"""Nothing on the hot path reads device values on the host, unless its file says HOST_SYNC and why.

Run with fake tensors, which have no values: .item(), .tolist() and nonzero() raise.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from moe_routing_bench import (
    ExpertWeights,
    Layout,
    MoE,
    Routing,
    RoutingPlan,
    TokenInfo,
    all_ops,
    all_routers,
)
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.score_topk.op import ScoreRule
from moe_routing_bench.parallel.traffic import Traffic

LAYOUTS = ("compact", "padded(capacity=24)", "padded(capacity=3,drop=probs)", "block(4)")
SYNC = (DataDependentOutputException, DynamicOutputShapeException)
T, D, F, E, K = 9, 16, 8, 5, 2


def fake_arguments(op: str, layout_text: str, ragged: bool) -> tuple:
    layout = Layout.parse(layout_text)
    routing = Routing(
        expert_TK=torch.zeros(T, K, dtype=torch.int64),
        gate_TK=torch.zeros(T, K),
        num_experts=E,
        ragged=ragged,
    )
    R = layout.num_rows(T, K, E)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    plan = RoutingPlan(
        row_TK=ints(T, K),
        pair_R=ints(R),
        offset_E1=ints(E + 1),
        count_E=ints(E),
        dropped_E=ints(E),
        layout=layout,
    )
    plan = replace(plan, filled=layout.kind == "compact" and not ragged)
    weights = ExpertWeights(w_in_EDG=torch.zeros(E, D, 2 * F), w_out_EFD=torch.zeros(E, F, D))
    traffic = Traffic(sent=(R,), received=(R,), place_Q=torch.zeros(R, dtype=torch.int64))
    return {
        "topk": (torch.zeros(T, E), K),
        "score_topk": (torch.zeros(T, E), torch.zeros(E), K, ScoreRule()),
        "make_plan": (routing, layout),
        "dispatch": (torch.zeros(T, D), plan),
        "grouped_gemm": (torch.zeros(R, D), torch.zeros(E, D, F), plan, torch.zeros(E, F)),
        "combine": (torch.zeros(R, D), torch.zeros(T, K), plan),
        "ep_dispatch": (torch.zeros(T, D), plan, traffic),
        "ep_combine": (torch.zeros(R, D), torch.zeros(T, K), plan, traffic),
        "expert_ffn": (torch.zeros(T, D), torch.zeros(T, K), plan, weights),
        "rms_norm": (torch.zeros(T, D), torch.zeros(D), 1e-6),
        "linear": (torch.zeros(T, D), torch.zeros(F, D), torch.zeros(F)),
        "attention": (
            torch.zeros(2, 4, T, D), torch.zeros(2, 2, T, D), torch.zeros(2, 2, T, D), True, 0, None,
        ),
    }[op]  # fmt: skip


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op,name", [(op, name) for op in all_ops().values() for name in op.names()], ids=str)
def test_no_implementation_reads_the_device_in_secret(op, name: str, layout: str, ragged: bool) -> None:
    try:
        implementation = op.get(name)
    except NotImplementedError as reason:  # a library it needs is absent
        pytest.skip(str(reason))
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = fake_arguments(op.name, layout, ragged)
        if (reason := implementation.why_not(*args)) is not None:
            pytest.skip(reason)
        try:
            implementation(*args)
        except SYNC:
            assert implementation.host_sync, "reads values on the host; say HOST_SYNC = 'why' or do not"
        except RuntimeError as error:
            # torch 2.13 has no fake grouped_mm for float32; with bfloat16 it does not read values either
            if "BF16" not in str(error):
                raise


TRITON = [(op, n) for op in all_ops().values() for n in op.names() if n.startswith("triton_")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op,name", TRITON, ids=str)
def test_no_triton_kernel_is_launched_with_a_value_from_the_device(
    op, name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, on a GPU that is not there: fake tensors say cuda, and a launch of a kernel does nothing."""
    pytest.importorskip("triton.language")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels need values")
    implementation = op.get(name)
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    # forward alone: autograd on a device that this build of torch does not have ends the process
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        args = fake_arguments(op.name, layout, ragged=True)
        if (reason := implementation.why_not(*args)) is not None:
            pytest.skip(reason)
        try:
            out = implementation(*args)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
            pytest.skip("indexing of tensors on a GPU cannot be pretended with a CPU build of torch")
        assert {tensor.device.type for tensor in tensors_in(out)} == {"cuda"}


def test_a_composed_implementation_tells_the_syncs_of_its_parts() -> None:
    expert_ffn = all_ops()["expert_ffn"]
    assert expert_ffn.get("staged").host_sync.startswith("grouped_gemm.expert_loop: ")
    assert expert_ffn.get("staged(grouped_gemm=padded_bmm)").host_sync == ""
    assert expert_ffn.get("staged(dispatch=index_select_reused)").forward_only


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(all_routers()))
def test_no_router_reads_the_device_in_secret(name: str, training: bool) -> None:
    rule = all_routers()[name]
    with FakeTensorMode():
        layer = MoE(
            D, F, E, rule.fixed_K or K, router=name, layout="block(4)",
            impl="staged(grouped_gemm=block_sparse)",
        ).train(training)  # fmt: skip
        info = TokenInfo(token_id_T=torch.zeros(T, dtype=torch.int64), mask_T=torch.ones(T, dtype=torch.bool))
        try:
            y_TD, _ = layer(torch.zeros(T, D), info)
        except SYNC:
            assert rule.host_sync, "reads values on the host; say host_sync = 'why' or do not"
        else:
            assert y_TD.shape == (T, D)


def test_the_test_sees_a_sync() -> None:
    with FakeTensorMode(), pytest.raises(SYNC):
        torch.zeros(3).sum().item()
    with FakeTensorMode(), pytest.raises(SYNC):
        torch.zeros(3).nonzero()
