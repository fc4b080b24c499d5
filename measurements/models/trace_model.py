"""A small MoE language model trained on bytes, and what its layers choose before and after.

Qwen3-MoE of 1.9 M parameters (4 layers, 16 experts, 2 per token), trained without any balancing loss on the
first nine tenths of tinyshakespeare. Both models, with random and with trained weights, are recorded by
`mrb trace record` over three texts it was not trained on, and shown by `mrb trace show`. Writes
trace_model.txt, trace_random.png and trace_trained.png beside this file; checkpoints and traces go to --work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "intermediate_size": 96, "max_position_embeddings": 512,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": True,
}  # fmt: skip
TEXTS = {
    "shakespeare_end.txt": "tinyshakespeare.txt",
    "wikipedia.txt": "wikitext2_test.txt",
    "novels.txt": "gutenberg_novels.txt",
}


def make_model(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))


def train(
    model: Qwen3MoeForCausalLM, text: bytes, *, steps: int, batch: int = 16, sequence: int = 128
) -> list[float]:
    """Plain AdamW on random pieces of the text; the losses in nats per byte."""
    draw = torch.Generator().manual_seed(1)
    token_T = torch.tensor(list(text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        start_B = torch.randint(len(token_T) - sequence, (batch,), generator=draw)
        token_BN = token_T[start_B.unsqueeze(1) + torch.arange(sequence)]
        loss = model(input_ids=token_BN, labels=token_BN, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mrb(*words: str) -> str:
    command = [sys.executable, "-m", "moe_routing_bench", *words]
    # one thread: the shapes are small
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if ran.returncode:
        raise SystemExit(f"{' '.join(words)}: {ran.stderr[-2000:]}")
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, default=HERE.parent.parent.parent / "shared" / "corpora")
    parser.add_argument("--work", type=Path, default=Path("/tmp/trace_model"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    learnt = (given.corpora / "tinyshakespeare.txt").read_bytes()
    cut = len(learnt) * 9 // 10
    for name, corpus in TEXTS.items():
        with (given.corpora / corpus).open("rb") as file:
            file.seek(cut if corpus == "tinyshakespeare.txt" else 0)
            (given.work / name).write_bytes(file.read(200_000))

    model = make_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(given.work / "random")
    started, before = time.perf_counter(), time.process_time()
    losses = train(model, learnt[:cut], steps=given.steps)
    seconds, cpu = time.perf_counter() - started, time.process_time() - before
    model.save_pretrained(given.work / "trained")
    lines = [
        f"python measurements/models/trace_model.py --steps {given.steps} --tokens {given.tokens}",
        f"{platform.machine()}, 1 thread, torch {torch.__version__}; {count:,} parameters",
        f"{given.steps} steps of 2,048 bytes in {seconds:.0f} s ({cpu:.0f} s of CPU time); loss "
        f"{losses[0]:.3f} to {sum(losses[-20:]) / len(losses[-20:]):.3f} nats per byte (mean of the last 20)",
    ]
    violations = {}
    for which in ("random", "trained"):
        trace = given.work / f"{which}.safetensors"
        texts = [word for name in TEXTS for word in ("--text", str(given.work / name))]
        mrb(
            "trace", "record", "--model", str(given.work / which), "--tokenizer", "bytes", *texts, "--tokens",
            str(given.tokens), "--batch", "8", "--sequence", "256", "--out", str(trace),
        )  # fmt: skip
        picture = given.out / f"trace_{which}.png"
        lines += ["", mrb("trace", "show", str(trace), "--picture", str(picture)).rstrip()]
        shown = json.loads(mrb("trace", "show", str(trace), "--json"))
        violations[which] = [layer["max_over_mean"] - 1 for layer in shown["layers"]]
    lines += ["", "max violation (busiest expert over mean, less 1)", "layer   random  trained"]
    for layer, (before, after) in enumerate(zip(*violations.values(), strict=True)):
        lines.append(f"{layer:5}   {before:6.2f}  {after:7.2f}")
    text = "\n".join(lines).replace(f"{given.work}/", "") + "\n"
    (given.out / "trace_model.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
