"""The decoder block: against Transformers' own layer, against attention written out, and in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_routing_bench.core.accuracy import judge
from moe_routing_bench.models.decoder import (
    Attention,
    DecoderBlock,
    TransformersBlock,
    rotary,
    transformers_moe,
    turned,
    why_not_transformers,
)
from moe_routing_bench.moe.layer import MoE

pytestmark = pytest.mark.slow

D, F, E, K, B, N = 32, 24, 8, 2, 2, 11


def block(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, moe: dict | None = None, **options
) -> DecoderBlock:
    torch.manual_seed(seed)
    layer = MoE(D, F, E, K, dtype=dtype, **(moe or {}))
    made = DecoderBlock(D, **{"heads": 4, "kv_heads": 2, "head_dim": 8, **options}, feed_forward=layer)
    for name, value in made.named_parameters():
        if "norm" in name:
            nn.init.normal_(value, mean=1.0, std=0.1)
        elif "router" in name:
            nn.init.normal_(value, std=1.0)
    return made


def tokens(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"bias": True, "theta": 1e6}], ids=str)
@pytest.mark.parametrize(("attention", "experts"), [("sdpa", "grouped_mm"), ("eager", "eager")])
def test_equals_transformers_own_layer(heads, options, attention, experts) -> None:
    pytest.importorskip("transformers")
    ours = block(heads=heads[0], kv_heads=heads[1], **options)
    theirs = TransformersBlock.of(ours, attention=attention, experts=experts)
    with torch.no_grad():
        y_BND, _ = ours(tokens())
        assert torch.allclose(y_BND, theirs(tokens()), atol=2e-6, rtol=1e-5)


def test_transformers_computes_the_same_angles() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    config = transformers.Qwen3MoeConfig(hidden_size=D, num_attention_heads=4, head_dim=8)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    x_BND, place_BN = tokens(), torch.arange(N).expand(B, N)
    theirs = Qwen3MoeRotaryEmbedding(config)(x_BND, place_BN)
    for mine, other in zip(rotary(N, 8, 5e5, x_BND), theirs, strict=True):
        assert torch.allclose(mine, other[0], atol=1e-6)


def test_gradients_equal_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    ours = block(qk_norm=True)
    theirs = TransformersBlock.of(ours, attention="eager", experts="eager")
    up_BND = tokens(seed=5)

    def gradients(call) -> dict[str, Tensor]:
        ours.zero_grad()
        theirs.layer.zero_grad()
        x_BND = tokens().requires_grad_()
        (call(x_BND) * up_BND).sum().backward()
        return {
            "x": x_BND.grad,
            **{name: p.grad for name, p in ours.named_parameters() if p.grad is not None},
        }

    mine, other = gradients(lambda x: ours(x)[0]), gradients(theirs)
    # router and experts are copies in Transformers' layout
    mlp = theirs.layer.mlp
    other |= {
        "feed_forward.router.w_DE": mlp.gate.weight.grad.t(),
        "feed_forward.experts.w_in_EDG": mlp.experts.gate_up_proj.grad.transpose(1, 2),
        "feed_forward.experts.w_out_EFD": mlp.experts.down_proj.grad.transpose(1, 2),
    }
    assert mine.keys() == other.keys() and len(mine) == 12
    for name, gradient in mine.items():
        assert torch.allclose(gradient, other[name], atol=2e-5, rtol=1e-4), name


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_sdpa_equals_attention_written_out_with_gradients(heads, qk_norm) -> None:
    both = [Attention(D, *heads, 8, method=method, qk_norm=qk_norm).double() for method in ("sdpa", "naive")]
    both[1].load_state_dict(both[0].state_dict())
    results = []
    for one in both:
        x_BND = tokens(torch.float64).requires_grad_()
        y_BND = one(x_BND)
        y_BND.square().sum().backward()
        results.append([y_BND, x_BND.grad, *(p.grad for p in one.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-9)


def test_a_token_does_not_see_later_ones_nor_other_sequences() -> None:
    for method in ("sdpa", "naive"):
        made, x_BND = block(method=method).double(), tokens(torch.float64)
        other = x_BND.clone()
        other[0, 5:] += 1
        with torch.no_grad():
            y, z = made(x_BND)[0], made(other)[0]
        assert torch.allclose(y[0, :5], z[0, :5]) and torch.allclose(y[1], z[1])
        assert not torch.allclose(y[0, 5], z[0, 5])


def test_attention_depends_on_distance_not_on_place() -> None:
    """The same tokens twice as far along give the same shares: what rotary positions are for."""
    A = 8
    q_NA, k_NA = (torch.randn(1, A, dtype=torch.float64).expand(20, A) for _ in range(2))
    by = rotary(20, A, 1e4, q_NA)
    score_NN = turned(q_NA[None, None], by)[0, 0] @ turned(k_NA[None, None], by)[0, 0].T
    assert torch.allclose(score_NN[3, 1], score_NN[13, 11]) and not torch.allclose(
        score_NN[3, 1], score_NN[3, 2]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["sdpa", "naive"])
def test_within_the_judges_bound_of_a_float64_oracle(dtype, method) -> None:
    """Attention alone: behind it a router may choose other experts in other precision."""
    made = block(dtype=dtype, method=method, qk_norm=True).attention
    plain = block(dtype=dtype, method="naive", qk_norm=True).attention
    x_BND = tokens(dtype)
    with torch.no_grad():
        got, baseline = made(x_BND), plain(x_BND)
        verdict = judge(got, plain.double()(x_BND.double()), baseline)
    assert verdict.passed, verdict.sentence


def test_rotary_angles_are_exact_in_sixteen_bits() -> None:
    cos_NA, _ = rotary(300, 4, 1e4, torch.empty((), dtype=torch.bfloat16))
    assert cos_NA.dtype == torch.bfloat16
    assert torch.equal(cos_NA[257, 0], torch.tensor(257.0, dtype=torch.float64).cos().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("moe", "sentence"),
    [
        ({"shared_F": 8}, "shared expert"),
        ({"activation": "gelu"}, "gated"),
        ({"bias": True}, "no biases"),
        ({"router": "hashed"}, "softmax top-k"),
        ({"layout": "padded(capacity_factor=1.0)"}, "drops nothing"),
    ],
)
def test_what_transformers_block_cannot_be_is_said(moe, sentence) -> None:
    pytest.importorskip("transformers")
    layer = MoE(D, F, E, K, **moe)
    assert sentence in (why_not_transformers(layer) or "")
    with pytest.raises(NotImplementedError, match=sentence):
        transformers_moe(layer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_heads": 3}, "equal parts"),
        ({"head_dim": 7}, "even width"),
        ({"method": "flash"}, "attention 'flash'"),
        ({"moe": {"layout": "padded(capacity_factor=1.0,drop=probs)"}}, "not causal"),
    ],
)
def test_mistakes_get_one_sentence(options, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        block(**options)


def test_compiles_without_graph_breaks() -> None:
    made = Attention(D, 4, 2, 8, qk_norm=True)
    x_BND = tokens()
    with torch.no_grad():
        assert torch.allclose(torch.compile(made, fullgraph=True, backend="eager")(x_BND), made(x_BND))
