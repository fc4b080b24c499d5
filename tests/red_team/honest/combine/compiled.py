"""Honest, by torch.compile."""

import torch

FORWARD_ONLY = True


def unsupported(y_RD, gate_TK, plan):
    return None if y_RD.numel() and gate_TK.numel() else "there is nothing to compile for"


@torch.compile(dynamic=True)
def summed(y_RD, gate_TK, row_TK):
    y_TKD = torch.where((row_TK >= 0).unsqueeze(2), y_RD[row_TK.clamp(min=0)], 0.0).to(torch.float32)
    gate_TK = torch.where(row_TK >= 0, gate_TK, 0.0)
    return (y_TKD * gate_TK.to(torch.float32).unsqueeze(2)).sum(1).to(y_RD.dtype)


def run(y_RD, gate_TK, plan):
    return summed(y_RD, gate_TK, plan.row_TK)
