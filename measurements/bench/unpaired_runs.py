"""How often `mrb results compare` calls equal code different if runs were not interleaved.

It writes unpaired_runs.json.

    python measurements/bench/unpaired_runs.py

Simulated: 40 rounds in each run, 3 % of jitter, each run as a whole faster or slower by chance (drift,
standard deviation 0 or 2 %), the same for baseline and candidate. By raw times the drift passes for a change
of the code; by the ratio to a baseline timed in the same rounds it cancels. No correction for many
comparisons, no yardstick.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moe_routing_bench.bench.verdict import DELTA
from moe_routing_bench.results.compare import interval_of, p_value_of, verdict_of

RUNS, ROUNDS, JITTER = 400, 40, 0.03


def run(rng: np.random.Generator, drift: float, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of baseline and candidate times of one run."""
    luck = rng.normal(0, drift)
    baseline = luck + rng.normal(0, JITTER, ROUNDS)
    return baseline, luck + effect + rng.normal(0, JITTER, ROUNDS)


def share(rng: np.random.Generator, drift: float, effect: float, by_ratio: bool) -> float:
    called = 0
    for _ in range(RUNS):
        (base_a, cand_a), (base_b, cand_b) = run(rng, drift, 0.0), run(rng, drift, effect)
        a, b = (cand_a - base_a, cand_b - base_b) if by_ratio else (cand_a, cand_b)
        centre = float(np.median(b) - np.median(a))
        verdict, _ = verdict_of(centre, interval_of(a, b), p_value_of(a, b), 0.0, DELTA, 0.0)
        called += verdict in ("FASTER", "SLOWER")
    return called / RUNS


def main() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "drift_sd": drift,
            "effect": effect,
            "called_different_by_times": share(rng, drift, np.log1p(effect), by_ratio=False),
            "called_different_by_ratio_to_baseline": share(rng, drift, np.log1p(effect), by_ratio=True),
        }
        for drift, effect in ((0.0, 0.0), (0.02, 0.0), (0.02, 0.05))
    ]
    document = {
        "command": "python measurements/bench/unpaired_runs.py",
        "runs": RUNS, "rounds": ROUNDS, "jitter": JITTER, "delta": DELTA, "rows": rows,
    }  # fmt: skip
    (Path(__file__).parent / "unpaired_runs.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
