"""What impl="auto" prefers for grouped_gemm: see ops/preference.py. Made by measurements/preferences.py."""

from moe_routing_bench.ops.preference import GPUS, NO_WAITING, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("vnni", "avx512"),
        order=("native",),
        evidence="measurements/records/regret.tar.xz: regret 1.00 at the median, 1.00 at the 95th "
        "percentile, 1.09 at worst of 28 cells",
    ),
    Preference(
        machines=("amx",),
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.88 of expert_loop's time in bfloat16, 1.02 in "
        "float32; for training measurements/records/training.tar.xz",
    ),
    Preference(
        machines=("avx2",),
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.04 of expert_loop's time in bfloat16, 1.37 in float32",
    ),
    Preference(
        machines=(PLAIN,),
        order=("expert_loop",),
        evidence="measurements/bench/first_minute.txt: torch_grouped_mm took 0.95 to 0.97 of its "
        "time, decided in one run of three",
    ),
    Preference(
        machines=GPUS,
        order=("triton_ragged", "torch_grouped_mm", "padded_bmm", "block_sparse"),
        evidence=NO_WAITING,
    ),
)
