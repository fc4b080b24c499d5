"""Honest, compiled by numba."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from moe_routing_bench.core.plan import RoutingPlan

FORWARD_ONLY = True


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    right = y_RD.dtype == gate_TK.dtype == torch.float32
    return None if right and y_RD.device.type == "cpu" else "float32 on the CPU only"


@numba.njit(cache=False)
def summed(y_RD: np.ndarray, gate_TK: np.ndarray, row_TK: np.ndarray) -> np.ndarray:
    out_TD = np.zeros((row_TK.shape[0], y_RD.shape[1]), dtype=np.float32)
    for t in range(row_TK.shape[0]):
        for k in range(row_TK.shape[1]):
            if row_TK[t, k] >= 0:
                out_TD[t] += gate_TK[t, k] * y_RD[row_TK[t, k]]
    return out_TD


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    given = (x.contiguous().numpy() for x in (y_RD, gate_TK, plan.row_TK))
    return torch.from_numpy(summed(*given))
