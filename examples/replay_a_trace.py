"""Write down what a router chose, read it back, and run another layer on the same choices.

python examples/replay_a_trace.py [FILE]
"""

import sys
import tempfile
from pathlib import Path

import torch

import moe_routing_bench as mrb
from moe_routing_bench.workloads.trace import read_trace, write_trace

torch.manual_seed(0)
x = torch.randn(256, 64)
layer = mrb.MoE(D=64, F=128, E=8, K=2)
y, routing = layer(x)

file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "routing.safetensors"
write_trace(file, routing, source="examples/replay_a_trace.py")
trace = read_trace(file)
print(f"{file.name}: {trace.routing.num_tokens} tokens, load {trace.routing.load_E().tolist()}")

# another layout and another kernel, but the recorded experts and gates
other = mrb.MoE(D=64, F=128, E=8, K=2, layout="block(16)", impl="staged")
other.load_state_dict(layer.state_dict())
again = other.compute(x, trace.routing)
difference = (again - y).abs().max().item()
print(f"largest difference {difference:.1e}")
assert difference < 1e-4
print(f'to time with it: mrb bench expert_ffn --experts 8 --choices 2 --workload "trace({file})"')
