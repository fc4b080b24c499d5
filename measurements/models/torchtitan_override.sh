#!/usr/bin/env bash
# The override inside torchtitan's own MoE: values and gradients of every parameter against a float64 oracle, judged
# beside torchtitan's own (tests/models/test_torchtitan.py, which is skipped where torchtitan is absent).
#   bash measurements/models/torchtitan_override.sh [FOLDER]     FOLDER: where torchtitan goes, /tmp/mrb_torchtitan
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-/tmp/mrb_torchtitan}
# without dependencies: what importing its MoE needs, and no other torch
[ -d "$folder/torchtitan" ] || pip install -q --target "$folder" --no-deps torchtitan==0.3.0 spmd_types==0.2.3 \
  torchdata==0.11.0 datasets==4.7.0 triton==3.9.0 tyro==1.0.16 docstring_parser typeguard shtab einops
export PYTHONPATH="$PWD/src:$folder"
{
  echo "torchtitan 0.3.0, torch $(python -c 'import torch; print(torch.__version__)'), commit $(git rev-parse --short HEAD), $(date -u +%FT%TZ)"
  echo "\$ pytest -v tests/models/test_torchtitan.py"
  pytest -v -n 0 -p no:cacheprovider tests/models/test_torchtitan.py | grep -E '::|passed|failed'
} | tee measurements/models/torchtitan_override.txt
