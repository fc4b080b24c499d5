"""Generation with a Qwen3-MoE of a billion parameters on this CPU: our plug-in against Transformers' own
experts.

    python measurements/cpu/generation.py             about 5 minutes, 6 GB; writes generation.json and .txt
    python measurements/cpu/generation.py --quick     a tiny model, written to /tmp, to see that it works

The model has the layers of Qwen3-30B-A3B (D=2048, F=768, 8 experts a token, 32 heads of 128, 4 of them for
keys and values), 64 experts instead of 128 and 3 layers instead of 48, random weights in bfloat16. The
vocabulary is 8192: at 3 layers the head then has the share of the bytes of a token that it has in the
original, a tenth. Prefill is one call with 512 tokens that keeps the logits of the last, as generate() does;
decode is 64 calls of one token each.

batched_mm copies the weights of every chosen expert for every token, 26 GB a layer for this prompt, so it
takes part in decode only, after a prefill by ours.

Every round times both phases of each implementation once, in a new order, on one text per round. A ratio is
the median over rounds of an implementation's time over ours in the same round, with an interval of 95 %, both
by the harness's own rule (bench/verdict.py); a whole model is not something it can time.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_routing_bench.models.transformers as plugin
from moe_routing_bench.bench.host import environment_document
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.machine import this_machine
from moe_routing_bench.models.reading import experts_modules

HERE = Path(__file__).parent
OURS = "moe_routing_bench"
NAMES = (OURS, "eager", "grouped_mm", "batched_mm")
PHASES = ("prefill", "decode")
DECODE_ONLY = ("batched_mm",)
FULL = {
    "vocab_size": 8192, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "norm_topk_prob": True,
}  # fmt: skip
TINY = FULL | {"vocab_size": 97, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
TINY |= {"num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}


def make_model(sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(tie_word_embeddings=True, **sizes)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return model


class Generation:
    """One model, and both phases of a text timed under any implementation."""

    def __init__(self, sizes: dict[str, Any], prompt: int, new: int):
        self.model, self.prompt, self.new = make_model(sizes), prompt, new
        self.frozen = copy.deepcopy(self.model)
        plugin.freeze(self.frozen)  # as people would for inference

    def text(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.config.vocab_size, (1, self.prompt + self.new), generator=generator)

    @torch.no_grad()
    def run(self, name: str, text_BN: Tensor) -> tuple[dict[str, float], Tensor]:
        """Seconds by phase, and the logits of the last prompt token. The tokens of decode are given, not
        chosen, so that every implementation does the same work."""
        first_by = OURS if name in DECODE_ONLY else name
        model = self._with(first_by)
        started = time.perf_counter()
        out = model(text_BN[:, : self.prompt], use_cache=True, logits_to_keep=1)
        prefilled = time.perf_counter()
        first = out.logits[0, -1]
        model = self._with(name)
        between = time.perf_counter()
        for n in range(self.prompt, self.prompt + self.new):
            out = model(text_BN[:, n : n + 1], past_key_values=out.past_key_values, use_cache=True)
        done = time.perf_counter()
        return {"prefill": prefilled - started, "decode": done - between}, first

    def _with(self, name: str) -> Any:
        model = self.frozen if name == OURS else self.model
        model.set_experts_implementation(name)
        return model

    def shares(self, name: str, text_BN: Tensor) -> dict[str, float]:
        """What part of each phase passes inside the experts modules."""
        spent: list[tuple[float, float]] = []
        started = [0.0]

        def before(*_: Any) -> None:
            started[0] = time.perf_counter()

        def after(*_: Any) -> None:
            spent.append((started[0], time.perf_counter() - started[0]))

        hooks = []
        for _, module in [*experts_modules(self.model), *experts_modules(self.frozen)]:
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        seconds, _ = self.run(name, text_BN)
        for hook in hooks:
            hook.remove()
        layers = self.model.config.num_hidden_layers
        inside = {
            "prefill": sum(s for _, s in spent[:layers]),
            "decode": sum(s for _, s in spent[layers:]),
        }
        return {phase: inside[phase] / seconds[phase] for phase in PHASES}


def interleaved(
    generation: Generation, rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    """Seconds by phase and implementation, a sample a round."""
    found: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in NAMES} for phase in PHASES}
    order = random.Random(0)
    for number in range(rounds):
        for name in order.sample(NAMES, len(NAMES)):
            seconds, _ = generation.run(name, generation.text(number))
            for phase in PHASES:
                found[phase][name].append(seconds[phase])
        say(f"round {number + 1} of {rounds}")
    return found


def _ratio(seconds: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    if name == OURS:
        return 1.0, 1.0, 1.0
    found = compare(seconds[OURS], seconds[name], confidence=0.95)
    return found.ratio, *found.interval


def summary(document: dict[str, Any]) -> str:
    here = document["session"]
    lines = [
        f"{document['parameters'] / 1e9:.2f} B parameters, bfloat16, {here['threads']} threads, "
        f"{here['machine']['cpu']}, commit {here['source']['commit'][:12]}, {here['date']}",
        f"prefill {document['prompt']} tokens in one call, decode {document['new']} calls of one token",
        "",
        f"{'':8}  {'experts':18}{'ms':>10}{'ms/token':>10}   time / ours (95 %)     inside experts",
    ]
    for phase in PHASES:
        tokens = document["prompt" if phase == "prefill" else "new"]
        for name, one in document[phase].items():
            middle, low, high = one["ratio"]
            lines.append(
                f"{phase:8}  {name:18}{one['ms']:10.1f}{one['ms'] / tokens:10.3f}   "
                f"{middle:5.2f} ({low:.2f} .. {high:.2f})   {one['share']:12.0%}"
            )
    lines += [
        "",
        *document["implementations"],
        f"largest difference of logits to eager: {document['difference']:.3g}",
    ]
    return "\n".join(lines) + "\n"


def main(
    rounds: Annotated[int, typer.Option(help="samples of each")] = 15,
    threads: Annotated[int, typer.Option(help="torch's threads")] = 2,
    quick: Annotated[bool, typer.Option(help="a tiny model, written to /tmp")] = False,
) -> None:
    torch.set_num_threads(threads)
    sizes, prompt, new = (TINY, 16, 4) if quick else (FULL, 512, 64)
    rounds = 5 if quick else rounds
    folder = Path("/tmp") if quick else HERE
    here = {**environment_document(this_machine()), "threads": threads, "date": f"{datetime.now(UTC):%F %T}"}
    generation = Generation(sizes, prompt, new)
    shares, logits = {}, {}
    for name in NAMES:  # the first calls, which pack
        logits[name] = generation.run(name, generation.text(0))[1].float()
        shares[name] = generation.shares(name, generation.text(1))
    running = plugin.implementations(generation.frozen)
    seconds = interleaved(generation, rounds, lambda text: typer.echo(text, err=True))
    document: dict[str, Any] = {
        "session": here,
        "parameters": sum(p.numel() for p in generation.model.parameters()),
        "sizes": sizes,
        "prompt": prompt,
        "new": new,
        "implementations": [str(one) for one in running],
        "difference": (logits[OURS] - logits["eager"]).abs().max().item(),
        "largest_logit": logits["eager"].abs().max().item(),
    }
    for phase in PHASES:
        document[phase] = {
            name: {
                "ms": median(seconds[phase][name]) * 1e3,
                "ratio": _ratio(seconds[phase], name),
                "share": shares[name][phase],
                "samples_ms": [float(f"{s * 1e3:.5g}") for s in seconds[phase][name]],
            }
            for name in NAMES
            if phase == "decode" or name not in DECODE_ONLY
        }
    text = summary(document)
    (folder / "generation.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "generation.txt").write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
