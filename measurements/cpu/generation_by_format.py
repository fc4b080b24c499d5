"""Generation by the format of the experts' weights: a random Qwen3-MoE of a billion parameters, and a small
model trained here, with its held-out loss.

    python measurements/cpu/generation_by_format.py            writes generation_by_format.json, .txt; 12 GB
    python measurements/cpu/generation_by_format.py --quick    tiny, written to /tmp, to see that it works

The random model is that of generation.py. Transformers' own experts run on its bfloat16 weights; ours are
frozen by plugin.freeze, in bfloat16 and in each format. Before anything is timed, the logits of a prompt are
held to a float32 model with the weights that the format keeps: their error (root mean square, relative) is at
most twice that of plain torch in bfloat16 with the same roundings. The trained model is that of
`mrb formats --text`, in float32; its loss is taken through the kernels that are timed.

Every round times both phases of every subject once, in a new order, on one text per round: the prompt in one
call, then calls of one token each. Tokens are given, not chosen, so that all do the same work. A ratio is the
median over rounds of a subject's time over that of native in the same round, with an interval of 95 %, both
by bench/verdict.py.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from generation import FULL, TINY, make_model
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_routing_bench.models.transformers as plugin
from moe_routing_bench import MoE
from moe_routing_bench.bench.host import environment_document
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.formats.named import INT8_ROWS, quantise
from moe_routing_bench.frozen import Frozen
from moe_routing_bench.machine import this_machine
from moe_routing_bench.models.reading import experts_modules, read, weights_of
from moe_routing_bench.models.running import make_plan
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn
from moe_routing_bench.train.loop import Ended, evaluate, train
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Rule, Run
from moe_routing_bench.train.text import read_texts

HERE = Path(__file__).parent
NATIVE = "native"
STORES = ("int8", "int8_a8", "int4_g128", "int4_g128_a8", "mxfp4", "mxfp4_a8")
OURS = {NATIVE: "", **{f"native(store={store})": store for store in STORES}}
THEIRS = ("eager", "grouped_mm")
PHASES = ("prefill", "decode")
TEXTS = [
    HERE.parents[1] / name
    for name in ("DESIGN.md", "docs/figures.md", "docs/gpu.md", "docs/quality.md", "CHANGELOG.md",
                 "README.md", "docs/routers.md", "docs/parallel.md")
]  # fmt: skip


@dataclass(kw_only=True)
class Subject:
    """prefill(prompt) gives what decode(that, token) goes on from; facts: bytes, errors, loss."""

    prefill: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Any]
    facts: dict[str, float]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})


@torch.no_grad()
def take_round(subjects: Mapping[str, Subject], text_BN: Tensor, prompt: int, dice: random.Random) -> None:
    for name in dice.sample(sorted(subjects), len(subjects)):
        subject = subjects[name]
        began = time.perf_counter()
        state = subject.prefill(text_BN[:, :prompt])
        between = time.perf_counter()
        for n in range(prompt, text_BN.shape[1]):
            subject.decode(state, text_BN[:, n : n + 1])
        subject.seconds["prefill"].append(between - began)
        subject.seconds["decode"].append(time.perf_counter() - between)


def bytes_of(model: nn.Module) -> dict[str, float]:
    def size(parameter: Tensor) -> int:
        return parameter.panels.nbytes if isinstance(parameter, Frozen) else parameter.nbytes

    parameters = dict(model.named_parameters())
    experts = sum(size(parameter) for name, parameter in parameters.items() if ".experts." in name)
    return {"model_bytes": sum(map(size, parameters.values())), "experts_bytes": experts}


def plain_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, impl: str
) -> Tensor:
    """What Transformers calls: plain torch with the roundings of this implementation."""
    weights = weights_of(module, read(module))
    gate_TK, plan = make_plan(top_k_index, top_k_weights, weights)
    return (expert_ffn.get(impl).plain or expert_ffn.reference)(hidden_states, gate_TK, plan, weights)


@torch.no_grad()
def keep_what_is_stored(model: nn.Module, name: str) -> None:
    for _, module in experts_modules(model):
        for matrix in ("gate_up_proj", "down_proj"):  # experts x columns x depth
            w_ENK = getattr(module, matrix)
            w_ENK.copy_(quantise(w_ENK.transpose(1, 2), name).decoded().weights(w_ENK.dtype).transpose(1, 2))


@torch.no_grad()
def logits_of(model: Any, text_BN: Tensor, experts: str) -> Tensor:
    model.set_experts_implementation(experts)
    return model(text_BN).logits[0].float()


def error(got: Tensor, right: Tensor) -> float:
    return float((got - right).square().mean().sqrt() / right.square().mean().sqrt())


def references(original: nn.Module, text_BN: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By implementation, logits with the weights it keeps: in float32, and of plain torch in bfloat16."""
    known = {}
    for name in dict.fromkeys(store.removesuffix(INT8_ROWS) for store in OURS.values()):
        model = copy.deepcopy(original).float()
        if name:
            keep_what_is_stored(model, name)
        right = logits_of(model, text_BN, "eager")
        model.bfloat16()
        for impl, store in OURS.items():
            if store.removesuffix(INT8_ROWS) == name:
                ALL_EXPERTS_FUNCTIONS.register(f"plain {impl}", partial(plain_experts, impl=impl))
                known[impl] = right, logits_of(model, text_BN, f"plain {impl}")
    return known


def random_subjects(sizes: dict[str, Any], prompt: int) -> dict[str, Subject]:
    original = make_model(sizes)
    text_BN = torch.randint(sizes["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(0))
    known = references(original, text_BN)
    exact, _ = known[NATIVE]

    def subject(model: Any, experts: str) -> Subject:
        def prefill(token_BN: Tensor) -> Any:
            model.set_experts_implementation(experts)
            return model(token_BN, use_cache=True, logits_to_keep=1).past_key_values

        def decode(cache: Any, token_B1: Tensor) -> Any:
            return model(token_B1, past_key_values=cache, use_cache=True)

        logits = logits_of(model, text_BN, experts)
        loss = torch.nn.functional.cross_entropy(logits[:-1], text_BN[0, 1:]).item()
        facts = {**bytes_of(model), "loss": loss, "error_to_float32": error(logits, exact)}
        if (impl := experts.removeprefix(f"{plugin.NAME}:")) in known:
            right, plain = known[impl]
            facts |= {"error_to_stored": error(logits, right), "most": 2 * error(plain, right)}
            typer.echo(f"{impl}: {facts}", err=True)
            if not facts["error_to_stored"] <= facts["most"]:
                raise RuntimeError(f"{impl}: the error of the logits is more than twice that of plain torch")
        return Subject(prefill=prefill, decode=decode, facts=facts)

    subjects = {name: subject(original, name) for name in THEIRS}
    for impl in OURS:
        frozen = copy.deepcopy(original)
        plugin.freeze(frozen, impl)
        subjects[impl] = subject(frozen, f"{plugin.NAME}:{impl}")
    return subjects


def trained_subjects(steps: int, prompt: int, new: int) -> tuple[dict[str, Subject], Callable[[int], Tensor]]:
    corpus = read_texts(TEXTS)
    rule = Rule(name="softmax_topk", router="softmax_topk")
    run = Run(rule=rule, steps=steps, evaluations=1, warmup=min(40, steps))
    (model,) = (event.model for event in train(run, corpus) if isinstance(event, Ended))

    def subject(impl: str) -> Subject:
        frozen: Decoder = copy.deepcopy(model)
        for layer in frozen.modules():
            if isinstance(layer, MoE):
                layer.expert_ffn = expert_ffn.get(impl)
                layer.freeze()
        loss = next(iter(evaluate(frozen, corpus, run).values()))
        frozen.eval()

        def prefill(token_BN: Tensor) -> Any:
            caches = frozen.caches(1, prompt + new)
            frozen(token_BN, caches)
            return caches

        def decode(caches: Any, token_B1: Tensor) -> Any:
            return frozen(token_B1, caches)

        return Subject(prefill=prefill, decode=decode, facts={**bytes_of(frozen), "loss": loss})

    pieces = corpus.held_out(0, pieces=8, sequence=prompt + new)
    return {impl: subject(impl) for impl in OURS}, lambda n: pieces[n % len(pieces)][None, : prompt + new]


def measured(
    subjects: dict[str, Subject], text: Callable[[int], Tensor], prompt: int, new: int, rounds: int
) -> dict[str, Any]:
    dice = random.Random(0)
    take_round(subjects, text(0), prompt, dice)  # the first calls are not kept
    for subject in subjects.values():
        subject.seconds = {phase: [] for phase in PHASES}
    for number in range(rounds):
        take_round(subjects, text(number), prompt, dice)
        typer.echo(f"round {number + 1} of {rounds}", err=True)
    document: dict[str, Any] = {"prompt": prompt, "new": new, "subjects": {}}
    for name, subject in subjects.items():
        document["subjects"][name] = one = dict[str, Any](subject.facts)
        for phase, tokens in zip(PHASES, (prompt, new), strict=True):
            seconds, base = subject.seconds[phase], subjects[NATIVE].seconds[phase]
            ratio = compare(base, seconds, confidence=0.95)
            one[phase] = {
                "tokens_per_second": tokens / median(seconds),
                "ratio": (1.0, 1.0, 1.0) if name == NATIVE else (ratio.ratio, *ratio.interval),
                "samples_ms": [float(f"{s * 1e3:.5g}") for s in seconds],
            }
    return document


def summary(document: dict[str, Any]) -> str:
    here = document["session"]
    cpu, load = here["machine"]["cpu"], here["load_average"][0]
    lines = [f"{here['threads']} threads, {cpu}, {here['date']}, load average before {load:.1f}"]
    heads = "".join(f"{phase + ' tokens/s':>20}{'time / native (95 %)':>24}" for phase in PHASES)
    for title in ("random", "trained"):
        model = document[title]
        prompt, new = model["prompt"], model["new"]
        lines += ["", f"{title}, {model['type']}: {prompt} tokens in one call, then {new} calls of one"]
        lines.append(f"{'experts':28}{'MB':>8}{'loss':>9}{heads}")
        for name, one in model["subjects"].items():
            line = f"{name:28}{one['experts_bytes'] / 1e6:8.1f}{one['loss']:9.4f}"
            for phase in PHASES:
                middle, low, high = one[phase]["ratio"]
                ratio = f"{middle:.3f} ({low:.3f} .. {high:.3f})"
                line += f"{one[phase]['tokens_per_second']:20.1f}{ratio:>24}"
            lines.append(line)
    return "\n".join(lines) + "\n"


def main(
    rounds: Annotated[int, typer.Option(min=5, help="samples of each")] = 15,
    threads: Annotated[int, typer.Option(help="torch's threads")] = 2,
    quick: Annotated[bool, typer.Option(help="a tiny model, written to /tmp")] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write to")] = None,
) -> None:
    torch.set_num_threads(threads)
    sizes, prompt, new, steps = (TINY, 16, 4, 5) if quick else (FULL, 128, 32, 300)
    folder = out or (Path("/tmp") if quick else HERE)
    here: dict[str, Any] = {**environment_document(this_machine()), "threads": threads}
    here |= {"date": f"{datetime.now(UTC):%F %T}", "load_average": os.getloadavg()}
    here["command"] = " ".join(["python", *sys.argv])

    def text(number: int) -> Tensor:
        dice = torch.Generator().manual_seed(1 + number)
        return torch.randint(sizes["vocab_size"], (1, prompt + new), generator=dice)

    trained, held_out = trained_subjects(steps, prompt, new)
    document: dict[str, Any] = {"session": here}
    document["trained"] = {"type": "float32", "steps": steps}
    document["trained"] |= measured(trained, held_out, prompt, new, rounds)
    document["random"] = {"type": "bfloat16", "sizes": sizes}
    document["random"] |= measured(random_subjects(sizes, prompt), text, prompt, new, rounds)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_by_format.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "generation_by_format.txt").write_text(summary(document))
    typer.echo(summary(document))


if __name__ == "__main__":
    typer.run(main)
