"""The attention operation in Transformers' models: model.set_attn_implementation("moe_routing_bench").

Importing models/transformers.py makes the name known. It is impl="auto" of ops/attention, whose kernels are
in most cases faster than torch's on a CPU (docs/figures.md). Calls that need more than the operation has take
Transformers' "sdpa", and a warning says once what they need: most often a mask, for padding or for a full
sliding window. Inside torch.compile sdpa always runs, and no warning can say so.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_routing_bench.ops.attention.op import attention

_warned: set[str] = set()


def register_attention(name: str) -> None:
    ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)  # None where causal attention needs no mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers calls this with (B, heads, N, A) and wants (B, N, heads, A); the names are its own."""
    if options.get("s_aux") is not None:
        raise NotImplementedError("this model's attention has sinks; use 'eager' for its attention")
    reason = _why_not(query, key, value, attention_mask, dropout, scaling, options)
    if reason is not None:
        if reason not in _warned and not torch.compiler.is_compiling():
            _warned.add(reason)
            warnings.warn(f"Transformers' sdpa runs where attention has {reason}", stacklevel=2)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            **options,
        )  # fmt: skip
    N = query.shape[2]
    causal = N > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:  # the rest of a cache with room for more
        key, value = key[:, :, :N], value[:, :, :N]
    y_BHNA = attention(query, key, value, causal=causal)
    return y_BHNA.transpose(1, 2).contiguous(), None


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None,
    options: dict[str, Any],
) -> str | None:  # fmt: skip
    if mask is not None:
        return "a mask"
    if dropout:
        return "dropout"
    if scaling is not None and abs(scaling * query.shape[3] ** 0.5 - 1) > 1e-6:
        return f"the scale {scaling:g}, not 1 / sqrt({query.shape[3]})"
    if value.shape != key.shape:
        return "values of another width than its keys"
    if torch.compiler.is_compiling():
        return "torch.compile around it"
    found = [name for name in ("position_bias", "softcap", "cache") if options.get(name) is not None]
    return found[0] if found else None
