"""Cosine router (X-MoE): the angle between token and expert in H dimensions, over a learned temperature.

    z_e = exp(s) * cos(x P, c_e),  p = softmax(z),  the K experts with the largest z,  gate = p
exp(s) starts at 2 and is at most 100, as in Tutel's gate of this name.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from moe_routing_bench import Router, Routing, TokenInfo
from moe_routing_bench.routers.losses import switch_loss


class CosineRouter(Router):
    causal, batch_dependent = True, False
    paper = "On the Representation Collapse of Sparse Mixture of Experts, Chi et al. 2022, arXiv:2204.09179"
    gate_sum = "at most one"
    loss_names = ("switch",)

    def __init__(self, D, E, K, *, width=16, **options):
        super().__init__(D, E, K, **options)
        self.p_DH = nn.Parameter(0.02 * torch.randn(D, width))
        self.c_HE = nn.Parameter(0.02 * torch.randn(width, E))
        self.log_scale = nn.Parameter(torch.tensor(math.log(2)))

    def forward(self, x_TD, info=TokenInfo()):  # noqa: B008
        h_TH = F.normalize(self.project(self.prepare(x_TD, info), self.p_DH), dim=1, eps=1e-4)
        scale = self.log_scale.to(self.dtype).clamp(max=math.log(100)).exp()
        logits_TE = scale * self.project(h_TH, F.normalize(self.c_HE.to(self.dtype), dim=0, eps=1e-4))
        score_TE = logits_TE.softmax(-1)
        _, expert_TK = self.topk(logits_TE, self.K)
        gate_TK = score_TE.gather(1, expert_TK)
        routing = Routing(
            expert_TK=expert_TK, gate_TK=gate_TK, num_experts=self.E, ragged=False, logits_TE=logits_TE
        )
        seen = (score_TE, expert_TK, self.E, info.mask_T)
        return self.finish(routing, {"switch": lambda: switch_loss(*seen)}, info)
