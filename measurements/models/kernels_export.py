"""An exported folder loaded by Hugging Face's `kernels`: without our package, and then before our kit.

    python kernels_export.py clean     our package is not there: load, register with Transformers, compare
    python kernels_export.py kit       our package is the judge of what the folder computes
    python kernels_export.py triton    the torch-cuda variant, interpreted on the CPU (needs triton)

LOCAL_KERNELS="org/name=DIR" names the folder; kernels_export.sh makes it and runs all three.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ["LOCAL_KERNELS"].partition("=")[2])


def clean() -> None:
    import transformers
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    import kernels

    assert importlib.util.find_spec("moe_routing_bench") is None, "our package is there"
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, kernels {kernels.__version__}"
    )
    print(f"{versions}; moe_routing_bench is not installed")
    for metadata in sorted(FOLDER.glob("build/*/metadata.json")):
        told = json.loads(metadata.read_text())["digest"]["files"]
        files = {str(p.relative_to(metadata.parent)) for p in metadata.parent.rglob("*") if p.is_file()}
        assert files == {*told, "metadata.json"}, files ^ set(told)
        for name, digest in told.items():
            seen = hashlib.sha256((metadata.parent / name).read_bytes()).digest()
            assert base64.b64encode(seen).decode() == digest, name
        print(f"{metadata.parent.name}: {len(told)} files, every digest right")
    loaded = kernels.get_kernel("org/name", version=0)
    print(f"kernels.get_kernel gave {loaded.__name__} with {', '.join(loaded.__all__)}")
    name = loaded.register()
    sizes: dict[str, Any] = {
        "vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "num_experts_per_tok": 2,
    }  # fmt: skip
    qwen = {"moe_intermediate_size": 48, "num_experts": 8, "head_dim": 16}
    for dtype in (torch.float32, torch.bfloat16):
        for build, config in (
            (Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **qwen)),
            (MixtralForCausalLM, MixtralConfig(**sizes, num_local_experts=8)),
        ):
            torch.manual_seed(0)
            model = build(config).to(dtype).eval()
            ids = torch.randint(0, 199, (2, 17))
            model.set_experts_implementation("eager")
            theirs = model(ids).logits
            theirs.float().square().mean().backward()
            wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            model.set_experts_implementation(name)
            ours = model(ids).logits
            ours.float().square().mean().backward()
            worst = max(
                float((p.grad - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-12))
                for n, p in model.named_parameters()
                if n in wanted
            )
            off = float((ours - theirs).abs().max() / theirs.abs().max())
            del theirs, ours  # their graphs hold the weights, and freezing wants them for itself
            model.zero_grad(set_to_none=True)
            model.set_experts_implementation("eager")
            tokens = model.generate(ids, max_new_tokens=12, do_sample=False)
            loaded.freeze(model)
            same = torch.equal(tokens, model.generate(ids, max_new_tokens=12, do_sample=False))
            what = f"{build.__name__}, {str(dtype)[6:]}"
            print(f"{what}: logits off by {off:.1e}, gradients by {worst:.1e}, same tokens frozen: {same}")
            assert off < (1e-5 if dtype == torch.float32 else 5e-2) and (same or dtype == torch.bfloat16)


def judged(moe_experts: Any, impl: str, dtypes: tuple[str, ...], cases: tuple[str, ...] = ()) -> None:
    from collections import Counter

    from moe_routing_bench.conformance.check import cells_of, check_implementation
    from moe_routing_bench.ops.implementation import Implementation

    def run(x_TD: Any, gate_TK: Any, plan: Any, weights: Any) -> Any:
        w_in, w_out = weights.w_in_EDG.transpose(1, 2), weights.w_out_EFD.transpose(1, 2)
        chosen_TK = plan.expert_TK()
        return moe_experts(x_TD, chosen_TK, gate_TK, w_in, w_out, activation=weights.activation, impl=impl)

    def unsupported(x_TD: Any, gate_TK: Any, plan: Any, weights: Any) -> str | None:
        if impl == "native" and x_TD.dtype == torch.float16:
            return "float16"
        return "moe_experts takes no biases" if weights.b_in_EG is not None else None

    exported = Implementation(
        op="expert_ffn", name="exported", origin="", summary="", run=run, unsupported=unsupported
    )
    counts, wrong = Counter[str](), list[str]()
    for cell in cells_of("expert_ffn", "exported", dtypes):
        if cell.case.name in cases or not cases:
            outcome = check_implementation(exported, cell)
            counts[outcome.status] += 1
            wrong += [f"{cell}: {sentence}" for sentence in outcome.sentences if outcome.status == "failed"]
    print(f"the kit on moe_experts(impl={impl!r}): {dict(sorted(counts.items()))}")
    assert not wrong, "\n".join(wrong[:5])


def kit() -> None:
    import kernels

    loaded = kernels.get_kernel("org/name", version=0)
    for impl in ("auto", "native", "staged"):
        judged(loaded.moe_experts, impl, ("float32", "bfloat16", "float16"))


def triton() -> None:
    """Not by get_kernel, which wants a GPU for this variant: by its path, as get_kernel would import it."""
    importlib.import_module("triton")  # the kit repairs its interpreter if it is loaded
    file = FOLDER / "build" / "torch-cuda" / "__init__.py"
    name = json.loads(file.with_name("metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    judged(module.moe_experts, "triton_fused", ("bfloat16",), ("plain", "odd_widths", "ragged_rows"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"clean": clean, "kit": kit, "triton": triton}[sys.argv[1]]()
