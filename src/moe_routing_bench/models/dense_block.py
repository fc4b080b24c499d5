"""A dense decoder block made of operations, and Transformers' own with the same weights.

    h = x + attention(norm(x)),   y = h + down(activate(up(norm(h))))

qkv, out, up and down are four products, each with a bias if bias=True. Queries and keys are turned by their
positions. All heads have their own keys and values. With D = 2,048, F = 4,096 and an activation that is not
gated it has 33,572,864 parameters: the four matrices, seven biases of width D, and the weights of two norms.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.experts import GATED, activate
from moe_routing_bench.models.decoder import TransformersBlock, put_parameter, rotary
from moe_routing_bench.ops.attention.op import Rotary
from moe_routing_bench.ops.attention.op import op as attention_op
from moe_routing_bench.ops.auto import Auto, resolve
from moe_routing_bench.ops.hf import why_absent
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.linear.op import PackedMatrix
from moe_routing_bench.ops.linear.op import op as linear_op
from moe_routing_bench.ops.rms_norm.op import op as rms_norm_op

PRODUCTS = ("qkv", "out", "up", "down")
THETA = 10_000.0


class DenseBlock(nn.Module):
    """One layer of a dense decoder:  y_BND = DenseBlock(64, 256, 4)(x_BND).

    linear, attention and rms_norm name implementations of these operations. freeze() packs matrices once.

    state_dict: qkv, out, up, down, input_norm, post_norm
    """

    def __init__(
        self, D: int, F: int, heads: int, *, activation: str = "gelu", bias: bool = True, eps: float = 1e-6,
        linear: str = "auto", attention: str = "auto", rms_norm: str = "auto",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if D % heads or D // heads % 2:
            raise ValueError(f"width {D} is not {heads} equal heads of an even width")
        self.heads, self.activation, self.eps = heads, activation, eps
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(D, 3 * D, bias=bias, **on)
        self.out = nn.Linear(D, D, bias=bias, **on)
        self.up = nn.Linear(D, 2 * F if activation in GATED else F, bias=bias, **on)
        self.down = nn.Linear(F, D, bias=bias, **on)
        self.input_norm = nn.RMSNorm(D, eps=eps, **on)
        self.post_norm = nn.RMSNorm(D, eps=eps, **on)
        self.linear: Implementation | Auto = resolve(linear_op, linear)
        self.attention, self.rms_norm = resolve(attention_op, attention), resolve(rms_norm_op, rms_norm)
        self.packed: dict[str, tuple[Implementation, PackedMatrix]] = {}

    def forward(self, x_BND: Tensor, by: Rotary | None = None) -> Tensor:
        B, N, D = x_BND.shape
        x_TD = x_BND.reshape(-1, D)
        y_TD = self.attend(self.product("qkv", self.norm(self.input_norm, x_TD)), B, by)
        h_TD = x_TD + self.product("out", y_TD)
        up_TF = activate(self.product("up", self.norm(self.post_norm, h_TD)), self.activation)
        return (h_TD + self.product("down", up_TF)).view(B, N, D)

    def norm(self, module: nn.RMSNorm, x_TD: Tensor) -> Tensor:
        return self.rms_norm(x_TD, module.weight, self.eps)

    def product(self, name: str, x_TD: Tensor) -> Tensor:
        """One of PRODUCTS."""
        module = self.get_submodule(name)
        if name in self.packed:
            implementation, matrix = self.packed[name]
            return implementation(x_TD, matrix, module.bias)
        return self.linear(x_TD, module.weight, module.bias)

    def attend(self, qkv_TF: Tensor, B: int, by: Rotary | None = None) -> Tensor:
        T, A = len(qkv_TF), qkv_TF.shape[1] // 3 // self.heads
        by = angles(T // B, A, qkv_TF) if by is None else by
        q_BHNA, k_BHNA, v_BHNA = qkv_TF.view(B, T // B, 3, self.heads, A).permute(2, 0, 3, 1, 4)
        y_BHNA = self.attention(q_BHNA, k_BHNA, v_BHNA, True, 0, by)
        return y_BHNA.transpose(1, 2).reshape(T, -1)

    def freeze(self, name: str, implementation: Implementation) -> None:
        """Packs the matrix of a product, which is then computed by this implementation."""
        assert implementation.freeze is not None
        self.packed[name] = implementation, implementation.freeze(self.get_submodule(name).weight)

    def extra_repr(self) -> str:
        names = (self.linear.label, self.attention.label, self.rms_norm.label)
        return f"{self.heads} heads, {self.activation}, {', '.join(names)}"


def angles(N: int, A: int, like: Tensor) -> Rotary:
    """Returns the angles of positions 0 to N - 1, in at least float32."""
    wide = like.new_empty((), dtype=torch.promote_types(like.dtype, torch.float32))
    cos_NA, sin_NA = rotary(N, A, THETA, wide)
    return Rotary(cos_MC=cos_NA[:, : A // 2].contiguous(), sin_MC=sin_NA[:, : A // 2].contiguous())


def transformers_dense(block: DenseBlock, *, attention: str = "sdpa") -> TransformersBlock:
    """Transformers' ArceeDecoderLayer with the weights of `block`: the one of its blocks that has RMSNorm,
    biases everywhere and no gate. It shares matrices with `block` and has three products for qkv."""
    if attention not in ("sdpa", "eager"):
        raise ValueError(f"Transformers' attention here is sdpa or eager, not {attention!r}")
    if (reason := why_absent()) is not None:
        raise NotImplementedError(reason)
    if block.activation in GATED:
        raise NotImplementedError(f"Transformers' Arcee block is not gated, {block.activation} is")
    modeling = importlib.import_module("transformers.models.arcee.modeling_arcee")
    D, bias = block.out.in_features, block.out.bias is not None
    config = modeling.ArceeConfig(
        hidden_size=D, intermediate_size=block.down.in_features, num_attention_heads=block.heads,
        num_key_value_heads=block.heads, hidden_act=block.activation, attention_bias=bias, mlp_bias=bias,
        rms_norm_eps=block.eps, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = attention
    with torch.device("meta"):
        layer = modeling.ArceeDecoderLayer(config, 0)
    for kind in ("weight", "bias") if bias else ("weight",):
        parts = dict(zip("qkv", getattr(block.qkv, kind).detach().split(D), strict=True))
        for name, value in parts.items():
            put_parameter(getattr(layer.self_attn, f"{name}_proj"), kind, value)
        put_parameter(layer.self_attn.o_proj, kind, getattr(block.out, kind))
        put_parameter(layer.mlp.up_proj, kind, getattr(block.up, kind))
        put_parameter(layer.mlp.down_proj, kind, getattr(block.down, kind))
    put_parameter(layer.input_layernorm, "weight", block.input_norm.weight)
    put_parameter(layer.post_attention_layernorm, "weight", block.post_norm.weight)
    layer = layer.train(block.training)
    return TransformersBlock(layer=layer, head_dim=D // block.heads, theta=THETA, masked=attention == "eager")
