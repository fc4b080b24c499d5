"""Training runs that take less than a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_routing_bench.train.settings import Rule, Run, Size

TINY = Size(layers=2, D=16, heads=2, kv_heads=1, head_dim=8, F=16, E=4, K=2, sequence=32)
RULES = {
    "softmax_topk": Rule(name="softmax_topk", options={"loss_weights": {"switch": 0.01}}),
    "noisy_topk": Rule(name="noisy_topk", router="noisy_topk"),
    "sigmoid_bias": Rule(name="sigmoid_bias", router="sigmoid_bias", controller="sign_bias"),
    "relu": Rule(
        name="relu", router="relu", options={"loss_weights": {"relu": 1.0}}, controller="l1_strength"
    ),
    "hashed": Rule(name="hashed", router="hashed"),
    "chain": Rule(name="chain", kind="chain", iterations=2),
    "dense": Rule(name="dense", kind="dense", times=2),
    "quantile": Rule(name="quantile", router="quantile", controller="quantile"),
    "capacity": Rule(name="capacity", layout="padded(capacity_factor=1)"),
    "adapters": Rule(
        name="adapters", kind="perft", adapter={"kind": "R", "num_adapters": 4, "K": 1, "rank": 2}
    ),
}


def tiny(rule: Rule | str = "softmax_topk", **changes: Any) -> Run:
    rule = RULES[rule] if isinstance(rule, str) else rule
    base = Run(rule=rule, size=TINY, steps=6, batch=2, warmup=2, evaluations=2, pieces=2)
    return replace(base, **changes)
