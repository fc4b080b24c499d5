"""Declares every hard case of the kit unsupported, and is wrong for tokens with fewer than K experts."""


def unsupported(y_RD, gate_TK, plan):
    return None if plan.num_tokens == 48 else "it is for 48 tokens"


def run(y_RD, gate_TK, plan):
    y_TKD = y_RD[plan.row_TK.flatten()].view(*gate_TK.shape, y_RD.shape[1]).float()
    return (y_TKD * gate_TK.float().unsqueeze(2)).sum(1).to(y_RD.dtype)
