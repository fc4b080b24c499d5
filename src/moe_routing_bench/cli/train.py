"""mrb train: trains language models that differ only in their router, and shows what each router costs."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import typer

from moe_routing_bench.bench.cores import core_count
from moe_routing_bench.cli.options import Json, fail, show_json, user_mistakes, with_options
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.report.console import bar, fitted, minutes, say, show
from moe_routing_bench.report.result_tables import pareto_table, show_runs, show_step, show_study
from moe_routing_bench.report.training_figures import draw_study
from moe_routing_bench.results.trainings import Training, read_trainings
from moe_routing_bench.train.loop import Evaluated, Event, Stepped
from moe_routing_bench.train.pareto import Pareto, pareto, sentences
from moe_routing_bench.train.predicting import predicted
from moe_routing_bench.train.records import execute, run_folder
from moe_routing_bench.train.settings import Rule, Run, Size
from moe_routing_bench.train.study import TIMES, StudyRun
from moe_routing_bench.train.study_rules import RATES, rule_named, studies
from moe_routing_bench.train.text import BYTES, TEXTS, Corpus, read_corpus, read_dataset, read_texts

SYNTHETIC = "synthetic"
LONG_SECONDS = 120.0  # if a study takes longer, the message suggests --quick
# the settings of --quick: a small model, few steps, one seed, one learning rate
QUICK = {
    "steps": 100, "seeds": 1, "evaluations": 2, "pieces": 8, "rounds": 8, "rate": 3e-3,
    "sizes": "layers=1,D=64,F=64,sequence=64",
}  # fmt: skip

Number = TypeVar("Number", int, float)
Out = Annotated[Path, typer.Option(help="The folder for runs and results; a stopped run continues there.")]


def _quick(context: typer.Context, given: bool) -> bool:
    if given:
        context.default_map = {**(context.default_map or {}), **QUICK}
    return given


def _protocol(context: typer.Context, study: str) -> str:
    """A file gives the study and its options; the command line may still change them."""
    if not study.endswith(".toml"):
        return study
    with user_mistakes():
        try:
            options = tomllib.loads(Path(study).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the study {study}: {error}") from None
        known = {parameter.name for parameter in context.command.params}
        if unknown := options.keys() - known:
            raise ValueError(f"{study}: mrb train study has no option {', '.join(sorted(unknown))}")
        context.default_map = {**(context.default_map or {}), **options}
        return str(options["study"])


def _numbers(name: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"--{name} is a list of numbers with commas between them, not {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options that say how a model is trained and on which text."""

    seed: Annotated[int, typer.Option(min=0, help="The seed of a run; in a study the first seed.")] = 0
    steps: Annotated[int, typer.Option(min=1, max=10_000_000, help="Optimiser steps of a run.")] = 600
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 4
    evaluations: Annotated[int, typer.Option(min=1, help="How often to measure the held-out loss.")] = 8
    pieces: Annotated[int, typer.Option(min=1, help="Sequences of held-out text to measure it on.")] = 48
    text: Annotated[
        list[Path] | None, typer.Option(help="A text to learn; its end is held out. Repeatable.")
    ] = None
    corpus: Annotated[
        str | None,
        typer.Option(help=f"A folder of texts, or one of {', '.join(TEXTS)}. Default: {SYNTHETIC}."),
    ] = None
    vocabulary: Annotated[
        int, typer.Option(min=BYTES, max=65536, help="Tokens: pieces learnt from the text; 256 is bytes.")
    ] = BYTES
    dataset: Annotated[
        str | None, typer.Option(help="A dataset of the Hugging Face Hub with a column `text`.")
    ] = None
    sizes: Annotated[
        str, typer.Option(help="Other sizes of the model: layers=2,D=64,F=64,E=4,sequence=128.")
    ] = ""
    rate: Annotated[
        float | None,
        typer.Option(help="The learning rate; a study then uses it for every router."),
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
            found = read_texts(self.text)
        elif self.dataset is not None:
            found = read_dataset(self.dataset)
        else:
            found = read_corpus(self.corpus or SYNTHETIC)
        return found.with_vocabulary(self.vocabulary)

    def run(self, study: str | None = None) -> Run:
        return Run(
            rule=Rule(name="like"), size=_sizes(self.sizes, study), steps=self.steps, batch=self.batch,
            autocast=self.autocast, warmup=min(40, max(1, self.steps // 5)), evaluations=self.evaluations,
            pieces=self.pieces, seed=self.seed, vocabulary=self.vocabulary,
        )  # fmt: skip

    def say_text(self) -> None:
        if not self.text and self.corpus is None and self.dataset is None:
            say(f"text: the made-up corpus `{SYNTHETIC}`; --text FILE or --corpus FOLDER reads a real one")


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
    """Train one small language model. You can stop it at any time; the same command continues it.

    \b
    Examples:
      mrb train run switch --steps 20 --out first
      mrb train run "top_p(p=0.5)" --text a.txt --text b.txt --out mine

    Without --text, --corpus or --dataset the text is made up: two languages of 40
    words, the same on every machine.
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
    study: Annotated[
        str,
        typer.Argument(
            is_eager=True,
            callback=_protocol,
            help=f"One of {', '.join(studies())}; or a file.toml that names one and its options.",
        ),
    ],
    out: Out,
    how: TrainOptions,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each router.")] = 3,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Runs at the same time, one thread each. Default: all cores."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this router of the study. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=8, help="Rounds for timing the steps.")] = 30,
    shares: Annotated[
        str,
        typer.Option(help="Runs also end after these shares of the baseline's seconds, as 0.25,0.5,1."),
    ] = "",
    looks: Annotated[
        str, typer.Option(help="Numbers of seeds after which a decided study stops, as 4,6,8,10.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Train small language models that differ in one thing, and show what it cost.

    \b
    Examples:
      mrb train study routers --quick --out look
      mrb train study routers --seeds 3 --out routers
      mrb train study capacity --text a.txt --text b.txt --out capacity

    A study chooses a learning rate for each router, trains every router with every
    seed on the same bytes from the same weights, then times the steps of all
    routers in turns. You can stop it at any time; the same command continues it.
    Without --text, --corpus or --dataset the text is made up: two languages of 40
    words, the same on every machine.
    """
    with user_mistakes():
        work = StudyRun(
            study, how.learnt(), out, like=how.run(study), seeds=seeds, jobs=jobs or core_count(),
            only=tuple(only or ()), rates=RATES if how.rate is None else (how.rate,),
            shares=_numbers("shares", shares, float), looks=_numbers("looks", looks, int),
        )  # fmt: skip
    how.say_text()
    _study(work, rounds, as_json)


def pareto_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a study.")],
    out: Annotated[Path | None, typer.Option(help="Folder for pictures and JSON. Default: FOLDER.")] = None,
    as_json: Json = False,
) -> None:
    """Show what each router reached and what it cost: a table, pareto.json, and pictures."""
    with user_mistakes():
        reached = pareto(folder)
        target = folder if out is None else out
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / "pareto.json", json.dumps(reached.to_dict(), indent=1) + "\n")
        drawn = draw_study(folder, reached, target)
    if as_json:
        show_json(reached.to_dict())
        return
    show(*pareto_table(reached), "", *sentences(reached), "", *_notes(reached))
    show(f"Written: {', '.join(str(target / name) for name in ('pareto.json', *drawn))}")


def predict_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a study.")],
    layers: Annotated[Path, typer.Option(help="A results folder of mrb bench layer --direction train.")],
    as_json: Json = False,
) -> None:
    """Compare the time of each router's step with the prediction of the layer benchmark."""
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
    """List the finished runs of a folder."""
    with user_mistakes():
        runs = read_trainings(folder)
    if as_json:
        show_json([one.model_dump(mode="json") for one in runs])
        return
    show_runs(runs)


def _study(work: StudyRun, rounds: int, as_json: bool) -> None:
    out = work.folder
    with user_mistakes():
        seconds = work.estimate(rounds=rounds)
        first_look = "; --quick gives a first look in about a minute" if seconds > LONG_SECONDS else ""
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


def _show_run(one: Training, out: Path) -> None:
    show(
        f"{one.rule}, seed {one.seed}: held-out loss {one.loss:.4f} nats per byte "
        f"({one.bits_per_byte:.3f} bits, perplexity {one.perplexity:.2f}) after {one.steps} steps "
        f"of {one.tokens // one.steps:,} tokens",
        f"training loss {one.training_loss:.4f}; {one.seconds:.1f} s in steps, {one.tokens_per_second:,.0f} "
        f"tokens/s on {one.threads} thread{'s' if one.threads > 1 else ''}; "
        + ", ".join(f"{part} {100 * share:.0f} %" for part, share in one.parts.items()),
        f"{one.parameters:,} parameters, {one.active_parameters:,.0f} active; "
        f"{one.flops_per_token / 1e6:.2f} MFLOP per token forward; {one.peak_bytes / 2**20:.0f} MiB at most",
        *(f"collapsed: {sentence}" for sentence in one.collapsed),
        f"Kept in {run_folder(out, one.key)}; `mrb train show {out}` lists all runs there.",
    )


def _notes(reached: Pareto) -> list[str]:
    made = reached.made
    seeds = reached.standings[0].seeds
    return [
        f"{reached.question} {seeds} seed{'s' if seeds > 1 else ''}, {reached.tokens:,} tokens each; "
        "± is half of a 95 % interval over seeds.",
        f"held-out: nats per byte at equal tokens. equal seconds: the same after {reached.budget:.0f} s, "
        f"{'of runs that end there' if reached.decisions else 'read from the curve'}. "
        "ratio: the time of a step divided by "
        f"{reached.baseline}'s, timed in turns.",
        f"{made['machine']}, {made['threads']} thread, torch {made['torch']}, commit {made['commit'][:10]}"
        + (", changed since" if made["dirty"] else "")
        + f", load {made['load']:.1f}",
    ]


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
    """Returns a function of values and step that also sends losses to a service."""
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
