"""What impl="auto" prefers for linear: see ops/preference.py."""

import torch

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=tuple(level for level in COMPILED if level != "amx"),
        order=("native",),
        evidence="measurements/records/seed-linear.tar.xz",
        dtype=torch.bfloat16,
    ),
    Preference(
        machines=(*COMPILED, PLAIN), order=("torch",), evidence="measurements/records/seed-linear.tar.xz"
    ),
    Preference(machines=GPUS, order=("torch",), evidence=NO_GPU),
)
