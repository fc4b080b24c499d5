#!/usr/bin/env bash
# The three-way table on this machine: 128 tokens through a Qwen MoE block (seed-qwen/e64),
# Transformers' block against a hand-ordered torch path and ours. Writes profile_qwen_bfloat16.{txt,png}.
# Full size needs about 8 GB; two threads only on a machine where nothing else runs:
#   ./profile_qwen.sh --full --threads 2
set -euo pipefail
cd "$(dirname "$0")"
mrb model profile seed-qwen/e64 --dtype bfloat16 --calls 10 --rows 8 --seconds 20 "$@" \
  --picture profile_qwen_bfloat16.png > profile_qwen_bfloat16.txt
