"""How a store grows: 100 and 500 cells through its own code, 10^5 to 10^7 records as made-up tables.

    python measurements/fleet/growth.py FOLDER [--cells 100,500] [--records 5,6,7] > growth.json

Cells: one segment each, put into a store in a folder (file://), then resume, a first query, the fold, and a
query and a resume after it. Records: a manifest with tables of at most a million rows, with lines and
samples. One table is made and the others are links to it, because making them takes the time and not reading
them. A hundred cells are not folded. A reader without a copy asks by `mirror` and `run_query`, and once by
the command `mrb results query` itself. "names" is what a reader lists.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.claims import plan_fleet, run_fleet
from moe_routing_bench.fleet.folding import ROW_GROUP, check_tables, compact_store
from moe_routing_bench.fleet.store import RemoteStore, mirror
from moe_routing_bench.results.objects import Objects
from moe_routing_bench.results.parquet import COLUMNS, COLUMNS_HASH
from moe_routing_bench.results.query import MEMORY_LIMIT, run_query
from moe_routing_bench.results.tables import Manifest, Table

TESTS = Path(__file__).parents[2] / "tests"
TABLE_ROWS = 1_000_000
LINE, SAMPLES = 3_200, 40  # letters of a record, and its samples
AGGREGATE = """SELECT impl, count(*), avg(ratio), min(median_ms), max(ratio) FROM records
    WHERE status = 'PASSED' GROUP BY impl"""


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return round(time.perf_counter() - began, 4)


def swept(url: str, cells: int, start: int = 0) -> None:
    sys.path.append(str(TESTS))  # for what it imports
    made = runpy.run_path(str(TESTS / "made_sweeps.py"))
    store, engine = RemoteStore(url, make=True), made["MadeUp"]()
    todo = made["made_cells"](cells)[start:]
    for _ in run_fleet(plan_fleet(todo, store, engine, retry_failed=False, resume=True), store, engine):
        pass


def first_answer(url: str) -> None:
    shutil.rmtree(os.environ["MRB_HOME"], ignore_errors=True)
    run_query(mirror(url, rows=True).folder, AGGREGATE)


def listed(url: str) -> dict[str, int]:
    return {kind: len(Objects(url).list(f"{kind}/")) for kind in ("segments", "manifests", "tables")}


def grow_cells(place: Path, count: int) -> dict[str, Any]:
    """Each cell has two records, which hold, though their times are made up."""
    url = f"file://{place}/store-{count}"
    os.environ["MRB_HOME"] = str(place / f"home-{count}")
    seconds = {"append, a cell": timed(lambda: swept(url, count)) / count}
    seconds["resume: which cells are done"] = timed(lambda: RemoteStore(url).attempts())
    seconds["first answer, nothing folded"] = timed(lambda: first_answer(url))
    seconds["fold, a record"] = timed(lambda: compact_store(Objects(url))) / count / 2
    seconds["resume, all folded"] = timed(lambda: RemoteStore(url).attempts())
    seconds["first answer, all folded"] = timed(lambda: first_answer(url))
    seconds["whole copy, a record"] = timed(lambda: mirror(url)) / count / 2
    seconds["check, a record"] = timed(lambda: check_tables(Objects(url))) / count / 2
    shutil.rmtree(place / f"store-{count}")
    return {"cells": count, "seconds": seconds}


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


def make_table(path: Path, rows: int) -> None:
    own = {
        "cell": "(hash(i // 10) >> 4)::BIGINT",
        "attempt": "1::BIGINT",
        "line": f"repeat(md5(i::VARCHAR), {LINE // 32})",
        "sample_seconds": f"list_transform(range({SAMPLES}), lambda x: random())",
    }
    columns = [f'({value(c.name, c.type)})::{c.type} AS "{c.name}"' for c in COLUMNS]
    columns += [f"{made} AS {name}" for name, made in own.items()]
    with duckdb.connect(config={"memory_limit": MEMORY_LIMIT}) as connection:
        connection.execute("SET enable_progress_bar = false")  # it would go to stdout
        connection.execute(
            f"COPY (SELECT {', '.join(columns)} FROM range({rows}) t(i)) TO '{path}' "
            f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP})"
        )


def grow_records(place: Path, power: int) -> dict[str, Any]:
    root = place / f"records-{power}"
    url, rows = f"file://{root}", min(10**power, TABLE_ROWS)
    os.environ["MRB_HOME"] = str(place / f"home-{power}")
    swept(url, 100)
    names = [
        f"tables/all/{hashlib.sha256(str(n).encode()).hexdigest()}.parquet" for n in range(10**power // rows)
    ]
    (root / "tables/all").mkdir(parents=True)
    making = timed(lambda: make_table(root / names[0], rows))
    for name in names[1:]:
        os.link(root / names[0], root / name)
    size = (root / names[0]).stat().st_size
    tables = [
        Table(
            name=name, bytes=size, rows=rows, columns=COLUMNS_HASH, suites=("", ""),
            days=("2026-11-16", "2026-11-17"),
        )
        for name in names
    ]  # fmt: skip
    manifest = Manifest(number=1, tables=tuple(tables)).model_dump_json()
    Objects(url).put_new(f"manifests/{1:012d}.json", manifest.encode())
    answers = [timed(lambda: first_answer(url)) for _ in range(3)]
    folder = mirror(url, rows=True).folder
    command = [sys.executable, "-m", "moe_routing_bench", "results", "query", AGGREGATE, "--folder", url]
    found = {
        "records": rows * len(names) + 200,
        "bytes of a record": round(size / rows, 1),
        "seconds to make a table": making,
        "names": listed(url),
        "first answers": answers,
        "next answer": timed(lambda: run_query(folder, AGGREGATE)),
        "resume: which cells are done": timed(lambda: RemoteStore(url).attempts()),
        "mrb results query, the whole command": timed(
            lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ),
    }
    shutil.rmtree(root)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", default="100,500")
    parser.add_argument("--records", default="5,6,7")
    given = parser.parse_args()
    place = given.folder.resolve()
    place.mkdir(parents=True)
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": this_machine().name}
    found |= {"load": os.getloadavg()[0], "cells": [], "records": []}
    for count in given.cells.split(","):
        found["cells"].append(grow_cells(place, int(count)))
        print(json.dumps(found["cells"][-1]), file=sys.stderr, flush=True)
    for power in given.records.split(","):
        found["records"].append(grow_records(place, int(power)))
        print(json.dumps(found["records"][-1]), file=sys.stderr, flush=True)
    found["load at the end"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
