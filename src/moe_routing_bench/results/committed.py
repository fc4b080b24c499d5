"""Which cases have a committed record: those in measurements/records/ of a checkout of this project."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

# a package installed by pip has no such folder above it
RECORDS = Path(__file__).parents[3] / "measurements" / "records"


def measured_cases(folder: Path = RECORDS) -> set[str] | None:
    """The names of cases with a time, full sizes alone; None if there are no committed records here."""
    if not folder.is_dir():
        return None
    measured = set()
    for packed in sorted(folder.glob("*.tar.xz")):
        with tarfile.open(packed) as tar:
            for member in tar:
                if not member.name.endswith("records.jsonl") or (file := tar.extractfile(member)) is None:
                    continue
                for record in map(json.loads, file):
                    if record["timing"] is not None and not record["workload"]["scaled_from"]:
                        measured.add(record["workload"]["case"])
    return measured
