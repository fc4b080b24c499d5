"""What impl="auto" prefers for attention: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("native", "sdpa"),
        evidence="not timed: a trial of the same loops took 0.5 to 0.8 of torch's time",
    ),
    Preference(machines=(PLAIN,), order=("sdpa_folded", "sdpa"), evidence="not timed: torch's own"),
    Preference(machines=GPUS, order=("sdpa",), evidence=NO_GPU),
)
