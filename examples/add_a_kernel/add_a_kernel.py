"""One gather and one multiply-add per choice: never holds T x K x D numbers."""

import torch


def run(y_RD, gate_TK, plan):
    wide = torch.promote_types(gate_TK.dtype, torch.promote_types(y_RD.dtype, torch.float32))
    y_TD = torch.zeros(plan.num_tokens, y_RD.shape[1], dtype=wide, device=y_RD.device)
    if plan.num_rows == 0:
        return y_TD.to(y_RD.dtype)
    for row_T, gate_T in zip(plan.row_TK.unbind(1), gate_TK.unbind(1), strict=True):
        y_kTD = y_RD.index_select(0, row_T.clamp(min=0)).to(wide)
        kept_T1 = (row_T >= 0).unsqueeze(1)
        # where a pair has no row, row and gate may be NaN, so both are selected away before the product
        y_TD = y_TD + torch.where(kept_T1, y_kTD, 0.0) * torch.where(
            kept_T1, gate_T.to(wide).unsqueeze(1), 0.0
        )
    return y_TD.to(y_RD.dtype)
