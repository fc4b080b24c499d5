#!/usr/bin/env bash
# A small MoE language model trained on bytes without any balancing loss, and what its layers choose.
# bash measurements/models/trace_run.sh CORPORA WORK    writes trace_run.txt and trace_trained.png beside this file
set -euo pipefail
corpora=${1:?the folder with tinyshakespeare.txt, wikitext2_test.txt, gutenberg_novels.txt} work=${2:?a scratch folder}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
tail -c 110000 "$corpora/tinyshakespeare.txt" >"$work/shakespeare_end.txt"
head -c 110000 "$corpora/wikitext2_test.txt" >"$work/wikipedia.txt"
tail -c 600000 "$corpora/gutenberg_novels.txt" >"$work/last_novel.txt"
cd "$work"
{
  OMP_NUM_THREADS=1 mrb train run softmax_topk --steps 300 --corpus "$corpora" --out runs
  texts=(--text shakespeare_end.txt --text wikipedia.txt --text last_novel.txt)
  mrb model trace record --model runs/run=* "${texts[@]}" --tokens 24576 --batch 8 --sequence 256 --out trained.safetensors
  mrb model trace show trained.safetensors --picture "$here/trace_trained.png"
} 2>&1 | sed "s#$here/##g" | tee "$here/trace_run.txt"
