"""What impl="auto" prefers for expert_ffn: see ops/preference.py."""

from moe_routing_bench.ops.preference import GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("amx",),
        order=("native",),
        evidence="measurements/cpu/cpu_grid.txt: 0.51 of the time of Transformers' best in bfloat16, 0.76 in "
        "float32; for training measurements/cpu/cpu_training.json",
    ),
    Preference(
        machines=("avx512",),
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.23 to 0.32 of staged's time in bfloat16, 0.49 to 0.75 in "
        "float32",
    ),
    Preference(
        machines=("avx2",),
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.03 to 0.05 of staged's time in bfloat16, 0.62 to 0.97 in "
        "float32",
    ),
    Preference(
        machines=(PLAIN,),
        order=("staged",),
        evidence="measurements/bench/first_answer.txt: nothing in plain torch was found faster",
    ),
    Preference(machines=GPUS, order=("staged",), evidence=NO_GPU),
)
