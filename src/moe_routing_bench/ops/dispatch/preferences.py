"""What impl="auto" prefers for dispatch: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.06 to 0.13 of index_select's time at 4096 tokens, 1.15 at 16",
    ),
    Preference(
        machines=(PLAIN,),
        order=("index_select",),
        evidence="not timed: the other one, one_hot_matmul, is quadratic in tokens",
    ),
    Preference(machines=GPUS, order=("index_select",), evidence=NO_GPU),
)
