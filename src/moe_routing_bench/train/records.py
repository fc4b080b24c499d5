"""Training runs on disk: their records, their events, and a state to continue from.

    DIR/trainings.jsonl                   one Training a line: what came of each finished run
    DIR/run=<key>/run.json                the settings
    DIR/run=<key>/events.jsonl            every step and evaluation, a line each
    DIR/run=<key>/state.safetensors       model, optimiser, controllers, random numbers: replaced as a whole
    DIR/run=<key>/state-<step>.safetensors    the same at a step where shorter runs begin to lower their rate

A killed run continues from its state. Lines of later steps are cut off first; they come again with the same
numbers. Only one process at a time trains a run; it holds a lock that ends with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.bench.identity import package_version
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.whole_files import write_whole
from moe_routing_bench.results.read import TRAININGS, is_plain_file
from moe_routing_bench.results.trainings import (
    MAX_LINE_BYTES,
    Layer,
    Point,
    Training,
    finished,
)
from moe_routing_bench.train.loop import Ended, Event, State, train
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Run
from moe_routing_bench.train.text import Corpus
from moe_routing_bench.train.work import work_of

EVENTS, STATE, SETTINGS, LOCK = "events.jsonl", "state.safetensors", "run.json", "lock"
SAVE_SECONDS = 20.0  # between states, about
LAST_SHARE = 0.1  # of the steps: their mean is the training loss


def run_folder(folder: Path, key: str) -> Path:
    return folder / f"run={key}"


def execute(
    run: Run, corpus: Corpus, folder: Path, *, study: str = "", trunk: str = "", keep: Sequence[int] = (),
    on_event: Callable[[Event], None] = lambda event: None,
) -> Training:  # fmt: skip
    """Trains one run to its end, from its saved state if there is one, and writes its record. A finished run
    keeps its record, because time and memory of doing nothing say nothing about it.

    trunk: the key of a longer run that is equal until this one lowers its rate; this one begins there. The
    longer run was given that step in `keep`.
    """
    home = run_folder(folder, run.key)
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        write_whole(home / SETTINGS, json.dumps(run.to_dict(), indent=1), sync=True)
        if trunk and not (home / STATE).exists():
            _branch(run_folder(folder, trunk), home, run)
        state = read_state(home)
        if state is not None and state.step == run.steps and (before := finished(folder).get(run.key)):
            return before
        kept = 0 if state is None else _kept_bytes(home)
        if state is not None and state.step in keep:  # the process may have ended between the two files
            _keep_state(home, state.step)
        weights = None
        if run.begin:
            weights = read_state(run_folder(folder, run.begin))
            if weights is None:
                raise ValueError(f"the run {run.begin}, whose weights this one begins with, is not finished")
        ended = None
        with (home / EVENTS).open("ab") as events:
            events.truncate(kept)
            saved = 0.0 if state is None else state.train_seconds

            def due(step: int, seconds: float) -> bool:
                return seconds - saved >= SAVE_SECONDS or step in keep

            for event in train(run, corpus.only(run.sources), state, due=due, weights=weights):
                if isinstance(event, State):
                    saved = event.train_seconds
                    events.flush()
                    os.fdatasync(events.fileno())
                    write_state(home, event, events.tell())
                    if event.step in keep:
                        _keep_state(home, event.step)
                elif isinstance(event, Ended):
                    ended = event
                else:
                    events.write(json.dumps(asdict(event), separators=(",", ":")).encode() + b"\n")
                    events.flush()
                on_event(event)
        assert ended is not None
        record = _record(run, corpus, home, ended, study)
        _append(folder / TRAININGS, record.line())
        if trunk:
            _kept_state(run_folder(folder, trunk), run.decays_at).unlink(missing_ok=True)
        return record


def _kept_state(home: Path, step: int) -> Path:
    return home / f"state-{step}.safetensors"


def _keep_state(home: Path, step: int) -> None:
    """Copies the state of this step, for the run that branches off here."""
    write_whole(_kept_state(home, step), (home / STATE).read_bytes(), sync=True)


def _branch(trunk: Path, home: Path, run: Run) -> None:
    """Copies what the longer run had done when this one lowers its rate: its events and its state."""
    longer = Run.from_dict(json.loads((trunk / SETTINGS).read_text()))
    assert replace(longer, steps=run.steps, evaluations=run.evaluations) == run, "not a branch of this run"
    kept = _kept_state(trunk, run.decays_at)
    (home / EVENTS).write_bytes((trunk / EVENTS).read_bytes()[: _events_bytes(kept)])
    write_whole(home / STATE, kept.read_bytes(), sync=True)


def write_state(home: Path, state: State, events_bytes: int) -> None:
    tensors = {name: value.detach().contiguous() for name, value in state.tensors.items()}
    about = {
        "step": str(state.step), "train_seconds": repr(state.train_seconds), "events": str(events_bytes),
        "sha256": _digest(tensors),
    }  # fmt: skip
    write_whole(home / STATE, save(tensors, metadata=about), sync=True)


def read_state(home: Path) -> State | None:
    """Returns None if there is no state. Raises ValueError if the file is damaged."""
    if not is_plain_file(home / STATE):
        return None
    data = (home / STATE).read_bytes()  # once: a run beside this may replace it between two reads
    try:
        tensors = load(data)
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        int(about["events"])
        state = State(step=int(about["step"]), train_seconds=float(about["train_seconds"]), tensors=tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{home / STATE} is damaged ({error}); delete it to begin anew") from None
    if _digest(tensors) != about.get("sha256"):
        raise ValueError(f"{home / STATE} is damaged (its sha256 differs); delete it to begin anew")
    return state


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_model(home: Path) -> Decoder:
    """Returns the model of a run from its last state, ready for use."""
    try:
        run = Run.from_dict(json.loads((home / SETTINGS).read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{home} holds no training run: {error}") from None
    state = read_state(home)
    if state is None:
        raise ValueError(f"{home} holds no state yet; train it first")
    model = Decoder(run)
    try:
        model.load_state_dict(state.part("model:"))
    except RuntimeError as error:
        raise ValueError(f"{home / STATE} is not of the model in {SETTINGS}: {error}") from None
    return model.eval()


def _events_bytes(state: Path) -> int:
    with safe_open(state, framework="pt") as file:
        return int(file.metadata()["events"])


def _kept_bytes(home: Path) -> int:
    kept = _events_bytes(home / STATE)
    path = home / EVENTS
    if not path.exists() or path.stat().st_size < kept:
        raise ValueError(f"{path} is shorter than when {STATE} was written; delete {home} to begin anew")
    return kept


def read_events(home: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a run: steps have "seconds", evaluations have "losses"."""
    path = home / EVENTS
    if not is_plain_file(path):
        return
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                return  # being written, or cut off
            yield json.loads(line)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    with (home / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is training {home.name}; wait for it") from None
        yield


def _append(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)


def _record(run: Run, corpus: Corpus, home: Path, ended: Ended, study: str) -> Training:
    events = list(read_events(home))
    steps = [event for event in events if "norm" in event]
    evaluations = [event for event in events if "losses" in event]
    last, first = evaluations[-1], evaluations[0]
    source = corpus.only(run.sources).sources[0].name
    loss = last["losses"][source]
    times = [sum(step["seconds"].values()) for step in steps]
    pairs = fmean(step["pairs_per_token"] for step in steps)
    tail = steps[-max(1, int(LAST_SHARE * len(steps))) :]
    work = work_of(ended.model, pairs)
    tokens = run.steps * run.batch * run.size.sequence
    total = sum(times)
    version = source_version()
    return Training(
        schema_version=1,
        key=run.key,
        created_at=datetime.now(UTC),
        study=study,
        rule=run.rule.name,
        settings=run.to_dict(),
        seed=run.seed,
        steps=run.steps,
        tokens=tokens,
        learning_rate=run.learning_rate,
        sees_future=run.sees_future,
        loss=loss,
        bits_per_byte=loss / math.log(2),
        perplexity=math.exp(min(loss, 60.0)),
        losses=last["losses"],
        training_loss=fmean(step["loss"] for step in tail),
        curve=tuple(
            Point(step=taken["step"], seconds=taken["train_seconds"], loss=taken["losses"][source])
            for taken in evaluations
        ),
        seconds=total,
        step_seconds=median(times),
        parts={part: sum(step["seconds"][part] for step in steps) / total for part in steps[0]["seconds"]},
        tokens_per_second=tokens / total,
        peak_bytes=max(0, ended.peak_bytes),
        parameters=work.parameters,
        active_parameters=work.active_parameters,
        flops_per_token=work.flops,
        train_flops=3 * work.flops * tokens,
        experts_per_token=pairs,
        layers=tuple(
            Layer(
                name=name,
                cv=load["cv"],
                max_violation=load["max_violation"],
                entropy_bits=load["entropy_bits"],
                dead_experts=load["dead_experts"],
                drop_rate=load["drop_rate"],
                agreement=last["knowledge"][name]["agreement"],
                tells=last["knowledge"][name]["of"],
                tells_at_first=first["knowledge"][name]["of"],
            )
            for name, load in last["layers"].items()
        ),
        collapsed=_collapses(evaluations),
        threads=torch.get_num_threads(),
        machine=this_machine().name,
        torch=torch.__version__,
        harness_version=package_version(),
        commit=str(version["commit"]),
        dirty=bool(version["dirty"]),
    )


def _collapses(evaluations: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns a sentence for each layer that was collapsed at an evaluation: from when to when."""
    sentences = []
    for name in {name for taken in evaluations for name in taken["collapsed"]}:
        collapsed = [taken for taken in evaluations if name in taken["collapsed"]]
        when, last = [taken["step"] for taken in collapsed], collapsed[-1]["collapsed"][name]
        still = "also at the end" if when[-1] == evaluations[-1]["step"] else f"until step {when[-1]}"
        sentences.append(f"layer {name} from step {when[0]}, {still}: {last}")
    return tuple(sorted(sentences))
