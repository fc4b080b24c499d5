"""model.set_attn_implementation("moe_routing_bench"): the attention operation in Transformers' models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import moe_routing_bench.models.transformers as plugin
from moe_routing_bench.models import attention
from tiny_models import VOCABULARY, close, make, tokens

NAME = plugin.NAME


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The number of queries and the causality of each call of the operation."""
    found: list[tuple[int, bool]] = []
    real = attention.attention

    def noted(q_BHNA: Tensor, *args: Any, **options: Any) -> Tensor:
        found.append((q_BHNA.shape[2], options["causal"]))
        return real(q_BHNA, *args, **options)

    monkeypatch.setattr(attention, "attention", noted)
    monkeypatch.setattr(attention, "_warned", set())
    return found


@torch.no_grad()
def generated(model: Any, name: str, **options: Any) -> Tensor:
    model.set_attn_implementation(name)
    found = model.generate(
        tokens(), max_new_tokens=5, min_new_tokens=5, do_sample=False, return_dict_in_generate=True,
        output_logits=True, pad_token_id=0, **options,
    )  # fmt: skip
    return torch.stack(found.logits)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_prompt_and_decoding_are_those_of_sdpa(name: str, calls: list[tuple[int, bool]]) -> None:
    model, layers = make(name), 2
    want = generated(model, "sdpa")
    close(generated(model, NAME), want)
    prompt = tokens().shape[1]
    assert calls == [(prompt, True)] * layers + [(1, False)] * layers * 4


def test_gradients_are_those_of_sdpa(calls: list[tuple[int, bool]]) -> None:
    grads = []
    for name in ("sdpa", NAME):
        model = make("qwen3_moe")
        model.set_attn_implementation(name)
        model(tokens()).logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    close(*grads[::-1])
    assert calls


def test_what_it_lacks_takes_sdpa_and_says_so(calls: list[tuple[int, bool]]) -> None:
    model, mask = make("qwen3_moe"), torch.ones_like(tokens())
    mask[0, :3] = 0
    want = generated(model, "sdpa", attention_mask=mask)
    with pytest.warns(UserWarning, match="a mask"):
        close(generated(model, NAME, attention_mask=mask), want)
    assert not calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        generated(model, NAME, attention_mask=mask)
    other = make("deepseek_v3")
    want = generated(other, "sdpa")
    with pytest.warns(UserWarning, match="another width"):
        close(generated(other, NAME), want)


def test_a_cache_with_room_for_more(calls: list[tuple[int, bool]]) -> None:
    model = make("qwen3_moe")
    want = generated(model, "sdpa", cache_implementation="static")
    with pytest.warns(UserWarning, match="a mask"):
        close(generated(model, NAME, cache_implementation="static"), want)
    assert len(calls) == 2  # the prompt


def test_sinks_are_refused() -> None:
    model = make("gpt_oss")
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError):
        model(torch.randint(VOCABULARY, (1, 4)))
