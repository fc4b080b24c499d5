"""Prepared: made once, made anew when weights change, gone when they are. The native layer relies on it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

import tiny_layers
from moe_routing_bench import ExpertWeights, MoE, Routing, cpp
from moe_routing_bench.ops.expert_ffn import native as launcher
from moe_routing_bench.prepared import Prepared
from tiny_layers import MAKE_PLAN, weights_of

pytestmark = pytest.mark.slow

COMPILES = pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


class Counting(Prepared[Tensor]):
    """Prepared sums of the weights, which counts how often it makes them."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.made = 0

        def make(weights: ExpertWeights) -> Tensor:
            self.made += 1
            time.sleep(seconds)
            return torch.stack([tensor.detach().double().sum() for tensor in weights.tensors().values()])

        super().__init__(make, nbytes=lambda sums: sums.nbytes)


def assert_current(prepared: Counting, weights: ExpertWeights) -> None:
    sums = [tensor.detach().double().sum() for tensor in weights.tensors().values()]
    assert torch.equal(prepared(weights), torch.stack(sums))


def test_it_is_made_once_and_its_cost_is_told() -> None:
    prepared, weights = Counting(), weights_of(2, 3, 4)
    first = prepared(weights)
    assert prepared(weights) is first and prepared(replace(weights)) is first
    assert prepared.made == 1 and len(prepared) == 1
    told = prepared.preparation(weights)
    assert told.value is first and told.nbytes == first.nbytes == 16 and told.seconds > 0


@pytest.mark.parametrize("name", ["w_in_EDG", "w_out_EFD", "b_in_EG", "b_out_ED"])
def test_a_write_to_any_tensor_is_noticed(name: str) -> None:
    prepared, weights = Counting(), weights_of(2, 3, 4, bias=True)
    tensor = weights.tensors()[name]
    writes = (
        lambda: tensor.add_(1),
        lambda: tensor[0].mul_(2),
        lambda: tensor.transpose(0, 1).copy_(torch.randn(tensor.transpose(0, 1).shape)),
        lambda: tensor.detach().zero_(),
    )
    for n, write in enumerate(writes):
        assert_current(prepared, weights)
        write()
        assert_current(prepared, weights)
        assert prepared.made == n + 2
    assert len(prepared) == 1


def test_a_write_through_another_view_is_noticed() -> None:
    prepared, stored_EGD = Counting(), torch.randn(2, 8, 3)
    weights = replace(weights_of(2, 3, 4), w_in_EDG=stored_EGD.transpose(1, 2))
    assert_current(prepared, weights)
    stored_EGD[1, 5, 2] = 100.0
    assert_current(prepared, weights)
    assert prepared.made == 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
def test_views_made_for_every_call_are_not_made_anew(mode: type, kind: type) -> None:
    prepared = Counting()
    gate_up_EGD, down_EDF = torch.randn(2, 8, 3), torch.randn(2, 3, 4)
    if kind is nn.Parameter:
        gate_up_EGD, down_EDF = nn.Parameter(gate_up_EGD), nn.Parameter(down_EDF)
    with mode():
        for _ in range(5):
            weights = ExpertWeights(w_in_EDG=gate_up_EGD.transpose(1, 2), w_out_EFD=down_EDF.transpose(1, 2))
            prepared(weights)
            del weights
            gc.collect()
    assert prepared.made == 1 and len(prepared) == 1


def test_what_differs_is_kept_apart() -> None:
    prepared, weights = Counting(), weights_of(2, 4, 4)
    others = (
        weights,
        replace(weights, activation="geglu"),
        replace(weights, w_in_EDG=weights.w_in_EDG[:, :, :4]),
        replace(weights, w_out_EFD=weights.w_out_EFD.transpose(1, 2)),
        replace(weights, w_out_EFD=weights.w_out_EFD[:1].expand(2, -1, -1)),
        replace(weights, b_out_ED=torch.randn(2, 4)),
    )
    for other in others:
        assert_current(prepared, other)
    assert prepared.made == len(prepared) == len(others)
    for other in others:
        prepared(other)
    assert prepared.made == len(others)


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_it_dies_with_its_weights(view: bool) -> None:
    prepared = Counting()
    kept = weights_of(2, 3, 4)
    prepared(kept)
    for _ in range(4):
        weights = weights_of(2, 3, 4, bias=True)
        if view:
            weights = replace(weights, w_in_EDG=torch.randn(2, 8, 3).transpose(1, 2))
        made = weakref.ref(prepared(weights))
        assert made() is not None and len(prepared) == 2
        del weights
        gc.collect()
        assert made() is None and len(prepared) == 1
    assert_current(prepared, kept)
    assert prepared.made == 5


@pytest.mark.parametrize("name", ["w_out_EFD", "b_in_EG", "b_out_ED"])
def test_one_tensor_replaced_takes_its_entry_along(name: str) -> None:
    """The new tensor may get the id, the memory and the count of writes of the one before."""
    prepared, weights = Counting(), weights_of(2, 3, 4, bias=True)
    for _ in range(50):
        assert_current(prepared, weights)
        shape = weights.tensors()[name].shape
        weights = replace(weights, **{name: None})
        weights = replace(weights, **{name: torch.randn(shape)})
    gc.collect()
    assert len(prepared) <= 1


def test_forget_makes_it_anew() -> None:
    prepared, weights = Counting(), weights_of(2, 3, 4)
    prepared(weights)
    weights.w_in_EDG.data.fill_(7)  # torch does not count this
    prepared.forget(weights)
    assert_current(prepared, weights)
    prepared.forget(weights)
    prepared.forget(weights)  # nothing is there any more, and that is fine
    assert len(prepared) == 0 and prepared.made == 2


def test_two_threads_make_it_once() -> None:
    prepared, weights, start = Counting(seconds=0.05), weights_of(2, 3, 4), Barrier(4)

    def work(_: int) -> Tensor:
        start.wait()
        return prepared(weights)

    with ThreadPoolExecutor(4) as pool:
        first, *rest = pool.map(work, range(4))
    assert prepared.made == 1 and all(other is first for other in rest)


def test_a_failure_keeps_nothing() -> None:
    def fail(weights: ExpertWeights) -> Tensor:
        raise MemoryError

    prepared, weights = Prepared(fail, nbytes=lambda t: t.nbytes), weights_of(2, 3, 4)
    with pytest.raises(MemoryError):
        prepared(weights)
    assert len(prepared) == 0


# ---- packed weights of the native layer


def replaced(layer: MoE, name: str) -> None:
    parameter = getattr(layer.experts, name)
    setattr(layer.experts, name, None)
    setattr(layer.experts, name, nn.Parameter(torch.randn_like(parameter)))


def stepped(layer: MoE, name: str) -> None:
    with torch.enable_grad():
        layer(torch.randn(6, layer.D, dtype=layer.experts.w_in_EDG.dtype))[0].square().sum().backward()
        torch.optim.SGD([getattr(layer.experts, name)], lr=1.0).step()
    layer.zero_grad()


def loaded(layer: MoE, name: str) -> None:
    state = {key: torch.randn_like(value) for key, value in layer.state_dict().items() if name in key}
    layer.load_state_dict(state, strict=False)


CHANGES: dict[str, Callable[[MoE, str], object]] = {
    "add_": lambda layer, name: getattr(layer.experts, name).add_(0.5),
    "copy_ to one expert": lambda layer, name: getattr(layer.experts, name)[2].copy_(torch.randn(())),
    "optimiser": stepped,
    "load_state_dict": loaded,
    "replaced": replaced,
    ".data written": lambda layer, name: getattr(layer.experts, name).data.mul_(-1),
    ".data of one expert": lambda layer, name: getattr(layer.experts, name).data[3].fill_(torch.randn(())),
    ".data set": lambda layer, name: setattr(
        getattr(layer.experts, name), "data", torch.randn_like(getattr(layer.experts, name))
    ),
}


def assert_right(layer: MoE, x_TD: Tensor) -> Tensor:
    """The layer gives what its weights, as they are now, say."""
    y_TD, routing = layer(x_TD)
    assert isinstance(routing, Routing)
    plan = MAKE_PLAN(routing, layer.layout)
    tiny_layers.assert_right(y_TD, x_TD, routing.gate_TK, plan, layer.experts.weights())
    return y_TD


@COMPILES
@DTYPES
@pytest.mark.parametrize("name", ["w_in_EDG", "w_out_EFD", "b_in_EG", "b_out_ED"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(change: str, name: str, dtype: torch.dtype) -> None:
    layer = MoE(40, 24, 5, 2, impl="native", bias=True, dtype=dtype)
    x_TD = torch.randn(20, 40, dtype=dtype)
    with torch.no_grad():
        before_TD = assert_right(layer, x_TD)
        for _ in range(4):
            CHANGES[change](layer, name)
            after_TD = assert_right(layer, x_TD)
            assert not torch.equal(after_TD, before_TD)
            before_TD = after_TD


@COMPILES
@pytest.mark.parametrize("name", ["w_in_EDG", "w_out_EFD"])
def test_weights_whose_writes_nobody_counts_are_looked_at(name: str) -> None:
    with torch.inference_mode():
        layer = MoE(40, 24, 70, 2, impl="native")
        x_TD = torch.randn(300, 40)
        before_TD = assert_right(layer, x_TD)
        for e in (0, 1, 34, 69):
            getattr(layer.experts, name)[e].mul_(-2)
            after_TD = assert_right(layer, x_TD)
            assert not torch.equal(after_TD, before_TD)
            before_TD = after_TD


@COMPILES
def test_weights_are_packed_once_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    packs, pack = [0], launcher.packed._make

    def counted(weights: ExpertWeights) -> launcher.Packed:
        packs[0] += 1
        return pack(weights)

    monkeypatch.setattr(launcher.packed, "_make", counted)
    gc.collect()
    kept = len(launcher.packed)
    layer = MoE(40, 24, 5, 2, impl="native")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for T in (1, 7, 3):
                assert_right(layer, torch.randn(T, 40).repeat(20, 1))
    assert packs == [1] and len(launcher.packed) == kept + 1
    panels = weakref.ref(launcher.packed(layer.experts.weights()).w_in)
    del layer
    gc.collect()
    assert len(launcher.packed) == kept and panels() is None


@COMPILES
def test_training_packs_nothing() -> None:
    gc.collect()
    kept = len(launcher.packed)
    layer = MoE(40, 24, 5, 2, impl="native")
    layer(torch.randn(6, 40))[0].sum().backward()
    assert len(launcher.packed) == kept
