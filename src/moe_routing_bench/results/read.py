"""Reads the records of a folder line by line. Anybody may have written them: a bad line becomes a sentence.

`RecordCount` counts records in the same way for every command. `measurable` makes an experiment of a record.

Somebody may scale the medians of all records of a cell by the same factor, and no record then contradicts
another. So medians, means, quantiles, rates, ratios and intervals are recomputed from samples.f64 when lines
are read, many records at once. This takes a third of the time of parsing the lines: 43 us instead of 123 us
per record of 40 samples on a busy machine, or about 20 s for 10^6 records. It happens once for each line,
because parquet.py keeps the result. The first call and the stage times are not verified. The bootstrap of an
interval is not repeated; only the ranks of its ends are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.results.record import (
    MAX_LINE_BYTES,
    SESSION,
    Record,
    RecordedExperiment,
    content_hash,
    parse_record,
)
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

RECORDS = "records.jsonl"
TRAININGS = "trainings.jsonl"  # see training.py
CUT_OFF = "the last line was cut off while it was written"
BATCH_RECORDS = 256  # verified against their samples at once
BATCH_SAMPLES = 1 << 22
SAMPLES = "samples.f64"
FIGURES = ("least", "p05", "p25", "median", "p75", "p95", "most", "mean", "std")
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
SLACK = 1e-9  # for rounding in the last digits
MAX_BASELINES = 64  # of a cell
Floats: TypeAlias = NDArray[np.float64]
Place = TypeVar("Place")  # where a record stands


@dataclass
class LeftOut:
    """Lines that are no records: their number, and a sentence about each of the first few. remarks: what else
    a reader must know about the remaining records."""

    MAX_SENTENCES = 20
    count: int = 0
    first: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, sentence: str, lines: int = 1) -> None:
        self.count += lines
        if len(self.first) < self.MAX_SENTENCES:
            self.first.append(sentence)


def read_records(
    path: Path, session: str, left_out: LeftOut, *, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yields the records of one file from byte `start` (the beginning of a line) up to `stop`.

    It leaves out bad lines, records that contradict their samples, and a last line without a newline, which
    was cut off while it was written.
    """
    samples = path.with_name(SAMPLES)
    if not is_plain_file(samples):
        timed = 0
        for _, record in _parsed(path, session, left_out, start, stop):
            timed += record.timing is not None
            yield record
        if timed:
            left_out.remarks.append(f"session {session} has no {SAMPLES}: {timed:,} times are not checked")
        return
    with samples.open("rb") as file:
        parsed = _parsed(path, session, left_out, start, stop)
        for where, record, sentence in held(parsed, lambda _, record: _samples(file.fileno(), record)):
            if sentence is None:
                yield record
            else:
                left_out.add(f"{where}: {record.record_id}: {sentence}")


def held(
    parsed: Iterator[tuple[Place, Record]], samples: Callable[[Place, Record], bytes]
) -> Iterator[tuple[Place, Record, str | None]]:
    """Yields each record with None, or with a sentence that says how it contradicts its samples."""
    for batch in _batches(parsed):
        found = whats_wrong([record for _, record in batch], [samples(*one) for one in batch])
        for (where, record), sentence in zip(batch, found, strict=True):
            yield where, record, sentence


def _samples(fd: int, record: Record) -> bytes:
    if record.timing is None:
        return b""
    return os.pread(fd, 8 * record.timing.samples.count, record.timing.samples.offset)


def _batches(parsed: Iterator[tuple[Place, Record]]) -> Iterator[list[tuple[Place, Record]]]:
    """Groups records into batches and keeps the records of a cell together."""
    batch: list[tuple[Place, Record]] = []
    samples = 0
    for where, record in parsed:
        full = len(batch) >= BATCH_RECORDS and batch[-1][1].cell_key != record.cell_key
        if full or samples > BATCH_SAMPLES:
            yield batch
            batch, samples = [], 0
        batch.append((where, record))
        samples += record.timing.samples.count if record.timing else 0
    if batch:
        yield batch


def _parsed(
    path: Path, session: str, left_out: LeftOut, start: int, stop: int | None
) -> Iterator[tuple[str, Record]]:
    """Yields (place, record) for each valid line."""
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while stop is None or at < stop:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            begin, at = at, at + len(line)
            where = f"{path} at byte {begin:,}"
            if not line.endswith(b"\n"):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_LINE_BYTES)
                    at += len(rest)
                if not rest:
                    left_out.add(f"{where}: {CUT_OFF}")
                    return
                left_out.add(f"{where}: the line has over {MAX_LINE_BYTES:,} bytes, which no record has")
                continue
            try:
                record = parse_record(line)
            except ValueError as error:
                left_out.add(f"{where}: {error}")
                continue
            if record.session != session:
                left_out.add(f"{where}: the record belongs to session {record.session}")
                continue
            yield where, record


def session_folders(folder: Path, left_out: LeftOut | None = None) -> dict[str, Path]:
    """Returns {session id: folder} for each folder with a records file, oldest first. Links are not followed.
    If a session has copies, only the longest counts, and left_out gets a remark for each of the others."""
    if not folder.is_dir():
        raise ValueError(f"there is no results folder {folder}; mrb bench layer --out {folder} makes one")
    folders: dict[str, Path] = {}
    known: dict[str, tuple[bool, int, str]] = {}  # by content: does its name match, its size, its id
    for path in sorted(folder.iterdir()):
        name = re.fullmatch(f"session=({SESSION})", path.name)
        if not (name and stat.S_ISDIR(path.lstat().st_mode) and is_plain_file(path / RECORDS)):
            continue
        folders[name[1]] = path
        content, session = _beginning(path / RECORDS)
        if not content:
            continue
        mine = (session == name[1], (path / RECORDS).stat().st_size, name[1])
        other = known.setdefault(content, mine)
        if other is not mine:
            copy, kept = (other, mine) if mine[:2] > other[:2] else (mine, other)
            known[content] = kept
            del folders[copy[2]]
            if left_out is not None:
                sentence = f"session {copy[2]} is a copy of session {kept[2]} and is not counted again"
                left_out.remarks.append(sentence)
    return folders


def _beginning(path: Path) -> tuple[str, str]:
    """Returns a hash of the first record without the session's name, and that name. A copy of a session has
    the same hash. Both are empty if the first line is no record."""
    with path.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    try:
        record = json.loads(line)
        names = [record.pop("session"), record.pop("record_id")]
        if record["timing"] is not None:
            record["timing"]["samples"].pop("file")
        return content_hash(record), str(names[0])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", ""


def is_plain_file(path: Path) -> bool:
    """Returns whether it is a file, and not a link (it may lead out of the folder) or a pipe (it may never
    end)."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


OWN_ROLES = ("baseline", "candidate")


@dataclass(frozen=True, kw_only=True)
class RecordCount:
    """The number of records, each a line of a results folder: RecordCount(implementations=12, again=6) is 18.

    again: records of a baseline that was timed a second time for noise, or next to code from outside.
    """

    implementations: int
    again: int

    @staticmethod
    def of(roles: Mapping[str, int]) -> RecordCount:
        implementations = sum(rows for role, rows in roles.items() if role in OWN_ROLES)
        return RecordCount(implementations=implementations, again=sum(roles.values()) - implementations)

    @property
    def records(self) -> int:
        return self.implementations + self.again

    def __add__(self, other: RecordCount) -> RecordCount:
        return RecordCount(
            implementations=self.implementations + other.implementations, again=self.again + other.again
        )

    def __str__(self) -> str:
        word = "record" if self.records == 1 else "records"
        if not self.again:
            return f"{self.records:,} {word}"
        return f"{self.records:,} {word}, {self.again:,} of them of baselines timed again to show the noise"

    def to_dict(self) -> dict[str, int]:
        return {
            "records": self.records,
            "implementations": self.implementations,
            "baselines_again": self.again,
        }


def whats_wrong(records: Sequence[Record], samples: Sequence[bytes]) -> list[str | None]:
    """Returns for each record None, or a sentence that says how it contradicts its samples. The records of a
    cell must be given together, because ratios come from paired samples. If one record of a cell is wrong,
    all are."""
    wrong: list[str | None] = [None] * len(records)
    cells = [(record.cell_key, record.session) for record in records]
    seconds: dict[int, Floats] = {}
    for place, (record, data) in enumerate(zip(records, samples, strict=True)):
        if record.timing is not None:
            if hashlib.sha256(data).hexdigest() != record.timing.samples.sha256:
                wrong[place] = f"its samples in {SAMPLES} were changed after they were written"
            elif len(data) != 8 * record.timing.samples.count:
                wrong[place] = "it has another number of samples"
            else:
                seconds[place] = np.frombuffer(data, dtype="<f8")
    by_count: dict[int, list[int]] = defaultdict(list)
    for place, values in seconds.items():
        by_count[len(values)].append(place)
    for places in by_count.values():
        for place, sentence in zip(places, _figures(records, seconds, places), strict=True):
            wrong[place] = sentence
    good = [place for place in seconds if wrong[place] is None]
    for _, cell in groupby(good, lambda place: cells[place]):
        members = list(cell)
        baselines = [p for p in members if records[p].implementation.role in ("baseline", "beside")]
        for place in members:
            if records[place].comparison is not None:
                others = [seconds[p] for p in baselines if p != place]
                wrong[place] = _comparison(records[place], seconds[place], others)
    for _, same in groupby(range(len(records)), lambda place: cells[place]):
        members = list(same)
        if first := next((records[p].record_id for p in members if wrong[p]), None):
            for place in members:
                wrong[place] = wrong[place] or f"{first} of the same cell contradicts its samples"
    return wrong


def _figures(
    records: Sequence[Record], seconds: dict[int, Floats], places: Sequence[int]
) -> Iterator[str | None]:
    """Checks all records with the same number of samples at once."""
    samples_RC = np.stack([seconds[place] for place in places])
    good_R = np.isfinite(samples_RC.sum(axis=1)) & (samples_RC.min(axis=1) > 0)
    samples_RC = np.where(good_R[:, None], samples_RC, 1.0)
    sorted_RC, count = np.sort(samples_RC, axis=1), samples_RC.shape[1]
    at = np.asarray(QUANTILES) * (count - 1)
    low, share = np.floor(at).astype(int), at - np.floor(at)
    high = np.minimum(low + 1, count - 1)
    quantiles = sorted_RC[:, low] * (1 - share) + sorted_RC[:, high] * share
    std_R = samples_RC.std(axis=1, ddof=1) if count > 1 else np.zeros(len(places))
    true = np.column_stack([quantiles, samples_RC.mean(axis=1), std_R])
    stated = np.array([[getattr(records[place].timing, name) for name in FIGURES] for place in places])
    off = np.abs(stated - true) > SLACK * sorted_RC[:, -1:]
    for row, place in enumerate(places):
        if not good_R[row]:
            yield "its samples are not all positive and finite"
        elif off[row].any():
            which = int(off[row].argmax())
            yield (
                f"it says {FIGURES[which]} {1e3 * stated[row, which]:.6g} ms where its samples say "
                f"{1e3 * true[row, which]:.6g} ms"
            )
        else:
            yield _rates(records[place])


def _rates(record: Record) -> str | None:
    """Checks that the rates follow from the median."""
    work, timing = record.work, record.timing
    assert work is not None and timing is not None
    bytes_moved = work.weight_bytes + work.activation_bytes
    least = work.least_seconds
    stated = {
        "tokens_per_second": (work.tokens_per_second, record.experiment.T),
        "flops_per_second": (work.flops_per_second, work.useful_flops),
        "bytes_per_second": (work.bytes_per_second, bytes_moved),
        "share_of_roof": (work.share_of_roof, None if least is None else min(least, timing.median)),
    }
    for name, (rate, amount) in stated.items():
        if rate is not None and not (
            amount is not None and math.isclose(rate * timing.median, amount, rel_tol=1e-6)
        ):
            return f"its {name} does not follow from its median"
    return None


def _comparison(record: Record, own: Floats, baselines: Sequence[Floats]) -> str | None:
    """Checks that the ratio is the median of the paired ratios to a baseline of the cell. If no baseline was
    timed as often, there are no pairs, and the ratio must only be possible."""
    stated = record.comparison
    assert stated is not None
    if {"FASTER": stated.high >= 1, "SLOWER": stated.low <= 1}.get(stated.verdict):
        return f"it says {stated.verdict} with an interval from {stated.low:g} to {stated.high:g}"
    if not baselines:
        return None
    paired = [other[: len(own)] for other in baselines if len(other) >= len(own)]
    if not paired:
        least = min(own.min() / other.max() for other in baselines)
        most = max(own.max() / other.min() for other in baselines)
        return None if least <= stated.ratio <= most else "its ratio is impossible with its samples"
    ratios = []
    for other in paired[:MAX_BASELINES]:
        log = np.sort(np.log(own) - np.log(other))
        ratios.append(math.exp((log[(len(log) - 1) // 2] + log[len(log) // 2]) / 2))  # the median
        if math.isclose(ratios[-1], stated.ratio):
            if _possible(log, stated.low, stated.high):
                return None
            return f"the interval from {stated.low:.4g} to {stated.high:.4g} does not follow from its samples"
    return f"it says ratio {stated.ratio:.6g} where its samples say {ratios[0]:.6g}"


def _possible(log: Floats, low: float, high: float) -> bool:
    """Returns whether these can be the ends of a 99 % interval of the median of sorted logarithms. Resampling
    is random, but it moved the ranks of the ends by less than 2 in every case tried."""
    n = len(log)
    half = 2.576 / 2 * math.sqrt(n)
    slack = 2 + 0.1 * half
    for end, rank in ((low, n / 2 - half), (high, n / 2 + half)):
        least, most = math.floor(rank - slack), math.ceil(rank + slack)
        nearest, furthest = log[max(0, min(least, n - 1))], log[max(0, min(most, n - 1))]
        if not nearest - SLACK <= math.log(end) <= furthest + SLACK:
            return False
    return True


def measurable(recorded: RecordedExperiment) -> Experiment:
    """Returns the experiment of a record. Axes that an old record lacks have their default. It raises a
    ValueError if the routing is missing."""
    known = {one.name: getattr(recorded, one.name) for one, _ in axes_of(Experiment)}
    known = {name: value for name, value in known.items() if value is not None}
    if "workload" not in known:
        raise ValueError("its worker died before it reported how tokens were routed")
    if "weights" not in known:
        from moe_routing_bench.bench.spans.span import span_named  # imports torch, for old records alone

        known["weights"] = span_named(recorded.span).weights
    named = known.get("implementations", ())
    known["implementations"] = tuple(ImplementationRef(**dict(one)) for one in named)
    return Experiment(**known)


def command_of(record: Record) -> str:
    """The command that measures a record again, built from its experiment; "" if there is none. What the
    file says is never shown: anybody may have written it."""
    try:
        experiment = measurable(record.experiment)
    except (ValueError, NotImplementedError):
        return ""
    own = experiment.implementations[-1:]  # after the baseline
    return repro_command(experiment, *own) if own else ""
