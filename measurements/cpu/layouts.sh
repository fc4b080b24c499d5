#!/usr/bin/env bash
# The three layouts at seed-grid (scaled twins), stage by stage, under three kinds of routing; writes layouts.txt.
# lognormal(maxvio=8) cannot exist here: with K = 2 the busiest of E <= 16 experts has at most 8 times the mean
# load, which is a MaxVio of 7. It is asked for all the same, and 6 beside it, which only E = 16 can have.
set -euo pipefail
cd "$(dirname "$0")"
mrb bench layer --case seed-grid --stages --seconds 3 --min-rounds 10 --checked 1 \
  --workload "uniform,zipf(1.2),lognormal(maxvio=8),lognormal(maxvio=6)" \
  --impl "staged @ compact" \
  --impl "staged(grouped_gemm=padded_bmm) @ case" \
  --impl "staged(grouped_gemm=block_sparse) @ block(64)" > layouts.txt
