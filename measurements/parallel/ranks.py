"""What the scripts here share: starting ranks as processes, and timing things in the same rounds on all."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RANK = "--rank"  # what a script is started with, and the rank's job in JSON


def run_ranks(
    script: str, job: Mapping[str, Any], inside: Sequence[str | None], **environment: str
) -> list[Any]:
    """What each rank gave to `answer`. inside: the network namespace of each rank, or None."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, name in enumerate(inside):
            given = {**job, "rank": rank, "world": len(inside), "folder": folder}
            words = [sys.executable, script, RANK, json.dumps(given)]
            words = ["ip", "netns", "exec", name, *words] if name else words
            processes.append(subprocess.Popen(words, env={**os.environ, **environment}))
        if codes := [code for process in processes if (code := process.wait(900))]:
            raise RuntimeError(f"ranks ended with {codes}; their words are above")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(inside))]


def answer(given: Mapping[str, Any], found: Any) -> None:
    (Path(given["folder"]) / f"{given['rank']}.json").write_text(json.dumps(found))


def job_of_this_rank() -> dict[str, Any] | None:
    """In a process that run_ranks started: its job."""
    return json.loads(sys.argv[2]) if sys.argv[1:2] == [RANK] else None


def in_rounds(
    kinds: Mapping[str, Callable[[], object]], rounds: int, warm: int, barrier: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of each kind in each round. The order is new in each round and the same on every rank."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    order = random.Random(0)
    for turn in range(rounds + warm):
        for name in order.sample(list(kinds), len(kinds)):
            barrier()
            began = time.perf_counter()
            kinds[name]()
            if turn >= warm:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def slowest(each: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Seconds of the slowest rank: a round is over when it is."""
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in each), strict=True)] for name in each[0]
    }


def ratios(base: Sequence[float], times: Sequence[float]) -> str:
    """base / times, neighbours in time: the middle and the quartiles over rounds."""
    low, half, high = statistics.quantiles([was / now for was, now in zip(base, times, strict=True)], n=4)
    return f"{half:.2f} ({low:.2f} to {high:.2f})"
