"""On paper: a store with up to 10^4 writers and 10^9 records, and an exchange of up to 4,096 ranks.

    python measurements/fleet/scale.py > measurements/fleet/scale.txt

Counts follow the code: fleet/claims.py, fleet/folding.py, parallel/traffic.py. Prices are the list prices of
S3 in us-east-1 (aws.amazon.com/s3/pricing): deletes are free. Seconds come from growth.json, made on
a busy machine. What was not measured is marked with ~.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

CELL_SECONDS, RECORDS = 30, 5  # of a cell
WRITE, READ, GIB_MONTH = 5e-6, 4e-7, 0.023  # dollars for a PUT or LIST, a GET or HEAD, a GiB
NAME_BYTES = 95  # of a segment in the manifest
LISTED = 1_000  # names in one answer
RECORD_BYTES = 4_000  # folding.py: a row with its line and samples, before compression
T, K, D, BYTES, EP = 4_096, 8, 7_168, 2, 64  # DeepSeek-V3 in bfloat16


def growth() -> tuple[float, dict[int, float]]:
    """Seconds to fold a record, and of a first answer by the number of records: medians of all runs."""
    runs = json.loads((Path(__file__).parent / "growth.json").read_text())["runs"]
    folds = [cells["seconds"]["fold, a record"] for run in runs for cells in run["cells"]]
    answers: dict[int, list[float]] = {}
    for run in runs:
        for one in run["records"]:
            answers.setdefault(round(one["records"], -5), []).extend(one["first answers"])
    return median(folds), {records: median(seconds) for records, seconds in answers.items()}


def main() -> None:
    fold, answers = growth()
    names = "cells a day", "requests, claim", "dollars, claim", "shard", "fold, core hours", "manifest MB"
    print("writers", *(f"{name:>16}" for name in names))
    for writers in (10, 100, 1_000, 10_000):
        cells = writers * 86_400 // CELL_SECONDS
        # a lease is listed and put, the segment is asked for and put, and the fold reads it
        claim, shard = cells * (3 * WRITE + 2 * READ), cells * (WRITE + READ)
        kept = cells / 24 * NAME_BYTES / 1e6  # a manifest names what was replaced in the last hour
        row = f"{claim:,.2f}", f"{shard:,.2f}", f"{cells * RECORDS * fold / 3_600:,.1f}", f"{kept:,.1f}"
        print(f"{writers:7,}", *(f"{value:>16}" for value in (f"{cells:,}", f"{5 * cells:,}", *row)))
    hour, day = 10_000 * 3_600 // CELL_SECONDS, 10_000 * 86_400 // CELL_SECONDS * RECORDS
    print(f"\nrequests for one list of an hour of segments, 10^4 writers: {hour // LISTED:,}")
    print(f"10^9 records after {1e9 / day:.1f} days of 10^4 writers")
    size = 1e9 * RECORD_BYTES
    print(f"at most {size / 2**40:.1f} TiB, ${size / 2**30 * GIB_MONTH:,.0f} a month")
    last = max(answers)
    for records, seconds in sorted(answers.items()):
        print(f"first answer at {records:,} records: {seconds:.1f} s")
    print(f"the same rate at 10^9: ~{answers[last] * 1e9 / last:,.0f} s")
    print("\nranks  groups  messages of a rank  of all  MB a rank sends, one exchange")
    for ranks in (8, 64, 512, 4_096):
        group = min(ranks, EP)
        sent = T * K * D * BYTES * (group - 1) / group / 1e6
        print(f"{ranks:5,} {ranks // group:7} {group - 1:19} {ranks * (group - 1):7,} {sent:12,.0f}")
    print(f"in one group of 4,096 each rank would send {4_095:,} messages of {T * K / 4_096:.0f} rows")


if __name__ == "__main__":
    main()
