"""What impl="auto" prefers for attention: see ops/preference.py."""

import torch

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

EVIDENCE = "measurements/records/seed-attention.tar.xz"  # one thread, forward: decoding, short, longer
# sdpa_folded runs only calls with one query per sequence
FOLDED, OURS = ("sdpa_folded", "sdpa"), ("sdpa_folded", "native", "sdpa")
PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=FOLDED,
        evidence="not timed: the backward of native is plain torch, that of sdpa a flash kernel",
        gradients=True,
    ),
    Preference(  # so many read keys where they are; timed with 4
        machines=COMPILED, order=("native", *FOLDED), evidence=EVIDENCE, most_queries=8
    ),
    Preference(machines=COMPILED, order=FOLDED, evidence=EVIDENCE, most_elements=1 << 16),
    Preference(machines=("amx",), order=FOLDED, evidence=EVIDENCE, dtype=torch.bfloat16),
    Preference(machines=COMPILED, order=OURS, evidence=EVIDENCE),
    Preference(machines=(PLAIN,), order=FOLDED, evidence="not timed: torch's own"),
    Preference(machines=GPUS, order=("sdpa",), evidence=NO_GPU),
)
