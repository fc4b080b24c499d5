"""What impl="auto" prefers for topk: see ops/preference.py."""

from moe_routing_bench.ops.preference import COMPILED, GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=(*COMPILED, PLAIN),
        order=("sort",),
        evidence="measurements/cpu/auto.txt: packed_key takes 1.3 to 1.4 times as long at 16 tokens, 0.6 to "
        "0.7 at 4096, of 64 experts; of 8 it is slower at any number",
    ),
    Preference(machines=GPUS, order=("sort",), evidence=NO_GPU),
)
