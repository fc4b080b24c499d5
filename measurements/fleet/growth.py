"""How a store grows: 10^3 and 10^4 cells through its own code, 10^6 to 10^8 records as Parquet parts.

    python measurements/fleet/growth.py FOLDER [--cells 1000,10000] [--records 6,7,8] > growth.json

Cells: one part and one commit each, put into a store in a folder (file://), then resume, compaction, and the
copy of a reader, cold and warm. Scaled down: 10^8 cells would be 2 * 10^8 small files on this disk.
Records: a reader's copy of rows (results/rows.py) with files of a million. Ten files are distinct and the
others copies of them, because making them takes the time and not reading them. They are asked by run_query,
and once by the command `mrb results` itself. `latest` is asked only where all files are distinct: copies
would have fewer cells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.mirror import mirror, mirror_rows
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.fleet.packs import compact_store
from moe_routing_bench.fleet.parts import Header
from moe_routing_bench.fleet.store import RemoteStore
from moe_routing_bench.results.parquet import COLUMNS
from moe_routing_bench.results.query import MEMORY_LIMIT, run_query
from moe_routing_bench.results.rows import INDEX, TABLES, note_file

TESTS = Path(__file__).parents[2] / "tests"
PART_ROWS, DISTINCT_PARTS = 1_000_000, 10
LINE, SAMPLES = 4_000, 320  # bytes of a record and of its samples: 40 rounds
AGGREGATE = """SELECT impl, count(*), avg(ratio), min(median_ms), max(ratio) FROM records
    WHERE status = 'PASSED' GROUP BY impl"""
LATEST = "SELECT impl, count(*), avg(ratio) FROM latest WHERE status = 'PASSED' GROUP BY impl"
RESUME = """SELECT count(DISTINCT cell_key) FROM records
    WHERE cell_key IN (SELECT md5(i::VARCHAR) FROM range(60000) t(i))"""


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return round(time.perf_counter() - began, 4)


def grow_cells(place: Path, count: int) -> dict[str, Any]:
    url = f"file://{place}/store-{count}"
    os.environ["MRB_HOME"] = str(place / f"home-{count}")
    store = RemoteStore(url, make=True)
    records, samples = b"x" * (2 * LINE - 1) + b"\n", b"\0" * (2 * SAMPLES)

    def publish(number: int) -> None:
        key = hashlib.sha256(str(number).encode()).hexdigest()
        header = Header(
            cell_key=key, session=f"s{number // 1000:06d}", number=number % 1000 + 1, environment="0" * 64,
            records=len(records), samples=len(samples), samples_at=len(samples) * (number % 1000),
        )  # fmt: skip
        assert store.publish(header, records, samples, attempt=1, failed=False)

    seconds = {"append, a cell": timed(lambda: [publish(number) for number in range(count)]) / count}
    seconds["resume: which cells are done"] = timed(lambda: store.attempts())
    seconds["copy for a reader, from parts"] = timed(lambda: mirror(url))
    seconds["the same, nothing new"] = timed(lambda: mirror(url))
    seconds["compaction"] = timed(lambda: compact_store(Objects(url)))
    seconds["compaction again, parts deleted"] = timed(lambda: compact_store(Objects(url), drop=True))
    shutil.rmtree(place / f"home-{count}")
    seconds["copy for a reader, from packs"] = timed(lambda: mirror(url))
    shutil.rmtree(place / f"store-{count}")
    return {"cells": count, "seconds": seconds}


def grow_rows(place: Path, count: int) -> dict[str, Any]:
    """Rows from cells whose records hold, each with two of them, though their times are made up."""
    url = f"file://{place}/made-{count}"
    os.environ["MRB_HOME"] = str(place / f"home-made-{count}")
    sys.path.append(str(TESTS))  # for what it imports
    made = runpy.run_path(str(TESTS / "made_sweeps.py"))
    store, engine = RemoteStore(url, make=True), made["MadeUp"]()
    plan = plan_fleet(made["made_cells"](count), store, engine, retry_failed=False, resume=True)
    for _ in run_fleet(plan, store, engine):
        pass
    seconds = timed(lambda: mirror_rows(url))
    found = {
        "cells": count,
        "copy of rows, a record": seconds / count / 2,
        "nothing new": timed(lambda: mirror_rows(url)),
    }
    shutil.rmtree(place / f"made-{count}")
    return found


def value(name: str, kind: str) -> str:
    """SQL for a made-up column: names repeat as they do in sweeps, times and ratios do not."""
    special = {
        "record_id": "'s' || (i // 1000)::VARCHAR || '-' || i::VARCHAR",
        "cell_key": "md5((i // 10)::VARCHAR)",
        "session": "'s' || (i // 1000)::VARCHAR",
        "created_at": "TIMESTAMP '2026-11-16' + to_seconds(i // 10)",
        "impl": "'implementation ' || (i % 10)::VARCHAR",
        "status": "if(i % 97 = 0, 'CRASHED', 'PASSED')",
        "role": "if(i % 10 = 0, 'baseline', 'candidate')",
    }
    if name in special:
        return special[name]
    if kind == "DOUBLE":
        varied = name.endswith("_ms") or name.startswith("ratio")
        return "random()" if varied else "(i % 1000) / 7.0"
    return {
        "BIGINT": "(i % 64)::BIGINT",
        "BOOLEAN": "i % 2 = 0",
        "VARCHAR": f"'{name} ' || (i % 20)::VARCHAR",
        "VARCHAR[]": f"['{name}']",
    }.get(kind, f"NULL::{kind}")


def make_part(path: Path, first: int, rows: int) -> None:
    columns = ", ".join(f'({value(c.name, c.type)})::{c.type} AS "{c.name}"' for c in COLUMNS)
    with duckdb.connect(config={"memory_limit": MEMORY_LIMIT}) as connection:
        connection.execute("SET enable_progress_bar = false")  # it would go to stdout
        connection.execute(
            f"COPY (SELECT {columns} FROM range({first}, {first + rows}) t(i)) TO '{path}' "
            "(FORMAT parquet, COMPRESSION zstd)"
        )


def ask(folder: Path, sql: str, times: int, answer: Any) -> None:
    seconds = [timed(lambda: run_query(folder, sql)) for _ in range(times)]
    answer.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10))


def asked(folder: Path, sql: str, times: int = 3) -> dict[str, Any]:
    """In a process of its own, whose memory is then its own too."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=ask, args=(folder, sql, times, answer))
    process.start()
    seconds, mib = answer.get(timeout=1800)
    process.join()
    return {"first": seconds[0], "warm": min(seconds[1:]), "MiB of the process": mib}


def distinct_parts(place: Path) -> tuple[list[Path], float]:
    place.mkdir()
    parts = [place / f"{number}.parquet" for number in range(DISTINCT_PARTS)]
    seconds = timed(lambda: [make_part(p, n * PART_ROWS, PART_ROWS) for n, p in enumerate(parts)])
    return parts, seconds / len(parts)


def grow_records(place: Path, power: int, distinct: list[Path]) -> dict[str, Any]:
    folder = place / f"records-{power}-rows"
    (folder / "environments").mkdir(parents=True)
    count = 10**power // PART_ROWS
    with closing(sqlite3.connect(folder / INDEX)) as index, index:
        index.executescript(TABLES)
        for number in range(1, count + 1):
            path = folder / f"rows-{number}.parquet"
            shutil.copyfile(distinct[number % len(distinct)], path)
            note_file(index, path, level=5, rows=PART_ROWS)
    size = sum(path.stat().st_size for path in folder.glob("rows-*"))
    command = [
        sys.executable,
        "-m",
        "moe_routing_bench",
        "results",
        "query",
        AGGREGATE,
        "--folder",
        str(folder),
    ]
    answer = {
        "records": count * PART_ROWS,
        "bytes of a record": round(size / count / PART_ROWS, 1),
        "aggregate query": asked(folder, AGGREGATE),
        "resume: which of 60,000 cells are there": asked(folder, RESUME),
        "mrb results, the whole command": timed(
            lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ),
    }
    if count <= len(distinct):
        answer["the newest record of each cell"] = asked(folder, LATEST)
    shutil.rmtree(folder)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", default="1000,10000")
    parser.add_argument("--records", default="6,7,8")
    given = parser.parse_args()
    place = given.folder.resolve()
    place.mkdir(parents=True)
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": this_machine().name}
    found |= {"load": os.getloadavg()[0], "cells": [], "rows": [], "records": []}
    for count in given.cells.split(","):
        found["cells"].append(grow_cells(place, int(count)))
        print(json.dumps(found["cells"][-1]), file=sys.stderr, flush=True)
    for count in (100, 1000):
        found["rows"].append(grow_rows(place, count))
        print(json.dumps(found["rows"][-1]), file=sys.stderr, flush=True)
    parts, making = distinct_parts(place / "distinct")
    found["seconds to make a part of 10^6 records"] = round(making, 1)
    for power in given.records.split(","):
        found["records"].append(grow_records(place, int(power), parts))
        print(json.dumps(found["records"][-1]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
