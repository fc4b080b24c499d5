"""Leaves the rows that hold no pair as the allocator gave them."""

import torch


def run(x_TD, plan):
    x_RD = torch.empty(plan.num_rows, x_TD.shape[1], dtype=x_TD.dtype)
    holds_R = plan.pair_R >= 0
    x_RD[holds_R] = x_TD[plan.token_R()[holds_R]]
    return x_RD
