"""What a results folder costs at 10^6 records: appending, making the copy for queries, an aggregate query.

    PYTHONPATH=src python measurements/results_scale.py [RECORDS]    5 minutes; writes results_scale.json

Ten sessions of 10^5 records. `append_ms`: one record with 40 samples, synced, in a session open beside them.
`query_seconds`: count and median by implementation and span, each on a new connection.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import duckdb
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from moe_routing_bench.results.flat import compact
from moe_routing_bench.results.query import keys, run_query
from moe_routing_bench.results.record import Timing, content_hash, parse_record
from moe_routing_bench.results.store import Session, iterate
from sample_records import SESSION, a_record

SESSIONS = 10
QUERY = "SELECT impl, span, count(*), median(median_ms) FROM records GROUP BY impl, span ORDER BY ALL"
LATEST = "SELECT impl, count(*), median(ratio) FROM latest GROUP BY impl"
APPENDS = 1_000


def fill(folder: Path, records: int) -> None:
    """Lines as a session writes them, without its sync after each cell."""
    template = a_record().line().decode()
    digits = random.Random(0)
    number = 0
    for part in range(SESSIONS):
        session = f"20261115T0247{part:02d}000-{part:08x}"
        path = folder / f"session={session}"
        path.mkdir(parents=True)
        with (path / "records.jsonl").open("w") as file:
            for _ in range(records // SESSIONS):
                scale = digits.lognormvariate(0, 0.3)
                line = template.replace(SESSION, session).replace("-000001", f"-{number % 1_000_000:06d}")
                line = line.replace('"label":"staged"', f'"label":"impl{number % 12}"')
                line = line.replace('"span":"expert_ffn"', f'"span":"span{number % 5}"')
                line = line.replace('"cell_key":"0123456789abcdef', f'"cell_key":"{number // 4:016x}')
                for field in ("0.0115", "0.01", "0.013", "0.0101", "0.0107", "0.0122", "0.0128"):
                    line = line.replace(f":{field},", f":{float(field) * scale!r},")
                file.write(line)
                number += 1
        parse_record(line.encode())


def timed(call: object, times: int = 1) -> list[float]:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()  # type: ignore[operator]
        seconds.append(time.perf_counter() - started)
    return seconds


def appends(folder: Path) -> list[float]:
    samples = np.linspace(0.01, 0.013, 40)
    milliseconds = []
    with Session.start(folder) as session:
        session.put_environment({"name": "synthetic"})
        for _ in range(APPENDS):
            base = a_record(session=session.id, record_id=session.new_record_id(), timing=None,
                            comparison=None, correctness__status="OOM", correctness__reason="x")  # fmt: skip
            good = a_record().correctness
            started = time.perf_counter()
            timing = Timing.of(samples, 0.1, session.put_samples(samples), {})
            parts = {**dict(base), "timing": timing, "correctness": good}
            session.append([type(base)(**parts)])
            milliseconds.append(1e3 * (time.perf_counter() - started))
    return milliseconds


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(dir=Path.cwd().parent) as scratch:
        folder = Path(scratch)
        fill(folder, records)
        (compacting,) = timed(lambda: compact(folder))
        milliseconds = appends(folder)
        query = timed(lambda: run_query(folder, QUERY), 5)
        latest = timed(lambda: run_query(folder, LATEST), 3)
        known = timed(lambda: keys(folder))
        (reading,) = timed(lambda: sum(1 for _ in iterate(folder)))
        sizes = {
            name: sum(path.stat().st_size for path in folder.glob(f"*/{name}"))
            for name in ("records.jsonl", "records.parquet")
        }
        counted = run_query(folder, "SELECT count(*), count(DISTINCT cell_key) FROM records")[1][0]
    found = {
        "command": f"python measurements/results_scale.py {records}",
        "machine": {"platform": platform.platform(), "cpu": _cpu()},
        "versions": {"python": sys.version.split()[0], "duckdb": duckdb.__version__, "numpy": np.__version__},
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
        "template": content_hash(json.loads(a_record().line())),
    }
    print(json.dumps(found, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    main()
