#!/usr/bin/env bash
# Decoder blocks: seed-moe-block, and the block of Qwen3-30B-A3B on 512 tokens. Writes block_decoder.txt.
# Full size needs about 8 GB; two threads only on a machine where nothing else runs:
#   ./block_decoder.sh --full --threads 2
set -euo pipefail
cd "$(dirname "$0")"
{
  mrb bench block --case seed-moe-block --seconds 15 "$@"
  mrb bench block --model qwen3-30b-a3b --tokens 512 --seconds 15 "$@"
} > block_decoder.txt
