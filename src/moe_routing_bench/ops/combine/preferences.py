"""What impl="auto" prefers for combine: see ops/preference.py. Made by measurements/preferences.py."""

from moe_routing_bench.ops.preference import GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("vnni", "avx512"),
        order=("native",),
        evidence="measurements/records/regret.tar.xz: regret 1.00 at the median, 1.01 at the 95th "
        "percentile, 1.20 at worst of 28 cells",
    ),
    Preference(
        machines=("amx", "avx2"),
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
