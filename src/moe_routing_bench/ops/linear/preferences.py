"""What impl="auto" prefers for linear: see ops/preference.py."""

import torch

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=tuple(level for level in COMPILED if level != "amx"),
        order=("native",),
        evidence="not timed: a trial of the same tiles took 0.25 of torch's time in bfloat16",
        dtype=torch.bfloat16,
    ),
    Preference(
        machines=(*COMPILED, PLAIN), order=("torch",), evidence="not timed: MKL is near the processor's limit"
    ),
    Preference(machines=GPUS, order=("torch",), evidence=NO_GPU),
)
