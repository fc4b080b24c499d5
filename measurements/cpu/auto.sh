#!/usr/bin/env bash
# What impl="auto" prefers on processors (ops/*/preferences.py), beside plain torch; writes auto.txt.
# A processor without AMX, or without AVX-512, is one with them that may not use them: torch's libraries by their
# environment variables, our kernels by level=.
set -euo pipefail
cd "$(dirname "$0")"
bench() {
  mrb bench "$1" --width 512 --hidden 384 --experts 64 --choices 8 --seconds 2 --min-rounds 8 --checked 1 "${@:2}"
}
limited() { # to a level: the command
  case $1 in
    amx) "${@:2}" ;;
    avx512) ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 ATEN_CPU_CAPABILITY=avx512 "${@:2}" ;;
    avx2) ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 "${@:2}" ;;
  esac
}
{
python -c "from moe_routing_bench.core.machine import this_machine; print(this_machine())"
for level in amx avx512 avx2; do
  echo "==== limited to $level"
  for dtype in bfloat16 float32; do
    for tokens in 16 256; do
      limited $level bench expert_ffn --tokens $tokens --dtype $dtype --impl "staged,native(level=$level)"
    done
    limited $level bench grouped_gemm --tokens 256 --dtype $dtype --impl "expert_loop,native(level=$level)"
  done
  for tokens in 16 4096; do
    limited $level bench make_plan --tokens $tokens --impl "argsort,counting,native(level=$level)"
    limited $level bench dispatch --tokens $tokens --dtype bfloat16 --impl "index_select,native(level=$level)"
    limited $level bench combine --tokens $tokens --dtype bfloat16 --impl "gather_sum,native(level=$level)"
    limited $level bench topk --tokens $tokens --dtype float32 --impl "sort,packed_key"
  done
done
} > auto.txt
