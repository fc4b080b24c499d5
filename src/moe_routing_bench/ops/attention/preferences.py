"""What impl="auto" prefers for attention: see ops/preference.py."""

import torch

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

EVIDENCE = "measurements/records/seed-attention.tar.xz"  # one thread, forward: decoding, short, longer
PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("sdpa_folded", "sdpa"),
        evidence="not timed: the backward of native is plain torch, that of sdpa a flash kernel",
        gradients=True,
    ),
    Preference(machines=COMPILED, order=("native", "sdpa_folded", "sdpa"), evidence=EVIDENCE, most_queries=1),
    Preference(machines=COMPILED, order=("sdpa",), evidence=EVIDENCE, most_elements=1 << 16),
    Preference(machines=COMPILED, order=("native", "sdpa"), evidence=EVIDENCE, dtype=torch.bfloat16),
    Preference(machines=COMPILED, order=("native", "sdpa"), evidence=EVIDENCE, most_elements=1 << 20),
    Preference(machines=COMPILED, order=("sdpa",), evidence=EVIDENCE),
    Preference(machines=(PLAIN,), order=("sdpa_folded", "sdpa"), evidence="not timed: torch's own"),
    Preference(machines=GPUS, order=("sdpa",), evidence=NO_GPU),
)
