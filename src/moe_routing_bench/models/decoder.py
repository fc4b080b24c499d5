"""A decoder block: RMSNorm, grouped-query attention with rotary positions, RMSNorm, MoE, two residuals.

    h = x + attention(norm(x)),   y = h + feed_forward(norm(h))

attention  q, k, v = x Wq, x Wk, x Wv in heads of width A: H of q, J of k and v, each for H / J heads of q
           qk_norm: q and k are normalised over A (Qwen3)
           rotary: the pair (j, j + A/2) of a head at position n is turned by the angle n * theta^(-2j/A)
           softmax(q k^T / sqrt(A)) over the tokens up to n, times v, times Wo
The method "sdpa" is torch's scaled_dot_product_attention. "naive" is what it is compared with: it repeats k
and v for every head of q and writes the N x N matrix.

Rotary pairs here are halves of a head, as in Llama, Qwen and Transformers; the paper and GPT-J pair
neighbours, which is the same up to the order of columns in Wq and Wk.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.core.experts import to_transformers
from moe_routing_bench.core.routing import TokenInfo
from moe_routing_bench.models.feed_forward import FeedForward
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.ops.hf import ACTIVATION, freeze, why_not
from moe_routing_bench.routers.softmax_topk import SoftmaxTopkRouter

METHODS = ("sdpa", "naive")
Rotary = tuple[Tensor, Tensor]


def rotary(N: int, A: int, theta: float, like: Tensor, *, start: int = 0) -> Rotary:
    """Returns cos_NA and sin_NA of the positions from `start` on, in the dtype and on the device of `like`.
    Angles are computed in float32 or wider, because in bfloat16 position 257 would be position 256."""
    wide = torch.promote_types(like.dtype, torch.float32)
    pair = torch.arange(0, A, 2, device=like.device, dtype=wide)
    position_N = torch.arange(start, start + N, device=like.device, dtype=wide)
    turn = torch.outer(position_N, theta ** (-pair / A))
    angle_NA = torch.cat((turn, turn), dim=-1)
    return angle_NA.cos().to(like.dtype), angle_NA.sin().to(like.dtype)


def turned(x_BHNA: Tensor, by: Rotary) -> Tensor:
    cos_NA, sin_NA = by
    first, second = x_BHNA.chunk(2, dim=-1)
    return x_BHNA * cos_NA + torch.cat((-second, first), dim=-1) * sin_NA


def naive_attention(q_BHNA: Tensor, k_BJNA: Tensor, v_BJNA: Tensor) -> Tensor:
    """Causal attention, written out. The softmax is computed in float32 or wider."""
    repeats, N = q_BHNA.shape[1] // k_BJNA.shape[1], q_BHNA.shape[2]
    k_BHNA, v_BHNA = (t.repeat_interleave(repeats, dim=1) for t in (k_BJNA, v_BJNA))
    score_BHNN = q_BHNA @ k_BHNA.transpose(2, 3) * q_BHNA.shape[-1] ** -0.5
    later_NN = torch.ones(N, N, dtype=torch.bool, device=q_BHNA.device).triu(1)
    wide = torch.promote_types(q_BHNA.dtype, torch.float32)
    share_BHNN = score_BHNN.masked_fill(later_NN, float("-inf")).softmax(-1, dtype=wide)
    return share_BHNN.to(q_BHNA.dtype) @ v_BHNA


class Cache:
    """Keys and values of the tokens read so far, for one layer. It has room for `most` tokens of B sequences.

    cache = Cache(B=1, kv_heads=2, most=512, head_dim=16, like=weight)
    attention(x_1ND, cache=cache)    reads N tokens, cache.length = N
    attention(x_11D, cache=cache)    reads the next token, which sees all earlier ones
    """

    def __init__(self, B: int, kv_heads: int, most: int, head_dim: int, like: Tensor):
        self.k_BJMA = like.new_empty(B, kv_heads, most, head_dim)
        self.v_BJMA = torch.empty_like(self.k_BJMA)
        self.length = 0

    def extend(self, k_BJNA: Tensor, v_BJNA: Tensor) -> Rotary:
        """Adds keys and values, and returns those of all tokens so far."""
        end = self.length + k_BJNA.shape[2]
        if end > self.k_BJMA.shape[2]:
            raise ValueError(f"the cache has room for {self.k_BJMA.shape[2]} tokens, not {end}")
        self.k_BJMA[:, :, self.length : end], self.v_BJMA[:, :, self.length : end] = k_BJNA, v_BJNA
        self.length = end
        return self.k_BJMA[:, :, :end], self.v_BJMA[:, :, :end]


class Attention(nn.Module):
    """Causal grouped-query attention on whole sequences, or on the next tokens with a cache. No padding mask.

    state_dict: q_proj, k_proj, v_proj, o_proj, and q_norm, k_norm with qk_norm: the names of Transformers.
    """

    def __init__(
        self, D: int, heads: int, kv_heads: int, head_dim: int, *, method: str = "sdpa",
        qk_norm: bool = False, bias: bool = False, theta: float = 10_000.0, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if method not in METHODS:
            raise ValueError(f"there is no attention {method!r}; there are {', '.join(METHODS)}")
        if min(D, heads, kv_heads, head_dim) < 1 or heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} heads of keys and values in equal parts")
        if head_dim % 2:
            raise ValueError(f"rotary positions turn pairs, so heads have an even width, not {head_dim}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.method, self.theta = method, theta
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(D, heads * head_dim, bias=bias, **on)
        self.k_proj = nn.Linear(D, kv_heads * head_dim, bias=bias, **on)
        self.v_proj = nn.Linear(D, kv_heads * head_dim, bias=bias, **on)
        self.o_proj = nn.Linear(heads * head_dim, D, bias=bias, **on)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps, **on) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=eps, **on) if qk_norm else None

    def forward(self, x_BND: Tensor, by: Rotary | None = None, cache: Cache | None = None) -> Tensor:
        B, N, _ = x_BND.shape
        before = 0 if cache is None else cache.length
        by = rotary(N, self.head_dim, self.theta, x_BND, start=before) if by is None else by
        q_BNHA, k_BNJA, v_BNJA = (
            project(x_BND).view(B, N, -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNHA, k_BNJA = self.q_norm(q_BNHA), self.k_norm(k_BNJA)
        q_BHNA, k_BJNA = (turned(t.transpose(1, 2), by) for t in (q_BNHA, k_BNJA))
        v_BJNA = v_BNJA.transpose(1, 2)
        if cache is not None:
            k_BJNA, v_BJNA = cache.extend(k_BJNA, v_BJNA)
        if before:  # a token sees all earlier tokens, and those of this call up to itself
            seen_NM = torch.ones(N, before + N, dtype=torch.bool, device=x_BND.device).tril(before)
            y_BHNA = F.scaled_dot_product_attention(
                q_BHNA, k_BJNA, v_BJNA, attn_mask=seen_NM, enable_gqa=self.heads != self.kv_heads
            )
        elif self.method == "naive":
            y_BHNA = naive_attention(q_BHNA, k_BJNA, v_BJNA)
        else:
            y_BHNA = F.scaled_dot_product_attention(
                q_BHNA, k_BJNA, v_BJNA, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        return self.o_proj(y_BHNA.transpose(1, 2).reshape(B, N, -1))

    def extra_repr(self) -> str:
        return f"{self.method}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"


class DecoderBlock(nn.Module):
    """One layer of a decoder:  y, routing = DecoderBlock(64, 4, 2, 16, feed_forward=MoE(64, 128, 8, 2))(x).

    x is (B, N, D): sequences, tokens, width. feed_forward: see FeedForward; one that is not causal is refused
    unless sees_future=True says that a token may see later ones. Other options are Attention's.

    state_dict: input_norm, attention.*, post_norm, feed_forward.*
    """

    def __init__(
        self, D: int, heads: int, kv_heads: int, head_dim: int, *, feed_forward: FeedForward,
        sees_future: bool = False, eps: float = 1e-6, **options: Any,
    ):  # fmt: skip
        super().__init__()
        if feed_forward.D != D:
            raise ValueError(f"the feed-forward layer has width {feed_forward.D}, the block {D}")
        if not feed_forward.causal and not sees_future:
            raise ValueError(
                "this MoE layer is not causal: in a decoder a token would see later ones; sees_future=True "
                "accepts that"
            )
        on: dict[str, Any] = {"device": feed_forward.like.device, "dtype": feed_forward.like.dtype}
        self.input_norm = nn.RMSNorm(D, eps=eps, **on)
        self.attention = Attention(D, heads, kv_heads, head_dim, eps=eps, **options, **on)
        self.post_norm = nn.RMSNorm(D, eps=eps, **on)
        self.feed_forward = feed_forward

    def forward(
        self,
        x_BND: Tensor,
        by: Rotary | None = None,
        *,
        token_id_BN: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Any]:
        """token_id_BN is for routers that read vocabulary ids. The second result is the layer's routing."""
        h_BND = x_BND + self.attention(self.input_norm(x_BND), by, cache)
        ids_T = None if token_id_BN is None else token_id_BN.reshape(-1)
        info = TokenInfo(num_sequences=x_BND.shape[0], token_id_T=ids_T)
        y_BND, chosen = self.feed_forward(self.post_norm(h_BND), info)
        return y_BND if self.feed_forward.carries_input else h_BND + y_BND, chosen


def why_not_transformers(moe: MoE) -> str | None:
    """Returns why Transformers' Qwen3-MoE block cannot compute this layer; None if it can."""
    if (reason := why_not(moe.experts.weights())) is not None:
        return reason
    if moe.shared is not None:
        return "Transformers' Qwen3-MoE block has no shared expert"
    if type(moe.router) is not SoftmaxTopkRouter or getattr(moe.router, "b_E", None) is not None:
        return "Transformers' Qwen3-MoE block routes by softmax top-k without a bias"
    if moe.layout.kind == "padded":
        return f"Transformers' Qwen3-MoE block drops nothing, {moe.layout} may"
    return None


def transformers_moe(moe: MoE, *, experts: str = "grouped_mm") -> Any:
    """Returns Transformers' own Qwen3MoeSparseMoeBlock with the weights of `moe`: (B, N, D) -> (B, N, D).
    `experts` names its experts function. Weights have the layout of a loaded model, copied if ours
    differs."""
    if (reason := why_not_transformers(moe)) is not None:
        raise NotImplementedError(reason)
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    with torch.device("meta"):
        block = modeling.Qwen3MoeSparseMoeBlock(_config(modeling, moe, experts))
    weights, router = moe.experts.weights(), moe.router
    assert isinstance(router, SoftmaxTopkRouter)
    trained = any(tensor.requires_grad for tensor in weights.tensors().values())
    theirs = to_transformers(weights if trained else freeze(weights))
    for name in ("gate_up_proj", "down_proj"):
        put_parameter(block.experts, name, theirs[name])
    # the router of a loaded model has the model's dtype; ours is float32
    put_parameter(block.gate, "weight", router.w_DE.t().to(weights.w_in_EDG.dtype))
    return block.train(moe.training)


@dataclass(frozen=True)
class TransformersBlock:
    """A decoder layer of Transformers with the weights of a block of ours; called like one.

    TransformersBlock.of(block, attention="sdpa", experts="grouped_mm")(x_BND, by) -> y_BND
    """

    layer: Any
    head_dim: int
    theta: float
    masked: bool  # eager attention is only causal if it is given a mask

    @staticmethod
    def of(block: DecoderBlock, *, attention: str = "sdpa", experts: str = "grouped_mm") -> TransformersBlock:
        if attention not in ("sdpa", "eager"):
            raise ValueError(f"Transformers' attention here is sdpa or eager, not {attention!r}")
        moe = block.feed_forward
        if not isinstance(moe, MoE):
            raise NotImplementedError("Transformers' Qwen3-MoE block holds an MoE layer, nothing else")
        mlp = transformers_moe(moe, experts=experts)
        ours = block.attention
        modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        config = _config(
            modeling, moe, experts,
            num_attention_heads=ours.heads,
            num_key_value_heads=ours.kv_heads,
            head_dim=ours.head_dim,
            attention_bias=ours.q_proj.bias is not None,
            rms_norm_eps=block.input_norm.eps,
        )  # fmt: skip
        config._attn_implementation = attention
        with torch.device("meta"):
            layer = modeling.Qwen3MoeDecoderLayer(config, 0)
        layer.mlp = mlp
        if ours.q_norm is None:
            layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
        for name, value in ours.named_parameters():
            part, _, suffix = name.partition(".")
            put_parameter(getattr(layer.self_attn, part), suffix, value)
        put_parameter(layer.input_layernorm, "weight", block.input_norm.weight)
        put_parameter(layer.post_attention_layernorm, "weight", block.post_norm.weight)
        return TransformersBlock(
            layer=layer.train(block.training),
            head_dim=ours.head_dim,
            theta=ours.theta,
            masked=attention == "eager",
        )

    def __call__(self, x_BND: Tensor, by: Rotary | None = None) -> Tensor:
        return self.layer(x_BND, **self._positions(x_BND, by))

    def attend(self, h_BND: Tensor, by: Rotary | None = None) -> Tensor:
        """Runs its attention alone, on the output of its first norm."""
        return self.layer.self_attn(h_BND, **self._positions(h_BND, by))[0]

    def _positions(self, x_BND: Tensor, by: Rotary | None) -> dict[str, Any]:
        N = x_BND.shape[1]
        cos_NA, sin_NA = rotary(N, self.head_dim, self.theta, x_BND) if by is None else by
        mask_11NN = None
        if self.masked:
            least = torch.finfo(x_BND.dtype).min
            mask_11NN = torch.full((1, 1, N, N), least, dtype=x_BND.dtype, device=x_BND.device).triu(1)
        return {"attention_mask": mask_11NN, "position_embeddings": (cos_NA[None], sin_NA[None])}


def transformers_model(blocks: Sequence[TransformersBlock], norm_D: Tensor, head_VD: Tensor) -> Any:
    """Returns Transformers' Qwen3MoeForCausalLM with a layer for each block. It copies plain weights, so that
    equal blocks share no memory; frozen ones it shares. It has no embedding: model(inputs_embeds=x_BND)."""
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = copy.deepcopy(blocks[0].layer.self_attn.config)
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = len(blocks), len(head_VD), False
    config.rope_parameters = {"rope_type": "default", "rope_theta": blocks[0].theta}
    with torch.device("meta"):
        model = modeling.Qwen3MoeForCausalLM(config)
    model.model.embed_tokens = nn.Embedding(1, len(norm_D), device=norm_D.device, dtype=norm_D.dtype)
    model.model.rotary_emb = modeling.Qwen3MoeRotaryEmbedding(config=config).to(norm_D.device)
    for place, block in enumerate(blocks):
        model.model.layers[place] = layer = copy.deepcopy(block.layer)
        layer.self_attn.layer_idx = place
        for module in layer.modules():  # one config, by which a model chooses its attention and its experts
            if hasattr(module, "config"):
                module.config = config
    put_parameter(model.model.norm, "weight", norm_D)
    put_parameter(model.lm_head, "weight", head_VD)
    return model.eval().requires_grad_(False)


def _config(modeling: Any, moe: MoE, experts: str, **sizes: Any) -> Any:
    weights, router = moe.experts.weights(), moe.router
    assert isinstance(router, SoftmaxTopkRouter)
    config = modeling.Qwen3MoeConfig(
        num_experts=weights.num_experts,
        num_experts_per_tok=router.K,
        hidden_size=weights.D,
        moe_intermediate_size=weights.F,
        hidden_act=ACTIVATION[weights.activation],
        norm_topk_prob=router.order != "softmax_then_topk",
        **sizes,
    )
    config._experts_implementation = experts
    return config


def put_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Shares a parameter, so that both blocks train it. Any other tensor becomes a contiguous parameter."""
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value.detach().contiguous(), requires_grad=value.requires_grad)
    setattr(module, name, value)
