"""Freezes the dense matrices of a Transformers model for the operation `linear`.

These are the products of attention and of feed-forward networks on every token (shared experts, dense
layers), and lm_head. A router is never touched. An lm_head that is tied to the embedding gets packed weights
of its own, and the embedding stays as it is; thaw() ties them again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core import frozen
from moe_routing_bench.core.frozen import Form, Freezing, Frozen, PackedMatrix, freezing, take_place
from moe_routing_bench.formats.named import INT8_ROWS_ERROR, SAMPLED, rounding
from moe_routing_bench.ops.coded import format_of, rounds_rows
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn_op
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.linear.op import op as linear_op

ROUTER = re.compile(r"(^|[._])(gate|router)$")  # the end of a path; gate_proj is no router
OTHER_TOWERS = re.compile(r"vision|visual|audio")
SHARED = re.compile(r"(^|\.)shared_(experts?|mlp)\.")


class FrozenLinear(nn.Linear):
    """nn.Linear, whose weight may be frozen."""

    tied_to = ""  # the path of the parameter that was its weight, if another module keeps it

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        if not isinstance(weight, Frozen):
            return super().forward(input)
        if torch.is_autocast_enabled(input.device.type):  # as in the experts: the dtype of the weights
            with torch.autocast(input.device.type, enabled=False):
                return self.forward(input.to(weight.dtype)).to(input.dtype)
        form = weight.form
        product = frozen_linear_op if torch.compiler.is_compiling() else _product
        x_TD, size = input.reshape(-1, input.shape[-1]), [self.out_features, self.in_features]
        y_TF = product(x_TD, weight.panels, self.bias, size, form.kernel, form.store or "")
        return y_TF.view(*input.shape[:-1], self.out_features)


def _product(
    x_TD: Tensor, panels: Tensor, b_F: Tensor | None, size: list[int], kernel: str, store: str
) -> Tensor:
    matrix = PackedMatrix(kernel=kernel, F=size[0], D=size[1], panels=panels, store=store or None)
    result: Tensor = linear_op.get(matrix.label)(x_TD, matrix, b_F)
    return result


frozen_linear_op = torch.library.custom_op("moe_routing_bench::frozen_linear", _product, mutates_args=())


@frozen_linear_op.register_fake
def _(x_TD: Tensor, panels: Tensor, b_F: Tensor | None, size: list[int], kernel: str, store: str) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], size[0])


def linear_for(asked: str) -> Implementation:
    """The implementation of linear that belongs to one of expert_ffn. Raises if there is none."""
    ffn = expert_ffn_op.get("native" if asked == "auto" else asked)
    if ffn.name != "native" or ffn.config.keys() - {"store", "batch_invariant"}:
        raise NotImplementedError(
            f"linears=True packs for native, auto or a format, not for expert_ffn.{ffn.label}"
        )
    store = ffn.config.get("store")
    return linear_op.get("native" if store is None else f"native(store={store})")


@torch.no_grad()
def freeze_linears(model: nn.Module, implementation: Implementation, *, named: bool) -> dict[str, str]:
    """Packs the weights of the model's dense matrices. Returns the linear modules that stay as they are, and
    why. named: raise if a matrix cannot be packed so, because the format was asked for by name."""
    paths = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        parent = type(model.get_submodule(path.rpartition(".")[0])).__name__
        if (reason := _why_left(path, module, parent, module is head)) is not None:
            left[path] = reason
            continue
        if isinstance(module.weight, Frozen):
            if not named or (module.weight.form.kernel, module.weight.form.store) == _form_of(implementation):
                continue
            thaw(module)
        if not named and module.weight.dtype == torch.float32:  # 5 to 17 % in records/seed-linear.tar.xz
            left[path] = "in float32 PyTorch multiplies faster; 'native' instead of 'auto' packs it"
            continue
        reason = implementation.why_not(module.weight.new_empty(1, module.in_features), module.weight, None)
        if reason is not None and named:
            raise NotImplementedError(f"{path}: {reason}")
        if reason is not None:
            left[path] = reason
            continue
        _freeze(module, implementation, _other_path(model, path) if paths[id(module.weight)] > 1 else "")
    return left


def _why_left(path: str, module: nn.Linear, parent: str, is_head: bool) -> str | None:
    if ROUTER.search(path):
        return "it is a router or a gate"
    if type(module) not in (nn.Linear, FrozenLinear):
        return f"it is a {type(module).__name__}"
    text = not OTHER_TOWERS.search(path.lower())
    if is_head or (text and ("Attention" in parent or parent.endswith("MLP") or SHARED.search(path))):
        return None
    return "it is not of attention, a feed-forward network or lm_head of the text decoder"


def _form_of(implementation: Implementation) -> tuple[str, str | None]:
    return implementation.name, implementation.config.get("store")


def _other_path(model: nn.Module, path: str) -> str:
    """The path of the embedding that has the same weight. Raises if another kind of module has it."""
    mine = model.get_submodule(path).weight
    for other, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is mine:
            return f"{other}.weight"
    raise NotImplementedError(f"{path} shares its weight with a module that is not an embedding; untie them")


def _freeze(module: nn.Linear, implementation: Implementation, tied_to: str) -> None:
    assert implementation.freeze is not None
    kernel, store = _form_of(implementation)
    form = Form(
        kernel=kernel, size=(1, module.in_features, module.out_features), dtype=module.weight.dtype,
        store=store, output_first=True, matrix=True,
    )  # fmt: skip
    packed = Frozen(implementation.freeze(module.weight).panels.unsqueeze(0), form)
    packed.panels.error = _error(module, store)  # type: ignore[attr-defined]
    if tied_to:
        packed.panels.beside = True  # type: ignore[attr-defined]
        module.weight = nn.Parameter(packed, requires_grad=False)
    else:
        take_place(module, {"weight": packed})
    module.__class__ = FrozenLinear
    module.tied_to = tied_to  # type: ignore[assignment]


def _error(module: nn.Linear, store: str | None) -> float:
    """Estimates the error of its results, relative to the exact ones. The part of rows of 8 bits was measured
    for a layer of two products, so it is rather too large for one."""
    if store is None:
        return 0.0
    ends_fD = torch.cat((module.weight[:SAMPLED], module.weight[-SAMPLED:]))
    rows = INT8_ROWS_ERROR if rounds_rows(store) else 0.0
    return math.hypot(rounding(ends_fD.t().unsqueeze(0), format_of(store)), rows)


def by_layer(model: nn.Module, left: Mapping[str, str]) -> Freezing | None:
    """What freezing did to a model and to each module in it."""
    whole = freezing(model)
    if whole is None:
        return None
    layers = {}
    for path, module in model.named_modules():
        if (one := freezing(module, recurse=False)) is not None:
            layers[path] = one
    return replace(whole, layers=layers, left=dict(left))


def thaw(model: nn.Module) -> None:
    """Replaces frozen parameters by plain ones, in this module and all modules in it, and ties what was tied
    before."""
    linears: list[Any] = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    parameters = dict(model.named_parameters())
    for module in linears:
        if module.tied_to in parameters:
            module.weight = parameters[module.tied_to]
    frozen.thaw(model)
    for module in linears:
        vars(module).pop("tied_to", None)
        module.__class__ = nn.Linear
