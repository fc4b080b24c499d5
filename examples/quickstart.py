"""One set of weights, three layouts, the same result; then a step of training.

python examples/quickstart.py
"""

import torch

import moe_routing_bench as mrb

torch.manual_seed(0)
x = torch.randn(4, 32, 64)  # 4 sequences of 32 tokens, D = 64

layer = mrb.MoE(D=64, F=128, E=8, K=2)
y, routing = layer(x)
print(f"{tuple(x.shape)} -> {tuple(y.shape)} with {layer.implementation}")
print("tokens per expert:", routing.load_E().tolist())

for layout in ("compact", "block(16)", "padded(capacity_factor=8)"):  # so large that nothing is dropped
    other = mrb.MoE(D=64, F=128, E=8, K=2, layout=layout, impl="staged")
    other.load_state_dict(layer.state_dict())
    plan = other.plan(routing)
    difference = (other(x)[0] - y).abs().max().item()
    print(f"{layout:26} {plan.num_rows:4} rows for 256 pairs, largest difference {difference:.1e}")
    assert difference < 1e-4

balanced = mrb.MoE(D=64, F=128, E=8, K=2, router_options={"loss_weights": {"switch": 0.01}})
y, routing = balanced(x)
loss = y.square().mean() + routing.aux_loss  # the router's own loss keeps experts evenly used
loss.backward()
print(f"balance loss {routing.aux_loss.item():.4f}; gradients reach every expert and the router")
