"""Estimates how long a cell will take on this machine, before anything of it runs.

A short probe says how fast the machine multiplies and copies, and how much times scatter at least: that
decides how many rounds the precision takes. Implementations are taken to be half as fast as the probe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from moe_routing_bench.bench.series import SAMPLE_OVERHEAD, fewest_rounds
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.machine import torch_threads
from moe_routing_bench.workloads.experiment import LONG_CALL, Experiment

START_SECONDS = 1.0  # a cell: workers, hashes of the code, results on disk
TRIAL_SECONDS = 0.4  # an implementation: its kit, its files
GPU_TRIAL_SECONDS = 6.0  # a guess: starting CUDA and compiling a kernel; nobody has measured it
TRIAL_CALLS, LONG_TRIAL_CALLS, SHARE_OF_PEAK = 9, 4, 0.5
MIN_SAMPLE = 1e-3
PROBE_SECONDS = 1.0
# a cell goes on until its worst ratio is known, and different kernels scatter more than one product does:
# 0.05 for two alike on a quiet machine, 0.08 to 0.2 (quartiles) in the cells of measurements/records
USUAL_SCATTER = 0.1
HALF_INTERVAL = 2.58 * 1.2533  # of a median, in standard deviations over the root of the rounds


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed(flops=2e11, bytes=8e9, jitter=0.03): per second, and the scatter of a ratio of two times."""

    flops: float
    bytes: float
    jitter: float


def estimate(experiment: Experiment) -> float:
    implementations = len(experiment.implementations)
    on_gpu = experiment.device != "cpu"
    # its oracle, in float64 on the CPU, is all that this processor computes
    speed = probe(experiment.threads, "float32" if on_gpu else experiment.dtype)
    work = {"forward": 1, "backward": 3, "train": 3}[experiment.direction]
    moved = experiment.held_bytes + 6 * experiment.activation_bytes
    call = 5e-5 + work * (experiment.flops / (SHARE_OF_PEAK * speed.flops) + moved / speed.bytes)
    oracle = work * ((3 if on_gpu else 8) * experiment.flops / speed.flops + 5 * moved / speed.bytes)
    judged = (2 + experiment.checked) * len({one.question for one in experiment.implementations}) * oracle
    if on_gpu:
        # the oracle is computed on the CPU, for the gate and for every timed result that is judged
        return GPU_TRIAL_SECONDS * implementations + judged + experiment.max_seconds
    long = call >= LONG_CALL
    trials = implementations * (TRIAL_SECONDS + (LONG_TRIAL_CALLS if long else TRIAL_CALLS) * call)
    calls = 1 if long else 1 + max(1.0, MIN_SAMPLE / 2 / call)
    one_round = (implementations + 1) * (calls * call + SAMPLE_OVERHEAD)
    wanted = (HALF_INTERVAL * max(speed.jitter, USUAL_SCATTER) / experiment.target) ** 2
    rounds = min(max(wanted, experiment.min_rounds), experiment.max_rounds) * one_round
    least = fewest_rounds(implementations) * one_round
    before = START_SECONDS + trials + judged
    return before + experiment.processes * max(
        least, min(rounds, (experiment.max_seconds - before) / experiment.processes)
    )


def share_of_rounds(experiments: Sequence[Experiment]) -> float:
    """Returns how much of the time for these cells goes to the rounds of the first one, whose trials are
    done. It assumes a machine with 10^11 operations and 10^10 bytes a second, because a probe would cost a
    second of the time to share."""
    rounds = [fewest_rounds(len(one.implementations)) * _round_seconds(one) for one in experiments]
    trials = [TRIAL_SECONDS * len(one.implementations) + 3 * _round_seconds(one) for one in experiments[1:]]
    return rounds[0] / (sum(rounds) + sum(trials))


def _round_seconds(experiment: Experiment) -> float:
    work = {"forward": 1, "backward": 3, "train": 3}[experiment.direction]
    read = (
        experiment.held_bytes * min(1.0, experiment.shape.num_pairs / experiment.E)
        if experiment.weights
        else 0
    )
    call = 5e-5 + work * (experiment.flops / 1e11 + (read + 6 * experiment.activation_bytes) / 1e10)
    calls = 1 if call >= LONG_CALL else 1 + max(1.0, MIN_SAMPLE / 2 / call)
    return (len(experiment.implementations) + 1) * (calls * call + SAMPLE_OVERHEAD)


@cache
def probe(threads: int, dtype: str) -> Speed:
    """Measures the machine's speed in about half a second. Beside another busy process it takes a few
    seconds, at worst eight slow calls."""
    with torch_threads(threads):
        a = torch.randn(256, 2048).to(DTYPES[dtype])
        b = torch.randn(2048, 1024).to(DTYPES[dtype])
        rows = torch.randn(2**22)
        products = _times(lambda: a @ b, 40)
        copies = _times(rows.clone, 12)
    logs = np.log(products[len(products) // 5 :])
    pairs = np.diff(logs[len(logs) % 2 :])[::2]
    # 1.4826 times the median of the absolute values is a standard deviation that spikes cannot raise
    jitter = float(np.clip(1.4826 * np.median(np.abs(pairs)), 0.005, 0.3))
    return Speed(
        flops=2 * 256 * 2048 * 1024 / float(np.median(products)),
        bytes=2 * rows.nbytes / float(np.median(copies)),
        jitter=jitter if math.isfinite(jitter) else 0.05,
    )


def _times(call: Callable[[], object], most: int) -> list[float]:
    """Returns the seconds of `most` calls, or of as many as PROBE_SECONDS allow, at least four."""
    times: list[float] = []
    while len(times) < 4 or (len(times) < most and sum(times) < PROBE_SECONDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times
