"""Frozen weights: packed once, in the place of the originals. However weights change, no result is old."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import changing_weights
import tiny_layers
from changing_weights import WAYS
from moe_routing_bench import ExpertWeights, MoE, Routing
from moe_routing_bench.core import cpp
from moe_routing_bench.core.frozen import Frozen, as_experts, as_parameter, take_place
from moe_routing_bench.ops.expert_ffn import native as launcher
from tiny_layers import MAKE_PLAN, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)

# what freezing refuses, because somebody holds the memory; what is as good as new weights; all else raises
REFUSED = {
    "numpy_view_kept", "made_from_numpy", "dlpack_kept", "storage_kept", "another_process", "mapped_file",
    "optimizer_made_before", "flat_buffer", "average_in_state_dict_kept",
}  # fmt: skip
AS_NEW = {"all_loaded_by_assignment", "rounded_by_dtype_with_swapping"}
HALF_NEW = {"replaced", "loaded_by_assignment", "swapped"}  # one matrix is new, the other frozen


@pytest.mark.parametrize("name", ["w_in_EDG", "w_out_EFD"])
@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_give_the_right_result(way: str, name: str) -> None:
    assert changing_weights.compared(way, name, frozen=False) == "right"


@pytest.mark.parametrize("name", ["w_in_EDG", "w_out_EFD"])
@pytest.mark.parametrize("way", WAYS)
def test_changed_frozen_weights_give_the_right_result_or_raise(way: str, name: str) -> None:
    said = "raises in freeze" if way in REFUSED else "raises"
    said = "right" if way in AS_NEW else "raises at the next call" if way in HALF_NEW else said
    assert changing_weights.compared(way, name, frozen=True) == said


def test_a_weight_makes_its_view_as_experts_once_and_a_copy_has_its_own() -> None:
    kept = as_parameter(launcher.freeze(weights_of()).w_in_EDG, output_first=True, alternating=False)
    view = as_experts(kept)
    assert isinstance(view, Frozen) and as_experts(kept) is view and view.shape == (5, 40, 48)
    assert as_experts(copy.deepcopy(kept)) is not view


def test_random_changes_leave_nothing_old() -> None:
    seen = changing_weights.random_changes(300, every=50)
    assert seen["old"] == 0 and seen["right"] > 100 and seen["raised"] > 50


def test_an_old_result_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table against a kernel that packs at the first call and looks at addresses and counts of writes."""
    pack, kept = launcher.freeze, dict[object, ExpertWeights]()

    def run(x_TD: Tensor, gate_TK: Tensor, plan: object, weights: ExpertWeights) -> Tensor:
        key = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights.tensors().values())
        if key not in kept:
            kept[key] = pack(weights)
        return right(x_TD, gate_TK, plan, kept[key])

    right = launcher.run
    found = Counter[str]()
    for way in WAYS:
        monkeypatch.setattr(changing_weights, "layer_of", lambda impl: _with_run(impl, run))
        kept.clear()
        try:
            changing_weights.compared(way, "w_in_EDG", frozen=False)
        except AssertionError:
            found[way] += 1
    assert found.keys() >= {"data_in_part", "numpy_view", "made_under_inference_mode"}


def _with_run(impl: str, run: object) -> MoE:
    torch.manual_seed(0)
    layer = MoE(40, 24, 5, 2, impl="staged", bias=True)
    if impl == "native":
        layer.expert_ffn = run  # type: ignore[assignment]
    return layer


def assert_right(layer: MoE, x_TD: Tensor, weights: ExpertWeights) -> Tensor:
    y_TD, routing = layer(x_TD)
    assert isinstance(routing, Routing)
    tiny_layers.assert_right(y_TD, x_TD, routing.gate_TK, MAKE_PLAN(routing, layer.layout), weights)
    return y_TD


def copied(weights: ExpertWeights) -> ExpertWeights:
    return copy.deepcopy(weights)


@DTYPES
@pytest.mark.parametrize("sizes", [(40, 24, "swiglu"), (64, 96, "gelu"), (33, 17, "geglu")], ids=str)
def test_frozen_weights_give_the_right_result_and_can_be_read_back(
    sizes: tuple[int, int, str], dtype: torch.dtype
) -> None:
    D, F, activation = sizes
    layer = MoE(D, F, 5, 2, impl="native", bias=True, dtype=dtype, activation=activation)
    x_TD, weights = torch.randn(20, D, dtype=dtype), copied(layer.experts.weights())
    y_TD = assert_right(layer.freeze(), x_TD, weights)
    for name, tensor in weights.tensors().items():
        assert torch.equal(layer.experts.get_parameter(name).clone(), tensor)
    # copies are frozen too; what is pickled or saved is plain
    twin = copy.deepcopy(layer)
    assert isinstance(twin.experts.w_in_EDG, Frozen) and torch.equal(twin(x_TD)[0], y_TD)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    again = pickle.loads(pickle.dumps(layer))
    for name, tensor in weights.tensors().items():
        assert type(saved[f"experts.{name}"]) is Tensor
        assert torch.equal(saved[f"experts.{name}"], tensor)
        assert torch.equal(again.experts.get_parameter(name), tensor)
    layer.thaw()
    assert not any(isinstance(p, Frozen) for p in layer.parameters())
    with torch.no_grad():
        layer.experts.w_in_EDG.mul_(-1)
        assert_right(layer, x_TD, layer.experts.weights())
    assert torch.equal(twin(x_TD)[0], y_TD)


def test_experts_that_share_memory_are_packed_once() -> None:
    weights = weights_of(5, 40, 24)
    shared = weights.w_in_EDG[:1].expand(5, -1, -1)
    frozen = launcher.freeze(ExpertWeights(w_in_EDG=shared, w_out_EFD=weights.w_out_EFD)).w_in_EDG
    assert isinstance(frozen, Frozen) and frozen.panels.shape[0] == 1
    assert torch.equal(frozen.clone(), shared)


def test_the_originals_are_gone() -> None:
    layer = MoE(64, 64, 4, 2, impl="native")
    original = weakref.ref(layer.experts.w_in_EDG)
    finalizers = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for _ in range(3):
        layer.freeze()
        frozen = layer.experts.w_in_EDG
        assert original() is None and isinstance(frozen, Frozen)
        assert frozen.panels.nbytes == frozen.numel() * 4  # no padding at this size: not a byte more
        layer.freeze()  # again is nothing new
        del frozen
        layer.thaw()
    assert len(weakref.finalize._registry) == finalizers  # type: ignore[attr-defined]


def test_a_refused_freeze_leaves_the_layer_as_it_was() -> None:
    layer, x_TD = MoE(40, 24, 5, 2, impl="native"), torch.randn(6, 40)
    with torch.no_grad():
        y_TD = layer(x_TD)[0]
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        parameter = layer.experts.w_in_EDG
        with pytest.raises(RuntimeError, match="w_in_EDG and w_out_EFD"):
            layer.freeze()
        assert layer.experts.w_in_EDG is parameter and parameter.requires_grad
        assert torch.equal(layer(x_TD)[0], y_TD)
        view_D = layer.experts.w_out_EFD.detach()[0, 0]
        del optimizer, parameter
        with pytest.raises(RuntimeError, match="w_out_EFD"):
            layer.freeze()
        view_D.zero_()
        assert type(layer.experts.w_in_EDG) is nn.Parameter
        assert layer.experts.w_out_EFD[0, 0].eq(0).all() and layer.experts.w_out_EFD.requires_grad
        del view_D
        layer.freeze()


def test_what_only_the_garbage_collector_holds_is_no_reason() -> None:
    layer = MoE(40, 24, 5, 2, impl="native")
    circle: list[object] = [layer.experts.w_in_EDG, layer.experts.w_out_EFD.detach()]
    circle.append(circle)
    gc.disable()
    try:
        del circle
        layer.freeze()
        assert isinstance(layer.experts.w_in_EDG, Frozen) and isinstance(layer.experts.w_out_EFD, Frozen)
    finally:
        gc.enable()


def test_frozen_weights_have_no_gradients_and_say_so() -> None:
    layer, x_TD = MoE(40, 24, 5, 2, impl="native").freeze(), torch.randn(6, 40)
    assert not any(p.requires_grad for p in layer.parameters())
    layer(x_TD)
    with pytest.raises(NotImplementedError, match="no gradients"):
        layer(x_TD.requires_grad_())
    layer.thaw().train_only("all")
    layer(x_TD)[0].sum().backward()
    assert layer.experts.w_in_EDG.grad is not None


def test_auto_runs_what_the_weights_were_frozen_for() -> None:
    layer, x_TD = MoE(40, 24, 5, 2), torch.randn(6, 40)
    layer.experts.freeze(launcher.op.get("native"))
    layer.requires_grad_(False)
    assert "expert_ffn.native (auto: the weights are frozen for it, packed once)" in layer.implementation
    layer(x_TD)
    with pytest.raises(NotImplementedError, match="frozen for native"):
        layer(x_TD.requires_grad_())
    plain = MoE(40, 24, 5, 2, impl="staged").freeze()  # nothing to pack
    assert type(plain.experts.w_in_EDG) is nn.Parameter


def test_rounded_weights_cannot_be_read_back() -> None:
    layer, x_TD = MoE(40, 24, 5, 2, impl="native(store=int8)"), torch.randn(6, 40)
    layer.freeze()
    layer(x_TD)
    for read in (lambda: layer.experts.w_in_EDG.clone(), lambda: pickle.dumps(layer), layer.thaw):
        with pytest.raises(NotImplementedError, match="int8 alone"):
            read()
    with pytest.raises(NotImplementedError, match=r"frozen for native\(store=int8\)"):
        launcher.op.get("native")(*tiny_layers.arguments()[:3], layer.experts.weights())


@pytest.mark.parametrize("store", ["int8", "bfloat16"])
def test_plain_weights_are_not_rounded_in_every_call(store: str) -> None:
    layer, x_TD = MoE(40, 24, 5, 2, impl=f"native(store={store})"), torch.randn(6, 40)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="freeze"):
        layer(x_TD)
    y_TD = layer.freeze()(x_TD)[0]
    # the benchmark and the kit call run, which does the same to plain weights
    weights = MoE(40, 24, 5, 2).experts.weights()
    with torch.no_grad():
        implementation = launcher.op.get(f"native(store={store})")
        args = tiny_layers.arguments()[:3]
        plain_TD = implementation.run(*args, weights)
        assert torch.equal(implementation(*args, implementation.freeze(weights)), plain_TD)
    assert y_TD.isfinite().all()


@DTYPES
@pytest.mark.parametrize("impl", ["auto", "staged", "native(store=int4_g32)"])
def test_a_layer_is_frozen_in_a_format_by_its_name(impl: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x_TD = MoE(64, 32, 5, 2, impl=impl, dtype=dtype), torch.randn(6, 64, dtype=dtype)
    named = MoE(64, 32, 5, 2, impl="native(store=int8_a8)", dtype=dtype)
    named.load_state_dict(layer.state_dict())
    assert layer.frozen is None
    y_TD = layer.freeze("int8_a8")(x_TD)[0]
    assert torch.equal(named.freeze()(x_TD)[0], y_TD)
    assert "native(store=int8_a8)" in layer.implementation and layer.frozen == named.frozen
    assert str(layer.frozen) in repr(layer)
    layer.freeze("native(store=int8_a8)").freeze()  # again is nothing new
    with pytest.raises(NotImplementedError, match="int8_a8 alone"):
        layer.freeze("int4_g32")


def test_packed_weights_may_be_rounded_later() -> None:
    layer = MoE(64, 32, 5, 2, impl="native").freeze()
    assert layer.frozen is not None and layer.frozen.error == 0
    layer.freeze("int8")
    assert layer.frozen is not None and layer.frozen.error > 0 and layer.frozen.label == "native(store=int8)"


@pytest.mark.parametrize("name", ["int3", "int8_a8_a8", "natvie", "int8_g0"])
def test_an_unknown_format_is_named_with_those_there_are(name: str) -> None:
    layer = MoE(40, 24, 5, 2)
    with pytest.raises(ValueError, match=r"int8_g128.*q4_k"):
        layer.freeze(name)
    assert layer.frozen is None


@pytest.mark.parametrize(
    "store", ["bfloat16", "int8", "int4_g32", "int4_g128_asym_a8", "mxfp4_a8", "q8_0_a8"]
)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_what_freezing_saved_and_what_error_to_expect_are_true(store: str, activation: str) -> None:
    torch.manual_seed(0)
    layer, x_TD = MoE(512, 256, 6, 2, activation=activation), torch.randn(64, 512)
    exact = copy.deepcopy(layer).double()
    routing = layer(x_TD)[1]
    with torch.no_grad():
        right_TD = exact.compute(x_TD.double(), routing)
        frozen = layer.freeze(store).frozen
        got_TD = layer.compute(x_TD, routing).double()
    assert frozen is not None
    assert frozen.before == 4 * 6 * 3 * 512 * 256 * (1 if activation == "swiglu" else 2 / 3)
    assert frozen.after == layer.experts.w_in_EDG.panels.nbytes + layer.experts.w_out_EFD.panels.nbytes
    assert frozen.saved == frozen.before - frozen.after > 0.45 * frozen.before
    error = float((got_TD - right_TD).square().mean().sqrt() / right_TD.square().mean().sqrt())
    least = 0.5 if store.endswith("_a8") else 0.7  # what rows of 8 bits add follows from the inputs
    assert least < error / frozen.error < 1.6, (error, frozen.error)


def test_only_parameters_of_the_module_are_taken() -> None:
    layer = MoE(40, 24, 5, 2, impl="native")
    twin = MoE(40, 24, 5, 2, impl="native")
    twin.experts.w_in_EDG = layer.experts.w_in_EDG  # tied
    with pytest.raises(RuntimeError, match="another module"):
        layer.freeze()
    with torch.no_grad():
        frozen = launcher.freeze(layer.experts.weights()).w_in_EDG
    del twin
    take_place(layer.experts, {"w_in_EDG": frozen})


def test_training_packs_nothing() -> None:
    layer = MoE(40, 24, 5, 2, impl="native")
    layer(torch.randn(6, 40))[0].sum().backward()
    assert type(layer.experts.w_in_EDG) is nn.Parameter
