"""What impl="auto" prefers for score_topk: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=(*COMPILED, PLAIN),
        order=("eager",),
        evidence="not timed: the only one that runs on a processor",
    ),
    Preference(machines=GPUS, order=("eager",), evidence=NO_GPU),
)
