"""Generation on this CPU: a random Qwen3-MoE of a billion parameters, and a small model trained here.

    python measurements/cpu/generation.py experts    ours beside Transformers' own experts; 5 minutes, 6 GB
    python measurements/cpu/generation.py formats    by the format of the experts' weights; 7 minutes, 12 GB
    ... --quick                                      tiny, written to /tmp, to see that it works

`experts` writes generation.json and .txt, `formats` generation_by_format.json and .txt.

The random model has the layers of Qwen3-30B-A3B (D=2048, F=768, 8 experts a token, 32 heads of 128, 4 of them
for keys and values), 64 experts instead of 128 and 3 layers instead of 48, in bfloat16. The vocabulary is
8192: at 3 layers the head then has the share of the bytes of a token that it has in the original, a tenth.
The trained model is that of `mrb model formats --text`, in float32; its loss is taken through the timed
kernels.

Ours are frozen by plugin.freeze; "ours everywhere" has our attention and dense matrices too. In `experts`,
batched_mm copies the weights of every chosen expert for every token, 26 GB a layer for this prompt, so it
takes part in decode only, after a prefill by ours. In `formats`,
before anything is timed, the logits of a prompt are held to a float32 model with the weights that the format
keeps: their error (root mean square, relative) is at most twice that of plain torch in bfloat16 with the same
roundings.

Every round times both phases of every subject once, in a new order, on one text per round: the prompt in one
call that keeps the logits of the last token, as generate() does, then calls of one token each. Tokens are
given, not chosen, so that all do the same work. A ratio is the median over rounds of a subject's time over
ours in the same round, with an interval of 95 %, both by bench/verdict.py; a whole model is not something the
harness can time.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_routing_bench.models.transformers as plugin
from moe_routing_bench import MoE
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.host import environment_document
from moe_routing_bench.formats.named import INT8_ROWS, quantise
from moe_routing_bench.models.reading import experts_modules, read, weights_of
from moe_routing_bench.models.running import make_plan
from moe_routing_bench.ops.expert_ffn.op import op as expert_ffn
from moe_routing_bench.train.loop import Ended, evaluate, train
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Rule, Run
from moe_routing_bench.train.text import read_texts

HERE = Path(__file__).parent
PHASES = ("prefill", "decode")
FULL = {
    "vocab_size": 8192, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "norm_topk_prob": True,
}  # fmt: skip
TINY = FULL | {"vocab_size": 97, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
TINY |= {"num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
OURS, BATCHED = plugin.NAME, "batched_mm"
WHOLE = "ours everywhere"  # experts, attention, dense matrices
NATIVE = "native"
STORES = ("int8", "int8_a8", "int4_g128", "int4_g128_a8", "mxfp4", "mxfp4_a8")
STORED = {NATIVE: "", **{f"native(store={store})": store for store in STORES}}
TEXTS = [
    HERE.parents[1] / name
    for name in ("DESIGN.md", "docs/figures.md", "docs/gpu.md", "docs/quality.md", "CHANGELOG.md",
                 "README.md", "docs/routers.md", "docs/parallel.md")
]  # fmt: skip
app = typer.Typer(help=__doc__, add_completion=False)
Rounds = Annotated[int, typer.Option(min=5, help="samples of each")]
Threads = Annotated[int, typer.Option(help="torch's threads")]
Quick = Annotated[bool, typer.Option(help="a tiny model, written to /tmp")]


@dataclass(kw_only=True)
class Subject:
    """prefill(prompt) gives what decode(that, token) goes on from; facts: bytes, errors, loss."""

    prefill: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Any]
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    @torch.no_grad()
    def run(self, text_BN: Tensor, prompt: int) -> dict[str, float]:
        """Seconds by phase."""
        began = time.perf_counter()
        state = self.prefill(text_BN[:, :prompt])
        between = time.perf_counter()
        for n in range(prompt, text_BN.shape[1]):
            self.decode(state, text_BN[:, n : n + 1])
        return {"prefill": between - began, "decode": time.perf_counter() - between}


def make_model(sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(tie_word_embeddings=True, **sizes)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def generating(model: Any, experts: str, attention: str = "sdpa") -> Subject:
    def prefill(token_BN: Tensor) -> Any:
        model.set_experts_implementation(experts)
        model.set_attn_implementation(attention)
        return model(token_BN, use_cache=True, logits_to_keep=1).past_key_values

    def decode(cache: Any, token_B1: Tensor) -> Any:
        return model(token_B1, past_key_values=cache, use_cache=True)

    return Subject(prefill=prefill, decode=decode)


def text_of(sizes: dict[str, Any], length: int, seed: int) -> Tensor:
    return torch.randint(sizes["vocab_size"], (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: Any, text_BN: Tensor, experts: str) -> Tensor:
    model.set_experts_implementation(experts)
    return model(text_BN).logits[0].float()


def measured(
    subjects: Mapping[str, Subject], text: Callable[[int], Tensor], prompt: int, rounds: int, ours: str
) -> dict[str, dict[str, Any]]:
    """By subject its facts, and by phase tokens a second, the ratio to ours, and all samples."""
    dice = random.Random(0)
    for number in range(-1, rounds):  # the first calls are not kept
        for name in dice.sample(sorted(subjects), len(subjects)):
            seconds = subjects[name].run(text(max(0, number)), prompt)
            for phase in PHASES if number >= 0 else ():
                subjects[name].seconds[phase].append(seconds[phase])
        typer.echo(f"round {number + 1} of {rounds}", err=True)
    document: dict[str, dict[str, Any]] = {}
    for name, subject in subjects.items():
        document[name] = dict(subject.facts)
        for phase, tokens in zip(PHASES, (prompt, text(0).shape[1] - prompt), strict=True):
            samples = subject.seconds[phase]
            ratio = compare(subjects[ours].seconds[phase], samples, confidence=0.95)
            document[name][phase] = {
                "tokens_per_second": tokens / median(samples),
                "ratio": (1.0, 1.0, 1.0) if name == ours else (ratio.ratio, *ratio.interval),
                "samples_ms": [float(f"{s * 1e3:.5g}") for s in samples],
            }
    return document


def inside_experts(
    subject: Subject, models: list[nn.Module], text_BN: Tensor, prompt: int
) -> dict[str, float]:
    """What part of each phase passes inside the experts modules."""
    spent: list[float] = []
    started = [0.0]

    def before(*_: Any) -> None:
        started[0] = time.perf_counter()

    def after(*_: Any) -> None:
        spent.append(time.perf_counter() - started[0])

    hooks = []
    for module in [module for model in models for _, module in experts_modules(model)]:
        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    seconds = subject.run(text_BN, prompt)
    for hook in hooks:
        hook.remove()
    layers = len(list(experts_modules(models[0])))
    return {
        "prefill": sum(spent[:layers]) / seconds["prefill"],
        "decode": sum(spent[layers:]) / seconds["decode"],
    }


@app.command()
def experts(rounds: Rounds = 15, threads: Threads = 2, quick: Quick = False) -> None:
    """Our plug-in beside Transformers' own experts."""
    here = session(threads)
    sizes, prompt, new = (TINY, 16, 4) if quick else (FULL, 512, 64)
    original = make_model(sizes)
    frozen = copy.deepcopy(original)
    plugin.freeze(frozen)  # as people would for inference
    whole = copy.deepcopy(original)
    plugin.freeze(whole, linears=True)
    subjects = {OURS: generating(frozen, OURS), WHOLE: generating(whole, OURS, plugin.NAME)}
    subjects |= {name: generating(original, name) for name in ("eager", "grouped_mm")}

    def batched(cache: Any, token_B1: Tensor) -> Any:
        original.set_experts_implementation(BATCHED)
        return original(token_B1, past_key_values=cache, use_cache=True)

    subjects[BATCHED] = Subject(prefill=subjects[OURS].prefill, decode=batched)
    first_BN = text_of(sizes, prompt, 0)
    ours, eager = (logits_of(frozen, first_BN, OURS)[-1], logits_of(original, first_BN, "eager")[-1])
    for subject in subjects.values():
        subject.run(text_of(sizes, prompt + new, 0), prompt)  # the first calls pack
        share = inside_experts(subject, [original, frozen, whole], text_of(sizes, prompt + new, 1), prompt)
        subject.facts["inside_experts"] = share
    document: dict[str, Any] = {
        "session": here,
        "parameters": sum(p.numel() for p in original.parameters()),
        "sizes": sizes,
        "prompt": prompt,
        "new": new,
        "implementations": [str(implementation) for implementation in plugin.implementations(frozen)],
        "difference": (ours - eager).abs().max().item(),
        "largest_logit": eager.abs().max().item(),
        "subjects": measured(subjects, partial(text_of, sizes, prompt + new), prompt, rounds, OURS),
    }
    del document["subjects"][BATCHED]["prefill"]
    keep("generation", document, experts_summary(document), quick)


def experts_summary(document: dict[str, Any]) -> str:
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
        for name, subject in document["subjects"].items():
            if phase in subject:
                middle, low, high = subject[phase]["ratio"]
                each = 1e3 / subject[phase]["tokens_per_second"]
                lines.append(
                    f"{phase:8}  {name:18}{tokens * each:10.1f}{each:10.3f}   "
                    f"{middle:5.2f} ({low:.2f} .. {high:.2f})   {subject['inside_experts'][phase]:12.0%}"
                )
    lines += ["", *document["implementations"]]
    lines.append(f"largest difference of logits to eager: {document['difference']:.3g}")
    return "\n".join(lines) + "\n"


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


def error(got: Tensor, right: Tensor) -> float:
    return float((got - right).square().mean().sqrt() / right.square().mean().sqrt())


def references(original: nn.Module, text_BN: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By implementation, logits with the weights it keeps: in float32, and of plain torch in bfloat16."""
    known = {}
    for name in dict.fromkeys(store.removesuffix(INT8_ROWS) for store in STORED.values()):
        model = copy.deepcopy(original).float()
        if name:
            keep_what_is_stored(model, name)
        right = logits_of(model, text_BN, "eager")
        model.bfloat16()
        for impl, store in STORED.items():
            if store.removesuffix(INT8_ROWS) == name:
                ALL_EXPERTS_FUNCTIONS.register(f"plain {impl}", partial(plain_experts, impl=impl))
                known[impl] = right, logits_of(model, text_BN, f"plain {impl}")
    return known


def random_subjects(sizes: dict[str, Any], prompt: int) -> dict[str, Subject]:
    original = make_model(sizes)
    text_BN = text_of(sizes, prompt, 0)
    known = references(original, text_BN)
    exact, _ = known[NATIVE]

    def subject(model: Any, experts: str) -> Subject:
        logits = logits_of(model, text_BN, experts)
        loss = torch.nn.functional.cross_entropy(logits[:-1], text_BN[0, 1:]).item()
        facts = {**bytes_of(model), "loss": loss, "error_to_float32": error(logits, exact)}
        if (impl := experts.removeprefix(f"{plugin.NAME}:")) in known:
            right, plain = known[impl]
            facts |= {"error_to_stored": error(logits, right), "most": 2 * error(plain, right)}
            typer.echo(f"{impl}: {facts}", err=True)
            if not facts["error_to_stored"] <= facts["most"]:
                raise RuntimeError(f"{impl}: the error of the logits is more than twice that of plain torch")
        return replace(generating(model, experts), facts=facts)

    subjects = {name: subject(original, name) for name in ("eager", "grouped_mm")}
    for impl in STORED:
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
    return {impl: subject(impl) for impl in STORED}, lambda n: pieces[n % len(pieces)][None, : prompt + new]


@app.command()
def formats(rounds: Rounds = 15, threads: Threads = 2, quick: Quick = False) -> None:
    """The same model and a trained one, by the format of the experts' weights."""
    here = session(threads)
    sizes, prompt, new, steps = (TINY, 16, 4, 5) if quick else (FULL, 128, 32, 300)
    document: dict[str, Any] = {"session": here}
    subjects, text = trained_subjects(steps, prompt, new)
    document["trained"] = {"type": "float32", "steps": steps, "prompt": prompt, "new": new}
    document["trained"]["subjects"] = measured(subjects, text, prompt, rounds, NATIVE)
    subjects = random_subjects(sizes, prompt)
    document["random"] = {"type": "bfloat16", "sizes": sizes, "prompt": prompt, "new": new}
    document["random"]["subjects"] = measured(
        subjects, lambda n: text_of(sizes, prompt + new, 1 + n), prompt, rounds, NATIVE
    )
    keep("generation_by_format", document, formats_summary(document), quick)


def formats_summary(document: dict[str, Any]) -> str:
    here = document["session"]
    cpu, load = here["machine"]["cpu"], here["load_average"][0]
    lines = [f"{here['threads']} threads, {cpu}, {here['date']}, load average before {load:.1f}"]
    heads = "".join(f"{phase + ' tokens/s':>20}{'time / native (95 %)':>24}" for phase in PHASES)
    for title in ("random", "trained"):
        model = document[title]
        prompt, new = model["prompt"], model["new"]
        lines += ["", f"{title}, {model['type']}: {prompt} tokens in one call, then {new} calls of one"]
        lines.append(f"{'experts':28}{'MB':>8}{'loss':>9}{heads}")
        for name, subject in model["subjects"].items():
            line = f"{name:28}{subject['experts_bytes'] / 1e6:8.1f}{subject['loss']:9.4f}"
            for phase in PHASES:
                middle, low, high = subject[phase]["ratio"]
                ratio = f"{middle:.3f} ({low:.3f} .. {high:.3f})"
                line += f"{subject[phase]['tokens_per_second']:20.1f}{ratio:>24}"
            lines.append(line)
    return "\n".join(lines) + "\n"


def session(threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    here = {**environment_document(this_machine()), "threads": threads, "date": f"{datetime.now(UTC):%F %T}"}
    return here | {"load_average": os.getloadavg(), "command": " ".join(["python", *sys.argv])}


def keep(name: str, document: dict[str, Any], text: str, quick: bool) -> None:
    folder = Path("/tmp") if quick else HERE
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{name}.txt").write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    app()
