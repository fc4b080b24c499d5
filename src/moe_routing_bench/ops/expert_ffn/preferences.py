"""What impl="auto" prefers for expert_ffn: see ops/preference.py. Made by measurements/preferences.py."""

from moe_routing_bench.ops.preference import GPUS, NO_WAITING, PLAIN, Preference

PREFERENCES = (
    Preference(
        machines=("vnni", "avx512"),
        order=("native",),
        evidence="measurements/records/regret.tar.xz: regret 1.00 at the median, 1.08 at the 95th "
        "percentile, 1.20 at worst of 102 cells",
    ),
    Preference(
        machines=("amx",),
        order=("native",),
        evidence="measurements/records/grid.tar.xz, and measurements/records/training.tar.xz for "
        "training: against Transformers and vLLM, summed up in docs/figures.md",
    ),
    Preference(
        machines=("avx2",),
        order=("native",),
        evidence="measurements/cpu/auto.txt: 0.03 to 0.05 of staged's time in bfloat16, 0.62 to "
        "0.97 in float32",
    ),
    Preference(
        machines=(PLAIN,),
        order=("staged",),
        evidence="measurements/bench/first_minute.txt: the best of plain torch took 0.95 to 0.97 "
        "of its time, decided in one run of three",
    ),
    Preference(
        machines=GPUS,
        order=(
            "triton_decode",
            "triton_fused",
            "staged(grouped_gemm=torch_grouped_mm)",
            "staged(grouped_gemm=padded_bmm)",
            "staged(grouped_gemm=block_sparse)",
            "dense_all_experts",
        ),
        evidence=NO_WAITING,
    ),
)
