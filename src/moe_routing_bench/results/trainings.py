"""The results of training runs, one record each: lines of DIR/trainings.jsonl, which train/records.py
writes."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from moe_routing_bench.core.text import first_problem
from moe_routing_bench.results.read import TRAININGS, LeftOut, is_plain_file
from moe_routing_bench.results.record import Amount, Count, Moment, Name, RecordPart, Seconds, Sentence, Share

MAX_LINE_BYTES = 1 << 20
Loss = Annotated[float, Field(ge=0, le=1e6)]


class Point(RecordPart):
    """The held-out loss after `step` steps and `seconds` of training."""

    step: Count
    seconds: Seconds
    loss: Loss


class Layer(RecordPart):
    """One router at the end of training: how even its load is, and how much the chosen expert tells about a
    token; see RoutingStatistics and watching.py."""

    name: Name
    cv: Amount
    max_violation: Amount
    entropy_bits: Amount
    dead_experts: Count
    drop_rate: Share | None
    agreement: Share | None
    tells: dict[Name, Share]
    tells_at_first: dict[Name, Share]


class Training(RecordPart):
    """The result of one run. loss: held-out nats per byte of the first source at the end.

    study="routers", rule="switch", seed=0, steps=600, loss=1.83, ...
    """

    schema_version: Literal[1]
    key: Name
    created_at: Moment
    study: Name
    rule: Name
    settings: dict[str, Any]
    seed: Count
    steps: Count
    tokens: Count
    learning_rate: Amount
    sees_future: bool
    loss: Loss
    bits_per_byte: Loss
    perplexity: Annotated[float, Field(ge=1, le=1e30)]
    losses: dict[Name, Loss]
    training_loss: Loss
    curve: Annotated[tuple[Point, ...], Field(max_length=10_000)]
    seconds: Seconds
    step_seconds: Seconds
    parts: dict[Name, Share]
    tokens_per_second: Amount
    peak_bytes: Count
    parameters: Count
    active_parameters: Amount
    flops_per_token: Amount
    train_flops: Amount
    experts_per_token: Amount
    layers: Annotated[tuple[Layer, ...], Field(max_length=4096)]
    collapsed: Annotated[tuple[Sentence, ...], Field(max_length=4096)]
    threads: Count
    machine: Name
    torch: Name
    harness_version: Name
    commit: Name
    dirty: bool

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


# the table `trainings` of a query has these fields of Training and the mean max violation of its layers
COLUMNS = {
    "key": "VARCHAR", "created_at": "TIMESTAMP", "study": "VARCHAR", "rule": "VARCHAR", "seed": "BIGINT",
    "steps": "BIGINT", "tokens": "BIGINT", "learning_rate": "DOUBLE", "sees_future": "BOOLEAN",
    "loss": "DOUBLE", "bits_per_byte": "DOUBLE", "perplexity": "DOUBLE", "training_loss": "DOUBLE",
    "seconds": "DOUBLE", "step_seconds": "DOUBLE", "tokens_per_second": "DOUBLE", "peak_bytes": "BIGINT",
    "parameters": "BIGINT", "active_parameters": "DOUBLE", "flops_per_token": "DOUBLE",
    "train_flops": "DOUBLE", "experts_per_token": "DOUBLE", "threads": "BIGINT", "machine": "VARCHAR",
    "torch": "VARCHAR", "commit": "VARCHAR", "dirty": "BOOLEAN",
}  # fmt: skip


def rows(folder: Path, left_out: LeftOut) -> list[tuple[Any, ...]]:
    """Returns the rows of the table: a value for each of COLUMNS, then max_violation."""
    lines = []
    for one in read_trainings(folder, left_out):
        violations = [layer.max_violation for layer in one.layers]
        lines.append((*(getattr(one, name) for name in COLUMNS), fmean(violations) if violations else None))
    return lines


def read_trainings(folder: Path | str, left_out: LeftOut | None = None) -> list[Training]:
    """Returns the newest record of each run in a folder. Bad lines become sentences in left_out."""
    left_out = LeftOut() if left_out is None else left_out
    path = Path(folder) / TRAININGS
    if not is_plain_file(path):
        raise ValueError(f"there are no training runs in {folder}; mrb train --out {folder} makes them")
    by_key: dict[str, Training] = {}
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                left_out.add(f"{path}: a line was cut off or is too long")
                break
            try:
                one = Training.model_validate_json(line)
            except ValidationError as error:
                left_out.add(f"{path}: {first_problem(error)}")
                continue
            by_key[one.key] = one
    return list(by_key.values())


def finished(folder: Path) -> dict[str, Training]:
    """Returns the finished runs of a folder by their key."""
    if not is_plain_file(folder / TRAININGS):
        return {}
    return {one.key: one for one in read_trainings(folder)}
