"""Runs a whole study into one folder: chooses learning rates, trains, times steps, and uses the models.

    DIR/study.json    which study, with which settings
    DIR/times.json    the time of a step of every rule, in turns (train/stepping.py)
    DIR/used.json     tokens a second of the trained models (train/decoding.py)

You can stop it at any time; the same command continues. Each run is a process with one thread, `jobs` at a
time: at these sizes two runs on one core each are faster than one run on two cores.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.core.fork_server import fork_server
from moe_routing_bench.core.machine import this_machine, torch_threads
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.results.read import is_plain_file
from moe_routing_bench.results.trainings import Training, finished
from moe_routing_bench.train.decoding import use
from moe_routing_bench.train.loop import Event, State
from moe_routing_bench.train.ngram import trigram_loss
from moe_routing_bench.train.records import EVENTS, execute, load_model, read_events, read_state, run_folder
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.stepping import step_times
from moe_routing_bench.train.study_rules import HOME, RATES, TUNING_SHARE, StudyRule, run_of, studies
from moe_routing_bench.train.text import Corpus

STUDY, TIMES, USED = "study.json", "times.json", "used.json"
TUNING = "tuning"  # what records of short runs have after the name of their study
POLL_SECONDS = 0.5
PROCESS_SECONDS = 1.5  # to start a run's process and to write its files, about


@dataclass(frozen=True, kw_only=True)
class Ongoing:
    """How far a study is. `share` is of the steps of this phase; `now` says what each process does.

    Ongoing(phase="training", share=0.4, now=("switch 0: step 240 of 600, loss 1.913",))
    """

    phase: str
    share: float
    now: tuple[str, ...]


OnProgress = Callable[[Ongoing], None]


class StudyRun:
    """One study in one folder: StudyRun("routers", corpus, folder, like=Run(...), seeds=3).run().

    Seeds are like.seed, like.seed + 1, ... With one rate every rule takes it.
    """

    def __init__(
        self, name: str, corpus: Corpus, folder: Path, *, like: Run, seeds: int, jobs: int = 1,
        rates: Sequence[float] = RATES, only: Sequence[str] = (),
    ):  # fmt: skip
        known = studies(like.size)
        if name not in known:
            raise ValueError(f"there is no study {name!r}; there are {', '.join(known)}")
        self.name, self.study, self.corpus, self.folder = name, known[name], corpus, folder
        self.like, self.seeds, self.jobs = replace(like, corpus=corpus.hash[:16]), seeds, jobs
        self.rates = tuple(rates)
        names = [entry.rule.name for entry in self.study.entries]
        if unknown := [rule for rule in only if rule not in names]:
            raise ValueError(f"the study {name} has no rule {unknown[0]!r}; it has {', '.join(names)}")
        self.entries = [
            entry for entry in self.study.entries if not only or entry.rule.name in {*only, HOME.rule.name}
        ]
        if any(entry.text == "away" for entry in self.entries) and len(corpus.sources) < 2:
            raise ValueError(f"the study {name} moves from one text to another; give two with --text")

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.corpus.sources)

    def tuning_runs(self) -> dict[str, list[Run]]:
        """Returns the short runs that choose a learning rate, by rule. A rule that starts from other weights
        is not tuned; it takes the middle rate."""
        if len(self.rates) == 1:
            return {}
        steps = max(1, int(TUNING_SHARE * self.like.steps))
        return {
            entry.rule.name: [
                self._run(entry, seed=self.like.seed, rate=rate).tuning(rate, steps) for rate in self.rates
            ]
            for entry in self.entries
            if entry.rate is None and not entry.begin
        }

    def _run(self, entry: StudyRule, *, seed: int, rate: float, begin: str = "") -> Run:
        return run_of(
            self.study, entry, like=self.like, seed=seed, rate=rate, sources=self.sources, begin=begin
        )

    def _rate(self, entry: StudyRule) -> float:
        """Returns the rate of a rule that is not tuned."""
        middle = self.rates[len(self.rates) // 2]
        return middle if len(self.rates) == 1 else entry.rate or middle

    def runs(self, chosen: dict[str, float]) -> dict[tuple[str, int], Run]:
        """Returns every run by rule and seed; runs that others start from come first."""
        by_seed: dict[tuple[str, int], Run] = {}
        for entry in self.entries:
            for seed in range(self.like.seed, self.like.seed + self.seeds):
                begin = by_seed[entry.begin, seed].key if entry.begin else ""
                rate = chosen.get(entry.rule.name, self._rate(entry))
                by_seed[entry.rule.name, seed] = self._run(entry, seed=seed, rate=rate, begin=begin)
        return by_seed

    def estimate(self, *, rounds: int) -> float:
        """Returns the remaining seconds on this machine, estimated from a few steps of the baseline."""
        baseline = (entry for entry in self.entries if entry.rule.name == self.study.baseline)
        entry = next(baseline, self.entries[0])
        probe = replace(self._run(entry, seed=self.like.seed, rate=self._rate(entry)), pieces=1)
        with torch_threads(1):
            step = median(step_times([(probe, None)], self.corpus, rounds=3).seconds[entry.rule.name])
        timing = 0.0 if is_plain_file(self.folder / TIMES) else rounds * len(self.entries) * step
        if self.study.only_times:
            return timing
        have = finished(self.folder)
        tuning = [run for runs in self.tuning_runs().values() for run in runs]
        todo = [run for run in (*tuning, *self.runs({}).values()) if run.key not in have]
        # a forward pass is a third of a step, and sources after the first have a quarter of the pieces
        passes = (3 + len(self.sources)) / 4 * self.like.pieces / self.like.batch / 3
        steps = sum(run.steps + (run.evaluations + 1) * passes for run in todo)
        return timing + (steps * step + PROCESS_SECONDS * len(todo)) / max(1, min(self.jobs, len(todo)))

    def run(self, on_progress: OnProgress = lambda ongoing: None, *, rounds: int = 30) -> None:
        self._begin()
        if not self.study.only_times:
            self._train([run for runs in self.tuning_runs().values() for run in runs], TUNING, on_progress)
            runs = self.runs(self.chosen_rates())
            # in waves: a run that starts from another run's weights comes after it
            done: set[str] = {""}
            while ready := [run for run in runs.values() if run.begin in done and run.key not in done]:
                self._train(ready, "", on_progress)
                done |= {run.key for run in ready}
        if not is_plain_file(self.folder / TIMES):
            self.time(on_progress, rounds=rounds)
        if not self.study.only_times and not is_plain_file(self.folder / USED):
            self.use(on_progress)

    def chosen_rates(self) -> dict[str, float]:
        """Returns the rate of each rule with the lowest held-out loss in the short runs."""
        tried = self.tuning_runs()
        losses = {key: run.loss for key, run in finished(self.folder).items()} if tried else {}
        return {
            rule: min(runs, key=lambda run: losses[run.key]).learning_rate for rule, runs in tried.items()
        }

    def _first_seed(self) -> list[Run]:
        """Returns the runs of the first seed, one for each rule; they are timed and used."""
        runs = self.runs(self.chosen_rates())
        return [run for (_, seed), run in runs.items() if seed == self.like.seed]

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STUDY
        about = {
            "study": self.name, "question": self.study.question, "baseline": self.study.baseline,
            "seeds": self.seeds, "rates": list(self.rates), "like": self.like.to_dict(),
            "sources": {
                source.name: {"learnt": len(source.learnt), "held_out": len(source.held_out)}
                for source in self.corpus.sources
            },
        }  # fmt: skip
        if is_plain_file(path):
            before = json.loads(path.read_text())
            if any(before.get(name) != about[name] for name in ("study", "like", "rates")):
                raise ValueError(
                    f"{self.folder} holds the study {before.get('study')} with other settings; "
                    "give another --out"
                )
            about["trigram"] = before["trigram"]
        else:
            about["trigram"] = trigram_loss(self.corpus)
        write_whole(path, json.dumps(about, indent=1), sync=True)

    def _train(self, runs: Sequence[Run], phase: str, on_progress: OnProgress) -> None:
        """Trains all runs that are not finished, `jobs` at a time."""
        have = finished(self.folder)
        todo = [run for run in runs if run.key not in have]
        if not todo:
            return
        study = f"{self.name} {phase}".strip()
        total = sum(run.steps for run in runs)
        done = sum(run.steps for run in runs if run.key in have)
        # one process for each run, to know its peak memory; torch is imported once, before the forks
        server = fork_server(__name__)
        with ProcessPoolExecutor(self.jobs, mp_context=server, max_tasks_per_child=1) as pool:
            going: dict[Future[None], Run] = {}
            waiting = list(reversed(todo))
            try:
                while waiting or going:
                    while waiting and len(going) < self.jobs:
                        run = waiting.pop()
                        going[pool.submit(_in_process, run, self.corpus, self.folder, study)] = run
                    ready, _ = wait(going, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in ready:
                        done += going.pop(future).steps
                        future.result()
                    now = [(run, *_last_step(run_folder(self.folder, run.key))) for run in going.values()]
                    on_progress(
                        Ongoing(
                            phase=phase or "training",
                            share=(done + sum(step for _, step, _ in now)) / total,
                            now=tuple(
                                f"{run.rule.name} {run.seed}: {said_step(step, run.steps, loss)}"
                                for run, step, loss in now
                            ),
                        )
                    )
            except BaseException:
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                raise

    def time(self, on_progress: OnProgress, *, rounds: int) -> None:
        """Times the step of every rule from its final state of the first seed, in turns, on one thread."""
        torch.set_num_threads(1)
        runs: list[tuple[Run, State | None]] = []
        if self.study.only_times:
            seed = self.like.seed
            runs = [(self._run(entry, seed=seed, rate=self._rate(entry)), None) for entry in self.entries]
        else:
            runs = [(run, read_state(run_folder(self.folder, run.key))) for run in self._first_seed()]
        times = step_times(
            runs, self.corpus, rounds=rounds,
            on_round=lambda done: on_progress(
                Ongoing(phase="timing steps", share=min(1.0, done / rounds), now=())
            ),
        )  # fmt: skip
        self._put(
            TIMES, {**asdict(times), "rounds": rounds, "tokens": self.like.batch * self.study.size.sequence}
        )

    def use(self, on_progress: OnProgress) -> None:
        """Measures prefill and decode of every final model of the first seed, or notes why a rule cannot
        decode."""
        torch.set_num_threads(1)
        runs = self._first_seed()
        answers: dict[str, Any] = {}
        for number, run in enumerate(runs):
            on_progress(Ongoing(phase="using models", share=number / len(runs), now=(run.rule.name,)))
            model = load_model(run_folder(self.folder, run.key))
            try:
                answers[run.rule.name] = asdict(use(model, run, self.corpus.only(run.sources)))
            except NotImplementedError as reason:
                answers[run.rule.name] = {"why_not": str(reason)}
        self._put(USED, {"rules": answers})

    def _put(self, name: str, values: dict[str, Any]) -> None:
        made = {
            "machine": this_machine().name, "torch": torch.__version__, "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0], "created_at": datetime.now(UTC).isoformat(), **source_version(),
        }  # fmt: skip
        write_whole(self.folder / name, json.dumps({"made": made, **values}), sync=True)


def _in_process(run: Run, corpus: Corpus, folder: Path, study: str) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()

    def still_wanted(event: Event) -> None:
        if os.getppid() != parent:  # the study was killed; the next one continues from the last state
            raise SystemExit(1)

    execute(run, corpus, folder, study=study, on_event=still_wanted)


def said_step(step: int, steps: int, loss: float | None) -> str:
    """said_step(40, 600, 1.913) is "step 40 of 600, loss 1.913"; before the first step there is no loss."""
    if loss is None:
        return f"step {step} of {steps}"
    return f"step {step} of {steps}, " + (f"loss {loss:.3f}" if math.isfinite(loss) else "diverged")


def _last_step(home: Path) -> tuple[int, float | None]:
    """Returns how far a run is and its loss, from the end of its events."""
    path = home / EVENTS
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().splitlines()[1:-1]
    except OSError:
        return 0, None
    for line in reversed(lines):
        if b'"norm"' in line:
            event = json.loads(line)
            return event["step"], event["loss"]
    return 0, None


def curves(folder: Path, trainings: Sequence[Training]) -> Iterator[tuple[Training, list[dict[str, Any]]]]:
    """Yields each run with its events."""
    for training in trainings:
        yield training, list(read_events(run_folder(folder, training.key)))
