"""Low-rank adapters on three-dimensional experts, outputs first (Qwen3-MoE) and inputs first (gpt-oss)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

pytest.importorskip("transformers")

import moe_routing_bench.models.transformers as plugin
import tiny_models
from moe_routing_bench.models.reading import experts_modules

pytestmark = pytest.mark.slow
RANK = 3


class Adapter(nn.Module):
    """w + left @ right for each expert, whichever of its sides the inputs are on."""

    def __init__(self, weight: Tensor, draws: torch.Generator):
        super().__init__()
        E, rows, columns = weight.shape
        self.left = nn.Parameter(torch.randn(E, rows, RANK, generator=draws) / RANK**0.5)
        self.right = nn.Parameter(torch.randn(E, RANK, columns, generator=draws) / columns**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.bmm(self.left, self.right)


def adapted(name: str) -> Any:
    model, draws = tiny_models.make(name).requires_grad_(False), torch.Generator().manual_seed(1)
    for _, module in experts_modules(model):
        for weight in ("gate_up_proj", "down_proj"):
            register_parametrization(module, weight, Adapter(getattr(module, weight), draws))
    return model


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("impl", ["auto", "native", "staged", "eager_loop"])
def test_adapters_learn_as_in_transformers(name: str, impl: str) -> None:
    model, ids = adapted(name), tiny_models.tokens()
    plain = tiny_models.make(name)(input_ids=ids, use_cache=False).logits
    logits, gradients = tiny_models.gradients(model, ids)
    assert (logits - plain).abs().max() > 0.1
    assert {path.rpartition(".")[2] for path in gradients} == {"left", "right"}
    model.set_experts_implementation(plugin.register(impl))
    try:
        ours, learned = tiny_models.gradients(model, ids)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    assert learned.keys() == gradients.keys()
    for path, gradient in gradients.items():
        torch.testing.assert_close(learned[path], gradient, rtol=1e-3, atol=1e-5, msg=path)
    # the sum is made anew in every call: a step is seen
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path in gradients:
                parameter -= 0.5 * gradients[path]
    stepped = model(input_ids=ids, use_cache=False).logits
    model.set_experts_implementation("eager")
    torch.testing.assert_close(stepped, model(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert (stepped - ours).abs().max() > 1e-3
