"""Training runs as a function returns them: mrb.train(["switch", "softmax_topk"], steps=100).runs"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moe_routing_bench.bench.cores import core_count
from moe_routing_bench.bench.fork_server import without_main_module
from moe_routing_bench.cli.progress import Bar, bar
from moe_routing_bench.cli.shown import Displayed, Table, temporary_folder
from moe_routing_bench.cli.train import rule_named, show_runs, show_step, show_study
from moe_routing_bench.machine import torch_threads
from moe_routing_bench.names import did_you_mean, one_of
from moe_routing_bench.results.pareto import Pareto, pareto
from moe_routing_bench.results.study import StudyRun
from moe_routing_bench.results.training import Training, execute, load_model, read_trainings, run_folder
from moe_routing_bench.train.loop import Event, Stepped
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Rule, Run, Size
from moe_routing_bench.train.studies import RATES, studies
from moe_routing_bench.train.text import read_texts, synthetic


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
        return load_model(run_folder(self.folder, named[one_of("rule", rule, named)].key))

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
