"""Results folders of any size for tests: a few hundred real cells, and copies of them for other widths."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from moe_routing_bench.results.folder import Session
from sample_runs import ENVIRONMENT, add_cell

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
MODELS = {"granite-3-moe": (40, 8), "olmoe-1b-7b": (64, 8), "qwen3-30b-a3b": (128, 8), "mixtral-8x7b": (8, 2)}
WORKLOADS = ("uniform", "zipf(1.2)", "lognormal(maxvio=2)")
WITH_SOURCE = {**ENVIRONMENT, "source": {"commit": "3f80af225a" * 4, "dirty": False}}


def fill(folder: Path, records: int) -> int:
    """At least so many records in cells of five: a baseline, three others, the twin. Returns how many."""
    first = folder.parent / f"{folder.name}.first"
    with Session.start(first) as session:
        cells = 0
        for workload in WORKLOADS:
            for model, (E, K) in MODELS.items():
                for T in TOKENS:
                    if 5 * cells >= records:
                        break
                    add_cell(
                        session,
                        {"staged": 1.0, "native": 0.5 + 0.05 * (cells % 11), "hf": 1.2, "other": "OOM"}
                        if cells % 4 == 3
                        else {"staged": 1.0, "native": 0.5 + 0.05 * (cells % 11), "hf": 1.2, "other": 0.8},
                        environment=WITH_SOURCE, seed=cells, experiment__case=f"{model}/{T}",
                        model=model, experiment__T=T, experiment__E=E, experiment__K=K,
                        experiment__workload=workload,
                    )  # fmt: skip
                    cells += 1
        name = session.id
    source = first / f"session={name}"
    lines = (source / "records.jsonl").read_bytes()
    copies = -(-records // lines.count(b"\n"))
    shutil.copytree(first / "environments", folder / "environments")
    for copy in range(copies):
        other = f"20261116T{copy:09d}-{copy:08x}"
        target = folder / f"session={other}"
        target.mkdir(parents=True)
        shutil.copyfile(source / "samples.f64", target / "samples.f64")
        changed = lines.replace(name.encode(), other.encode()).replace(
            b'"D":1792', f'"D":{1792 + 64 * copy}'.encode()
        )
        (target / "records.jsonl").write_bytes(
            changed.replace(b'"cell_key":"', f'"cell_key":"{copy:08x}'.encode())
        )
        _shorten_keys(target / "records.jsonl")
    shutil.rmtree(first)
    return copies * lines.count(b"\n")


def _shorten_keys(path: Path) -> None:
    """A cell key has 64 digits: the copy's number took the place of the last eight."""
    keys = rb'"cell_key":"([0-9a-f]{64})[0-9a-f]{8}"'
    path.write_bytes(re.sub(keys, rb'"cell_key":"\1"', path.read_bytes()))
