"""Runs a whole study into one folder: chooses learning rates, trains, times steps, and uses the models.

    DIR/study.json    which study, with which settings
    DIR/places.json   the time of a step after the choice of rates: where runs of equal seconds end
    DIR/times.json    the time of a step of every rule, in turns (train/stepping.py)
    DIR/used.json     tokens a second of the trained models (train/decoding.py)

You can stop it at any time; the same command continues. Each run is a process with one thread, `jobs` at a
time: at these sizes two runs on one core each are faster than one run on two cores.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.core.fork_server import fork_server
from moe_routing_bench.core.machine import this_machine, torch_threads
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.results.read import is_plain_file
from moe_routing_bench.results.trainings import Training, finished
from moe_routing_bench.train.decoding import use
from moe_routing_bench.train.looks import Decision, decisions
from moe_routing_bench.train.loop import DivergedError, Event
from moe_routing_bench.train.ngram import trigram_loss
from moe_routing_bench.train.records import EVENTS, execute, load_model, read_events, read_state, run_folder
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.stepping import StepTimes, step_times
from moe_routing_bench.train.study_rules import (
    HOME,
    MAX_RATE,
    MIN_RATE,
    RATES,
    TUNING_SEEDS,
    TUNING_SHARE,
    StudyRule,
    run_of,
    studies,
)
from moe_routing_bench.train.text import Corpus

STUDY, PLACES, TIMES, USED = "study.json", "places.json", "times.json", "used.json"
DIVERGED = "diverged.txt"
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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a study. It waits for `after`, a key, begins as a branch of `trunk`, and keeps states for
    its own branches."""

    run: Run
    after: str = ""
    trunk: str = ""
    keep: tuple[int, ...] = ()

    @staticmethod
    def alone(run: Run) -> Planned:
        return Planned(run=run)

    @property
    def own_steps(self) -> int:
        """The steps that it does itself."""
        return self.run.steps - (self.run.decays_at if self.trunk else 0)


class StudyRun:
    """One study in one folder: StudyRun("routers", corpus, folder, like=Run(...), seeds=3).run().

    Seeds are like.seed, like.seed + 1, ... With one rate every rule takes it; otherwise each rule's is chosen
    with seeds and text that are not reported.

    shares=(0.25, 0.5, 1): each rule also ends a run after these shares of the seconds of like.steps steps of
    the baseline. All runs of a rule and seed have one trunk: shorter ones branch off the longest where
    they begin to lower their rate. looks=(4, 6, 8, 10): stops early if all comparisons are decided.
    """

    def __init__(
        self, name: str, corpus: Corpus, folder: Path, *, like: Run, seeds: int, jobs: int = 1,
        rates: Sequence[float] = RATES, only: Sequence[str] = (), shares: Sequence[float] = (),
        looks: Sequence[int] = (),
    ):  # fmt: skip
        known = studies(like.size)
        if name not in known:
            raise ValueError(f"there is no study {name!r}; there are {', '.join(known)}")
        self.name, self.study, self.corpus, self.folder = name, known[name], corpus, folder
        self.like, self.seeds, self.jobs = replace(like, corpus=corpus.hash[:16]), seeds, jobs
        self.rates, self.shares, self.looks = tuple(rates), tuple(shares), tuple(looks) or (seeds,)
        if self.looks[-1] != seeds:
            raise ValueError(f"the last look is after all {seeds} seeds, not after {self.looks[-1]}")
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

    def tuning_runs(self) -> dict[str, dict[float, list[Run]]]:
        """Returns the short runs that choose a learning rate, by rule and rate. A rule's grid grows until its
        best rate is inside. A rule that starts from other weights is not tuned; it takes the middle rate.
        """
        if len(self.rates) == 1:
            return {}
        losses = self._tuning_losses()
        steps = max(1, int(TUNING_SHARE * self.like.steps))
        tried = {}
        for entry in self.entries:
            if entry.rate is not None or entry.begin:
                continue

            def runs_of(rate: float, entry: StudyRule = entry) -> list[Run]:
                return [self._run(entry, seed=seed, rate=rate).tuning(rate, steps) for seed in TUNING_SEEDS]

            grid = {rate: runs_of(rate) for rate in self.rates}
            while all(run.key in losses for runs in grid.values() for run in runs):
                best = min(grid, key=lambda rate: _mean(grid[rate], losses))
                if min(grid) < best < max(grid):
                    break
                further = best / 2 if best == min(grid) else best * 2
                if not MIN_RATE <= further <= MAX_RATE:
                    break
                grid[further] = runs_of(further)
            tried[entry.rule.name] = grid
        return tried

    def _tuning_losses(self) -> dict[str, float]:
        """Returns the loss of each finished run; a run that diverged has an infinite one."""
        diverged = {
            path.parent.name.removeprefix("run="): math.inf for path in self.folder.glob(f"run=*/{DIVERGED}")
        }
        return {key: run.loss for key, run in finished(self.folder).items()} | diverged

    def _run(self, entry: StudyRule, *, seed: int, rate: float, begin: str = "") -> Run:
        return run_of(
            self.study, entry, like=self.like, seed=seed, rate=rate, sources=self.sources, begin=begin
        )

    def _rate(self, entry: StudyRule) -> float:
        """Returns the rate of a rule that is not tuned."""
        middle = self.rates[len(self.rates) // 2]
        return middle if len(self.rates) == 1 else entry.rate or middle

    def lengths(self) -> dict[str, dict[str, int]]:
        """Returns the steps of each rule's runs by what they end at: "tokens", or a share of the seconds."""
        path = self.folder / PLACES
        if is_plain_file(path):
            placed: dict[str, dict[str, int]] = json.loads(path.read_text())["lengths"]
            if new := [entry.rule.name for entry in self.entries if entry.rule.name not in placed]:
                raise ValueError(
                    f"the steps of {new[0]} are not in {path}: the study was begun with --only. Give the "
                    "same --only, or another --out"
                )
            return placed
        return self._lengths({entry.rule.name: 1.0 for entry in self.entries})

    def _lengths(self, ratios: Mapping[str, float]) -> dict[str, dict[str, int]]:
        """ratios: of the time of a step to the baseline's."""
        steps = self.like.steps
        return {
            rule: {"tokens": steps}
            | {f"{share:g}": max(2, round(share * steps / ratio)) for share in self.shares}
            for rule, ratio in ratios.items()
        }

    def runs(self, chosen: dict[str, float], *, seeds: int | None = None) -> list[Planned]:
        """Returns all runs, seed by seed; runs that others start from come first."""
        planned: list[Planned] = []
        lengths = self.lengths()
        for seed in range(self.like.seed, self.like.seed + (seeds or self.seeds)):
            keys: dict[str, str] = {}
            for entry in self.entries:
                begin = keys[entry.begin] if entry.begin else ""
                rate = chosen.get(entry.rule.name, self._rate(entry))
                run = self._run(entry, seed=seed, rate=rate, begin=begin)
                keys[entry.rule.name] = run.key
                steps = sorted(set(lengths[entry.rule.name].values()), reverse=True)
                trunk, *branches = (replace(run, steps=count) for count in steps)
                keep = tuple(branch.decays_at for branch in branches)
                planned.append(Planned(run=trunk, after=begin, keep=keep))
                planned += [Planned(run=branch, after=trunk.key, trunk=trunk.key) for branch in branches]
        return planned

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
        tuning = [run for grid in self.tuning_runs().values() for runs in grid.values() for run in runs]
        planned = [*map(Planned.alone, tuning), *self.runs(self.chosen_rates())]
        todo = [one for one in planned if one.run.key not in have]
        # a forward pass is a third of a step, and sources after the first have a quarter of the pieces
        passes = (3 + len(self.sources)) / 4 * self.like.pieces / self.like.batch / 3
        steps = sum(one.own_steps + (one.run.evaluations + 1) * passes for one in todo)
        return timing + (steps * step + PROCESS_SECONDS * len(todo)) / max(1, min(self.jobs, len(todo)))

    def run(self, on_progress: OnProgress = lambda ongoing: None, *, rounds: int = 30) -> None:
        self._begin()
        if not self.study.only_times:
            self._tune(on_progress)
            if self.shares and not is_plain_file(self.folder / PLACES):
                self._place(on_progress, rounds=rounds)
            for seeds in self.looks:
                self._train(self.runs(self.chosen_rates(), seeds=seeds), "", on_progress)
                if seeds < self.seeds and all(one.decided for one in self.decisions().values()):
                    break
        if not is_plain_file(self.folder / TIMES):
            self.time(on_progress, rounds=rounds)
        if not self.study.only_times and not is_plain_file(self.folder / USED):
            self.use(on_progress)

    def _tune(self, on_progress: OnProgress) -> None:
        """Tries learning rates until the best of each rule is inside its grid."""
        known = -1
        while known != (known := len(self._tuning_losses())):
            grids = self.tuning_runs().values()
            runs = [run for grid in grids for tried in grid.values() for run in tried]
            self._train([*map(Planned.alone, runs)], TUNING, on_progress)

    def chosen_rates(self) -> dict[str, float]:
        """Returns the rate of each rule with the lowest mean loss in the short runs."""
        tried = self.tuning_runs()
        losses = self._tuning_losses() if tried else {}
        return {rule: min(grid, key=lambda rate: _mean(grid[rate], losses)) for rule, grid in tried.items()}

    def _place(self, on_progress: OnProgress, *, rounds: int) -> None:
        """Times a step of every rule in turns, from the state of a short run, to know where runs must end."""
        grids, chosen = self.tuning_runs(), self.chosen_rates()
        runs = []
        for entry in self.entries:
            rule = entry.rule.name
            first = self._run(entry, seed=self.like.seed, rate=self._rate(entry))
            runs.append(grids[rule][chosen[rule]][0] if rule in chosen else first)
        times = self._step_times(runs, on_progress, rounds=rounds)
        base = times.seconds[self.study.baseline]
        ratios = {
            rule: 1.0 if rule == self.study.baseline else compare(base, seconds).ratio
            for rule, seconds in times.seconds.items()
        }
        placed = {"lengths": self._lengths(ratios), "ratios": ratios, "rates": chosen}
        self._put(PLACES, {**placed, **asdict(times), "rounds": rounds})

    def decisions(self) -> dict[str, Decision]:
        """Returns what the comparison of each rule with the baseline came to at equal tokens."""
        reported = [run for run in finished(self.folder).values() if not run.study.endswith(TUNING)]
        return decisions(reported, baseline=self.study.baseline, lengths=self.lengths(), looks=self.looks)

    def _first_seed(self) -> list[Run]:
        """Returns the runs of the first seed, one for each rule; they are timed and used."""
        runs = self.runs(self.chosen_rates(), seeds=1)
        return [planned.run for planned in runs if planned.run.steps == self.like.steps]

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STUDY
        about = {
            "study": self.name, "question": self.study.question, "baseline": self.study.baseline,
            "seeds": self.seeds, "rates": list(self.rates), "like": self.like.to_dict(),
            "shares": list(self.shares), "looks": list(self.looks),
            "sources": {
                source.name: {"learnt": len(source.learnt), "held_out": len(source.held_out)}
                for source in self.corpus.sources
            },
        }  # fmt: skip
        if is_plain_file(path):
            before = json.loads(path.read_text())
            if any(before.get(name) != about[name] for name in ("study", "like", "rates", "shares", "looks")):
                raise ValueError(
                    f"{self.folder} holds the study {before.get('study')} with other settings; "
                    "give another --out"
                )
            about["trigram"] = before["trigram"]
        else:
            about["trigram"] = trigram_loss(self.corpus)
        write_whole(path, json.dumps(about, indent=1), sync=True)

    def _train(self, planned: Sequence[Planned], phase: str, on_progress: OnProgress) -> None:
        """Trains all runs that are not finished, `jobs` at a time. A run that starts from another one comes
        after it."""
        have = set(self._tuning_losses())
        todo = [one for one in planned if one.run.key not in have]
        if not todo:
            return
        study = f"{self.name} {phase}".strip()
        total = sum(one.own_steps for one in planned)
        done = total - sum(one.own_steps for one in todo)
        # one process for each run, to know its peak memory; torch is imported once, before the forks
        server = fork_server(__name__)
        with ProcessPoolExecutor(self.jobs, mp_context=server, max_tasks_per_child=1) as pool:
            going: dict[Future[None], Planned] = {}
            try:
                while todo or going:
                    ready_to_go = [one for one in todo if one.after in {"", *have}]
                    for one in ready_to_go[: self.jobs - len(going)]:
                        todo.remove(one)
                        going[pool.submit(_in_process, one, self.corpus, self.folder, study)] = one
                    ready, _ = wait(going, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in ready:
                        one = going.pop(future)
                        future.result()
                        done += one.own_steps
                        have.add(one.run.key)
                    now = [
                        (one.run, *_last_step(run_folder(self.folder, one.run.key))) for one in going.values()
                    ]
                    on_progress(
                        Ongoing(
                            phase=phase or "training",
                            share=min(1.0, (done + sum(step for _, step, _ in now)) / total),
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
        if self.study.only_times:
            seed = self.like.seed
            runs = [self._run(entry, seed=seed, rate=self._rate(entry)) for entry in self.entries]
        else:
            runs = self._first_seed()
        times = self._step_times(runs, on_progress, rounds=rounds)
        self._put(
            TIMES, {**asdict(times), "rounds": rounds, "tokens": self.like.batch * self.study.size.sequence}
        )

    def _step_times(self, runs: Sequence[Run], on_progress: OnProgress, *, rounds: int) -> StepTimes:
        torch.set_num_threads(1)
        return step_times(
            [(run, read_state(run_folder(self.folder, run.key))) for run in runs], self.corpus, rounds=rounds,
            on_round=lambda done: on_progress(
                Ongoing(phase="timing steps", share=min(1.0, done / rounds), now=())
            ),
        )  # fmt: skip

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


def _mean(runs: Sequence[Run], losses: Mapping[str, float]) -> float:
    return fmean(losses.get(run.key, math.inf) for run in runs)


def _in_process(planned: Planned, corpus: Corpus, folder: Path, study: str) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()

    def still_wanted(event: Event) -> None:
        if os.getppid() != parent:  # the study was killed; the next one continues from the last state
            raise SystemExit(1)

    run = planned.run
    try:
        execute(
            run, corpus, folder, study=study, trunk=planned.trunk, keep=planned.keep, on_event=still_wanted
        )
    except DivergedError as reason:
        if run.part != "tuning":
            raise
        write_whole(run_folder(folder, run.key) / DIVERGED, f"{reason}\n", sync=True)  # the rate is too high


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
