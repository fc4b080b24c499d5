#!/usr/bin/env bash
# Every Triton kernel with every configuration, for four GPUs and three models: compile.txt, and the table that CI
# compares with (tests/data/compile.json). 10 minutes on 2 cores, with the triton that CUDA builds of torch pin.
set -euo pipefail
cd "$(dirname "$0")"
mrb gpu compile --configs --out compile.json
mv compile.json ../../tests/data/
