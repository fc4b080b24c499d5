"""Transformers' MoE models in a size for tests, with weights large enough that the experts matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_routing_bench.models.reading import experts_modules

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# what a model has besides SIZES, and under which name its number of experts stands
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_key_value_heads": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_nextn_predict_layers": 0,
        },
    ),
    # gates are made of the scores that are left after groups were ruled out
    "deepseek_v2": (
        "DeepseekV2",
        {
            "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
            "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4,
            "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    # no gate, relu2
    "nemotron_h": (
        "NemotronH",
        {
            "n_routed_experts": 8, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["full_attention", "moe", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
            "n_groups": 2, "ssm_state_size": 8, "num_hidden_layers": None,
        },
    ),
    # an activation that is not one of ours: the model's own function is called between our operations
    "gelu_tanh": (
        "Qwen3Moe",
        {
            "num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
}  # fmt: skip


def make(name: str, seed: int = 0, **options: Any) -> Any:
    """A model in float32, in evaluation mode, with weights of the size 1 / sqrt(inputs) and clear choices."""
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | own | options))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            # 4 x: the chosen experts stand out, so that a rounding does not choose others
            router = path.endswith(("gate.weight", "router.weight"))
            inputs = parameter.shape[-1] if parameter.ndim == 2 else 32
            parameter.normal_(std=(4.0 if router else 1.0) / inputs**0.5, generator=generator)
        for path, parameter in model.named_parameters():
            if path.endswith("bias") and parameter.ndim:
                parameter.normal_(std=0.5, generator=generator)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2, generator=generator)
    return model.eval()


def tokens(rows: int = 2, columns: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(2, VOCABULARY, (rows, columns), generator=generator)


def gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of every parameter that takes part."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), found


def choices(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The sorted experts of every token, layer by layer."""
    chosen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].sort(-1).values))
        for _, module in experts_modules(model)
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return chosen


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
