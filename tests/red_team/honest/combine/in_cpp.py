"""Honest, in C++ by torch's extension loader."""

import tempfile
from functools import cache

import torch

from moe_routing_bench.core import cpp

FORWARD_ONLY = True
SOURCE = """
#include <torch/extension.h>
at::Tensor combine(at::Tensor y, at::Tensor gate, at::Tensor row) {
    const auto T = row.size(0), K = row.size(1), D = y.size(1);
    auto out = at::zeros({T, D}, y.options());
    const float *from = y.data_ptr<float>(), *weight = gate.data_ptr<float>();
    const int64_t *rows = row.data_ptr<int64_t>();
    float *to = out.data_ptr<float>();
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++)
            if (rows[t * K + k] >= 0)
                for (int64_t d = 0; d < D; d++)
                    to[t * D + d] += weight[t * K + k] * from[rows[t * K + k] * D + d];
    return out;
}
"""


def unsupported(y_RD, gate_TK, plan):
    if cpp.missing_tool() is not None:
        return cpp.missing_tool()
    right = y_RD.dtype == gate_TK.dtype == torch.float32
    return None if right and y_RD.device.type == "cpu" else "float32 on the CPU only"


@cache
def extension():
    from torch.utils.cpp_extension import load_inline

    # a folder of its own: torch waits for ever for the lock of a build that was killed
    folder = tempfile.mkdtemp()
    flags = ["-O1"]
    return load_inline(
        "red_team_combine", SOURCE, functions=["combine"], extra_cflags=flags, build_directory=folder
    )


def run(y_RD, gate_TK, plan):
    return extension().combine(y_RD.contiguous(), gate_TK.contiguous(), plan.row_TK.contiguous())
