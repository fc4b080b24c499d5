"""Computes honestly, and then returns something else: another dtype, shape, container or value."""

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run


def run(y_RD, gate_TK, plan, *, how):
    if how == "bfloat16":  # products and sums: fast, and wrong in the third digit
        return honest(y_RD.bfloat16(), gate_TK.bfloat16(), plan).to(y_RD.dtype)
    y_TD = honest(y_RD, gate_TK, plan)
    if how == "dtype":
        return y_TD.to(torch.bfloat16 if y_TD.dtype != torch.bfloat16 else torch.float32)
    if how == "shape":  # one token too many
        return torch.cat((y_TD, y_TD[:1]))
    if how == "broadcasts":  # a comparison that broadcasts does not see a leading dimension of one
        return y_TD.unsqueeze(0)
    if how == "tuple":
        return (y_TD,)
    if how == "sparse":
        return y_TD.to_sparse()
    if how == "nan":
        y_TD[-1, -1] = float("nan")
    elif how == "above_256":  # right up to 256 tokens
        y_TD[256:] = 0
    elif how == "at_192":  # right at any other number of tokens
        return y_TD * 1.25 if len(y_TD) == 192 else y_TD
    return y_TD
