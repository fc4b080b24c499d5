"""What impl="auto" prefers for ep_combine: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("all_to_all(combine=native)",),
        evidence="not timed: it suits all ranks; its combine is what measurements/cpu/auto.txt prefers",
    ),
    Preference(
        machines=(PLAIN,),
        order=("all_to_all",),
        evidence="not timed: it suits all ranks, in plain torch",
    ),
    Preference(machines=GPUS, order=("all_to_all",), evidence=NO_GPU),
)
