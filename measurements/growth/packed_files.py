"""What packing experts costs, what keeping the packed form on disk adds, and what mapping it again costs.

    python measurements/growth/packed_files.py             3 minutes; writes packed_files.json
    python measurements/growth/packed_files.py --quick     small layers, written to /tmp, to see that it works

A layer with the widths of Qwen3-30B-A3B in bfloat16, with 8, 16 and 32 experts. Seconds are of the processor,
one thread, so that a busy machine matters less, and without waiting for the disk; the least of three. `pack`
is without files, `keep` packs and writes, `map` freezes the same weights again: it reads the weights once for
their name (SHA-256) and the file once for its CRC.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from moe_routing_bench import ExpertWeights
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.fleet.host import environment_document
from moe_routing_bench.ops.expert_ffn import native

STORES = ("int8", "int4_g128", "mxfp4")
REPEATS = 3


def timed(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def row(weights: ExpertWeights, store: str) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"pack": [], "keep": [], "map": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            kept, again = PackedFiles(folder), PackedFiles(folder)
            seconds["pack"].append(timed(lambda: native.freeze(weights, store=store)))
            seconds["keep"].append(timed(lambda kept=kept: native.freeze(weights, store=store, kept=kept)))
            seconds["map"].append(timed(lambda again=again: native.freeze(weights, store=store, kept=again)))
            assert again.mapped == kept.written and not again.written
    source = weights.w_in_EDG.nbytes + weights.w_out_EFD.nbytes
    least = {name: round(min(each), 4) for name, each in seconds.items()}
    per_gb = {name: round(value / source * 1e9, 2) for name, value in least.items()}
    return {
        "store": store,
        "experts": weights.num_experts,
        "source_bytes": source,
        "packed_bytes": kept.written,
        "seconds": least,
        "seconds_per_gb_of_source": per_gb,
    }


def main(
    quick: Annotated[bool, typer.Option(help="small layers, written to /tmp")] = False,
) -> None:
    torch.set_num_threads(1)
    D, F = (256, 96) if quick else (2048, 768)
    rows = []
    for E in (8, 16, 32):
        w_in_EDG, w_out_EFD = torch.randn(E, D, 2 * F).bfloat16(), torch.randn(E, F, D).bfloat16()
        weights = ExpertWeights(w_in_EDG=w_in_EDG, w_out_EFD=w_out_EFD)
        for store in STORES:
            rows.append(row(weights, store))
            typer.echo(rows[-1])
    here = {**environment_document(this_machine()), "threads": 1, "load_average": os.getloadavg()}
    document = {"command": "python measurements/growth/packed_files.py", "session": here, "rows": rows}
    path = Path("/tmp") if quick else Path(__file__).parent
    (path / "packed_files.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
