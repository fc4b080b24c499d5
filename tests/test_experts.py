"""The one weight layout, and the converters from Transformers' layouts, against a loop over nn.Linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe_routing_bench import (
    Layout,
    Routing,
    expert_ffn,
    from_expert_list,
    from_transformers,
    make_plan,
    to_transformers,
)
from moe_routing_bench.core.experts import ACTIVATIONS, GATED, activate

T, D, H, E = 6, 7, 5, 3  # no two alike, so that no transposition goes unseen


def by_hand(x, gate, up, down, act, biases=None):
    """Each token through its expert, written with F.linear as a model would."""
    b_gate, b_up, b_down = biases or ([None] * E, [None] * E, [None] * E)
    rows = []
    for t in range(T):
        e = t % E
        h = F.linear(x[t], up[e], b_up[e])
        h = act(h) if gate is None else act(F.linear(x[t], gate[e], b_gate[e])) * h
        rows.append(F.linear(h, down[e], b_down[e]))
    return torch.stack(rows)


def run(x, weights):
    expert_TK = (torch.arange(T) % E).unsqueeze(1)
    routing = Routing(expert_TK=expert_TK, gate_TK=torch.ones(T, 1, dtype=x.dtype), num_experts=E)
    return expert_ffn(x, routing.gate_TK, make_plan(routing, Layout.compact()), weights)


@pytest.fixture
def parts():
    torch.manual_seed(3)
    kind = {"dtype": torch.float64}
    x = torch.randn(T, D, **kind)
    gate, up = torch.randn(E, H, D, **kind), torch.randn(E, H, D, **kind)
    return x, gate, up, torch.randn(E, D, H, **kind)


def test_default_layout_is_a_view(parts) -> None:
    x, gate, up, down = parts
    gate_up = torch.cat((gate, up), dim=1)
    weights = from_transformers(gate_up, down, activation="swiglu")
    assert weights.w_in_EDG.data_ptr() == gate_up.data_ptr()
    assert weights.w_out_EFD.data_ptr() == down.data_ptr()
    torch.testing.assert_close(run(x, weights), by_hand(x, gate, up, down, F.silu))


def test_transposed_layout_with_biases(parts) -> None:
    x, gate, up, down = parts
    b_gate, b_up, b_down = (torch.randn(E, n, dtype=torch.float64) for n in (H, H, D))
    weights = from_transformers(
        torch.cat((gate, up), dim=1).transpose(1, 2).contiguous(),
        down.transpose(1, 2).contiguous(),
        activation="geglu",
        gate_up_proj_bias=torch.cat((b_gate, b_up), dim=1),
        down_proj_bias=b_down,
        is_transposed=True,
    )
    expected = by_hand(x, gate, up, down, F.gelu, (b_gate, b_up, b_down))
    torch.testing.assert_close(run(x, weights), expected)


def test_interleaved_layout_of_gpt_oss(parts) -> None:
    x, gate, up, down = parts
    interleaved = torch.stack((gate, up), dim=2).reshape(E, 2 * H, D).transpose(1, 2)
    assert torch.equal(interleaved[..., 0::2].transpose(1, 2), gate)
    weights = from_transformers(
        interleaved, down.transpose(1, 2), activation="swiglu", is_transposed=True, is_concatenated=False
    )
    torch.testing.assert_close(run(x, weights), by_hand(x, gate, up, down, F.silu))


def test_experts_without_a_gate(parts) -> None:
    x, _, up, down = parts
    weights = from_transformers(up, down, activation="relu")
    torch.testing.assert_close(run(x, weights), by_hand(x, None, up, down, F.relu))


def test_one_linear_per_expert(parts) -> None:
    x, gate, up, down = parts
    gated = from_expert_list(list(gate), list(up), list(down), activation="swiglu")
    torch.testing.assert_close(run(x, gated), by_hand(x, gate, up, down, F.silu))
    plain = from_expert_list(None, list(up), list(down), activation="silu")
    torch.testing.assert_close(run(x, plain), by_hand(x, None, up, down, F.silu))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
def test_there_and_back(is_transposed: bool, is_concatenated: bool) -> None:
    shape = (E, D, 2 * H) if is_transposed else (E, 2 * H, D)
    given = {
        "gate_up_proj": torch.randn(shape),
        "down_proj": torch.randn((E, H, D) if is_transposed else (E, D, H)),
        "gate_up_proj_bias": torch.randn(E, 2 * H),
        "down_proj_bias": torch.randn(E, D),
    }
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated}
    back = to_transformers(from_transformers(**given, activation="swiglu", **flags), **flags)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], given[name]) for name in given)


def test_a_wrong_layout_is_refused(parts) -> None:
    _, gate, up, down = parts
    with pytest.raises(ValueError, match="not 7"):
        from_transformers(torch.cat((gate, up), dim=1), down, activation="swiglu", is_transposed=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    h = torch.randn(4, 10) * 10  # beyond every clamp
    gate, up = h[:, :5], h[:, 5:]
    clamped = gate.clamp(max=7)
    expected = {
        "gelu": F.gelu(h),
        "relu": F.relu(h),
        "relu2": h.clamp(min=0) ** 2,
        "silu": F.silu(h),
        "swiglu": F.silu(gate) * up,
        "geglu": F.gelu(gate) * up,
        "swiglu_oai": clamped * torch.sigmoid(1.702 * clamped) * (up.clamp(-7, 7) + 1),
    }[activation]
    assert expected.shape[1] == (5 if activation in GATED else 10)
    assert torch.equal(activate(h, activation), expected)
