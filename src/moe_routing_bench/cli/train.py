"""mrb train: language models that differ in their routing rule alone, and what each rule costs.

Training runs as a function returns them: mrb.train(["switch", "softmax_topk"], steps=100).runs
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType

from moe_routing_bench.bench.cores import core_count
from moe_routing_bench.cli.options import Json, fail, show_json, user_mistakes, with_options
from moe_routing_bench.cli.results import Displayed, Table, temporary_folder
from moe_routing_bench.core.fork_server import without_main_module
from moe_routing_bench.core.machine import torch_threads
from moe_routing_bench.core.names import did_you_mean, one_of, parse_spec
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report.console import Bar, bar, fitted, minutes, say, show
from moe_routing_bench.report.training_figures import draw_study
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.train.loop import Evaluated, Event, Stepped
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.pareto import Pareto, pareto, sentences
from moe_routing_bench.train.predicting import predicted
from moe_routing_bench.train.records import execute, load_model, run_folder
from moe_routing_bench.train.settings import Rule, Run, Size
from moe_routing_bench.train.study import TIMES, Ongoing, StudyRun, said_step
from moe_routing_bench.train.study_rules import RATES, rule_for, studies
from moe_routing_bench.train.text import Corpus, read_corpus, read_dataset, read_texts, synthetic

SYNTHETIC = "synthetic"
LONG_SECONDS = 120.0  # a study that takes longer names --quick
# of --quick: a small model, few steps, one seed, one learning rate
QUICK = {
    "steps": 100, "seeds": 1, "evaluations": 2, "pieces": 8, "rounds": 8, "rate": 3e-3,
    "sizes": "layers=1,D=64,F=64,sequence=64",
}  # fmt: skip

Out = Annotated[Path, typer.Option(help="The folder for runs and results; they go on from there.")]


def _quick(context: typer.Context, given: bool) -> bool:
    if given:
        context.default_map = {**(context.default_map or {}), **QUICK}
    return given


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a model is trained, on which text."""

    seed: Annotated[int, typer.Option(min=0, help="The seed of a run; in a study the first one.")] = 0
    steps: Annotated[int, typer.Option(min=1, max=10_000_000, help="Optimiser steps of a run.")] = 600
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 4
    evaluations: Annotated[int, typer.Option(min=1, help="Times the held-out loss is taken.")] = 8
    pieces: Annotated[int, typer.Option(min=1, help="Sequences of held-out text it is taken on.")] = 48
    text: Annotated[
        list[Path] | None, typer.Option(help="A text to learn; its end is held out. Repeatable.")
    ] = None
    corpus: Annotated[
        str | None, typer.Option(help=f"A folder of texts, or `{SYNTHETIC}`, which is the default.")
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="A dataset of the Hugging Face Hub with a column `text`.")
    ] = None
    sizes: Annotated[
        str, typer.Option(help="Other sizes of the model: layers=2,D=64,F=64,E=4,sequence=128.")
    ] = ""
    rate: Annotated[
        float | None,
        typer.Option(help="The learning rate; in a study that of every rule, and none is chosen."),
    ] = None
    autocast: Annotated[bool, typer.Option("--autocast", help="Matrix products in bfloat16.")] = False
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            is_eager=True,
            callback=_quick,
            help="A first look in about a minute: a small model, 100 steps, one seed.",
        ),
    ] = False

    def learnt(self) -> Corpus:
        if sum(given is not None for given in (self.text or None, self.corpus, self.dataset)) > 1:
            raise ValueError("--text, --corpus and --dataset each name the text; give one of them")
        if self.text:
            return read_texts(self.text)
        if self.dataset is not None:
            return read_dataset(self.dataset)
        return synthetic() if self.corpus in (None, SYNTHETIC) else read_corpus(Path(self.corpus))

    def run(self, study: str | None = None) -> Run:
        return Run(
            rule=Rule(name="like"), size=_sizes(self.sizes, study), steps=self.steps, batch=self.batch,
            autocast=self.autocast, warmup=min(40, max(1, self.steps // 5)), evaluations=self.evaluations,
            pieces=self.pieces, seed=self.seed,
        )  # fmt: skip

    def say_text(self) -> None:
        if not self.text and self.corpus is None and self.dataset is None:
            say(f"text: the corpus `{SYNTHETIC}`, made up; --text FILE or --corpus FOLDER for a real one")


@with_options
def run_command(
    router: Annotated[str, typer.Argument(help='A router, such as switch or "top_p(p=0.5)"; or dense.')],
    out: Out,
    how: TrainOptions,
    sees_future: Annotated[
        bool, typer.Option("--sees-future", help="Accept a router that looks at later tokens.")
    ] = False,
    sink: Annotated[str | None, typer.Option(help="Also send losses to trackio or wandb.")] = None,
    as_json: Json = False,
) -> None:
    """Train one small language model. Stop it at any time: the same command goes on.

    \b
    Examples:
      mrb train run switch --steps 20 --out first
      mrb train run "top_p(p=0.5)" --text a.txt --text b.txt --out mine

    Without --text, --corpus or --dataset the text is made up (two languages of
    40 words), the same everywhere.
    """
    with user_mistakes():
        corpus, like = how.learnt(), how.run()
        run = replace(
            like, rule=rule_named(router, like.size), learning_rate=how.rate or 3e-3, sees_future=sees_future,
            corpus=corpus.hash[:16],
        )  # fmt: skip
    how.say_text()
    _one(run, corpus, out, sink, as_json)


@with_options
def study_command(
    study: Annotated[str, typer.Argument(help=f"One of {', '.join(studies())}.")],
    out: Out,
    how: TrainOptions,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each rule.")] = 3,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Runs side by side, one thread each. Default: all cores."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this rule of the study. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=8, help="Rounds in which steps are timed.")] = 30,
    as_json: Json = False,
) -> None:
    """Train small language models that differ in one thing, and say what it cost.

    \b
    Examples:
      mrb train study routers --quick --out look
      mrb train study routers --seeds 3 --out routers
      mrb train study capacity --text a.txt --text b.txt --out capacity

    A study chooses a learning rate for each rule, trains every rule with every
    seed on the same bytes from the same weights, then times the steps of all
    rules in turns. Stop it at any time: the same command goes on.
    Without --text, --corpus or --dataset the text is made up (two languages of
    40 words), the same everywhere.
    """
    with user_mistakes():
        work = StudyRun(
            study, how.learnt(), out, like=how.run(study), seeds=seeds, jobs=jobs or core_count(),
            only=tuple(only or ()), rates=RATES if how.rate is None else (how.rate,),
        )  # fmt: skip
    how.say_text()
    _study(work, rounds, as_json)


def pareto_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a study.")],
    out: Annotated[Path | None, typer.Option(help="Where pictures and JSON go. Default: FOLDER.")] = None,
    as_json: Json = False,
) -> None:
    """What each rule reached and what it cost: a table, pareto.json, and pictures."""
    with user_mistakes():
        reached = pareto(folder)
        target = folder if out is None else out
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / "pareto.json", json.dumps(reached.to_dict(), indent=1) + "\n")
        drawn = draw_study(folder, reached, target)
    if as_json:
        show_json(reached.to_dict())
        return
    show(*table(reached), "", *sentences(reached), "", *_notes(reached))
    show(f"Written: {', '.join(str(target / name) for name in ('pareto.json', *drawn))}")


def predict_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a study.")],
    layers: Annotated[Path, typer.Option(help="A results folder of mrb bench layer --direction train.")],
    as_json: Json = False,
) -> None:
    """The time of each rule's step beside what the layer benchmark predicts for it."""
    with user_mistakes():
        rows = predicted(folder, layers)
    if as_json:
        show_json([{**vars(one), "gap": one.gap} for one in rows])
        return
    numbers = {
        "layer ms": [f"{one.layer:.2f}" for one in rows],
        "predicted ms": [
            f"{one.predicted:.1f} ({one.between[0]:.1f} to {one.between[1]:.1f})" for one in rows
        ],
        "step ms": [f"{one.step:.1f}" for one in rows],
        "gap": [f"{100 * one.gap:+.1f} %" for one in rows],
    }
    show(*fitted({"rule": [one.rule for one in rows]}, numbers))


def show_command(
    folder: Annotated[Path, typer.Argument(help="A folder that mrb train wrote.")], as_json: Json = False
) -> None:
    """The finished runs of a folder, one a line."""
    with user_mistakes():
        runs = read_trainings(folder)
    if as_json:
        show_json([one.model_dump(mode="json") for one in runs])
        return
    show_runs(runs)


def show_runs(runs: Sequence[Training]) -> None:
    words = {"rule": [one.rule for one in runs], "study": [one.study for one in runs]}
    numbers = {
        "seed": [str(one.seed) for one in runs],
        "steps": [str(one.steps) for one in runs],
        "rate": [f"{one.learning_rate:g}" for one in runs],
        "held-out": [f"{one.loss:.4f}" for one in runs],
        "training": [f"{one.training_loss:.4f}" for one in runs],
        "ms/step": [f"{1e3 * one.step_seconds:.0f}" for one in runs],
        "tokens/s": [f"{one.tokens_per_second:,.0f}" for one in runs],
        "MiB": [f"{one.peak_bytes / 2**20:.0f}" for one in runs],
    }
    show(*fitted(words, numbers))


def _study(work: StudyRun, rounds: int, as_json: bool) -> None:
    out = work.folder
    with user_mistakes():
        seconds = work.estimate(rounds=rounds)
        first_look = "; --quick is a first look in about a minute" if seconds > LONG_SECONDS else ""
        say(f"study {work.name}: about {minutes(seconds)} minutes on {work.jobs} cores{first_look}")
        with bar(f"study {work.name}") as shown:
            try:
                work.run(partial(show_study, shown), rounds=rounds)
            except KeyboardInterrupt:
                fail(f"stopped; the same command goes on from what is in {out}")
    if not work.study.only_times:
        pareto_command(out, None, as_json)
        return
    times = json.loads((out / TIMES).read_text())["seconds"]
    if as_json:
        show_json(times)
        return
    steps = [f"{1e3 * median(values):.1f}" for values in times.values()]
    show(*fitted({"rule": [*times]}, {"ms/step": steps}))


def _one(run: Run, corpus: Corpus, out: Path, sink: str | None, as_json: bool) -> None:
    send = _sink(sink, run)
    with user_mistakes(), bar(run.rule.name) as shown:
        collapsed: set[str] = set()

        def on_event(event: Event) -> None:
            if isinstance(event, Stepped):
                show_step(shown, run, event)
                send({"loss": event.loss, "learning_rate": event.learning_rate}, event.step)
            elif isinstance(event, Evaluated):
                send({f"held_out/{name}": value for name, value in event.losses.items()}, event.step)
                for layer in event.collapsed.keys() - collapsed:
                    collapsed.add(layer)
                    say(f"layer {layer} has collapsed at step {event.step}: {event.collapsed[layer]}")

        try:
            record = execute(run, corpus, out, on_event=on_event)
        except KeyboardInterrupt:
            fail(f"stopped; the same command goes on from what is in {out}")
    if as_json:
        show_json(record.model_dump(mode="json"))
        return
    _show_run(record, out)


def show_study(shown: Bar, ongoing: Ongoing) -> None:
    shown.update(ongoing.share, 1, phase=ongoing.phase, now="; ".join(ongoing.now))


def show_step(shown: Bar, run: Run, event: Stepped) -> None:
    rate = run.batch * run.size.sequence / sum(event.seconds.values())
    now = f"{said_step(event.step, run.steps, event.loss)}, {rate:,.0f} tokens/s"
    shown.update(event.step, run.steps, phase="training", now=now)


def _show_run(one: Training, out: Path) -> None:
    show(
        f"{one.rule}, seed {one.seed}: held-out loss {one.loss:.4f} nats per byte "
        f"({one.bits_per_byte:.3f} bits, perplexity {one.perplexity:.2f}) after {one.steps} steps "
        f"of {one.tokens // one.steps:,} bytes",
        f"training loss {one.training_loss:.4f}; {one.seconds:.1f} s in steps, {one.tokens_per_second:,.0f} "
        f"tokens/s on {one.threads} thread{'s' if one.threads > 1 else ''}; "
        + ", ".join(f"{part} {100 * share:.0f} %" for part, share in one.parts.items()),
        f"{one.parameters:,} parameters, {one.active_parameters:,.0f} active; "
        f"{one.flops_per_token / 1e6:.2f} MFLOP a token forward; {one.peak_bytes / 2**20:.0f} MiB at most",
        *(f"collapsed: {sentence}" for sentence in one.collapsed),
        f"Kept in {run_folder(out, one.key)}; `mrb train show {out}` lists all runs there.",
    )


def table(reached: Pareto) -> list[RenderableType]:
    rows = reached.standings
    numbers = {
        "held-out": [one.loss.said() for one in rows],
        f"from {reached.baseline}": [
            "-" if one.rule == reached.baseline else one.difference.said("+") for one in rows
        ],
        "equal seconds": [f"{one.at_equal_seconds.mean:.3f}" for one in rows],
        "ms/step": [f"{1e3 * one.step_seconds:.0f}" for one in rows],
        "ratio": [f"{one.step_ratio:.2f}" for one in rows],
        "MFLOP": [f"{one.flops_per_token / 1e6:.2f}" for one in rows],
        "params": [f"{one.parameters / 1e6:.2f} M" for one in rows],
        "MiB": [f"{one.peak_bytes / 2**20:.0f}" for one in rows],
        "experts": [f"{one.experts_per_token:.2f}" if one.max_violation is not None else "-" for one in rows],
        "max vio": ["-" if one.max_violation is None else f"{one.max_violation:.2f}" for one in rows],
        "rate": [f"{one.learning_rate:g}" for one in rows],
        "decode 8": [f"{one.decode[8]:,.0f}" if 8 in one.decode else "-" for one in rows],
    }
    return fitted(
        {"rule": [one.title for one in rows]},
        numbers,
        spare=("rate", "MiB", "max vio", "experts", "decode 8", "MFLOP"),
    )


def _notes(reached: Pareto) -> list[str]:
    made = reached.made
    seeds = reached.standings[0].seeds
    return [
        f"{reached.question} {seeds} seed{'s' if seeds > 1 else ''}, {reached.tokens:,} bytes each; "
        "± is half of a 95 % interval over seeds.",
        "held-out: nats per byte at equal tokens. equal seconds: the same after "
        f"{reached.budget:.0f} s, read off the curve. ratio: of the times of a step to "
        f"{reached.baseline}'s, in turns.",
        f"{made['machine']}, {made['threads']} thread, torch {made['torch']}, commit {made['commit'][:10]}"
        + (", changed since" if made["dirty"] else "")
        + f", load {made['load']:.1f}",
    ]


def rule_named(text: str, size: Size) -> Rule:
    """A router by name with options, as in mrb bench; `dense` is the control as wide as K experts."""
    if text == "dense":
        return Rule(name="dense", kind="dense", times=size.K)
    name, options = parse_spec(text)
    return rule_for(name, options, size, name=text)


def _sizes(text: str, study: str | None) -> Size:
    size = studies()[study].size if study in studies() else Size()
    changes = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name.strip() not in vars(size) or not value.strip().isdecimal() or not int(value):
            raise ValueError(
                f"cannot read {word!r} in --sizes; there are {', '.join(vars(size))}, as layers=2"
            )
        changes[name.strip()] = int(value)
    return replace(size, **changes)


def _sink(name: str | None, run: Run) -> Any:
    """Where losses are also sent: a function of values and step."""
    if name is None:
        return lambda values, step: None
    if name not in ("trackio", "wandb"):
        fail(f"--sink is trackio or wandb, not {name!r}")
    try:
        tracker = __import__(name)
    except ImportError:
        fail(f"--sink {name} needs the package; pip install {name}")
    tracker.init(project="moe-routing-bench", name=f"{run.rule.name}-{run.seed}", config=run.to_dict())
    return lambda values, step: tracker.log({**values, "step": step})


class Trainings(Displayed):
    """Finished training runs, one for each rule and seed; `folder` keeps them."""

    def __init__(self, runs: Sequence[Training], folder: Path, keeps: ExitStack):
        self.runs, self.folder = list(runs), folder
        weakref.finalize(self, keeps.close)

    def pareto(self) -> Pareto:
        """What each rule of a study reached and what it cost."""
        return pareto(self.folder)

    def model(self, rule: str, seed: int = 0) -> Decoder:
        """The trained model of a rule."""
        named = {one.rule: one for one in self.runs if one.seed == seed}
        home = run_folder(self.folder, named[one_of("rule", rule, named)].key)
        with torch.random.fork_rng(devices=()):  # a new model draws weights
            return load_model(home)

    def to_pandas(self) -> Any:
        documents = [one.model_dump(mode="json") for one in self.runs]
        rows = [tuple(document.values()) for document in documents]
        return Table(list(documents[0]) if documents else [], rows).to_pandas()

    def _show(self) -> None:
        show_runs(self.runs)


def trained(
    routers: str | Sequence[str], study: str, *, text: Sequence[Path], out: Path | None, steps: int,
    seeds: int, quiet: bool, settings: dict[str, Any],
) -> Trainings:  # fmt: skip
    """See `train` in api.py."""
    of_run = {one.name for one in fields(Run)} - {"rule", "size", "steps", "sources", "begin", "corpus"}
    known = [*of_run, *(one.name for one in fields(Size))]
    if unknown := next((name for name in settings if name not in known), None):
        hint = did_you_mean(unknown, known)
        raise TypeError(f"train has no setting {unknown!r}; {hint}there are {', '.join(sorted(known))}")
    corpus = read_texts(text) if text else synthetic()
    size = studies()[study].size if study in studies() else Size()
    size = replace(size, **{name: settings.pop(name) for name in list(settings) if name not in of_run})
    warmup = {"warmup": min(40, max(1, steps // 5))}
    like = Run(
        rule=Rule(name="like"), size=size, steps=steps, **{**warmup, **settings}, corpus=corpus.hash[:16]
    )
    with ExitStack() as stack, torch_threads(torch.get_num_threads()), torch.random.fork_rng(devices=()):
        folder = temporary_folder(stack) if out is None else out
        if study:
            rates = (like.learning_rate,) if "learning_rate" in settings else RATES
            work = StudyRun(study, corpus, folder, like=like, seeds=seeds, jobs=core_count(), rates=rates)
            with bar(f"study {study}", quiet=quiet) as shown, without_main_module():
                work.run(partial(show_study, shown))
            return Trainings(read_trainings(folder), folder, stack.pop_all())
        runs = []
        for router, seed in product(
            [routers] if isinstance(routers, str) else routers, range(like.seed, like.seed + seeds)
        ):
            run = replace(like, rule=rule_named(router, size), seed=seed)
            with bar(run.rule.name, quiet=quiet) as shown:

                def on_event(event: Event, run: Run = run, shown: Bar = shown) -> None:
                    if isinstance(event, Stepped):
                        show_step(shown, run, event)

                runs.append(execute(run, corpus, folder, on_event=on_event))
        return Trainings(runs, folder, stack.pop_all())
