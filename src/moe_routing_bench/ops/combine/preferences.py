"""What impl="auto" prefers for combine: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=COMPILED,
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.37 of gather_sum's time at 16 tokens, 0.02 to 0.03 at 4096",
    ),
    Preference(
        machines=(PLAIN,),
        order=("gather_sum",),
        evidence="measurements/records/plain.tar.xz: in plain torch, against index_add",
    ),
    Preference(machines=GPUS, order=("gather_sum",), evidence=NO_GPU),
)
