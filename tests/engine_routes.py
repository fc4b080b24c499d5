"""Routes as serving engines return them: of a small synthetic model, good ones, and the ways to pack them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.workloads.serving import Request
from moe_routing_bench.workloads.trace_check import Recording

Ids = NDArray[Any]


def text(T: int, seed: int = 0, vocabulary: int = 60) -> list[int]:
    """Token ids with the popularity of words."""
    draw = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocabulary + 1)
    return draw.choice(vocabulary, T, p=share / share.sum()).tolist()


def routes(
    tokens: list[int],
    *,
    L: int = 3,
    E: int = 16,
    K: int = 2,
    skew: float = 0.0,
    context: float = 0.7,
    seed: int = 1,
) -> Ids:
    """tokens x layers x choices: a vector for each token, noise for its context, a router in every layer."""
    draw, model = np.random.default_rng(seed), np.random.default_rng(7)
    embedding, router = model.normal(size=(200, 24)), model.normal(size=(L, 24, E))
    popular = skew * model.normal(size=(L, E))
    x = embedding[np.array(tokens, dtype=int)]
    ids = []
    for layer in range(L):
        x = x + context * draw.normal(size=x.shape)
        ids.append(np.argsort(-(x @ router[layer] / 24**0.5 + popular[layer]), axis=1)[:, :K])
    return np.stack(ids, axis=1).astype(np.int32)


def hashed(tokens: list[int], *, L: int, E: int, K: int) -> Ids:
    """A table of experts for every token and layer."""
    table = np.argsort(np.random.default_rng(3).random((200, L, E)), axis=2)[:, :, :K]
    return table[np.array(tokens)].astype(np.int32)


def recording(*ids: Ids, E: int = 16, tokens: list[list[int]] | None = None, **more: Any) -> Recording:
    requests = [
        Request(
            name=f"response {number}",
            ids=one,
            token_ids=None if tokens is None else tuple(tokens[number]),
            tokens=None if tokens is None else len(tokens[number]),
            **more,
        )
        for number, one in enumerate(ids)
    ]
    return Recording(requests=requests, layers=[*range(ids[0].shape[1])], num_experts=E)


def npy(ids: Ids) -> str:
    """As vLLM sends it."""
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def flat(ids: Ids, dtype: str = "int32") -> str:
    """As SGLang sends it."""
    return base64.b64encode(ids.astype(dtype).tobytes()).decode()


def vllm(ids: Ids, tokens: list[int], prompt: int) -> dict[str, Any]:
    return {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "...", "token_ids": tokens[prompt:], "routed_experts": npy(ids)}],
        "prompt_token_ids": tokens[:prompt],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(tokens) - prompt},
    }


def sglang(ids: Ids, tokens: list[int], prompt: int) -> dict[str, Any]:
    about = {"prompt_tokens": prompt, "completion_tokens": len(tokens) - prompt, "routed_experts": flat(ids)}
    return {"text": "...", "output_ids": tokens[prompt:], "meta_info": about}


def saved(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path
