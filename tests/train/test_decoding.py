"""Models in use: a cache changes nothing, frozen layers neither."""

from __future__ import annotations

import pytest
import torch

from moe_routing_bench.train.decoding import use
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Rule
from moe_routing_bench.train.text import synthetic
from moe_routing_bench.train.work import work_of
from tiny_training import RULES, TINY, tiny


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("capacity",)])
@torch.no_grad()
def test_tokens_one_by_one_are_the_whole_text(rule: str) -> None:
    model = Decoder(tiny(rule)).double().eval()
    token_BN = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    whole, _ = model(token_BN)
    caches = model.caches(2, 12)
    parts = [model(token_BN[:, :5], caches)[0], model(token_BN[:, 5:8], caches)[0]]
    parts += [model(token_BN[:, place : place + 1], caches)[0] for place in range(8, 12)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-6)
    with pytest.raises(ValueError, match="room for 12"):
        model(token_BN[:, :1], caches)


def test_a_model_in_use() -> None:
    corpus, run = synthetic(size=6000), tiny()
    used = use(Decoder(run), run, corpus, prompt=16, new=4, repeats=1)
    assert [rate.batch for rate in used.rates] == [1, 8, 32]
    assert all(rate.prefill > 0 and rate.decode > 0 for rate in used.rates)
    assert used.frozen_loss == pytest.approx(used.loss, rel=1e-5)
    rule = Rule(name="soft", router="soft_moe", K=1)
    with pytest.raises(NotImplementedError, match="later tokens"):
        future = tiny(rule, sees_future=True)
        use(Decoder(future), future, corpus)


def test_the_work_of_a_token_by_hand() -> None:
    size = TINY
    work = work_of(Decoder(tiny()), pairs_per_token=2)
    attention = size.D * (16 + 8 + 8) + 16 * size.D  # q, k, v and o
    expert = 3 * size.D * size.F
    scores = 2 * 2 * 16 * 33 / 2
    layer = 2 * attention + scores + 2 * 2 * expert + 2 * size.D * size.E
    assert work.flops == 2 * layer + 2 * size.D * 256
    assert work.active_parameters == work.parameters - 2 * 2 * expert
    dense = work_of(Decoder(tiny("dense")), pairs_per_token=0)
    assert dense.flops == work.flops - 2 * 2 * size.D * size.E  # equal but for the routers
