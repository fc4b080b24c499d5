"""The plug-in for vLLM, with a stand-in for vLLM's class: what is served, what stays with vLLM, and what
the log says. measurements/models/vllm_plugin.sh runs it in vLLM itself."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import tiny_layers
from child_process import python
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.models import vllm as plugin
from repository import ROOT
from tiny_layers import needs_compiler

FUSED_MOE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"


class Log(logging.Logger):
    info_once, warning_once = logging.Logger.info, logging.Logger.warning


class UnquantizedFusedMoEMethod(nn.Module):
    """What the plug-in sees of vLLM's class; its own kernel gives ones."""

    registry: ClassVar[dict[str, type]] = {}
    is_monolithic = False

    def __init__(self, moe: Any):
        super().__init__()
        self.moe, self.packed, self.supports_pre_processed_weights = moe, False, True

    @classmethod
    def register_oot(cls, ours: type) -> None:
        assert cls.__name__ not in cls.registry
        cls.registry[cls.__name__] = ours

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.packed = True

    def apply(self, layer: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        assert self.packed
        return torch.ones_like(x)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """vLLM's modules as far as the plug-in imports them, and what its log was told."""
    said: list[tuple[str, str]] = []
    log = Log("vllm.test")
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    log.addHandler(handler)
    parts: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": lambda name: log},
        "vllm.model_executor.custom_op": {"op_registry_oot": UnquantizedFusedMoEMethod.registry},
        FUSED_MOE: {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        "vllm.version": {"__version__": "0.32.0"},
    }
    for path in list(parts):
        for depth in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:depth])
            if not isinstance(sys.modules.get(name), ModuleType) or name in parts:
                module = ModuleType(name)
                vars(module).update(parts.get(name, {}))
                monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(plugin.VARIABLE, "1")
    plugin.register.cache_clear()
    yield SimpleNamespace(said=said, version=sys.modules["vllm.version"])
    UnquantizedFusedMoEMethod.registry.clear()
    plugin.register.cache_clear()


def config(**changes: Any) -> SimpleNamespace:
    ranks = {name: changes.pop(name, 1) for name in plugin.RANKS}
    return SimpleNamespace(is_lora_enabled=False, moe_parallel_config=SimpleNamespace(**ranks), **changes)


def layer_of(dtype: torch.dtype = torch.bfloat16, *, bias: bool = False, **changes: Any) -> Any:
    """vLLM's RoutedExperts with random weights in its layout."""
    weights = tiny_layers.weights_of(5, 64, 32, dtype=dtype, bias=bias)
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(weights.w_in_EDG.transpose(1, 2).contiguous(), requires_grad=False)
    layer.w2_weight = nn.Parameter(weights.w_out_EFD.transpose(1, 2).contiguous(), requires_grad=False)
    if bias:
        layer.w13_bias = nn.Parameter(weights.b_in_EG, requires_grad=False)
        layer.w2_bias = nn.Parameter(weights.b_out_ED, requires_grad=False)
    facts = {"activation": SimpleNamespace(value="silu"), "top_k": 2, "apply_router_weight_on_input": False}
    for name, value in {**facts, **changes}.items():
        setattr(layer, name, value)
    return layer


def loaded(layer: Any, moe: Any = None) -> Any:
    plugin.register()
    (ours,) = UnquantizedFusedMoEMethod.registry.values()
    method = ours(config() if moe is None else moe)
    method.process_weights_after_loading(layer)
    return method


def call(method: Any, layer: Any, *, T: int = 9, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Any]:
    x_TD, gate_TK = torch.randn(T, 64).to(dtype), torch.rand(T, 2)
    routing = tiny_layers.routing_of(T, 2, 5)
    with torch.inference_mode():
        y_TD = method.apply(layer, x_TD, gate_TK, routing.expert_TK.int(), None, None)
    return y_TD, (x_TD, gate_TK, tiny_layers.MAKE_PLAN(routing, plugin.LAYOUT))


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_our_kernel_serves_and_the_log_says_so(vllm: Any, dtype: torch.dtype, bias: bool) -> None:
    layer = layer_of(dtype, bias=bias)
    assert plugin.weights_of(layer).w_in_EDG.data_ptr() == layer.w13_weight.data_ptr()  # not yet a copy
    plain = plugin.weights_of(deepcopy(layer))
    method = loaded(layer)
    assert isinstance(layer.w13_weight, Frozen) and layer.w13_weight.shape == (5, 64, 64)
    assert not method.packed and not method.supports_pre_processed_weights
    y_TD, args = call(method, layer, dtype=dtype)
    tiny_layers.assert_right(y_TD, *args, plain)
    ((level, sentence),) = vllm.said
    assert level == "INFO" and "native" in sentence and "E=5 D=64 F=32 K=2 swiglu" in sentence
    assert "preferred on" in sentence
    method.process_weights_after_loading(layer)  # once more, as vLLM may
    y_TD, args = call(method, layer, dtype=dtype)
    tiny_layers.assert_right(y_TD, *args, plain)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ranks": ({}, {"tp_size": 2, "ep_size": 2}, r"tp_size is 2, ep_size is 2"),
    "lora": ({}, {"is_lora_enabled": True}, "LoRA"),
    "gates first": ({"apply_router_weight_on_input": True}, {}, "applied to the input"),
    "activation": ({"activation": SimpleNamespace(value="gelu_tanh")}, {}, "the activation is gelu_tanh"),
    "clamped": ({"swiglu_limit": 7.0}, {}, "swiglu_limit of its own"),
    "half": ({"dtype": torch.float16}, {}, "would be staged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_cannot_serve_stays_with_vllm_and_a_warning_says_why(vllm: Any, name: str) -> None:
    changes, moe, reason = REFUSED[name]
    layer = layer_of(**changes)
    settings = config()
    for fact, value in moe.items():
        setattr(settings.moe_parallel_config if fact in plugin.RANKS else settings, fact, value)
    method = loaded(layer, settings)
    assert method.packed and not isinstance(layer.w13_weight, Frozen)
    y_TD, _ = call(method, layer, dtype=layer.w13_weight.dtype)
    assert torch.equal(y_TD, torch.ones_like(y_TD))
    level, sentence = vllm.said[-1]
    assert level == "WARNING" and "own experts" in sentence and reason in sentence


def test_choices_that_do_not_arrive_are_a_reason(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "is_monolithic", True)
    assert loaded(layer_of()).packed
    assert "logits" in vllm.said[-1][1]


@needs_compiler
def test_weights_that_somebody_holds_are_not_packed(vllm: Any) -> None:
    layer = layer_of()
    held = layer.w2_weight
    assert loaded(layer).packed and layer.w2_weight is held
    assert vllm.said[-1][0] == "WARNING" and "w2_weight" in vllm.said[-1][1]


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.33.0rc1", "1.0", "dev"])
def test_another_version_is_refused_with_a_sentence(vllm: Any, version: str) -> None:
    vllm.version.__version__ = version
    plugin.register()
    assert not UnquantizedFusedMoEMethod.registry
    ((level, sentence),) = vllm.said
    assert level == "WARNING" and version in sentence and plugin.INSTALL in sentence


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_the_version_that_was_tried_is_served(version: str) -> None:
    assert plugin.why_not_version(version) is None


def test_a_place_that_is_taken_stays_taken(vllm: Any) -> None:
    UnquantizedFusedMoEMethod.registry["UnquantizedFusedMoEMethod"] = Log
    plugin.register()
    assert UnquantizedFusedMoEMethod.registry["UnquantizedFusedMoEMethod"] is Log
    assert "another plug-in" in vllm.said[0][1]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_taken_over_unasked(vllm: Any, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE)
    if value is not None:
        monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.register()
    assert not UnquantizedFusedMoEMethod.registry
    ((level, sentence),) = vllm.said
    assert level == "INFO" and "MRB_VLLM=1" in sentence


def test_registering_twice_is_registering_once(vllm: Any) -> None:
    plugin.register()
    plugin.register()
    assert len(UnquantizedFusedMoEMethod.registry) == 1 and not vllm.said


@pytest.mark.slow
def test_the_entry_point_is_declared_and_nothing_else_imports_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((_, value),) = project["entry-points"]["vllm.general_plugins"].items()
    module, _, function = value.partition(":")
    assert module == plugin.__name__ and getattr(plugin, function) is plugin.register
    python(f"import sys, {module}; assert 'vllm' not in sys.modules")
