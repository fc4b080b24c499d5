"""What impl="auto" prefers for topk: see ops/preference.py. Made by measurements/preferences.py."""

from moe_routing_bench.ops.preference import GPUS, NO_GPU, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("vnni", "avx512"),
        order=("native",),
        evidence="measurements/records/regret.tar.xz: regret 1.00 at the median, 1.00 at the 95th "
        "percentile, 1.00 at worst of 24 cells",
    ),
    Preference(
        machines=("amx", "avx2"),
        order=("native", "sort"),
        evidence="measurements/cpu/topk.txt: 0.01 to 0.70 of sort's time over 1 to 4096 tokens, 8 "
        "to 512 experts and 1 to 16 choices; sort for float64 and more choices",
    ),
    Preference(
        machines=(PLAIN,),
        order=("sort",),
        evidence="measurements/cpu/auto.txt: packed_key takes 1.3 to 1.4 times as long at 16 "
        "tokens, 0.6 to 0.7 at 4096, of 64 experts; of 8 it is slower at any number",
    ),
    Preference(machines=GPUS, order=("sort",), evidence=NO_GPU),
)
