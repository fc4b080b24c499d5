"""The whole conformance kit on every Triton implementation and all options, interpreted, memory watched.

    TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1 python measurements/gpu/interpreted_kit.py   15 minutes, 2 cores

Writes interpreted_kit.txt: for every implementation the cells that passed, those it says it cannot
do, and what was watched. CI runs fewer cells of the options (tests/interpreted/test_kit.py).
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells, check
from moe_routing_bench.conformance.instrumented import instrumented
from moe_routing_bench.core.machine import this_machine

HERE = Path(__file__).parent


@cache
def wanted() -> list[KitCell]:
    return list(cells(specs="triton_*"))


def checked(number: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    cell = wanted()[number]
    started = time.perf_counter()
    with instrumented(order="random", seed=1) as seen:
        outcome = check(cell)
    return {
        "impl": f"{cell.op}.{cell.spec}",
        "cell": str(cell),
        "status": outcome.status,
        "why": outcome.sentences[:1],
        "launches": seen.launches,
        "programs": seen.programs,
        "lanes": seen.lanes,
        "seconds": round(time.perf_counter() - started, 2),
    }


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'implementation':72} passed  failed  cannot  launches  programs   lanes watched"
    for name in dict.fromkeys(row["impl"] for row in found):
        rows = [row for row in found if row["impl"] == name]
        count = Counter(row["status"] for row in rows)
        launches, programs, lanes = (
            sum(row[key] for row in rows) for key in ("launches", "programs", "lanes")
        )
        yield (
            f"{name:72} {count['passed']:6} {count['failed']:7} {count['unsupported']:7} {launches:9} "
            f"{programs:9} {lanes:15,}"
        )
    count = Counter(row["status"] for row in found)
    yield (
        f"{'all':72} {count['passed']:6} {count['failed']:7} {count['unsupported']:7} "
        f"{sum(row['launches'] for row in found):9} {sum(row['programs'] for row in found):9} "
        f"{sum(row['lanes'] for row in found):15,}"
    )


def main() -> None:
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = []
        for row in pool.imap(checked, range(len(wanted())), chunksize=8):
            found.append(row)
            if len(found) % 50 == 0:
                print(f"{len(found)} of {len(wanted())}, {time.perf_counter() - started:.0f} s", flush=True)
    unable = [row for row in found if row["status"] == "unsupported"]
    lines = [
        f"triton {triton.__version__}, torch {torch.__version__}, {this_machine().name}, "
        f"{time.perf_counter() - started:.0f} s",
        *table(found),
        "",
        *sorted({f"cannot: {row['impl'].partition('(')[0]}: {row['why'][0]}" for row in unable}),
        *(f"FAILED {row['cell']}: {row['why']}" for row in found if row["status"] == "failed"),
    ]
    (HERE / "interpreted_kit.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
