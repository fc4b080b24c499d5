#!/bin/sh
# mrb model kernels, loaded where our package is not, then before the kit. Writes kernels_export.txt beside it.
#   ENV=/tmp/kernels_env TRITON=DIR sh measurements/models/kernels_export.sh
# ENV gets torch 2.13.0, kernels 0.17.2 and Transformers if it is not there; TRITON is a folder that holds triton.
set -eu
here=$(cd "$(dirname "$0")" && pwd); source=$here/../../src; env=${ENV:-/tmp/kernels_env}; dir=$(mktemp -d)/hub
if [ ! -x "$env/bin/python" ]; then
    python3 -m venv "$env"
    "$env/bin/pip" install -q torch==2.13.0
    "$env/bin/pip" install -q kernels==0.17.2 "transformers==5.22.2" ninja numpy
fi
unset PYTHONPATH
export LOCAL_KERNELS="org/name=$dir" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore PATH="$env/bin:$PATH"
{
    echo "# sh measurements/models/kernels_export.sh   $(date -u +%F), $(uname -m), $(nproc) cores"
    PYTHONPATH=$source "${MRB_PYTHON:-python3}" -m moe_routing_bench export kernels "$dir" | sed "s,$dir,DIR,"
    (cd / && "$env/bin/python" "$here/kernels_export.py" clean)
    (cd / && PYTHONPATH=$source "$env/bin/python" "$here/kernels_export.py" kit)
    if [ -n "${TRITON:-}" ]; then
        (cd / && TRITON_INTERPRET=1 PYTHONPATH=$source:$TRITON "$env/bin/python" "$here/kernels_export.py" triton)
    fi
} > "$here/kernels_export.txt"
cat "$here/kernels_export.txt"
