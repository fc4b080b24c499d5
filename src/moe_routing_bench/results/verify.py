"""Verifies a record's statistics by recomputing them from its raw samples.

Somebody may scale the medians of all records of a cell by the same factor, and no record then contradicts
another. So medians, means, quantiles, rates, ratios and intervals are recomputed from samples.f64 when lines
are read, many records at once. This takes a third of the time of parsing the lines: 43 us instead of 123 us
per record of 40 samples on a busy machine, or about 20 s for 10^6 records. It happens once for each line,
because parquet.py keeps the result. The first call and the stage times are not verified. The bootstrap of an
interval is not repeated; only the ranks of its ends are checked.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from moe_routing_bench.results.record import Record

SAMPLES = "samples.f64"
FIGURES = ("least", "p05", "p25", "median", "p75", "p95", "most", "mean", "std")
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
SLACK = 1e-9  # for rounding in the last digits
MAX_BASELINES = 64  # of a cell
Floats: TypeAlias = NDArray[np.float64]


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
