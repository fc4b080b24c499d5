"""Records as a results folder holds them, for tests: a whole one, a failed one, and changes to both."""

from __future__ import annotations

import json
from typing import Any

from moe_routing_bench.results.record import Record, Timing, parse_record

SESSION = "20261115T024734123-1f3a9c02"
HASH = "0123456789abcdef" * 4


def document(**changes: Any) -> dict[str, Any]:
    """A whole record as JSON would hold it; changes are by dotted path with __ for the dot."""
    whole: dict[str, Any] = {
        "schema_version": 3,
        "record_id": f"{SESSION}-000001",
        "cell_key": HASH,
        "session": SESSION,
        "suite": "seed-fused",
        "suite_version": 1,
        "created_at": "2026-11-15T02:47:34.123456Z",
        "harness_version": "0.1.0",
        "harness_hash": HASH,
        "model": "",
        "included": ["dispatch", "grouped_gemm", "combine"],
        "excluded": ["router"],
        "experiment": {
            "span": "expert_ffn", "direction": "forward", "case": "seed-fused/32x7168~scaled", "T": 32,
            "D": 1792, "F": 64, "E": 64, "K": 8, "W": 1, "dtype": "float32", "store": "",
            "activation": "swiglu", "bias": False, "shared_F": 0, "heads": 0, "kv_heads": 0, "sequences": 1,
            "context": 0, "layers": 1, "causal": True, "window": 0, "rotary": False, "layout": "compact",
            "weights": True, "checkpoint": "", "checkpoint_layer": 0,
            "scaled_from": "seed-fused/32x7168", "workload": "zipf(1.2)", "seed": 0, "device": "cpu",
            "threads": 1, "cache": "hot", "view": "host_wall", "processes": 1, "max_rounds": 1000,
            "min_rounds": 20, "max_seconds": 60.0, "target": 0.01, "step_seconds": 120.0,
            "memory_gib": 12.0, "checked": 3, "stages": False, "sandbox": False, "trust": False,
            "all": False,
            "implementations": [
                {"name": name, "layout": "compact", "router": "", "layer": "", "frozen": False}
                for name in ("eager_loop", "staged")
            ],
            "include": [],
        },
        "routing": {
            "checksum": HASH, "active_experts": 60, "zero_experts": 4, "max_over_mean": 2.5,
            "max_violation": 1.5, "max_violation_rank": 0.0, "cv": 0.9, "gini": 0.5, "entropy_bits": 5.1,
            "dropped_pairs": 0, "padded_rows": 8, "tile_efficiency": 0.97,
        },
        "implementation": {
            "label": "staged", "spec": "staged", "origin": "built in", "source_hash": HASH,
            "role": "candidate", "deterministic": True, "host_sync": "", "runs": "", "contract_hash": HASH,
            "layout": "compact", "router": "", "layer": "",
        },
        "protocol": {
            "all_threads": 1, "rounds": 40, "calls_per_sample": 3, "warmup_calls": 5,
            "stop_reason": "precision reached", "fresh_inputs": "per call",
        },
        "timing": {
            "median": 0.0115, "mean": 0.0115, "std": 0.001, "least": 0.01, "most": 0.013, "p05": 0.0101,
            "p25": 0.0107, "p75": 0.0122, "p95": 0.0128, "first_call": 0.2,
            "samples": {"file": f"session={SESSION}/samples.f64", "offset": 0, "count": 40, "sha256": HASH},
            "stages": {"route": 0.001, "grouped_gemm": 0.01},
        },
        "comparison": {
            "baseline": "eager_loop", "ratio": 0.9, "low": 0.88, "high": 0.92, "p_adjusted": 1e-9,
            "verdict": "FASTER", "reason": "it takes 0.9 times as long", "more_rounds": None,
            "aa_floor": 0.004,
        },
        "work": {
            "useful_flops": 10**9, "executed_flops": 11 * 10**8, "weight_bytes": 10**7,
            "activation_bytes": 10**6, "floor_seconds": 0.001, "share_of_roof": 0.4, "bw_2pass": 1e9,
            "bw_strict": 1.5e9, "tokens_per_second": 2782.6, "flops_per_second": 8.7e10,
            "bytes_per_second": 9.6e8,
            "wire_bytes": 2_000_000,
            "least_wire_bytes": 1_500_000,
            "roof_seconds": 0.001,
            "roof_busy": False,
        },
        "correctness": {
            "status": "PASSED", "reason": "", "checks": ["shape", "value"], "max_error": 1e-6,
            "max_bound": 1e-5, "error": None, "checked_timed_calls": 4,
        },
        "peak_rss_bytes": 500_000_000,
        "weather": {"load_before": 0.5, "load_after": 0.6, "steal_percent": 0.1, "throttled": None},
        "engine": "local",
        "cell_seconds": 12.5,
        "environment": HASH,
        "repro": "mrb bench expert_ffn --case seed-fused/32x7168~scaled",
        "log_tail": "a line\nanother\n",
    }  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = whole
        for parent in parents:
            part = part[parent]
        part[last] = value
    return whole


def with_times(whole: dict[str, Any], timing: Timing) -> dict[str, Any]:
    """The record with these times, and the rates that follow from their median."""
    work, seconds = whole["work"], timing.median
    rates = {
        "tokens_per_second": whole["experiment"]["T"] / seconds,
        "flops_per_second": work["useful_flops"] / seconds,
        "bytes_per_second": (work["weight_bytes"] + work["activation_bytes"]) / seconds,
        "share_of_roof": min(1.0, work["roof_seconds"] / seconds),
    }
    return {**whole, "timing": json.loads(timing.model_dump_json()), "work": {**work, **rates}}


def failed(status: str, **changes: Any) -> dict[str, Any]:
    why: dict[str, Any] = {"timing": None, "comparison": None, "correctness__reason": "why"}
    return document(**{**why, "correctness__status": status, **changes})


def line(given: dict[str, Any]) -> bytes:
    return json.dumps(given).encode() + b"\n"


def a_record(**changes: Any) -> Record:
    return parse_record(line(document(**changes)))
