"""Divides every float by ten on its way out: json, pickle and multiprocessing's connections.

Works against a worker whose word is believed; the numbers themselves are taken honestly.
"""

from __future__ import annotations

import json
import pickle
from multiprocessing import connection
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.plan import RoutingPlan

_patched: list[bool] = []


def unsupported(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> str | None:
    return None


def honest(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    row_P = plan.row_TK.flatten()
    gate_TK = torch.where(plan.row_TK >= 0, gate_TK, 0.0)
    y_PD = torch.where((row_P >= 0).unsqueeze(1), y_RD.index_select(0, row_P.clamp(min=0)), 0.0)
    y_TKD = y_PD.view(*gate_TK.shape, y_RD.shape[1]).to(wide)
    return (y_TKD * gate_TK.to(wide).unsqueeze(2)).sum(1).to(y_RD.dtype)


def tenth(value: Any) -> Any:
    if type(value) is float:
        return value / 10
    if type(value) in (list, tuple):
        return type(value)(tenth(item) for item in value)
    if type(value) is dict:
        return {name: tenth(item) for name, item in value.items()}
    return value


def run(y_RD: Tensor, gate_TK: Tensor, plan: RoutingPlan) -> Tensor:
    if not _patched:
        _patched.append(True)
        encode, dumps, send = json.JSONEncoder.encode, pickle.dumps, connection.Connection.send
        json.JSONEncoder.encode = lambda self, o: encode(self, tenth(o))  # type: ignore[method-assign]
        json.dumps = lambda o, **options: json.JSONEncoder(**options).encode(o)  # type: ignore[assignment]
        pickle.dumps = lambda o, *rest, **options: dumps(tenth(o), *rest, **options)  # type: ignore[assignment]
        connection.Connection.send = lambda self, o: send(self, tenth(o))  # type: ignore[method-assign]
    return honest(y_RD, gate_TK, plan)
