"""What impl="auto" prefers for rms_norm: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("native",),
        evidence="measurements/records/seed-rmsnorm.tar.xz",  # one thread
    ),
    Preference(machines=(PLAIN,), order=("torch",), evidence="not timed: it needs no compiler"),
    Preference(machines=GPUS, order=("torch",), evidence=NO_GPU),
)
