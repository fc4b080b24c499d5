#!/usr/bin/env bash
# Ways to place experts and ways to keep them, on routing recorded here: two small models trained on bytes, one without
# any balancing and one with DeepSeek-V3's bias, and the stream of `mrb bench balance`, whose topics drift and jump.
# bash measurements/parallel/policies.sh CORPORA WORK    writes policies.txt beside this file; counts, no times
set -euo pipefail
corpora=${1:?the folder with tinyshakespeare.txt, wikitext2_test.txt, gutenberg_novels.txt} work=${2:?a scratch folder}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
tail -c 110000 "$corpora/tinyshakespeare.txt" >"$work/shakespeare_end.txt"
head -c 110000 "$corpora/wikitext2_test.txt" >"$work/wikipedia.txt"
cd "$work"
for router in softmax_topk sigmoid_bias; do
  OMP_NUM_THREADS=1 mrb train run $router --steps 400 --sizes E=16 --corpus "$corpora" --out "runs_$router" >"$router.log"
  OMP_NUM_THREADS=1 mrb model trace record --model "runs_$router"/run=* --text shakespeare_end.txt --text wikipedia.txt \
    --tokens 32768 --batch 8 --sequence 256 --out "$router.safetensors" >>"$router.log"
done
mrb bench balance --trace drift.safetensors >drift.log
{
  for trace in softmax_topk sigmoid_bias drift; do
    echo "== $trace"
    grep "held-out" $trace.log || true
    mrb parallel place $trace.safetensors --ranks 8 --replicas 0,8 --windows 6
    mrb parallel cache $trace.safetensors --slots 4
    mrb parallel cache $trace.safetensors --slots 8
  done
  echo "== drift, placed anew four times as often"
  mrb parallel place drift.safetensors --ranks 8 --replicas 0,8 --windows 24
} 2>&1 | tee "$here/policies.txt"
