"""Watches the place where a router of Transformers chooses: torch.topk of its scores, inside the experts'
block.

Routers differ in what they do before (softmax, sigmoid, bias, groups) and after (gates, renormalised or not),
but each chooses by one topk over all experts. A torch function mode sees that call and may replace its
result. The router's own code then makes the gates, with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Chosen(NamedTuple):
    """The result of topk."""

    values: Tensor
    indices: Tensor


# gets the number of the layer, the scores (... x E), how many are chosen, and topk itself
OnTopK = Callable[[int, Tensor, int, Callable[[], Any]], Any]


@contextmanager
def at_topk(
    model: nn.Module,
    layers: Mapping[int, tuple[str, nn.Module]],
    on_topk: OnTopK,
    before: Callable[[int], None] = lambda layer: None,
) -> Iterator[None]:
    """Inside `with`, on_topk(layer, scores, k, topk) gives the result of topk over all experts in these
    layers.

    layers  as in tracing.moe_layers: {3: ("model.layers.3.mlp.experts", module), ...}
    before  is called with the layer before its block runs
    """
    handles: list[Any] = []
    modes: dict[int, _TopK] = {}

    def enter(layer: int) -> None:
        before(layer)
        modes[layer] = _TopK(layer, int(layers[layer][1].num_experts), on_topk)  # type: ignore[arg-type]
        modes[layer].__enter__()

    def leave(layer: int) -> None:
        if (mode := modes.pop(layer, None)) is not None:
            mode.__exit__(None, None, None)

    try:
        for layer, (name, _) in layers.items():
            block = model.get_submodule(name.rpartition(".")[0])
            handles.append(block.register_forward_pre_hook(lambda *_, layer=layer: enter(layer)))
            # after an error too
            handles.append(
                block.register_forward_hook(lambda *_, layer=layer: leave(layer), always_call=True)
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


class _TopK(TorchFunctionMode):
    def __init__(self, layer: int, num_experts: int, on_topk: OnTopK):
        super().__init__()
        self.layer, self.num_experts, self.on_topk = layer, num_experts, on_topk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk or func is Tensor.topk:
            named = {**dict(zip(("input", "k", "dim"), args, strict=False)), **kwargs}
            scores, dim = named["input"], named.get("dim", -1)
            if scores.shape[-1] == self.num_experts and dim in (-1, scores.ndim - 1):
                return self.on_topk(self.layer, scores, int(named["k"]), lambda: func(*args, **kwargs))
        return func(*args, **kwargs)
