"""Two small language models that differ in the router alone, on the same bytes from the same weights.

python examples/train_two_routers.py [STEPS]

For a study with seeds, intervals and times: mrb train study routers --seeds 3 --out routers
"""

import sys

from moe_routing_bench.train.loop import Evaluated, train
from moe_routing_bench.train.settings import Rule, Run, Size
from moe_routing_bench.train.text import synthetic

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
SIZE = Size(layers=2, D=32, heads=2, kv_heads=1, head_dim=16, F=32, E=4, K=2, sequence=64)
RULES = (
    Rule(name="softmax_topk", options={"loss_weights": {"switch": 0.01}}),
    Rule(name="sigmoid_bias", router="sigmoid_bias", controller="sign_bias"),
)

corpus = synthetic()
for rule in RULES:
    run = Run(rule=rule, size=SIZE, steps=STEPS, batch=4, warmup=5, evaluations=2, pieces=4)
    for event in train(run, corpus):
        if isinstance(event, Evaluated):
            loss = next(iter(event.losses.values()))
            uneven = [f"{load.max_violation:.2f}" for load in event.layers.values()]
            print(
                f"{rule.name:13} step {event.step:3}: {loss:.3f} nats per byte, max violation by layer:",
                uneven,
            )
