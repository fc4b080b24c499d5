"""What impl="auto" prefers for make_plan: see ops/preference.py. Made by measurements/preferences.py."""

from moe_routing_bench.ops.preference import GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("vnni", "avx512"),
        order=("native",),
        evidence="measurements/records/regret.tar.xz: regret 1.00 at the median, 1.00 at the 95th "
        "percentile, 1.00 at worst of 16 cells",
    ),
    Preference(
        machines=("amx", "avx2"),
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.14 to 0.16 of argsort's time at 16 tokens, 0.09 to "
        "0.11 at 4096",
    ),
    Preference(
        machines=(PLAIN,),
        order=("argsort",),
        evidence="measurements/cpu/auto.txt: counting takes 1.2 to 4 times as long",
    ),
    Preference(machines=GPUS, order=("argsort",), evidence=NO_GPU),
)
