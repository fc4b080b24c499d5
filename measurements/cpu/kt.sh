#!/usr/bin/env bash
# KTransformers' kernel beside ours in a small bfloat16 layer: checked by the kit, then timed.
#   bash measurements/cpu/kt.sh [FOLDER]       FOLDER: where kt-kernel goes, /tmp/mrb_kt; 5 minutes
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-/tmp/mrb_kt}
[ -d "$folder/kt_kernel" ] || pip install -q --target "$folder" --no-deps kt-kernel==0.7.2 gguf
export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
{
  echo "kt-kernel 0.7.2, variant $(python -c 'import kt_kernel; print(kt_kernel.__cpu_variant__)'), commit $(git rev-parse --short HEAD), $(date -u +%FT%TZ)"
  for command in \
    "mrb check --op expert_ffn --impl kt --include-path examples/kt_kernel" \
    "mrb bench layer --width 1024 --hidden 512 --experts 16 --topk 4 --dtype bfloat16 --tokens 4,128 --impl native,kt --include-path examples/kt_kernel --threads 2 --seconds 100 --no-save"; do
    echo; echo "\$ $command"; $command 2>/dev/null || echo "exit code $?"
  done
} | tee measurements/cpu/kt.txt
