"""What impl="auto" prefers for dispatch: see ops/preference.py. Made by measurements/preferences.py."""

from moe_routing_bench.ops.preference import GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("vnni", "avx512"),
        order=("native",),
        evidence="measurements/records/regret.tar.xz: regret 1.00 at the median, 1.02 at the 95th "
        "percentile, 1.04 at worst of 28 cells",
    ),
    Preference(
        machines=("amx", "avx2"),
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
