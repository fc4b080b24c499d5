"""What impl="auto" prefers for rms_norm: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("native",),
        evidence="not timed: a trial of the same loop moved 9.5 GB/s where torch moved 0.9",
    ),
    Preference(machines=(PLAIN,), order=("torch",), evidence="not timed: it needs no compiler"),
    Preference(machines=GPUS, order=("torch",), evidence=NO_GPU),
)
