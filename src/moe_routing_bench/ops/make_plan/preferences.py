"""What impl="auto" prefers for make_plan: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.14 to 0.16 of argsort's time at 16 tokens, 0.09 to 0.11 at "
        "4096",
    ),
    Preference(
        machines=(PLAIN,),
        order=("argsort",),
        evidence="measurements/cpu/auto.txt: counting takes 1.2 to 4 times as long",
    ),
    Preference(machines=GPUS, order=("argsort",), evidence=NO_GPU),
)
