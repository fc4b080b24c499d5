"""A converted MoE block gives the model's numbers, keeps what was learnt, and goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from moe_routing_bench import MoE
from moe_routing_bench.models.convert import ConvertedBlock, convert, revert
from tiny_models import close, gradients, make, tokens

pytestmark = pytest.mark.slow

BLOCKS = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"]


class OldExpert(nn.Module):
    def __init__(self, D: int, F_: int, names: tuple[str, str, str]):
        super().__init__()
        gate, up, down = names
        self.names = names
        setattr(self, gate, nn.Linear(D, F_, bias=False))
        setattr(self, up, nn.Linear(D, F_, bias=False))
        setattr(self, down, nn.Linear(F_, D, bias=False))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class OldBlock(nn.Module):
    """As Transformers 4 wrote Qwen3-MoE and Mixtral, and remote code still does."""

    def __init__(
        self, *, mixtral: bool = False, norm: bool = True, tuple_out: bool = True, scale: float = 1.0
    ):
        super().__init__()
        self.num_experts, self.top_k, self.tuple_out, self.scale = 6, 2, tuple_out, scale
        if not mixtral:
            self.norm_topk_prob = norm
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        self.gate = nn.Linear(16, 6, bias=False)
        self.gate.weight.data.mul_(8)
        self.experts = nn.ModuleList(OldExpert(16, 12, names) for _ in range(6))
        self.renormalise = mixtral or norm

    def forward(self, hidden_states: Tensor) -> Any:
        x = hidden_states.view(-1, 16)
        logits = self.gate(x)
        weights, chosen = F.softmax(logits, dim=1, dtype=torch.float).topk(2, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            y = y.index_add(0, token, expert(x[token]) * weights[token, slot, None].to(x.dtype))
        y = self.scale * y.view(hidden_states.shape)
        return (y, logits) if self.tuple_out else y


@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_keeps_its_numbers_and_gradients(name: str) -> None:
    model, ids = make(name), tokens()
    before = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    logits, gradient = gradients(model, ids)
    assert convert(model) is model
    blocks = [module for module in model.modules() if isinstance(module, ConvertedBlock)]
    assert blocks and all(isinstance(block.moe, MoE) for block in blocks)
    with torch.no_grad():
        close(model(ids).logits, logits)
    ours, our_gradient = gradients(model, ids)
    close(ours, logits)
    for path, expected in gradient.items():
        close(found_in(our_gradient, path), expected)
    assert revert(model) is model
    assert not any(isinstance(module, ConvertedBlock) for module in model.modules())
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, before[path]), path
    again, gradient_again = gradients(model, ids)
    assert torch.equal(again, logits) and gradient_again.keys() == gradient.keys()


def found_in(gradient: dict[str, Tensor], path: str) -> Tensor:
    """The gradient of a parameter of the original, from the converted model."""
    for name, ours in {
        "mlp.experts.gate_up_proj": "mlp.moe.experts.w_in_EDG",
        "mlp.experts.down_proj": "mlp.moe.experts.w_out_EFD",
        "mlp.gate.weight": "mlp.moe.router.w_DE",
    }.items():
        if path.endswith(name):
            return gradient[path.replace(name, ours)].transpose(-1, -2)
    return gradient[path.replace("mlp.shared_experts", "mlp.shared")]


def test_transformers_weights_are_not_copied() -> None:
    model = make("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    address = experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()
    convert(model)
    mine = model.model.layers[0].mlp.moe.experts
    assert (mine.w_in_EDG.data_ptr(), mine.w_out_EFD.data_ptr()) == address
    revert(model)
    assert (experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()) == address
    assert experts.gate_up_proj.is_contiguous()


def test_what_was_learnt_and_moved_goes_back(tmp_path: Path) -> None:
    model, ids = make("qwen3_moe"), tokens()
    convert(model, impl="staged")  # native computes no float64
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(model, ids)
    optimizer.step()
    model.double()
    want = model(ids).logits
    revert(model)
    assert all(p.dtype == torch.float64 and p.device.type == "cpu" for p in model.parameters())
    close(model(ids).logits, want)
    model.save_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": False}, {"mixtral": True}, {"tuple_out": False}],
    ids=lambda o: "-".join(o) or "plain",
)
def test_lists_of_experts(options: dict[str, bool], dtype: torch.dtype) -> None:
    holder = nn.Sequential(OldBlock(**options)).to(dtype)
    block = holder[0]
    x = torch.randn(2, 5, 16).to(dtype)
    want = block(x)
    convert(holder)
    got = holder[0](x)
    assert isinstance(got, tuple) == isinstance(want, tuple) == options.get("tuple_out", True)
    got_y, want_y = (y[0] if isinstance(y, tuple) else y for y in (got, want))
    if isinstance(got, tuple):
        torch.testing.assert_close(got[1].reshape(want[1].shape), want[1], rtol=2e-2, atol=2e-2)
    if dtype == torch.float32:
        close(got_y, want_y)
    else:
        torch.testing.assert_close(got_y, want_y, rtol=3e-2, atol=3e-2 * want_y.abs().max().item())
    assert all(p.device.type == "meta" for p in block.parameters())  # no second copy meanwhile
    revert(holder)
    assert holder[0] is block
    after = block(x)
    assert torch.equal(after[0] if isinstance(after, tuple) else after, want_y)
    storages = {p.untyped_storage().data_ptr() for p in block.parameters()}
    assert len(storages) == len(list(block.parameters()))  # safetensors refuses shared memory


def test_a_block_alone() -> None:
    block, x = OldBlock(tuple_out=False), torch.randn(1, 4, 16)
    want = block(x)
    converted = convert(block, impl="staged")
    close(converted(x), want)
    assert revert(converted) is block


def test_what_is_not_known_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="MoE block"):
        convert(nn.Linear(3, 3))
    shared = OldBlock()
    shared.shared_expert = nn.Linear(16, 16)
    with pytest.raises(NotImplementedError, match="shared_expert"):
        convert(shared)
    with pytest.raises(NotImplementedError, match="something else"):
        convert(OldBlock(scale=2.5))
    noisy = make("mixtral", router_jitter_noise=0.1)
    with pytest.raises(NotImplementedError, match="router_jitter_noise"):
        convert(noisy)
    biased = OldBlock()
    biased.gate = nn.Linear(16, 6)
    with pytest.raises(NotImplementedError, match="plain Linear"):
        convert(biased)
