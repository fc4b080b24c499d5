"""Computes honestly, and changes one of its inputs before, after or around that."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD, gate_TK, plan, *, what):
    if what == "restored":  # clears NaN in place and puts every number back before it returns
        kept_RD = y_RD.clone()
        y_RD.nan_to_num_()
        y_TD = honest(y_RD, gate_TK, plan)
        y_RD.copy_(kept_RD)
        return y_TD
    y_TD = honest(y_RD, gate_TK, plan)
    if what == "rows":  # as scratch memory
        y_RD.mul_(0.5)
    elif what == "gate":
        gate_TK[0, 0] += 1
    elif what == "plan":  # all choices of a token point to its first row, so the next call reads less
        plan.row_TK.copy_(plan.row_TK[:, :1].clone().expand_as(plan.row_TK))
    elif what == "plan_field":  # another tensor in the frozen plan: the old one, if hashed, is untouched
        object.__setattr__(plan, "row_TK", torch.full_like(plan.row_TK, -1))
    elif what == "storage":  # other memory: the object is the same, the numbers are not
        y_RD.data = torch.zeros_like(y_RD)
    elif what == "result_inside":  # the result is a view of the first rows of y_RD
        return y_RD[: len(y_TD)].copy_(y_TD)
    return y_TD
