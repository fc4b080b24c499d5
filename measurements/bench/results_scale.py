"""What a results folder costs at 10^6 records: appending, making the copy for queries, an aggregate query.

    python measurements/bench/results_scale.py [RECORDS]     5 minutes; writes results_scale.json

Ten sessions of 10^5 records. `append_ms`: one record with 40 samples, synced, in a session open beside them.
`query_seconds`: count and median by implementation and span, each on a new connection.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import duckdb
import numpy as np

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.results.folder import Session, iterate
from moe_routing_bench.results.parquet import compact
from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.record import Record, Timing, parse_record
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

SESSIONS = 10
QUERY = "SELECT impl, span, count(*), median(median_ms) FROM records GROUP BY impl, span ORDER BY ALL"
KEYS = "SELECT DISTINCT cell_key, status FROM records"
LATEST = "SELECT impl, count(*), median(ratio) FROM latest GROUP BY impl"
APPENDS = 1_000


def measured() -> Record:
    """A record as a sweep writes it, of two implementations of combine on a few tokens."""
    case = Experiment(case="own/x", span="combine", T=16, D=32, F=32, E=4, K=2, dtype="float32")
    experiment = replace(
        case,
        workload="uniform",
        implementations=(ImplementationRef(name="gather_sum"), ImplementationRef(name="index_add")),
        min_rounds=40,
        max_rounds=40,
    )
    with tempfile.TemporaryDirectory() as folder:
        list(run_sweep([experiment], Path(folder), LocalExecutor()))
        return next(r for r in iterate(Path(folder)) if r.implementation.role == "candidate")


def fill(folder: Path, record: Record, records: int) -> None:
    """Lines as a session writes them, without its sync after each cell."""
    digits = random.Random(0)
    number = 0
    for part in range(SESSIONS):
        session = f"20261115T0247{part:02d}000-{part:08x}"
        path = folder / f"session={session}"
        path.mkdir(parents=True)
        with (path / "records.jsonl").open("wb") as file:
            for _ in range(records // SESSIONS):
                whole = json.loads(record.line())
                whole |= {"session": session, "record_id": f"{session}-{number % 1_000_000:06d}"}
                whole["cell_key"] = f"{number // 4:064x}"
                whole["implementation"]["label"] = f"impl{number % 12}"
                whole["experiment"]["span"] = f"span{number % 5}"
                scale, timing = digits.lognormvariate(0, 0.3), whole["timing"]
                timing["samples"]["file"] = f"session={session}/samples.f64"
                for name in ("median", "mean", "least", "most", "p05", "p25", "p75", "p95"):
                    timing[name] *= scale
                line = json.dumps(whole, separators=(",", ":")).encode() + b"\n"
                file.write(line)
                number += 1
        parse_record(line)


def timed(call: object, times: int = 1) -> list[float]:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()  # type: ignore[operator]
        seconds.append(time.perf_counter() - started)
    return seconds


def appends(folder: Path, record: Record) -> list[float]:
    samples = np.linspace(0.01, 0.013, 40)
    milliseconds = []
    with Session.start(folder) as session:
        session.put_environment({"name": "synthetic"})
        for _ in range(APPENDS):
            started = time.perf_counter()
            timing = Timing.of(samples, 0.1, session.put_samples(samples), {})
            named = {"session": session.id, "record_id": session.new_record_id(), "timing": timing}
            session.append([Record(**{**dict(record), **named})])
            milliseconds.append(1e3 * (time.perf_counter() - started))
    return milliseconds


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(dir=Path.cwd().parent) as scratch:
        folder, record = Path(scratch), measured()
        fill(folder, record, records)
        (compacting,) = timed(lambda: compact(folder))
        milliseconds = appends(folder, record)
        query = timed(lambda: run_query(folder, QUERY), 5)
        latest = timed(lambda: run_query(folder, LATEST), 3)
        known = timed(lambda: run_query(folder, KEYS))
        (reading,) = timed(lambda: sum(1 for _ in iterate(folder)))
        sizes = {
            name: sum(path.stat().st_size for path in folder.glob(f"*/{name}"))
            for name in ("records.jsonl", "records.parquet")
        }
        counted = run_query(folder, "SELECT count(*), count(DISTINCT cell_key) FROM records")[1][0]
    found = {
        "command": f"python measurements/bench/results_scale.py {records}",
        "machine": this_machine().to_dict(),
        "versions": {"duckdb": duckdb.__version__, "numpy": np.__version__},
        "records": counted[0],
        "cells": counted[1],
        "append_ms": {
            "median": median(milliseconds),
            "p99": float(np.quantile(milliseconds, 0.99)),
            "most": max(milliseconds),
            "appends": APPENDS,
        },
        "query": QUERY,
        "query_seconds": {"best": min(query), "worst": max(query)},
        "latest_query_seconds": {"best": min(latest), "worst": max(latest)},
        "keys_seconds": known[0],
        "compact_seconds": compacting,
        "iterate_seconds": reading,
        "bytes": sizes,
        "line_bytes": len(record.line()),
    }
    print(json.dumps(found, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
