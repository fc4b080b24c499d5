"""Our plug-in inside vLLM on this CPU: the same greedy tokens, every call judged, and what it gains.

    bash measurements/models/vllm_plugin.sh           builds the environment, then runs this file
    python measurements/models/vllm_plugin.py         in an environment that has vLLM and this package
    python measurements/models/vllm_plugin.py --part speed     one part again; the other stays in the file
    python measurements/models/vllm_plugin.py --quick          a small model to time, written to /tmp

1. Tiny random Qwen3-MoE, Mixtral and OLMoE, saved by Transformers, whose experts weigh enough to matter.
   Each is served twice, with the plug-in and without (MRB_VLLM=1). In float32 the greedy tokens must
   agree; in bfloat16, whose logits are often nearly equal, they may part where the two best are closer than
   GAP. With the plug-in every call of the experts is kept and judged (accuracy.py) against a float64 oracle;
   the other calls of a layer are the further data that few rows need. With experts that give zero, other
   tokens must come out.
2. Two layers as wide as Qwen3-30B-A3B's, 32 experts each, most of the parameters. Both engines live at once,
   each in a process of its own that is stopped (SIGSTOP) unless it is its turn. A round times each phase once
   in both, in random order, on the same prompts. Ratios are paired by round; CPU seconds stand beside wall
   seconds because other processes of a shared machine disturb them less.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

HERE = Path(__file__).parent
PLUGGED = {"with": "1", "without": None}  # MRB_VLLM
TINY: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 8, "norm_topk_prob": True, "head_dim": 32},
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 8},
    "Olmoe": {"intermediate_size": 64, "num_experts": 16},
}
SHARED = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}  # fmt: skip
LARGE = {
    "vocab_size": 8192, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 32,
    "num_experts_per_tok": 8, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 1024, "initializer_range": 0.02,
}  # fmt: skip
# prompts, tokens of each, new tokens of each
PHASES = {"prefill 256": (1, 256, 1), "decode, 1 sequence": (1, 8, 16), "decode, 16 sequences": (16, 8, 5)}
SAID = "vllm_plugin.log"
GAP = 0.1  # nats between the two best tokens


def save_model(family: str, sizes: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.set_default_dtype(dtype)
    try:
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)


def prompts_of(seed: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


class Engine:
    """vLLM with one model, in a process of its own; `ask` runs one of the functions below in it."""

    def __init__(self, folder: Path, plugged: str, dtype: str, log: Path):
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        settings = {
            "MRB_VLLM": PLUGGED[plugged], "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }  # fmt: skip
        self.pipe, self.log = ours, log
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, folder, dtype, log, settings), daemon=True
        )
        self.process.start()
        self.answer()

    def ask(self, what: str, *words: Any) -> Any:
        self.wake(True)
        self.pipe.send((what, words))
        return self.answer()

    def answer(self) -> Any:
        while not self.pipe.poll(1):
            if not self.process.is_alive():
                raise RuntimeError(f"vLLM ended; its last words:\n{self.log.read_text()[-4000:]}")
        got = self.pipe.recv()
        self.wake(False)
        return got

    def wake(self, on: bool) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGCONT if on else signal.SIGSTOP)

    def end(self) -> str:
        """Stops it; answers what the plug-in said in vLLM's log."""
        self.wake(True)
        self.process.kill()
        self.process.join()
        lines = self.log.read_text().splitlines()
        return "\n".join(line for line in lines if "moe-routing-bench" in line)


def serve(pipe: Any, folder: Path, dtype: str, log: Path, settings: dict[str, str | None]) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name, value in settings.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    from vllm import LLM

    llm = LLM(
        str(folder), enforce_eager=True, skip_tokenizer_init=True, dtype=dtype, max_model_len=1024,
        enable_prefix_caching=False,
    )  # fmt: skip
    pipe.send("ready")
    while True:
        what, words = pipe.recv()
        pipe.send(globals()[what](llm, *words))


def generate(llm: Any, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
    """Tokens, wall seconds, CPU seconds of all threads."""
    started, used = time.perf_counter(), time.process_time()
    out = _generate(llm, prompts, new)
    spent = time.perf_counter() - started, time.process_time() - used
    return [list(output.token_ids) for output in out], *spent


def generate_with_gaps(llm: Any, prompts: list[list[int]], new: int) -> list[list[tuple[int, float]]]:
    """Every token, and how far the second best was behind the best."""
    found = []
    for output in _generate(llm, prompts, new, logprobs=2):
        best = [sorted((p.logprob for p in position.values()), reverse=True) for position in output.logprobs]
        found.append([(token, two[0] - two[1]) for token, two in zip(output.token_ids, best, strict=True)])
    return found


def _generate(llm: Any, prompts: list[list[int]], new: int, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True, **more)
    out = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
    return [request.outputs[0] for request in out]


@dataclass
class Call:
    """What the experts of one layer were given, and what they gave."""

    layer: int
    args: dict[str, Any]
    y_TD: torch.Tensor


def judged(llm: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Generates once more, keeps every call of our experts, and judges each."""
    from moe_routing_bench.core.accuracy import Expected
    from moe_routing_bench.models import vllm as plugin
    from moe_routing_bench.models.running import make_plan
    from moe_routing_bench.ops.expert_ffn.op import op

    calls: list[Call] = []
    plain: dict[int, Any] = {}  # by the address of the packed weights
    real = plugin.run_experts

    def kept(x_TD: Any, expert_TK: Any, gate_TK: Any, weights: Any, impl: str) -> Any:
        y_TD = real(x_TD, expert_TK, gate_TK, weights, impl)
        layer = weights.w_in_EDG.panels.data_ptr()
        if layer not in plain:
            thawed = {n: t.clone() for n, t in weights.tensors().items()}
            plain[layer] = type(weights)(**thawed, activation=weights.activation)
        gates, plan = make_plan(expert_TK, gate_TK, plain[layer])
        args = {"x_TD": x_TD.clone(), "gate_TK": gates.clone(), "plan": plan, "weights": plain[layer]}
        calls.append(Call(layer, args, y_TD.clone()))
        return y_TD

    plugin.run_experts = kept
    generate(llm, prompts, new)
    plugin.run_experts = real
    right: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for call in calls:
            x, gate, plan, weights = call.args.values()
            exact = op.reference(x.double(), gate.double(), plan, weights.to(dtype=torch.float64))
            right.append((exact, op.reference(x, gate, plan, weights)))
    wrong, worst = [], 0.0
    for number, call in enumerate(calls):
        others = [right[i] for i, c in enumerate(calls) if c.layer == call.layer and i != number][:8]
        expected = Expected(oracle=right[number][0], baseline=right[number][1], more=lambda n, o=others: o)
        for verdict in op.judge(call.y_TD, expected, call.args):
            wrong += [] if verdict.passed else [verdict.sentence]
            worst = max(worst, verdict.max_error / verdict.max_bound if verdict.max_bound else 0.0)
    tokens = [call.y_TD.shape[0] for call in calls]
    return {"calls": len(calls), "tokens": [min(tokens), max(tokens)], "wrong": wrong, "worst": worst}


def without_experts(llm: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    from moe_routing_bench.models import vllm as plugin

    real = plugin.run_experts
    plugin.run_experts = lambda x_TD, *rest: torch.zeros_like(x_TD)
    tokens, *_ = generate(llm, prompts, new)
    plugin.run_experts = real
    return tokens


def prove(family: str, dtype: str, scratch: Path) -> dict[str, Any]:
    folder = scratch / f"{family}-{dtype}"
    save_model(family, SHARED | TINY[family], folder, getattr(torch, dtype))
    prompts = [prompts_of(n, 1, length, 512)[0] for n, length in enumerate((1, 7, 40, 200))]
    found: dict[str, Any] = {"model": family, "dtype": dtype}
    by: dict[str, list[list[tuple[int, float]]]] = {}
    for plugged in PLUGGED:
        engine = Engine(folder, plugged, dtype, scratch / SAID)
        by[plugged] = engine.ask("generate_with_gaps", prompts, 12)
        if plugged == "with":
            found["tokens"] = [[token for token, _ in row] for row in by["with"]]
            found["judge"] = engine.ask("judged", prompts, 12)
            found["experts matter"] = engine.ask("without_experts", prompts, 12) != found["tokens"]
        found[f"log {plugged}"] = engine.end()
    found["gaps where tokens part"] = [
        next(max(a[1], b[1]) for a, b in zip(*rows, strict=True) if a[0] != b[0])
        for rows in zip(*by.values(), strict=True)
        if any(a[0] != b[0] for a, b in zip(*rows, strict=True))
    ]
    found["median gap"] = median(gap for row in by["with"] for _, gap in row)
    nearly = dtype == "bfloat16" and all(gap < GAP for gap in found["gaps where tokens part"])
    found["right"] = bool(found["experts matter"] and not found["judge"]["wrong"])
    found["right"] &= nearly or not found["gaps where tokens part"]
    return found


def fallback(scratch: Path) -> str:
    """What is said about a model that we cannot serve, here one in float16, which vLLM then serves itself."""
    engine = Engine(scratch / "Qwen3Moe-float32", "with", "float16", scratch / SAID)
    engine.ask("generate", prompts_of(0, 1, 8, 512), 4)
    return engine.end()


def timed(sizes: dict[str, Any], rounds: int, scratch: Path) -> dict[str, Any]:
    folder = scratch / "large"
    save_model("Qwen3Moe", sizes, folder, torch.bfloat16)
    engines = {p: Engine(folder, p, "bfloat16", scratch / f"{p}.log") for p in PLUGGED}
    order = random.Random(0)
    samples: dict[str, dict[str, list[list[float]]]] = {f: {p: [] for p in PLUGGED} for f in PHASES}
    same = dict.fromkeys(PHASES, 0)
    for number in range(-1, rounds):  # the first is not counted
        for phase, (count, length, new) in PHASES.items():
            prompts, tokens = prompts_of(number, count, length, sizes["vocab_size"]), {}
            for plugged in order.sample(list(PLUGGED), 2):
                tokens[plugged], *spent = engines[plugged].ask("generate", prompts, new)
                if number >= 0:
                    samples[phase][plugged].append(spent)
            same[phase] += number >= 0 and tokens["with"] == tokens["without"]
        typer.echo(f"round {number + 1} of {rounds}: {json.dumps(samples)}", err=True)
    said = {plugged: engine.end() for plugged, engine in engines.items()}
    return {"sizes": sizes, "samples": samples, "same": same, "log": said, "rounds": rounds}


def header(here: dict[str, Any]) -> str:
    return (
        f"vLLM {here['vllm']} (community build vllm-cpu), torch {torch.__version__}, 2 threads, "
        f"{here['machine']['cpu']}, level {here['level']}, load {here['load']:.0f}, "
        f"commit {here['source']['commit'][:12]}, {here['date']}, {here['command']}"
    )


def proof_lines(proofs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for proof in proofs:
        judge, (few, many) = proof["judge"], proof["judge"]["tokens"]
        parted = ", ".join(f"{gap:.3f}" for gap in proof["gaps where tokens part"])
        parted = f"tokens part where the two best are {parted} nats apart" if parted else "the same tokens"
        lines += [
            f"{proof['model']} {proof['dtype']}: {'right' if proof['right'] else 'WRONG'}. With and without "
            f"the plug-in {parted} (half of all gaps below {proof['median gap']:.2f}); "
            f"{judge['calls']} calls of {few} to {many} tokens judged, {len(judge['wrong'])} wrong, "
            f"largest error {judge['worst']:.2f} of the bound; "
            f"without experts {'other' if proof['experts matter'] else 'THE SAME'} tokens",
            *proof["log with"].splitlines()[-1:],
        ]
    return lines


def speed_lines(large: dict[str, Any]) -> list[str]:
    from moe_routing_bench.bench.verdict import compare

    lines = [
        f"{large['sizes']}, bfloat16, {large['rounds']} rounds; ratio: vLLM's own / plug-in, 95 %",
        f"{'':22}{'plug-in ms':>12}{'vLLM ms':>10}  {'wall ratio':22}{'CPU ratio':22}same tokens",
    ]
    for phase, by in large["samples"].items():
        row = f"{phase:22}"
        for plugged, width in (("with", 12), ("without", 10)):
            row += f"{median(wall for wall, _ in by[plugged]) * 1e3:{width}.0f}"
        for clock in (0, 1):
            with_it, without = ([sample[clock] for sample in by[plugged]] for plugged in PLUGGED)
            found = compare(with_it, without, confidence=0.95)
            row += f"  {found.ratio:5.2f} ({found.interval[0]:.2f} .. {found.interval[1]:.2f})"
        lines.append(f"{row}   {large['same'][phase]} of {large['rounds']}")
    return [*lines, *large["log"]["with"].splitlines()[-1:]]


def session() -> dict[str, Any]:
    import vllm.version

    from moe_routing_bench.core import cpp
    from moe_routing_bench.core.machine import this_machine
    from moe_routing_bench.fleet.host import environment_document

    return {
        **environment_document(this_machine()),
        "vllm": vllm.version.__version__,
        "level": cpp.best_level(),
        "load": os.getloadavg()[0],
        "command": " ".join(["python", *sys.argv]),
        "date": f"{datetime.now(UTC):%F %T}",
    }


def main(
    part: Annotated[str, typer.Option(help="proofs, speed or all")] = "all",
    rounds: Annotated[int, typer.Option(help="pairs of samples of each phase")] = 12,
    scratch: Annotated[Path, typer.Option(help="where models and logs go")] = Path("/tmp/vllm_plugin"),
    quick: Annotated[bool, typer.Option(help="few rounds of a small model, written to /tmp")] = False,
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path("/tmp") if quick else HERE
    kept = folder / "vllm_plugin.json"
    document: dict[str, Any] = json.loads(kept.read_text()) if part != "all" and kept.exists() else {}
    if part in ("proofs", "all"):
        proofs = []
        for family in TINY:
            for dtype in ("float32", "bfloat16"):
                proofs.append(prove(family, dtype, scratch))
                typer.echo(json.dumps(proofs[-1]), err=True)
        document["proofs"] = {"session": session(), "found": proofs, "fallback": fallback(scratch)}
    if part in ("speed", "all"):
        sizes = LARGE | (
            {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8} if quick else {}
        )
        document["speed"] = {"session": session(), "found": timed(sizes, 5 if quick else rounds, scratch)}
    lines = []
    for name, say in (("proofs", proof_lines), ("speed", speed_lines)):
        if name in document:
            lines += [header(document[name]["session"]), *say(document[name]["found"])]
            lines += [document[name].get("fallback", ""), ""]
    kept.write_text(json.dumps(document, indent=1) + "\n")
    (folder / "vllm_plugin.txt").write_text("\n".join(lines))
    typer.echo("\n".join(lines))
    proofs = document.get("proofs", {"found": [], "fallback": "vLLM's own experts run"})
    if not all(proof["right"] for proof in proofs["found"]) or "vLLM's own" not in proofs["fallback"]:
        raise SystemExit("the plug-in is wrong somewhere, see above")


if __name__ == "__main__":
    typer.run(main)
